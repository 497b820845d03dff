"""A compiled model on IPUs: attached, loaded, and run on any number of micro-batches.

A *micro-batch* is what the model was compiled for: arrays of the anchors' shapes. Micro-batches go to iterations, then
replicas, in order. The device runs whole iterations of all replicas, and where micro-batches overlap in a pipeline
whole passes of it; what is missing is filled with zeros, whose results nobody sees.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from podrun.core.errors import PodrunError, PoplarError, RecoverableRuntimeError, UsageError
from podrun.core.executable import Retrieval, StreamDirection
from podrun.runtime.device_pool import DevicePool
from podrun.runtime.model_export import ANCHOR_HANDLE
from podrun.serving.compiler import ServedModel

if TYPE_CHECKING:
    from podrun.runtime.device import RunDevice

NamedArrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class DataDescription:
    """An input or an output of a compiled model: what one micro-batch has."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    popef_contains_tensor_data: bool = False

    def numpy_data_type(self) -> np.dtype:
        """The dtype."""
        return self.dtype

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


class LoadedModel:
    """See the module docstring. UsageError where no IPUs are free, with who holds them."""

    def __init__(self, model: ServedModel, device: RunDevice | None = None) -> None:
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
        self._check_streams()
        self._overlap = self._program.batches_per_pass
        self.group = metadata.replicationFactor * (max(1, self._overlap))
        """Micro-batches that the device takes at once."""
        self._device = device or acquire_device(self._program.layout.ipus)
        self._lock = threading.Lock()
        self._loaded = False
        self.load()

    def load(self) -> None:
        """Attach and load the program with its variables: what an IPU holds before is gone."""
        self._device.hold(self._program.layout.ipus)
        self._device.ensure_attached()
        self._device.connection.load(self._program)
        self._device.connection.write_variables(
            {n: v for n, v in self.model.variables().items() if n in self._program.variables}
        )
        self._loaded = True

    def run(self, inputs: NamedArrays, count: int) -> tuple[dict[str, np.ndarray], ModelledTime]:
        """Run ``count`` micro-batches; arrays are ``[count * rows, ...]``, and so are the results.

        PoplarError if the system reports one; the next run loads the program again if the IPUs were reset.
        """
        with self._lock:
            if not self._loaded:
                self.load()
            padded = -(-count // self.group) * self.group
            filled = {name: self._laid_out(name, value, count, padded) for name, value in inputs.items()}
            batches = 1 if self._overlap > 1 else padded // self.group
            begin = time.perf_counter()
            try:
                result = self._device.connection.run(batches, filled)
            except PoplarError as error:
                self._loaded = not needs_reset(error)
                raise
            wall = time.perf_counter() - begin
        outputs = {
            name: self._results(name, result.anchors[stream], count) for name, stream in self._streams.items()
        }
        return outputs, self._cost(batches, result.modelled_seconds, wall)

    def close(self) -> None:
        """Give the IPUs back. Idempotent."""
        self._device.detach()

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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

    def _results(self, name: str, value: np.ndarray, count: int) -> np.ndarray:
        shape = self.outputs[name].shape
        flat = value.reshape(-1, *shape)[:count]
        return flat.reshape(count * shape[0], *shape[1:]) if shape else flat


def needs_reset(error: PodrunError) -> bool:
    """True iff an error costs IPUs their memory and a reset makes them usable again."""
    if isinstance(error, RecoverableRuntimeError):
        return str(getattr(error.recovery_action, "value", "")) == "IPU_RESET"
    return isinstance(error, PoplarError)


def acquire_device(ipus: int, environ: Mapping[str, str] | None = None) -> RunDevice:
    """A device of that many IPUs, attached. UsageError with who holds them."""
    acquisition = DevicePool(environ).acquire(ipus)
    if acquisition.device is None:
        reasons: Sequence[str] = list(dict.fromkeys(acquisition.refusals)) or ["the partition is smaller"]
        raise UsageError(
            f"no device with {ipus} IPUs is free: {'; '.join(reasons)}",
            hint="gc-monitor shows who holds them.",
        )
    return acquisition.device
