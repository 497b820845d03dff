"""The low-level interface of the SDK's model runtime: a session that loads, runs and saves by hand, and queues for it.

    session = PopefSession(PopefFiles("executable.popef"), SessionSettings(LaunchPolicy.Immediate))
    queues = session.createQueueManager()
    session.runLoadPrograms()
    queues.inputQueue("x").enqueue(x)               # arrays of the anchors' shapes; used where they lie
    queues.outputQueue("y").enqueue(y, callback)    # filled, then callback() is called
    session.runMainPrograms()                       # one run; a program calls this in a thread of its own

    session.setUserInputHandler("x", fill)          # instead of a queue: fill(array) before each run
    session.setUserOutputHandler("y", take)         # and take(array) after it

Programs import `PopefSession` as ``model_runtime.Session``. Names are those of the SDK's guide and of programs in
public repositories, which are C++; its Python form is not known in full, and this is podrun's reading of it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import field
from enum import Enum

import numpy as np

from podrun.core.errors import CallError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.popef.metadata import PopefAnchor
from podrun.runtime.device import RunDevice
from podrun.serving.closing import ClosedAtEnd
from podrun.serving.compiler import ServedModel
from podrun.serving.loaded_model import DataDescription, LoadedModel
from podrun.serving.runtime.config import LightRunnerConfig
from podrun.serving.runtime.views import DeviceWaitConfig, PopefFiles, TensorDescription

AnchorHandler = Callable[[np.ndarray], None]
"""Fills the array of one micro-batch of an input, or takes that of an output."""


class LaunchPolicy(Enum):
    """When a session takes IPUs: as it is made, or when it loads."""

    Immediate = 0
    Deferred = 1


@dataclass(slots=True)
class SessionSettings:
    """Settings of a `PopefSession`; ``wait_config`` as of runners."""

    policy: LaunchPolicy = LaunchPolicy.Deferred
    check_package_hash: bool = True
    wait_config: DeviceWaitConfig = field(default_factory=DeviceWaitConfig)


class SessionQueue:
    """The arrays of one anchor that wait for a run, each with what is called when the run has used or filled it, or
    has failed.
    """

    def __init__(self, told: DataDescription, changed: threading.Condition) -> None:
        self._told, self._changed = told, changed
        self.waiting: deque[tuple[np.ndarray, Callable[[], None] | None]] = deque()
        self.owed = 0
        """Arrays of runs that failed before these were queued."""

    def tensorInfo(self) -> TensorDescription:
        """Name, shape and type of one array."""
        return TensorDescription.of(self._told)

    def enqueue(self, array: np.ndarray, callback: Callable[[], None] | None = None) -> None:
        """Queue an array of one micro-batch. UsageError for another type or size."""
        told = self._told
        if (
            not isinstance(array, np.ndarray)
            or array.dtype != told.dtype
            or array.nbytes != told.size_in_bytes
        ):
            held = (
                f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            )
            raise UsageError(f"the queue of {told.name!r} takes {told.dtype}{list(told.shape)}, not {held}")
        with self._changed:
            passed, self.owed = self.owed > 0, max(0, self.owed - 1)
            if not passed:
                self.waiting.append((array, callback))
                self._changed.notify_all()
        if passed and callback is not None:
            callback()


class SessionQueues:
    """A queue for each input and output; see `PopefSession.createQueueManager`."""

    def __init__(
        self, inputs: Sequence[DataDescription], outputs: Sequence[DataDescription], group: int
    ) -> None:
        self._changed = threading.Condition()
        self.inputs = {d.name: SessionQueue(d, self._changed) for d in inputs}
        self.outputs = {d.name: SessionQueue(d, self._changed) for d in outputs}
        self._group, self._flush, self.connected = group, False, True
        self.handled: set[str] = set()
        """Anchors with a handler, whose queues are not used."""

    def inputQueue(self, name: str) -> SessionQueue:
        """The queue of an input. UsageError for another name."""
        return _named(self.inputs, name, "input")

    def outputQueue(self, name: str) -> SessionQueue:
        """The queue of an output. UsageError for another name."""
        return _named(self.outputs, name, "output")

    def flushAll(self) -> None:
        """Let the next run take what waits: zeros take the place of what is missing."""
        with self._changed:
            self._flush = True
            self._changed.notify_all()

    def disconnectAll(self) -> None:
        """End runs that wait for arrays, and all later ones."""
        with self._changed:
            self.connected = False
            self._changed.notify_all()

    def take(self) -> tuple[dict[str, list[np.ndarray]], list[Callable[[], None]]] | None:
        """The inputs of the next run, as many for each anchor, with their callbacks; None when disconnected. Waits."""
        with self._changed:
            while self.connected:
                queues = self._queued(self.inputs)
                ready = min((len(queue.waiting) for queue in queues.values()), default=self._group)
                if ready >= self._group or (self._flush and ready):
                    self._flush = False
                    return self._taken(queues, min(ready, self._group))
                self._changed.wait()
        return None

    def fill(self, results: dict[str, np.ndarray], count: int) -> None:
        """Copy results to the output arrays, waiting for arrays that are not there, and tell their owners."""
        with self._changed:
            queues = self._queued(self.outputs)
            while self.connected and any(len(queue.waiting) < count for queue in queues.values()):
                self._changed.wait()
            if not self.connected:
                return
            targets, callbacks = self._taken(queues, count)
        for name, arrays in targets.items():
            for array, value in zip(arrays, results[name].reshape(count, -1), strict=True):
                array.reshape(-1)[...] = value
        for callback in callbacks:
            callback()

    def skip(self, count: int) -> list[Callable[[], None]]:
        """Take the output arrays of a run that failed, which stay as they are. Returns their callbacks; arrays that
        are not there yet are passed over when they come.
        """
        callbacks: list[Callable[[], None]] = []
        with self._changed:
            for name, queue in self._queued(self.outputs).items():
                ready = min(count, len(queue.waiting))
                callbacks += self._taken({name: queue}, ready)[1]
                queue.owed += count - ready
        return callbacks

    def _queued(self, queues: dict[str, SessionQueue]) -> dict[str, SessionQueue]:
        return {name: queue for name, queue in queues.items() if name not in self.handled}

    @staticmethod
    def _taken(
        queues: dict[str, SessionQueue], count: int
    ) -> tuple[dict[str, list[np.ndarray]], list[Callable[[], None]]]:
        pairs = {name: [queue.waiting.popleft() for _ in range(count)] for name, queue in queues.items()}
        arrays = {name: [array for array, _ in taken] for name, taken in pairs.items()}
        return arrays, [call for taken in pairs.values() for _, call in taken if call is not None]


class PopefSession(ClosedAtEnd):
    """Loads a PopEF file, or `PopefFiles`, on IPUs and runs it step by step: queues of inputs and outputs, load, runs.

    It takes IPUs at once or at the load, as ``config.policy`` says; `stop` (or ``with``) gives them back. UsageError
    where none are free.
    """

    def __init__(self, model: str | PopefFiles, config: SessionSettings | None = None) -> None:
        self._config = config or SessionSettings()
        self._model = ServedModel(model.path if isinstance(model, PopefFiles) else model)
        self._device: RunDevice | None = None
        self._loaded: LoadedModel | None = None
        self._queues: SessionQueues | None = None
        self._handlers: dict[str, AnchorHandler] = {}
        if self._config.policy is LaunchPolicy.Immediate:
            self._load()

    def model(self) -> ServedModel:
        """The model; ``model().metadata`` is the file's."""
        return self._model

    def getUserInputAnchors(self) -> list[PopefAnchor]:
        """The inputs of a run."""
        return list(self._model.metadata.inputs())

    def getUserOutputAnchors(self) -> list[PopefAnchor]:
        """The outputs of a run."""
        return list(self._model.metadata.outputs())

    def setUserInputHandler(self, name: str, handler: AnchorHandler | None) -> None:
        """Have ``handler`` fill the input's array of each micro-batch before a run, in the thread of
        `runMainPrograms`; None: its queue feeds it again. UsageError for another name.
        """
        self._handle(name, handler, [a.name for a in self.getUserInputAnchors()], "input")

    def setUserOutputHandler(self, name: str, handler: AnchorHandler | None) -> None:
        """Have ``handler`` take the output's array of each micro-batch after a run; as `setUserInputHandler`."""
        self._handle(name, handler, [a.name for a in self.getUserOutputAnchors()], "output")

    def _handle(self, name: str, handler: AnchorHandler | None, known: Sequence[str], what: str) -> None:
        if name not in known:
            raise UsageError(f"the model has no {what} {name!r}; it has {', '.join(known)}")
        if handler is None:
            self._handlers.pop(name, None)
        elif callable(handler):
            self._handlers[name] = handler
        else:
            raise UsageError(f"the handler of {name!r} is called with an array; {handler!r} cannot be")
        if self._queues is not None:
            self._queues.handled = set(self._handlers)

    def bindToDevice(self, device: RunDevice) -> None:
        """Run on IPUs that the caller holds. CallError after the load."""
        if self._loaded is not None:
            raise CallError("the session has IPUs already", hint="stop() gives them back.")
        self._device = device

    def createQueueManager(self) -> SessionQueues:
        """Queues of the inputs and outputs. Those of an earlier call are disconnected."""
        loaded = self._load()
        if self._queues is not None:
            self._queues.disconnectAll()
        self._queues = SessionQueues([*loaded.inputs.values()], [*loaded.outputs.values()], loaded.group)
        self._queues.handled = set(self._handlers)
        return self._queues

    def runLoadPrograms(self) -> None:
        """Load the program and write the weights. UsageError where no IPUs are free."""
        if self._loaded is None:
            self._load()
        else:
            self._loaded.load()

    def runMainPrograms(self) -> bool:
        """Run once with what handlers give and the queues have, waiting for it; False when they are disconnected.

        PoplarError if the run fails, with which its arrays are taken: the next run has the next ones.
        """
        loaded, queues = self._loaded, self._queues
        if (
            loaded is not None
            and queues is None
            and loaded.inputs.keys() | loaded.outputs.keys() == {*self._handlers}
        ):
            queues = self.createQueueManager()
        if loaded is None or queues is None:
            raise CallError(
                "the session is not ready to run",
                hint="Call createQueueManager() and runLoadPrograms() first.",
            )
        taken = queues.take()
        if taken is None:
            return False
        arrays, callbacks = taken
        count = len(next(iter(arrays.values()), ())) or loaded.group
        try:
            results, _ = loaded.run(self._inputs_of_run(loaded, arrays, count), count)
        except BaseException:
            callbacks += queues.skip(count)
            raise
        finally:
            for callback in callbacks:
                callback()
        queues.fill(results, count)
        for name in loaded.outputs.keys() & self._handlers.keys():
            for array in results[name].reshape(count, *loaded.outputs[name].shape):
                self._handlers[name](array)
        return True

    def _inputs_of_run(
        self, loaded: LoadedModel, arrays: dict[str, list[np.ndarray]], count: int
    ) -> dict[str, np.ndarray]:
        """The arrays of the queues, and those that handlers fill."""
        inputs = {
            name: np.stack([value.reshape(loaded.inputs[name].shape) for value in values])
            for name, values in arrays.items()
        }
        for name in loaded.inputs.keys() & self._handlers.keys():
            inputs[name] = np.zeros((count, *loaded.inputs[name].shape), loaded.inputs[name].dtype)
            for part in range(count):
                self._handlers[name](inputs[name][part, ...])
        return inputs

    def reload(self, model: str | PopefFiles) -> None:
        """Take another model onto the session's IPUs; its queues are made anew."""
        self.unload()
        self._model = ServedModel(model.path if isinstance(model, PopefFiles) else model)
        self._load()

    def unload(self) -> None:
        """Take the model off the IPUs. Idempotent."""
        if self._queues is not None:
            self._queues.disconnectAll()
            self._queues = None
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.close()

    def close(self) -> None:
        """`unload` under another name."""
        self.unload()

    stop = unload

    def _load(self) -> LoadedModel:
        if self._loaded is None:
            settings = LightRunnerConfig(
                check_package_hash=self._config.check_package_hash,
                device_wait_config=self._config.wait_config.wait(),
            )
            self._loaded = settings.put_on_ipus(self._model, self._device)
        return self._loaded


def _named(queues: dict[str, SessionQueue], name: str, what: str) -> SessionQueue:
    if name not in queues:
        raise UsageError(f"the model has no {what} {name!r}; it has {', '.join(queues)}")
    return queues[name]
