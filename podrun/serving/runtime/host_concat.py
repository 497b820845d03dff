"""Joins many small inputs on the host: `HostConcatRunner`, for models whose pass ``apply_host_concat_split`` made one
tensor of them. One transfer of a large tensor takes less time than many of small ones.

Which inputs go into which tensor is said by the settings, else by the file, into which conversion writes it: its blob
`HOST_CONCAT_KEY` is JSON, tensor name -> ``{"input_tensor_names": [...], "shape": [...], "input_shape": [...]}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import field

import numpy as np

from podrun.core.errors import ConfigError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.onnx_models.annotations import HOST_CONCAT_KEY
from podrun.runtime.device import RunDevice
from podrun.serving.closing import ClosedAtEnd
from podrun.serving.compiler import ServedModel
from podrun.serving.loaded_model import DataDescription
from podrun.serving.runtime.config import LightRunnerConfig
from podrun.serving.runtime.light_runner import LightFuture, LightRunner


@dataclass(frozen=True, slots=True)
class HostConcatConfig:
    """A tensor that is put together on the host: of the inputs' elements, one input behind the other.
    ``data_size_bytes``: of the tensor; 0: not checked. ``input_shape``, podrun's own: of each input; empty: an equal
    share of the tensor's first axis.
    """

    tensor_name: str
    input_tensor_names: Sequence[str]
    shape: Sequence[int]
    data_size_bytes: int = 0
    input_shape: Sequence[int] = ()


@dataclass(slots=True)
class HostConcatRunnerConfig(LightRunnerConfig):
    """Settings of a `HostConcatRunner`. ``host_concat_config``: by name of the tensor; empty: as the file says."""

    host_concat_config: Mapping[str, HostConcatConfig] = field(default_factory=dict)


def concat_configs_of(model: ServedModel) -> dict[str, HostConcatConfig]:
    """What a file says; empty if it says nothing. ConfigError for a blob that is damaged."""
    for blob in model.reader.opaqueBlobs():
        if blob.name == HOST_CONCAT_KEY:
            try:
                entries = json.loads(bytes(blob.data()))
                return {
                    str(name): HostConcatConfig(
                        str(name),
                        [str(part) for part in entry["input_tensor_names"]],
                        [int(size) for size in entry["shape"]],
                        int(entry.get("data_size_bytes", 0)),
                        [int(size) for size in entry.get("input_shape", ())],
                    )
                    for name, entry in entries.items()
                }
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"{model.label}: {HOST_CONCAT_KEY} is damaged: {error}") from error
    return {}


class HostConcatRunner(ClosedAtEnd):
    """Joins many small inputs on the host to one tensor, which takes less time to send. ``close`` (or ``with``) gives
    the IPUs back.
    """

    def __init__(
        self,
        executable: str | bytes | ServedModel,
        config: HostConcatRunnerConfig | None = None,
        device: RunDevice | None = None,
    ) -> None:
        settings = config or HostConcatRunnerConfig()
        model = executable if isinstance(executable, ServedModel) else ServedModel(executable)
        self._concats = dict(settings.host_concat_config) or concat_configs_of(model)
        if not self._concats:
            raise UsageError(
                f"{model.label} does not say which inputs are joined",
                hint="HostConcatRunnerConfig(host_concat_config={...}) does.",
            )
        self._runner = LightRunner(model, settings, device)
        try:
            self._parts = self._parts_of(self._concats)
        except UsageError:
            self._runner.stop()
            raise

    def get_execute_inputs(self) -> list[DataDescription]:
        """The inputs of a request: those that are joined, then the others."""
        joined = [part for parts in self._parts.values() for part in parts]
        return [*joined, *(d for d in self._runner.get_execute_inputs() if d.name not in self._concats)]

    def get_execute_outputs(self) -> list[DataDescription]:
        """The outputs of a request."""
        return self._runner.get_execute_outputs()

    get_model_inputs, get_model_outputs = get_execute_inputs, get_execute_outputs

    def execute(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
        """Run, and fill the arrays of ``outputs``."""
        self.execute_async(inputs, outputs).wait()

    def execute_async(
        self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
    ) -> LightFuture:
        """Start a run. UsageError for inputs that do not fit."""
        if missing := sorted({d.name for d in self.get_execute_inputs()} ^ inputs.keys()):
            raise UsageError(f"input {missing[0]!r} is missing, or is none of this model's")
        arrays = dict(inputs)
        for name, parts in self._parts.items():
            values = [_checked(arrays.pop(part.name), part) for part in parts]
            shape = tuple(self._concats[name].shape)
            arrays[name] = np.concatenate([value.reshape(-1) for value in values]).reshape(shape)
        return self._runner.execute_async(arrays, outputs)

    executeAsync = execute_async

    def close(self) -> None:
        """Give the IPUs back. Idempotent."""
        self._runner.stop()

    def _parts_of(self, configs: Mapping[str, HostConcatConfig]) -> dict[str, list[DataDescription]]:
        """The inputs that go into each tensor: equal shares of its first axis."""
        held = {d.name: d for d in self._runner.get_execute_inputs()}
        parts = {}
        for name, config in configs.items():
            if name not in held or tuple(config.shape) != held[name].shape:
                raise UsageError(
                    f"host_concat_config has {name!r} {list(config.shape)}; the model has "
                    f"{ {n: list(d.shape) for n, d in held.items()} }"
                )
            count, tensor = len(config.input_tensor_names), held[name]
            if config.data_size_bytes not in (0, tensor.size_in_bytes):
                raise UsageError(f"{name!r} has {tensor.size_in_bytes} bytes, not {config.data_size_bytes}")
            if not count or tensor.shape[0] % count:
                raise UsageError(f"{count} inputs cannot have equal shares of {name!r} {list(tensor.shape)}")
            shape = tuple(config.input_shape) or (tensor.shape[0] // count, *tensor.shape[1:])
            if np.prod(shape, dtype=np.int64) * count != np.prod(tensor.shape, dtype=np.int64):
                raise UsageError(f"{count} inputs {list(shape)} do not fill {name!r} {list(tensor.shape)}")
            parts[name] = [DataDescription(part, shape, tensor.dtype) for part in config.input_tensor_names]
        return parts


def _checked(value: np.ndarray, part: DataDescription) -> np.ndarray:
    if not isinstance(value, np.ndarray) or value.dtype != part.dtype or value.size != np.prod(part.shape):
        held = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise UsageError(f"input {part.name!r} is {held}; the model takes {part.dtype}{list(part.shape)}")
    return value
