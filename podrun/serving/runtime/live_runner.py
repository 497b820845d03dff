"""A runner that lives as long as a service: after errors that stay it is made anew. It is a `ModelRunner`, for fused
models a `ModelFusionRunner`.

An error that an IPU reset mends is the runner's own business (``auto_reset``). After another one, such as a machine
that is lost, `LiveRunner` takes IPUs again: those that the partition has by then. It tries once in `retry_seconds`;
whoever asks in between waits for that attempt, so that an instance without IPUs does not draw requests from those that
have some. Each error of IPUs is noted with the requests that it cost (`podrun.serving.request_incidents`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from podrun.core.errors import CallError, FailedAssertionError, PodrunError, PoplarError, ServiceError
from podrun.serving.compiler import ServedModel
from podrun.serving.fused_models import fused_graphs
from podrun.serving.loaded_model import DataDescription, needs_reset
from podrun.serving.request_incidents import IncidentLog
from podrun.serving.runner import ModelRunner
from podrun.serving.runtime.config import RuntimeConfig
from podrun.serving.runtime.fusion_runner import ModelFusionRunner
from podrun.serving.runtime.requests import QueuedRequest

RETRY_SECONDS = 1.0


class LiveRunner:
    """A runner that lives as long as a service: after errors that stay it is made anew. Thread-safe. UsageError
    at the start where no IPUs are free.
    """

    def __init__(
        self,
        model: ServedModel,
        config: RuntimeConfig,
        incidents: IncidentLog,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._model, self.config, self._incidents = model, config, incidents
        self._retry_seconds = retry_seconds
        self._lock = threading.Lock()
        self._runner: ModelRunner | ModelFusionRunner | None = self._made_anew()
        self._inputs = self._runner.get_execute_inputs()
        self._outputs = self._runner.get_execute_outputs()
        tensors = (*self._inputs, *self._outputs)
        self._rows = {tensor.name: self._runner.rows_behind(tensor.name) for tensor in tensors}
        self._failure: PodrunError | None = None
        self._next_attempt = 0.0
        self._closed = False
        self._asked = 0

    def get_execute_inputs(self) -> list[DataDescription]:
        """The inputs of a request."""
        return list(self._inputs)

    def rows_behind(self, name: str) -> int:
        """Rows of the compiled batch that a tensor belongs to."""
        return self._rows[name]

    def get_execute_outputs(self) -> list[DataDescription]:
        """The outputs of a request."""
        return list(self._outputs)

    def prepared(
        self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray], label: str = ""
    ) -> QueuedRequest:
        """A checked request. UsageError for what does not fit; ServiceError, with the reason, while there are no IPUs.

        ``label``: the client's id of the request, for incidents.
        """
        request = self.current().prepared(inputs, outputs)
        self._asked += 1
        request.label = label or f"#{self._asked}"
        return request

    def run_now(self, requests: Sequence[QueuedRequest]) -> None:
        """Run requests together in this thread; their futures have the results."""
        self.current().run_now(requests)
        self.note(requests)

    def run_queued(self, requests: Sequence[QueuedRequest]) -> None:
        """Give requests to the queue, where those of other threads may join them, and wait until all are answered."""
        runner = self.current()
        for request in requests:
            runner.enqueue(request)
        for request in requests:
            request.future.wait_for_answer()
        self.note(requests)

    def note(self, requests: Sequence[QueuedRequest]) -> None:
        """Note what errors of IPUs cost, once the requests are answered; takes IPUs again later where that is
        needed. A false assertion of the program is the client's own.
        """
        failed: dict[int, tuple[PoplarError, list[QueuedRequest]]] = {}
        for request in requests:
            error = request.future.error
            if isinstance(error, PoplarError) and not isinstance(error, FailedAssertionError):
                failed.setdefault(id(error), (error, []))[1].append(request)
        for error, costs in failed.values():
            rows = sum(request.rows for request in costs)
            self._incidents.note(error, [request.label for request in costs], rows, self._action(error))

    def _made_anew(self) -> ModelRunner | ModelFusionRunner:
        fused = fused_graphs(anchor.name for anchor in self._model.metadata.inputs())
        return (ModelFusionRunner if fused else ModelRunner)(self._model, self.config)

    def current(self) -> ModelRunner | ModelFusionRunner:
        """The runner, a new one where the last one failed for good. ServiceError while there are no IPUs."""
        with self._lock:
            if self._closed:
                raise CallError("the runner is closed")
            runner = self._runner
            if runner is not None and (runner.failure is None or not self.config.auto_reset):
                return runner
            if runner is not None:
                self._failure, self._runner = runner.failure, None
                runner.close()
            time.sleep(max(0.0, min(self._retry_seconds, self._next_attempt - time.monotonic())))
            self._next_attempt = time.monotonic() + self._retry_seconds
            try:
                self._runner = self._made_anew()
            except PodrunError as error:
                reason = "" if self._failure is None else f"; before: {self._failure.message}"
                raise ServiceError(
                    f"the model has no IPUs: {error.message}{reason}", hint=error.hint
                ) from error
            return self._runner

    @property
    def is_live(self) -> bool:
        """True iff the model is on IPUs, as far as is known."""
        runner = self._runner
        return not self._closed and runner is not None and runner.failure is None

    def close(self) -> None:
        """Answer what is queued, then give the IPUs back. Idempotent."""
        with self._lock:
            self._closed = True
            runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def _action(self, error: PoplarError) -> str:
        if not self.config.auto_reset:
            return "the model refuses requests until it is loaded again"
        if needs_reset(error):
            return "the IPUs are reset and the program is loaded again for the next request"
        return "the model takes IPUs again for the next request"
