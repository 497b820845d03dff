"""A compiled model on IPUs: attached, loaded, and run on any number of micro-batches.

A *micro-batch* is what the model was compiled for: arrays of the anchors' shapes. Micro-batches go to iterations,
then replicas, in order. The device runs whole iterations of all replicas, and where micro-batches overlap in a
pipeline whole passes of it; what is missing is filled with zeros, whose results nobody sees.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.cluster import IPUS_PER_MACHINE
from podrun.core.errors import (
    FailedAssertionError,
    PodrunError,
    PoplarError,
    RecoverableRuntimeError,
    SystemRuntimeError,
    UsageError,
)
from podrun.core.executable import Retrieval, StreamDirection
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.device_pool import Candidates, DevicePool
from podrun.runtime.model_export import ANCHOR_HANDLE
from podrun.serving.closing import ClosedAtEnd
from podrun.serving.compiler import ServedModel

if TYPE_CHECKING:
    from podrun.device.connection import RunInFlight
    from podrun.runtime.device import RunDevice

NamedArrays = Mapping[str, np.ndarray]
_locks: weakref.WeakKeyDictionary[RunDevice, threading.Lock] = weakref.WeakKeyDictionary()
"""Of each device, whose models take turns."""


@dataclass(frozen=True, slots=True)
class DataDescription:
    """An input or an output of a compiled model: what one micro-batch has."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    popef_contains_tensor_data: bool = False

    def numpy_data_type(self) -> np.dtype:
        """The NumPy dtype of the elements."""
        return self.dtype

    def whole_shape(self, count: int) -> tuple[int, ...]:
        """The shape of an array that holds ``count`` micro-batches: the first dimension is ``count`` times as large."""
        return (count * self.shape[0], *self.shape[1:]) if self.shape else (count,)

    @property
    def size_in_bytes(self) -> int:
        """Bytes of one micro-batch."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ModelledTime:
    """What a run cost. ``compute_s``: modelled on the IPUs; ``transfer_s``: modelled between host and IPUs;
    ``emulation_s``: wall time of the emulation.
    """

    compute_s: float
    transfer_s: float
    emulation_s: float


@dataclass(frozen=True, slots=True)
class StartedSize:
    """What was started: micro-batches, batches of the device, the load they belong to, when, and of how many
    micro-batches a false assertion of the program is an error.
    """

    count: int
    batches: int
    loads: int
    begin: float
    checked: int


class FalseBatchesError(FailedAssertionError):
    """Assertions were false in micro-batches of a run. ``answers``: of each one, whether they were true or not checked,
    and the run's results and cost; the results of the other micro-batches are right.
    """

    answers: tuple[np.ndarray, dict[str, np.ndarray], ModelledTime]


class StartedBatches:
    """Micro-batches that have been started and whose results are still to be waited for."""

    def __init__(self, loaded: LoadedModel, run: RunInFlight, size: StartedSize) -> None:
        self._loaded, self._run, self._size = loaded, run, size

    def wait(self) -> tuple[dict[str, np.ndarray], ModelledTime]:
        """The results and what they cost, as `LoadedModel.run` gives them."""
        return self._loaded.collected(self._run, self._size)


class ModelledPace:
    """Lets runs take as long as is modelled, times ``scale``: for trying a service at the speed of IPUs. Runs
    follow one another, as on IPUs. Scale 0: they take as long as their emulation.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self._free = 0.0

    def keep(self, begin: float, modelled_s: float) -> None:
        """Wait until the run that was started at ``begin`` (of `time.perf_counter`) is over on IPUs."""
        if self.scale:
            self._free = max(begin, self._free) + modelled_s * self.scale
            time.sleep(max(0.0, self._free - time.perf_counter()))


class LoadedModel(ClosedAtEnd):
    """A compiled model on IPUs: attached, loaded, and run on any number of micro-batches. UsageError where no IPUs are
    free, with who holds them.

    ``shared``: the caller holds ``device``, and other models may run on it: the program of the one that runs is
    loaded when it runs.
    """

    def __init__(
        self,
        model: ServedModel,
        device: RunDevice | None = None,
        *,
        shared: bool = False,
        time_scale: float = 0.0,
    ) -> None:
        self.model, metadata = model, model.metadata
        self._program = model.program()
        self.inputs = {
            a.name: DataDescription(a.name, a.tensorInfo.shape, a.tensorInfo.dataType.numpy_dtype)
            for a in metadata.inputs()
        }
        self.outputs = {
            a.name: DataDescription(a.name, a.tensorInfo.shape, a.tensorInfo.dataType.numpy_dtype)
            for a in metadata.outputs()
        }
        self._streams = {a.name: a.handle.removeprefix(ANCHOR_HANDLE) for a in metadata.outputs()}
        asserted = metadata.asserted()
        self._asserted = None if asserted is None else asserted.handle.removeprefix(ANCHOR_HANDLE)
        self._check_streams()
        self._overlap = self._program.batches_per_pass
        self.group = metadata.replicationFactor * (max(1, self._overlap))
        """Micro-batches that the device takes at once."""
        self._device = device or acquire_device(self._program.layout.ipus)
        self._shared = shared
        self._pace = ModelledPace(time_scale)
        self._lock = _locks.setdefault(self._device, threading.Lock())
        self._loaded = False
        self._loads = 0
        self.failure: PodrunError | None = None
        """The error after which runners use the model no more."""
        self._variables = {n: v for n, v in model.variables().items() if n in self._program.variables}
        self.load()

    def load(self) -> None:
        """Attach and load the program with its variables: what an IPU holds before is gone."""
        self.model.check_unchanged()
        self._device.hold(self._program.layout.ipus)
        self._device.ensure_attached()
        self._device.connection.load(self._program)
        self._device.connection.write_variables(self._variables)
        self._loaded = True
        self._loads += 1
        self._device.loaded = self

    def run(
        self, inputs: NamedArrays, count: int, outputs: NamedArrays | None = None, checked: int | None = None
    ) -> tuple[dict[str, np.ndarray], ModelledTime]:
        """Run ``count`` micro-batches; arrays are ``[count * rows, ...]``, and so are the results.

        ``outputs``: arrays that results are written to where nothing has to be filled up; the results have them then.
        PoplarError if the system reports one; the next run loads the program again if the IPUs were reset. ``checked``
        as of `start`.
        """
        return self.start(inputs, count, outputs, depth=1, checked=checked).wait()

    def start(
        self,
        inputs: NamedArrays,
        count: int,
        outputs: NamedArrays | None = None,
        *,
        depth: int = 2,
        checked: int | None = None,
    ) -> StartedBatches:
        """Start micro-batches and return before they are done. ``depth``: runs in flight, as the device connection
        takes them; where there are as many already, this waits for the oldest. ``checked``: of how many micro-batches,
        from the first on, a false assertion of the program is an error; None: of all.
        """
        with self._lock:
            if not self._loaded or self._device.loaded is not self:
                self.load()
            padded = -(-count // self.group) * self.group
            filled = {name: self._laid_out(name, value, count, padded) for name, value in inputs.items()}
            batches = 1 if self._overlap > 1 else padded // self.group
            targets = self._targets(outputs or {}, padded) if padded == count else {}
            run = self._device.connection.start(batches, filled, targets, depth=depth)
            checked = count if checked is None else checked
            size = StartedSize(count, batches, self._loads, time.perf_counter(), checked)
            return StartedBatches(self, run, size)

    def collected(self, run: RunInFlight, size: StartedSize) -> tuple[dict[str, np.ndarray], ModelledTime]:
        """The results of a run that was started. For `StartedBatches`."""
        try:
            result = run.wait()
        except PodrunError as error:
            with self._lock:
                if size.loads == self._loads:  # Another run's error may have had the program loaded again.
                    self._loaded = not needs_reset(error)
            raise
        cost = self._cost(size.batches, result.modelled_seconds, time.perf_counter() - size.begin)
        self._pace.keep(size.begin, cost.compute_s + cost.transfer_s)
        outputs = {
            name: self._results(name, result.anchors[stream], size.count)
            for name, stream in self._streams.items()
        }
        if self._asserted is not None:
            held = result.anchors[self._asserted].reshape(-1)[: size.count].astype(bool)
            held[size.checked :] = True
            if not held.all():
                false = FalseBatchesError(
                    "An assertion of the program failed on the device.",
                    hint="Look at the values of the request; ipu.internal_ops.print_tensor shows those of the program.",
                )
                false.answers = held, outputs, cost
                raise false
        return outputs, cost

    def write_variables(self, values: NamedArrays) -> None:
        """Replace weights on the IPUs, and those that a later load writes. Waits for runs in flight."""
        with self._lock:
            if not self._loaded or self._device.loaded is not self:
                self.load()
            self._device.connection.write_variables(values)
            self._variables.update({name: np.array(value) for name, value in values.items()})

    @property
    def tile_report(self) -> Mapping[str, Any]:
        """What the tile model says of the program."""
        return self._program.tile_report

    @property
    def variable_names(self) -> set[str]:
        """Weights that the host may replace: those that were not compiled as constants."""
        replaced = {a.name for a in self.model.metadata.anchors if a.programs}
        return self._variables.keys() & replaced

    def close(self) -> None:
        """Give the IPUs back, unless they are the caller's. Idempotent."""
        if not self._shared:
            self._device.detach()
        elif self._device.loaded is self:
            self._device.loaded = None

    def _cost(self, batches: int, modelled: float, wall: float) -> ModelledTime:
        step = self._program.tile_report.get("step", {})
        compute = float(step.get("seconds") or 0.0) * batches
        return ModelledTime(min(compute, modelled), max(0.0, modelled - compute), wall)

    def _check_streams(self) -> None:
        """UsageError for anchors that come back otherwise than with all values."""
        for name, stream in self._streams.items():
            held = self._program.streams.get(stream)
            if held is None or held.direction is not StreamDirection.TO_HOST:
                raise UsageError(f"{self.model.label}: output {name!r} has no stream in the program")
            if held.retrieval is not Retrieval.ALL:
                raise UsageError(
                    f"{self.model.label}: output {name!r} returns {held.retrieval.value}; a server needs all values",
                    hint='Compile with AnchorReturnType("All").',
                )

    def _laid_out(self, name: str, value: np.ndarray, count: int, padded: int) -> np.ndarray:
        """``[batches, micro-batches, replicas, *shape]``: a view of ``value`` where nothing is missing."""
        description = self.inputs[name]
        stream = self._program.streams[name]
        shape = description.shape
        value = np.ascontiguousarray(value).reshape(count, *shape)
        if stream.broadcast:
            return np.repeat(value[:1], padded // self.group * self._overlap, 0).reshape(
                -1, self._overlap, *shape
            )
        if padded > count:
            whole = np.zeros((padded, *shape), description.dtype)
            whole[:count] = value
            value = whole
        return value.reshape(-1, self._overlap, self.model.metadata.replicationFactor, *shape)

    def _targets(self, outputs: NamedArrays, padded: int) -> dict[str, np.ndarray]:
        """The arrays of ``outputs`` as the device fills them, by stream; those that do not lie in one piece are
        left.
        """
        replicas = self.model.metadata.replicationFactor
        return {
            self._streams[name]: value.reshape(-1, self._overlap, replicas, *self.outputs[name].shape)
            for name, value in outputs.items()
            if value.flags.c_contiguous and value.flags.writeable and value.flags.aligned
        }

    def _results(self, name: str, value: np.ndarray, count: int) -> np.ndarray:
        shape = self.outputs[name].shape
        flat = value.reshape(-1, *shape)[:count]
        return flat.reshape(count * shape[0], *shape[1:]) if shape else flat


def needs_reset(error: PodrunError) -> bool:
    """True iff an error costs IPUs their memory and a reset of them makes them usable again: an application's
    error other than a false assertion, or a recoverable one whose action is IPU_RESET.
    """
    if isinstance(error, RecoverableRuntimeError):
        return str(getattr(error.recovery_action, "value", "")) == "IPU_RESET"
    return isinstance(error, PoplarError) and not isinstance(
        error, (SystemRuntimeError, FailedAssertionError)
    )


def ends_runner(error: Exception, auto_reset: bool) -> bool:
    """True iff a runner answers later requests with an error of one run, too."""
    if not isinstance(error, PodrunError) or isinstance(error, FailedAssertionError):
        return False
    return not (auto_reset and needs_reset(error))


@dataclass(frozen=True, slots=True)
class DeviceWait:
    """How long a runner waits for IPUs that others hold, and between two attempts, seconds. Where a second attempt
    would come too late there is one.
    """

    timeout_s: float = 0.0
    sleep_s: float = 1.0


def acquire_device(
    ipus: int,
    environ: Mapping[str, str] | None = None,
    wait: DeviceWait | None = None,
    identifier: int | None = None,
    turn: int = 0,
) -> RunDevice:
    """A device of that many IPUs, attached: that of an id, or the first that is free, from machine ``turn`` on.
    UsageError with who holds them.
    """
    wait, pool = wait or DeviceWait(), DevicePool(environ)
    end = time.monotonic() + wait.timeout_s
    while True:
        device, reasons = _attempt(pool, ipus, identifier, turn)
        if device is not None:
            return device
        left = end - time.monotonic()
        if left <= 0 or wait.sleep_s >= wait.timeout_s:
            named = "" if identifier is None else f" {identifier}"
            raise UsageError(
                f"no device{named} with {ipus} IPUs is free: {'; '.join(reasons)}",
                hint="gc-monitor shows who holds them.",
            )
        time.sleep(min(wait.sleep_s, left))


def from_machine(devices: Candidates, turn: int) -> Candidates:
    """Devices in an order that begins with machine ``turn`` (counted around), so that instances spread over
    machines.
    """
    machines = sorted({ipus.first // IPUS_PER_MACHINE for _, ipus in devices})
    if len(machines) < 2 or not turn:
        return devices
    places = {machine: (index - turn) % len(machines) for index, machine in enumerate(machines)}
    return sorted(devices, key=lambda device: places[device[1].first // IPUS_PER_MACHINE])


def _attempt(
    pool: DevicePool, ipus: int, identifier: int | None, turn: int
) -> tuple[RunDevice | None, Sequence[str]]:
    """A device, or why there is none."""
    if identifier is None:
        acquisition = pool.acquire(ipus, order=lambda devices: from_machine(devices, turn))
        return acquisition.device, list(dict.fromkeys(acquisition.refusals)) or ["the partition is smaller"]
    device = pool.acquire_by_id(identifier)
    if device is None:
        return None, ["it is taken"]
    if device.ipu_count != ipus:
        device.detach()
        raise UsageError(f"device {identifier} has {device.ipu_count} IPUs; the model takes {ipus}")
    return device, ()
