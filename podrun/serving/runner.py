"""Runs requests of any size, from any thread: `ModelRunner`.

    runner = ModelRunner("executable.popef", RuntimeConfig(batching_dim=0, timeout_ns=300_000))
    future = runner.execute_async({"x": x}, {"y": y}); future.wait()        # y is filled in place

Without batching (`RuntimeConfig.batching_dim` `OFF`) the rows of a request are a multiple of those that the model was
compiled for. With it, requests of any size fill compiled batches together: a batch that is full runs at once, one that
is not waits ``timeout_ns`` for other requests (0: for ever) and is then filled with zeros, which nobody sees.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np

from podrun.core.errors import CallError, DeadlineError, PodrunError, UsageError
from podrun.serving.compiler import ServedModel
from podrun.serving.loaded_model import DataDescription, LoadedModel, ModelledTime, needs_reset

OFF = 0xFFFFFFFF
"""`RuntimeConfig.batching_dim` of a runner that does not batch."""
FOREVER = (1 << 64) - 1
_CLOSE_SECONDS = 30.0


@dataclass(slots=True)
class RuntimeConfig:
    """How a runner works; names and defaults are the SDK's."""

    timeout_ns: int = 10_000_000
    batching_dim: int = OFF
    thread_safe: bool = True
    validate_io_params: bool = True
    check_package_hash: bool = True
    ring_buffer_size_multiplier: int = 2
    auto_reset: bool = False
    flush_on_waiting_outputs: bool = False
    batch_size_timeout_ns: int = FOREVER
    data_parallel_timeout_ns: int = FOREVER
    is_batch_size_timeout_enabled: bool = False
    request_tracepoints_buffer_size: int = 1000


class RunFuture:
    """A request that was given to a runner."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self.modelled: ModelledTime | None = None
        """What the run cost that answered the request, when it is done."""
        self.queue_seconds = 0.0
        """Seconds between the call and the run."""

    def wait(self, seconds: float | None = None) -> None:
        """Return when the outputs are filled; raises the request's error, DeadlineError after ``seconds``."""
        if not self._done.wait(seconds):
            raise DeadlineError(f"the request was not answered within {seconds:g} s")
        if self._error is not None:
            raise self._error

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the request as answered."""
        self._error = error
        self._done.set()


@dataclass(slots=True)
class QueuedRequest:
    """A request in a runner's queue. ``rows``: along the first axis of its arrays."""

    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    rows: int
    future: RunFuture = field(default_factory=RunFuture)
    since: float = field(default_factory=time.monotonic)


class ModelRunner:
    """See the module docstring. Takes a path or a `ServedModel`; `close` (or ``with``) gives the IPUs back."""

    def __init__(
        self, model: str | bytes | ServedModel, config: RuntimeConfig | None = None, **options: object
    ) -> None:
        self.config = config or RuntimeConfig()
        for name, value in options.items():
            setattr(self.config, name, value)
        if self.config.batching_dim not in (0, OFF):
            raise UsageError(f"batching_dim is 0 or off, not {self.config.batching_dim}")
        compiled = model if isinstance(model, ServedModel) else ServedModel(model)
        self._loaded = LoadedModel(compiled)
        self._rows = _rows_of_batch(self._loaded.inputs)
        self._queue: queue.Queue[QueuedRequest | None] = queue.Queue()
        self._failed: PodrunError | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="podrun-model-runner", daemon=True)
        self._thread.start()

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

    def execute(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
        """Run a request and fill the arrays of ``outputs``."""
        self.execute_async(inputs, outputs).wait()

    def execute_async(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> RunFuture:
        """Give a request to the runner; returns at once. UsageError for names, types and shapes that do not fit.

        The arrays must not change before the request is answered: they are used where they lie.
        """
        request = self.prepared(inputs, outputs)
        self._queue.put(request)
        return request.future

    def prepared(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> QueuedRequest:
        """A checked request that is not queued, for `run_now`. UsageError as from `execute_async`."""
        if self._closed:
            raise CallError("the runner is closed")
        return QueuedRequest(inputs, outputs, self._checked(inputs, outputs))

    def run_now(self, requests: Sequence[QueuedRequest]) -> None:
        """Run requests together in this thread, without waiting for others; their futures have the results."""
        self._run(requests)

    executeAsync = execute_async

    def close(self) -> None:
        """Answer what is queued, then give the IPUs back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join(_CLOSE_SECONDS)
        self._loaded.close()

    def __enter__(self) -> ModelRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- checks ---------------------------------------------------------------------------------------------

    def _checked(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> int:
        """The rows of a request."""
        if inputs.keys() != self._loaded.inputs.keys():
            raise UsageError(f"the inputs are {sorted(self._loaded.inputs)}, not {sorted(inputs)}")
        if unknown := sorted(outputs.keys() - self._loaded.outputs.keys()):
            raise UsageError(f"there is no output {unknown[0]!r}: there are {sorted(self._loaded.outputs)}")
        sizes = {_rows(name, value, self._loaded.inputs[name], self._rows) for name, value in inputs.items()}
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
        for name, value in outputs.items():
            shape = self._loaded.outputs[name].shape
            wanted = (rows * shape[0] // self._rows, *shape[1:]) if shape else (rows // self._rows,)
            dtype = self._loaded.outputs[name].dtype
            if value.dtype != dtype or value.size != np.prod(wanted):
                raise UsageError(
                    f"output {name!r} is {dtype}{list(wanted)}; the array is {value.dtype}{list(value.shape)}"
                )
        return rows

    # -- the thread -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        waiting: list[QueuedRequest] = []
        ended = False
        while not ended or waiting:
            if not waiting:
                first = self._queue.get()
                if first is None:
                    return
                waiting.append(first)
            ended = self._gather(waiting) or ended
            self._run(waiting)
            waiting = []

    def _gather(self, waiting: list[QueuedRequest]) -> bool:
        """Take the requests that go into one run with the first. True if the runner was closed meanwhile."""
        size = self._rows * self._loaded.group
        if self.config.batching_dim == OFF and size == self._rows:
            return False
        seconds = self.config.timeout_ns / 1e9
        end = waiting[0].since + seconds if seconds else None
        while sum(request.rows for request in waiting) < size:
            left = None if end is None else max(0.0, end - time.monotonic())
            try:
                request = self._queue.get(timeout=left)
            except queue.Empty:
                return False
            if request is None:
                return True
            waiting.append(request)
        return False

    def _run(self, requests: Sequence[QueuedRequest]) -> None:
        try:
            if self._failed is not None:
                raise self._failed
            begin = time.monotonic()
            for request in requests:
                request.future.queue_seconds = begin - request.since
            rows = sum(request.rows for request in requests)
            count = -(-rows // self._rows)
            inputs = {name: self._joined(name, requests, count) for name in self._loaded.inputs}
            results, modelled = self._loaded.run(inputs, count)
        except PodrunError as error:
            if not (self.config.auto_reset and needs_reset(error)):
                self._failed = self._failed or error
            for request in requests:
                request.future.finish(error)
        else:
            self._hand_over(requests, results, modelled)

    def _joined(self, name: str, requests: Sequence[QueuedRequest], count: int) -> np.ndarray:
        """The rows of all requests, those of one request as they lie; zeros behind them to full batches."""
        whole = count * self._rows
        if len(requests) == 1 and requests[0].rows == whole:
            return requests[0].inputs[name]
        parts = [request.inputs[name] for request in requests]
        filled = sum(request.rows for request in requests)
        shape = self._loaded.inputs[name].shape
        if filled < whole:
            parts.append(np.zeros((whole - filled, *shape[1:]), self._loaded.inputs[name].dtype))
        return np.concatenate([part.reshape(-1, *shape[1:]) for part in parts])

    def _hand_over(
        self, requests: Sequence[QueuedRequest], results: Mapping[str, np.ndarray], modelled: ModelledTime
    ) -> None:
        begin = 0
        for request in requests:
            for name, target in request.outputs.items():
                value = results[name]
                each_row = self._loaded.outputs[name].shape[:1] == (self._rows,)
                part = value[begin : begin + request.rows] if each_row else value
                target.reshape(-1)[...] = part.reshape(-1)
            begin += request.rows
            request.future.modelled = modelled
            request.future.finish()


def _rows_of_batch(inputs: Mapping[str, DataDescription]) -> int:
    """The rows of a compiled batch, which all inputs share. UsageError where they do not."""
    sizes = {description.shape[0] if description.shape else 0 for description in inputs.values()}
    if len(sizes) != 1 or 0 in sizes:
        raise UsageError(f"the model's inputs do not share a batch axis: {sorted(sizes)}")
    return sizes.pop()


def _rows(name: str, value: np.ndarray, description: DataDescription, batch: int) -> int:
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
