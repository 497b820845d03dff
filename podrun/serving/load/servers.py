"""Servers of the v2 inference protocol: what a model takes, and requests to it, over gRPC or HTTP.

A request is written once and sent again and again: what is measured is the server. Arrays go as binary data in both
protocols. Needs the extra ``podrun[serving]``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urlsplit

import numpy as np

from podrun.core.errors import MissingPackageError, NotFoundError, ServiceError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.serving.load.windows import ServerAnswer

if TYPE_CHECKING:
    import aiohttp

MODELLED_OUTPUT = "ipu_time_us"
"""The output in which the backend ``poplar`` tells modelled compute, transfer and queue in microseconds."""


@dataclass(frozen=True, slots=True)
class InputForm:
    """An input of a model. ``shape``: with -1 for what is open; the batch is its first entry where the model
    batches."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelForm:
    """What a server says of a model. ``max_batch``: 0 for a model that does not batch."""

    name: str
    inputs: tuple[InputForm, ...]
    outputs: tuple[str, ...]
    max_batch: int


class ModelServer(Protocol):
    """A connection to a server."""

    async def describe(self, model: str) -> ModelForm:
        """What a model takes. NotFoundError for a model that is not there, ServiceError for no answer."""

    def prepare(self, form: ModelForm, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the request that `infer` sends."""

    async def infer(self) -> ServerAnswer:
        """Send the request; never raises for what the server or the network does."""

    async def close(self) -> None:
        """End the connection."""


def connect_server(url: str, timeout_s: float) -> ModelServer:
    """A connection to ``grpc://HOST:PORT``, ``http://HOST:PORT`` or ``HOST:PORT``, which is gRPC. Raises UsageError
    for another form, MissingPackageError without the packages."""
    parts = urlsplit(url if "://" in url else f"grpc://{url}")
    try:
        known = parts.scheme in ("grpc", "http") and parts.hostname and parts.port and parts.path in ("", "/")
    except ValueError:  # A port that is no number.
        known = False
    if not known:
        raise UsageError(
            f"{url!r} is no address of a server", hint="As in localhost:8001 or http://localhost:8000."
        )
    address = f"{parts.hostname}:{parts.port}"
    try:
        return _HttpServer(address, timeout_s) if parts.scheme == "http" else _GrpcServer(address, timeout_s)
    except ImportError as error:
        raise MissingPackageError(
            f"podrun load needs {error.name}, which is not installed",
            hint='Type: pip install "podrun[serving]"',
        ) from None


def _unreachable(address: str, why: object) -> ServiceError:
    return ServiceError(f"no server answers at {address}: {why}", hint="Start one: podrun serve REPOSITORY")


def _absent(model: str, address: str, why: object) -> NotFoundError:
    return NotFoundError(
        f"{address} does not serve {model}: {why}", hint="The server's log says which models it has."
    )


class _GrpcServer:
    """gRPC, by Triton's own client."""

    def __init__(self, address: str, timeout_s: float) -> None:
        import tritonclient.grpc.aio as client

        self._client, self.address, self._timeout = client.InferenceServerClient(address), address, timeout_s
        self._library = client
        self._request: dict[str, Any] = {}

    async def describe(self, model: str) -> ModelForm:
        error = self._library.InferenceServerException
        try:
            async with asyncio.timeout(self._timeout):
                if not await self._client.is_server_live():
                    raise _unreachable(self.address, "it is not live")
        except (error, TimeoutError) as why:
            raise _unreachable(self.address, why) from None
        try:
            async with asyncio.timeout(self._timeout):
                metadata = await self._client.get_model_metadata(model)
                config = await self._client.get_model_config(model)
        except (error, TimeoutError) as why:
            raise _absent(model, self.address, why) from None
        inputs = tuple(InputForm(one.name, one.datatype, tuple(one.shape)) for one in metadata.inputs)
        return ModelForm(
            model, inputs, tuple(one.name for one in metadata.outputs), config.config.max_batch_size
        )

    def prepare(self, form: ModelForm, arrays: Mapping[str, np.ndarray]) -> None:
        inputs = []
        for tensor in form.inputs:
            entry = self._library.InferInput(tensor.name, list(arrays[tensor.name].shape), tensor.datatype)
            entry.set_data_from_numpy(arrays[tensor.name])
            inputs.append(entry)
        outputs = [self._library.InferRequestedOutput(name) for name in form.outputs]
        self._request = {"model_name": form.name, "inputs": inputs, "outputs": outputs}
        self._modelled = MODELLED_OUTPUT in form.outputs

    async def infer(self) -> ServerAnswer:
        try:
            result = await self._client.infer(**self._request, client_timeout=self._timeout)
        except self._library.InferenceServerException as error:
            return ServerAnswer(_kind(error.status() or "", error.message()))
        except asyncio.CancelledError:
            raise
        return ServerAnswer(
            modelled_us=_modelled(result.as_numpy(MODELLED_OUTPUT)) if self._modelled else None
        )

    async def close(self) -> None:
        await self._client.close()


def _kind(status: str, message: str) -> str:
    """The kind of an error: the protocol's status, and of the message what names no single request."""
    code = status.removeprefix("StatusCode.")
    return f"{code}: {message.split(';', maxsplit=1)[0][:120]}" if code else message[:120]


def _modelled(values: np.ndarray | None) -> tuple[float, float, float] | None:
    if values is None or values.size < 3:
        return None
    compute, transfer, queue = (float(value) for value in values.reshape(-1)[:3])
    return compute, transfer, queue


class _HttpServer:
    """HTTP with the binary extension of the protocol, by aiohttp."""

    def __init__(self, address: str, timeout_s: float) -> None:
        import aiohttp

        self._library, self.address, self._timeout = aiohttp, address, timeout_s
        self._open: aiohttp.ClientSession | None = None
        self._path, self._body, self._head = "", b"", {"": ""}
        self._modelled = False

    def _session(self) -> aiohttp.ClientSession:
        """The session, which belongs to the loop that runs."""
        if self._open is None:
            limits = self._library.ClientTimeout(total=self._timeout)
            self._open = self._library.ClientSession(
                f"http://{self.address}", timeout=limits, connector=self._library.TCPConnector(limit=0)
            )
        return self._open

    async def _read(self, path: str) -> tuple[int, bytes]:
        async with self._session().get(path) as response:
            return response.status, await response.read()

    async def describe(self, model: str) -> ModelForm:
        name = quote(model, safe="")
        try:
            status, _ = await self._read("/v2/health/live")
            if status != 200:
                raise _unreachable(self.address, f"its health is HTTP {status}")
            status, text = await self._read(f"/v2/models/{name}")
            if status != 200:
                raise _absent(model, self.address, _message(text, status))
            metadata = json.loads(text)
            _, text = await self._read(f"/v2/models/{name}/config")
            batch = int(json.loads(text).get("max_batch_size", 0))
            inputs = tuple(
                InputForm(one["name"], one["datatype"], tuple(int(size) for size in one["shape"]))
                for one in metadata["inputs"]
            )
            return ModelForm(model, inputs, tuple(one["name"] for one in metadata["outputs"]), batch)
        except (self._library.ClientError, TimeoutError) as why:
            raise _unreachable(self.address, why or "in time") from None
        except (ValueError, KeyError, TypeError, AttributeError) as why:
            raise ServiceError(
                f"{self.address} is no server of the v2 protocol: its answer has no {why}",
                hint="Give the port of HTTP of a server such as Triton: http://localhost:8000",
            ) from None

    def prepare(self, form: ModelForm, arrays: Mapping[str, np.ndarray]) -> None:
        parts = [np.ascontiguousarray(arrays[tensor.name]).tobytes() for tensor in form.inputs]
        inputs = [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(arrays[tensor.name].shape),
                "parameters": {"binary_data_size": len(part)},
            }
            for tensor, part in zip(form.inputs, parts, strict=True)
        ]
        head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        self._path, self._body = f"/v2/models/{quote(form.name, safe='')}/infer", b"".join([head, *parts])
        self._head = {"Inference-Header-Content-Length": str(len(head))}
        self._modelled = MODELLED_OUTPUT in form.outputs

    async def infer(self) -> ServerAnswer:
        try:
            async with self._session().post(self._path, data=self._body, headers=self._head) as response:
                text = await response.read()
                if response.status != 200:
                    return ServerAnswer(f"HTTP {response.status}: {_message(text, response.status)}"[:140])
                size = int(response.headers.get("Inference-Header-Content-Length", len(text)))
        except TimeoutError:
            return ServerAnswer("no answer in time")
        except self._library.ClientError as error:
            return ServerAnswer(f"{type(error).__name__}: {error}"[:140])
        return ServerAnswer(modelled_us=_binary_output(text, size) if self._modelled else None)

    async def close(self) -> None:
        if self._open is not None:
            await self._open.close()


def _message(text: bytes, status: int) -> str:
    try:
        return str(json.loads(text)["error"]).split(";")[0]
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}"


def _binary_output(text: bytes, head: int) -> tuple[float, float, float] | None:
    """Modelled time out of an answer with binary outputs, which follow the head in their order."""
    at = head
    for output in json.loads(text[:head]).get("outputs", ()):
        size = int(output.get("parameters", {}).get("binary_data_size", 0))
        if output["name"] == MODELLED_OUTPUT:
            return _modelled(np.frombuffer(text[at : at + size], "<f4"))
        at += size
    return None
