"""Runs requests of any size, from any thread: `ModelRunner`.

    runner = ModelRunner("executable.popef", RuntimeConfig(batching_dim=0, timeout_ns=300_000))
    future = runner.execute_async({"x": x}, {"y": y}); future.wait()        # y is filled in place

Without batching (`RuntimeConfig.batching_dim` `OFF`) the rows of a request are a multiple of those that the model was
compiled for. With it, requests of any size fill compiled batches together: rows that fill batches run at once, the rest
waits ``timeout_ns`` for other requests (0: for ever) and is then filled with zeros, which nobody sees.

One thread starts runs, another one collects their results: while one run computes, the next one is put together and
started. Requests are answered in the order in which they came.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from podrun.core.errors import CallError, PodrunError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.device import RunDevice
from podrun.serving.batching import BatchingRule
from podrun.serving.closing import ClosedAtEnd
from podrun.serving.compiler import ServedModel
from podrun.serving.fused_models import FusedBatches, FusedGraph, fused_graphs
from podrun.serving.loaded_model import (
    DataDescription,
    FalseBatchesError,
    LoadedModel,
    ModelledTime,
    StartedBatches,
    ends_runner,
)
from podrun.serving.runtime.config import FOREVER, OFF, RuntimeConfig
from podrun.serving.runtime.requests import QueuedRequest, RequestPart, RequestQueue, RunFuture, whole_parts

__all__ = ["FOREVER", "OFF", "ModelRunner", "QueuedRequest", "RunFuture", "RuntimeConfig"]

AnyStarted = StartedBatches | FusedBatches
_CLOSE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When a request came, when its last run was started, and when it was answered: seconds on the monotonic clock."""

    queued: float
    started: float
    answered: float


class ModelRunner(ClosedAtEnd):
    """Runs requests of any size, from any thread. Takes a path, a `ServedModel`, or a model of a fused program that is
    loaded; `close` (or ``with``) gives the IPUs back. ``device``: IPUs that the caller holds, else any that are free.
    ``options`` replace settings of ``config``.
    """

    def __init__(
        self,
        model: str | bytes | ServedModel | FusedGraph,
        config: RuntimeConfig | None = None,
        device: RunDevice | None = None,
        **options: object,
    ) -> None:
        self.config = (config or RuntimeConfig()).changed(options)
        self._loaded: LoadedModel | FusedGraph
        self._loaded = model if isinstance(model, FusedGraph) else self.config.put_on_ipus(model, device)
        try:
            if isinstance(self._loaded, LoadedModel) and fused_graphs(self._loaded.inputs):
                raise UsageError(
                    f"{self._loaded.model.label} is a fused model, and a ModelRunner runs one model",
                    hint="ModelFusionRunner runs it; Runner(file) picks it.",
                )
            self._rows = rows_of_batch(self._loaded.inputs)
        except UsageError:
            self._loaded.close()
            raise
        size = self._rows * self._loaded.group
        self._waits = self.config.batching_dim != OFF or size > self._rows
        self._undivided = outputs_without_rows(self._loaded.outputs, self._rows)
        divided = self.config.batching_dim != OFF and not self._undivided
        rule = BatchingRule(size if self._waits else 1, whole_requests=not divided)
        self._queue = RequestQueue(rule, self._delay)
        self._in_flight: queue.SimpleQueue[tuple[list[RequestPart], AnyStarted] | None]
        self._in_flight = queue.SimpleQueue()
        self._times: deque[RequestTimes] = deque(maxlen=self.config.request_tracepoints_buffer_size or None)
        self._closed = False
        self._threads = [
            threading.Thread(target=work, name=f"podrun-model-runner-{name}", daemon=True)
            for name, work in (("starts", self._start_runs), ("collects", self._collect_runs))
        ]
        for thread in self._threads:
            thread.start()

    def get_execute_inputs(self) -> list[DataDescription]:
        """The inputs of a request."""
        return list(self._loaded.inputs.values())

    def get_execute_outputs(self) -> list[DataDescription]:
        """The outputs of a request."""
        return list(self._loaded.outputs.values())

    get_model_inputs, get_model_outputs = get_execute_inputs, get_execute_outputs

    @property
    def compiled_rows(self) -> int:
        """Rows of a compiled batch."""
        return self._rows

    def rows_behind(self, name: str) -> int:
        """Rows of the compiled batch that a tensor belongs to."""
        return self._rows

    @property
    def failure(self) -> PodrunError | None:
        """The error that all requests get from now on; None if the runner works."""
        return self._loaded.failure

    def request_times(self) -> list[RequestTimes]:
        """The times of the last requests, oldest first."""
        return list(self._times)

    def execute(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
        """Run a request and fill the arrays of ``outputs``.

        Where requests do not share runs this happens in the calling thread: a queue would cost its latency twice.
        """
        request = self.prepared(inputs, outputs)
        if self._waits:
            self.enqueue(request)
            request.future.wait()
        else:
            self.run_now([request])
            request.future.wait(0)

    def execute_async(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> RunFuture:
        """Give a request to the runner; returns at once. UsageError for names, types and shapes that do not fit.

        The arrays must not change before the request is answered: they are used where they lie.
        """
        request = self.prepared(inputs, outputs)
        self.enqueue(request)
        return request.future

    executeAsync = execute_async

    def prepared(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> QueuedRequest:
        """A checked request that is not queued, for `enqueue` and `run_now`. UsageError as from `execute_async`."""
        if self._closed:
            raise CallError("the runner is closed")
        if not self.config.validate_io_params:
            inputs = {name: value for name, value in inputs.items() if name in self._loaded.inputs}
            outputs = {name: value for name, value in outputs.items() if name in self._loaded.outputs}
        request = QueuedRequest(inputs, outputs, self._checked(inputs, outputs))
        if self.config.flush_on_waiting_outputs:
            request.future.on_wait = lambda: self._queue.flush(request)
        return request

    def enqueue(self, request: QueuedRequest) -> None:
        """Queue a prepared request. CallError if the runner was closed meanwhile."""
        request.since = time.monotonic()
        if not self._queue.put(request):
            raise CallError("the runner is closed")

    def run_now(self, requests: Sequence[QueuedRequest]) -> None:
        """Run requests together in this thread, without waiting for others; their futures have the results."""
        parts = whole_parts(requests)
        started = self._start(parts, depth=1)
        if started is not None:
            self._collect(parts, started)

    def flush(self) -> None:
        """Run what waits without waiting for more."""
        self._queue.flush()

    def close(self) -> None:
        """Answer what is queued, then give the IPUs back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._queue.close()
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)
        self._loaded.close()

    # -- checks ---------------------------------------------------------------------------------------------

    def _checked(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> int:
        """The rows of a request."""
        if inputs.keys() != self._loaded.inputs.keys():
            raise UsageError(f"the inputs are {sorted(self._loaded.inputs)}, not {sorted(inputs)}")
        if unknown := sorted(outputs.keys() - self._loaded.outputs.keys()):
            raise UsageError(f"there is no output {unknown[0]!r}: there are {sorted(self._loaded.outputs)}")
        sizes = {
            rows_of_input(name, value, self._loaded.inputs[name], self._rows)
            for name, value in inputs.items()
        }
        if len(sizes) != 1:
            raise UsageError(f"the inputs have different numbers of rows: {sorted(sizes)}")
        rows = sizes.pop()
        if rows < 1:
            raise UsageError("a request has at least one row")
        if self.config.batching_dim == OFF and rows % self._rows:
            raise UsageError(
                f"a request of {rows} rows: the model was compiled for {self._rows}, and multiples of it are taken",
                hint="RuntimeConfig(batching_dim=0) takes any number.",
            )
        if self._undivided and rows % self._rows:
            name = self._undivided[0]
            raise UsageError(
                f"a request of {rows} rows: output {name!r} is {list(self._loaded.outputs[name].shape)} for "
                f"{self._rows} rows, which says of no row what belongs to it, so whole batches are taken",
                hint="Give the model's outputs the batch as their first dimension.",
            )
        for name, value in outputs.items():
            shape = self._loaded.outputs[name].shape
            wanted = (rows * shape[0] // self._rows, *shape[1:]) if shape else (rows // self._rows,)
            dtype = self._loaded.outputs[name].dtype
            if value.dtype != dtype or value.size != np.prod(wanted):
                raise UsageError(
                    f"output {name!r} is {dtype}{list(wanted)}; the array is {value.dtype}{list(value.shape)}"
                )
        return rows

    # -- the threads ------------------------------------------------------------------------------------------

    def _delay(self, rows: int) -> float:
        return self.config.delay_s(rows, self._rows) if self._waits else 0.0

    def _start_runs(self) -> None:
        while (parts := self._queue.take()) is not None:
            started = self._start(parts, depth=self.config.depth)
            if started is not None:
                self._in_flight.put((parts, started))
        self._in_flight.put(None)

    def _collect_runs(self) -> None:
        while (run := self._in_flight.get()) is not None:
            self._collect(*run)

    def _start(self, parts: list[RequestPart], depth: int) -> AnyStarted | None:
        """Start a run; None if it cannot be, which its requests are told."""
        try:
            if self._loaded.failure is not None:
                raise self._loaded.failure
            begin = time.monotonic()
            for part in parts:
                part.request.future.queue_seconds = begin - part.request.since
            rows = sum(part.rows for part in parts)
            count = -(-rows // self._rows)
            inputs = {name: self._joined(name, parts, count) for name in self._loaded.inputs}
            direct = parts[0].request.outputs if len(parts) == 1 and parts[0].whole else {}
            full = parts[0].rows == count * self._rows
            # Zeros that fill the last micro-batch may not be what the program asserts.
            checked = rows // self._rows
            return self._loaded.start(inputs, count, direct if full else {}, depth=depth, checked=checked)
        except Exception as error:
            self._fail(parts, error)
        return None

    def _collect(self, parts: list[RequestPart], started: AnyStarted) -> None:
        try:
            results, modelled = started.wait()
        except FalseBatchesError as error:
            held, results, modelled = error.answers
            self._fail(self._parts_in_false_batches(parts, held), error)
            self._hand_over(parts, results, modelled)
        except Exception as error:
            self._fail(parts, error)
        else:
            self._hand_over(parts, results, modelled)

    def _fail(self, parts: list[RequestPart], error: Exception) -> None:
        if isinstance(error, PodrunError) and ends_runner(error, self.config.auto_reset):
            self._loaded.failure = self._loaded.failure or error
        for part in parts:
            part.request.future.finish(error)

    def _parts_in_false_batches(self, parts: Sequence[RequestPart], held: np.ndarray) -> list[RequestPart]:
        """The parts with rows in micro-batches of which an assertion was false."""
        false, begin = [], 0
        for part in parts:
            end = begin + part.rows
            if not held[begin // self._rows : -(-end // self._rows)].all():
                false.append(part)
            begin = end
        return false

    def _joined(self, name: str, parts: Sequence[RequestPart], count: int) -> np.ndarray:
        """The rows of all parts, those of one part as they lie; zeros behind them to full batches."""
        whole = count * self._rows
        values = [part.request.inputs[name][part.begin : part.end] for part in parts]
        if len(parts) == 1 and parts[0].rows == whole:
            return values[0]
        missing = whole - sum(part.rows for part in parts)
        if missing:
            description = self._loaded.inputs[name]
            values.append(np.zeros((missing, *description.shape[1:]), description.dtype))
        return np.concatenate(values)

    def _hand_over(
        self, parts: Sequence[RequestPart], results: Mapping[str, np.ndarray], modelled: ModelledTime
    ) -> None:
        begin = 0
        for part in parts:
            request = part.request
            for name, target in request.outputs.items():
                value = results[name]
                if np.shares_memory(target, value):  # The device has filled the caller's array.
                    continue
                if name not in self._undivided:
                    rows = target.reshape(request.rows, -1)[part.begin : part.end]
                    rows[...] = value[begin : begin + part.rows].reshape(part.rows, -1)
                else:
                    target.reshape(-1)[...] = value.reshape(-1)
            begin += part.rows
            request.answered += part.rows
            request.future.modelled = modelled
            if request.answered == request.rows:
                started = request.since + request.future.queue_seconds
                self._times.append(RequestTimes(request.since, started, time.monotonic()))
                request.future.finish()


def rows_of_batch(inputs: Mapping[str, DataDescription]) -> int:
    """The rows of a compiled batch, which all inputs share. UsageError where they do not."""
    sizes = {description.shape[0] if description.shape else 0 for description in inputs.values()}
    if len(sizes) != 1 or 0 in sizes:
        raise UsageError(f"the model's inputs do not share a batch axis: {sorted(sizes)}")
    return sizes.pop()


def outputs_without_rows(outputs: Mapping[str, DataDescription], batch: int) -> list[str]:
    """Outputs whose first dimension is not the batch of ``batch`` rows; their results are those of whole batches."""
    return [name for name, description in outputs.items() if description.shape[:1] != (batch,)]


def rows_of_input(name: str, value: np.ndarray, description: DataDescription, batch: int) -> int:
    """The rows of a request's input. UsageError for another type or shape; ``batch``: compiled rows."""
    if not isinstance(value, np.ndarray):
        raise UsageError(f"input {name!r} is {type(value).__name__}, not an array")
    if value.dtype != description.dtype:
        raise UsageError(f"input {name!r} has type {value.dtype}; the model takes {description.dtype}")
    if value.ndim != len(description.shape) or value.shape[1:] != description.shape[1:]:
        raise UsageError(
            f"input {name!r} has shape {list(value.shape)}; the model takes {list(description.shape)}, with any number "
            f"of rows for {batch}"
        )
    return int(value.shape[0])
