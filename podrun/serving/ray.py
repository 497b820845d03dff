"""Serves a model over the machines of a POD with Ray Serve: one replica of the deployment for each instance of the
model.

    from ray import serve
    from podrun.serving.ray import PodClient, deployment

    serve.run(deployment("executable.popef"), name="net")      # IPUOF_* name the partition
    client = PodClient(serve.get_app_handle("net"), attempts=2)
    client.predict({"x": x}, seconds=1.0)["y"]

A replica takes IPUs of the partition, whichever are free, over as many hosts as Ray and the partition have. Ray Serve
starts as many replicas as the load asks for, at most as many as the partition has room for. A machine that is lost
takes the requests in flight on it; its replica takes other IPUs, or Ray Serve makes another one when it finds it ill,
and the other replicas go on. `PodClient` asks again elsewhere where that is allowed, within the request's deadline.
Over HTTP a deployment takes the bodies of TensorFlow Serving's predict calls.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.environment import environment, pass_on
from podrun.core.error_codec import error_from_json, error_to_json
from podrun.core.errors import DeadlineError, PodrunError, PoplarError, ServiceError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.device_pool import DevicePool
from podrun.serving.compiler import ServedModel
from podrun.serving.tfserving.answers import VersionOnIpus
from podrun.serving.tfserving.grpc_front import told_error
from podrun.serving.tfserving.rest_front import http_code, inputs_of_json, json_of_outputs

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle
    from starlette.requests import Request
    from starlette.responses import JSONResponse

PARTITION_VARIABLES = ("IPUOF_", "PODRUN_", "GCDA_")
"""Beginnings of variables that replicas get: they name the partition, and what podrun keeps."""


@dataclass(frozen=True, slots=True)
class RayServiceOptions:
    """How a model is deployed. ``most_replicas``: None for as many as the partition has room for. ``ongoing``: requests
    of a replica at which another one is started. ``delay_us``: how long an incomplete batch waits for other requests.
    ``cpus``: that Ray reserves for a replica. ``environ``: names the partition; by default that of this process.
    """

    least_replicas: int = 1
    most_replicas: int | None = None
    ongoing: float = 8.0
    delay_us: int = 0
    cpus: float = 0.1
    health_seconds: float = 5.0
    environ: Mapping[str, str] = field(default_factory=lambda: dict(environment()))


def room_for(model: ServedModel, environ: Mapping[str, str]) -> int:
    """How many instances of a model the partition holds. UsageError if it holds none."""
    ipus = model.program().layout.ipus
    room = DevicePool(environ).total_ipus // ipus
    if not room:
        raise UsageError(f"the partition has less than the {ipus} IPUs of {model.label}")
    return room


class IpuReplica:
    """A replica of the deployment: an instance of the model on IPUs of its own. Ray Serve makes it."""

    def __init__(self, name: str, data: bytes, names: dict[str, str], delay_us: int, environ: dict[str, str]):
        for variable in environ.items():
            pass_on(*variable)
        from ray import serve

        rank = getattr(serve.get_replica_context(), "rank", None)
        turn = int(getattr(rank, "rank", 0) or 0)
        self._version = VersionOnIpus(f"{name} (replica {turn})", ServedModel(data), names, delay_us, turn)

    async def predict(self, inputs: dict[str, np.ndarray], seconds: float, label: str = "") -> dict[str, Any]:
        """The outputs of a request, or its error as JSON: podrun's errors cross by their own codec."""
        try:
            return {"outputs": await self._outputs(inputs, seconds, label)}
        except PodrunError as error:
            return {"error": error_to_json(error)}

    async def __call__(self, request: Request) -> JSONResponse:
        """A predict call over HTTP."""
        from starlette.responses import JSONResponse

        try:
            body = json.loads(await request.body())
            if not isinstance(body, dict):
                raise UsageError("the request is no JSON object")
            inputs, rows = inputs_of_json(body, self._version.inputs)
            outputs = await self._outputs(inputs, 60.0, request.headers.get("x-request-id", ""))
            return JSONResponse(json_of_outputs(outputs, rows))
        except ValueError as error:
            return JSONResponse({"error": f"JSON Parse error: {error}"}, 400)
        except PodrunError as error:
            return JSONResponse({"error": told_error(error)}, http_code(error))

    def check_health(self) -> None:
        """Called by Ray Serve: raises while the model has no IPUs, after an attempt to get some."""
        self._version.revive()

    def __del__(self) -> None:
        version = getattr(self, "_version", None)
        if version is not None:
            version.close()

    async def _outputs(
        self, inputs: Mapping[str, np.ndarray], seconds: float, label: str
    ) -> dict[str, np.ndarray]:
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()
        enqueue = functools.partial(self._version.enqueue, inputs, list(self._version.outputs), label)
        request = await loop.run_in_executor(None, enqueue)  # Waits where IPUs have to be taken again.

        def tell() -> None:
            loop.call_soon_threadsafe(answered.set)

        request.future.when_done(tell)
        try:
            await asyncio.wait_for(answered.wait(), seconds)
        except TimeoutError:
            raise DeadlineError(f"the request was not answered within {seconds:g} s") from None
        request.future.wait(0)
        return {name: request.outputs[d.name] for name, d in self._version.outputs.items()}


def deployment(
    model: str | Path,
    name: str = "model",
    options: RayServiceOptions | None = None,
    names: Mapping[str, str] | None = None,
) -> Application:
    """The application to give to `ray.serve.run`. ``names``: anchor -> name for clients, where they differ.

    UsageError for a partition without room, ConfigError for a file that is no compiled model, MissingPackageError
    without Ray Serve.
    """
    try:
        from ray import serve
    except ImportError as error:
        from podrun.core.errors import MissingPackageError

        raise MissingPackageError(
            "Ray Serve is not installed", hint="pip install 'podrun[serving]'"
        ) from error
    chosen = options or RayServiceOptions()
    compiled = ServedModel(str(model))
    most = chosen.most_replicas or room_for(compiled, chosen.environ)
    if not 0 < chosen.least_replicas <= most:
        raise UsageError(f"least_replicas is 1 to {most}, not {chosen.least_replicas}")
    environ = {n: v for n, v in chosen.environ.items() if n.startswith(PARTITION_VARIABLES)}
    deployed = serve.deployment(
        IpuReplica,
        name=name,
        autoscaling_config={
            "min_replicas": chosen.least_replicas,
            "initial_replicas": chosen.least_replicas,
            "max_replicas": most,
            "target_ongoing_requests": chosen.ongoing,
        },
        max_ongoing_requests=max(16, int(4 * chosen.ongoing)),
        health_check_period_s=chosen.health_seconds,
        health_check_timeout_s=max(10.0, 2 * chosen.health_seconds),
        ray_actor_options={"num_cpus": chosen.cpus},
    )
    data = Path(model).read_bytes()
    return deployed.bind(name, data, dict(names or {}), chosen.delay_us, environ)


class PodClient:
    """Asks a deployment. ``attempts``: how often a request is tried, on whichever replica Ray Serve picks, when IPUs or
    a replica fail it; 1: their error is raised.
    """

    def __init__(self, handle: DeploymentHandle, attempts: int = 1) -> None:
        self._handle, self._attempts = handle, attempts

    def predict(
        self, inputs: Mapping[str, np.ndarray], seconds: float = 60.0, label: str = ""
    ) -> dict[str, np.ndarray]:
        """The outputs of a request. Raises its error: DeadlineError after ``seconds``, in all attempts together."""
        end = time.monotonic() + seconds
        for attempt in range(self._attempts):
            try:
                return self._asked(dict(inputs), end - time.monotonic(), label)
            except (PoplarError, ServiceError) as error:
                if isinstance(error, DeadlineError) or attempt + 1 == self._attempts:
                    raise
        raise ServiceError("no attempt was allowed", hint="PodClient(handle, attempts=1)")

    def _asked(self, inputs: dict[str, np.ndarray], seconds: float, label: str) -> dict[str, np.ndarray]:
        from ray.exceptions import GetTimeoutError, RayError

        late = DeadlineError("the request was not answered before its deadline")
        if seconds <= 0:
            raise late
        try:
            answer = self._handle.predict.remote(inputs, seconds, label).result(timeout_s=seconds)
        except (TimeoutError, GetTimeoutError):
            raise late from None
        except RayError as error:
            raise ServiceError(f"a replica ended before it answered: {type(error).__name__}") from error
        if "error" in answer:
            raise error_from_json(answer["error"])
        outputs: dict[str, np.ndarray] = answer["outputs"]
        return outputs
