"""The interface of the SDK's model runtime over `ModelRunner`: views of memory in, memory out.

    runner = CallableRunner(PopefFiles("executable.popef"), config=ViewRunnerConfig())
    view = InputViews(); view["x"] = x
    result = runner.execute(view); result["y"]           # or executeAsync(view), wait(), and then result["y"]

Programs import these classes as ``model_runtime.ModelRunner``, ``PopefPaths``, ``ModelRunnerConfig`` and
``InputMemoryView``. What of that interface is published is what programs in public repositories use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from datetime import timedelta
from enum import Enum

import numpy as np

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.popef.metadata import ElementType
from podrun.runtime.device import RunDevice
from podrun.serving.closing import ClosedAtEnd
from podrun.serving.loaded_model import DataDescription, DeviceWait
from podrun.serving.runner import ModelRunner
from podrun.serving.runtime.config import OFF, RuntimeConfig
from podrun.serving.runtime.requests import RunFuture


class DeviceWaitStrategy(Enum):
    """Whether a runner waits for IPUs that others hold."""

    NO_WAIT = 0
    WAIT_WITH_TIMEOUT = 1
    WAIT_FOREVER = 2


@dataclass(frozen=True, slots=True)
class DeviceWaitConfig:
    """How a runner waits for IPUs: for ``timeout``, with ``sleepTime`` between two attempts."""

    strategy: DeviceWaitStrategy = DeviceWaitStrategy.NO_WAIT
    timeout: timedelta = timedelta(seconds=1)
    sleepTime: timedelta = timedelta(seconds=6)

    def wait(self) -> DeviceWait:
        """The strategy as the runtime takes it: the longest wait, and the pause between two looks, in seconds."""
        seconds = {
            DeviceWaitStrategy.NO_WAIT: 0.0,
            DeviceWaitStrategy.WAIT_WITH_TIMEOUT: self.timeout.total_seconds(),
            DeviceWaitStrategy.WAIT_FOREVER: math.inf,
        }
        return DeviceWait(seconds[self.strategy], max(0.05, self.sleepTime.total_seconds()))


@dataclass(slots=True)
class ViewRunnerConfig:
    """Settings of a `CallableRunner`; they mean what those of `RuntimeConfig` mean."""

    device_wait_config: DeviceWaitConfig = field(default_factory=DeviceWaitConfig)
    replica_to_device: Mapping[int, int] = field(default_factory=dict)
    timeout_ns: timedelta | int = timedelta(milliseconds=10)
    batching_dim: int = OFF
    thread_safe: bool = True
    validate_io_params: bool = True
    check_package_hash: bool = True
    ring_buffer_size_multiplier: int = 2
    auto_reset: bool = False
    flush_on_waiting_outputs: bool = False
    is_batch_size_timeout_enabled: bool = False

    def runtime_config(self) -> RuntimeConfig:
        """The settings of the runner that stand for these options."""
        timeout = self.timeout_ns
        if isinstance(timeout, timedelta):
            timeout = int(timeout.total_seconds() * 1e9)
        return RuntimeConfig(
            replica_to_device=self.replica_to_device,
            check_package_hash=self.check_package_hash,
            device_wait_config=self.device_wait_config.wait(),
            timeout_ns=timeout,
            batching_dim=self.batching_dim,
            validate_io_params=self.validate_io_params,
            ring_buffer_size_multiplier=self.ring_buffer_size_multiplier,
            auto_reset=self.auto_reset,
            flush_on_waiting_outputs=self.flush_on_waiting_outputs,
            is_batch_size_timeout_enabled=self.is_batch_size_timeout_enabled,
        )


class PopefFiles:
    """The files of a model. podrun's models are one file each: UsageError for more."""

    def __init__(self, paths: str | Sequence[str]) -> None:
        listed = [paths] if isinstance(paths, str) else list(paths)
        if len(listed) != 1:
            raise UsageError(f"a model is one PopEF file, not {len(listed)}")
        self.path = str(listed[0])

    def __repr__(self) -> str:
        return f"PopefPaths({self.path!r})"


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """An input or an output: ``data_type`` is PopEF's."""

    name: str
    shape: list[int]
    data_type: ElementType
    size_in_bytes: int

    @staticmethod
    def of(description: DataDescription) -> TensorDescription:
        """What the runtime knows of a tensor, under PopRT's names."""
        kind = next(t for t in ElementType if t.numpy_dtype == description.dtype)
        return TensorDescription(description.name, list(description.shape), kind, description.size_in_bytes)


class InputViews(dict[str, np.ndarray]):
    """Inputs by name. The arrays are used where they lie."""


class OutputViews(Mapping[str, np.ndarray]):
    """Outputs by name, in memory of the runner's own; from ``executeAsync`` there after `wait`."""

    def __init__(self, arrays: Mapping[str, np.ndarray], future: RunFuture) -> None:
        self._arrays, self._future = arrays, future

    def wait(self) -> None:
        """Return when the outputs are there; raises the request's error."""
        self._future.wait()

    def __getitem__(self, name: str) -> np.ndarray:
        self.wait()
        return self._arrays[name]

    def __iter__(self) -> object:  # type: ignore[override]
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class CallableRunner(ClosedAtEnd):
    """A runner that is called with arrays, as PopRT's are (see the module docstring)."""

    def __init__(
        self,
        model: str | PopefFiles,
        config: ViewRunnerConfig | None = None,
        device: RunDevice | None = None,
    ) -> None:
        path = model.path if isinstance(model, PopefFiles) else model
        self._runner = ModelRunner(path, (config or ViewRunnerConfig()).runtime_config(), device)

    def getExecuteInputs(self) -> list[TensorDescription]:
        """The inputs of a request."""
        return [TensorDescription.of(d) for d in self._runner.get_execute_inputs()]

    def getExecuteOutputs(self) -> list[TensorDescription]:
        """The outputs of a request."""
        return [TensorDescription.of(d) for d in self._runner.get_execute_outputs()]

    def execute(
        self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray] | None = None
    ) -> OutputViews:
        """Run a request; ``outputs``: arrays to fill, else new ones."""
        result = self.executeAsync(inputs, outputs)
        result.wait()
        return result

    def executeAsync(
        self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray] | None = None
    ) -> OutputViews:
        """Give a request to the runner; returns at once."""
        arrays = outputs
        if arrays is None:
            first = next(iter(inputs.values()), None)
            rows = int(first.shape[0]) if isinstance(first, np.ndarray) and first.ndim else 0
            arrays = {d.name: _empty(d, rows, self._runner.compiled_rows) for d in self._outputs}
        return OutputViews(arrays, self._runner.execute_async(inputs, arrays))

    @property
    def _outputs(self) -> list[DataDescription]:
        return self._runner.get_execute_outputs()

    def close(self) -> None:
        """Answer what is queued, then give the IPUs back. Idempotent."""
        self._runner.close()


def _empty(description: DataDescription, rows: int, compiled: int) -> np.ndarray:
    shape = description.shape
    whole = (rows * shape[0] // compiled, *shape[1:]) if shape else (rows // compiled,)
    return np.empty(whole, description.dtype)
