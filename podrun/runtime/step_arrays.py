"""A run's data in arrays: checked for memory that outputs share, and in the types that the device has."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from podrun.core.errors import CallError
from podrun.core.executable import numpy_dtype
from podrun.runtime.building import BuiltModel
from podrun.runtime.operators import Form
from podrun.runtime.settings import RunPlan, RunSettings, StepData, StepTensor

_log = logging.getLogger("podrun.runtime")
_WARNED: set[str] = set()


def tensor_dtype(tensor: StepTensor) -> np.dtype[Any]:
    """The NumPy type of a tensor of a run."""
    return numpy_dtype(tensor.spec.dtype)


def as_device_type(array: np.ndarray, tensor: StepTensor) -> np.ndarray:
    """``array`` in the type the device has. CallError for a type that does not become it.

    Equal types pass; int64 becomes int32 with a warning, once per tensor; uint8 bytes stand for float8.
    """
    wanted = tensor_dtype(tensor)
    if array.dtype == wanted:
        return array
    if array.dtype in (np.int64, np.uint64) and wanted in (np.int32, np.uint32):
        if tensor.name not in _WARNED:
            _WARNED.add(tensor.name)
            _log.warning(
                "Input %r is %s; the device takes %s, so it is converted.", tensor.name, array.dtype, wanted
            )
        limits = np.iinfo(wanted)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise CallError(
                f"Input {tensor.name!r} is {array.dtype} with values that do not fit the device's {wanted}."
            )
        return array.astype(wanted)
    if array.dtype == np.uint8 and wanted.name.startswith("float8"):
        return array.view(wanted)
    raise CallError(
        f"Type discrepancy for tensor {tensor.name!r}: the model has {Form.of(tensor.spec).kind} ({wanted}), the "
        f"array given is {array.dtype}. Pass array.astype({str(wanted)!r})."
    )


def returned_arrays(built: BuiltModel, plan: RunPlan, settings: RunSettings) -> dict[str, np.ndarray]:
    """Zeros for every tensor that comes back: batches, micro-batches and replicas in front of its own dimensions, those
    of size 1 left out.
    """
    arrays = {}
    for name, kind in plan.returned.items():
        spec = built.info(name)
        crossings = kind.crossings(plan.batches, settings.micro_batches)
        replicas = settings.local_replicas
        leading: tuple[int, ...] = (replicas,)
        if kind.every_micro_batch:
            leading = (crossings // settings.micro_batches, settings.micro_batches, replicas)
        shape = (*(size for size in leading if size != 1), *spec.shape)
        arrays[name] = np.zeros(shape, numpy_dtype(spec.dtype))
    return arrays


class ArrayStep(StepData):
    """Data of a run in contiguous arrays of its own: ``outputs`` are filled in place."""

    def __init__(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
        self._inputs, self._outputs = inputs, outputs

    def input_names(self) -> list[str]:
        """Names of the inputs given."""
        return list(self._inputs)

    def fetch(self, tensor: StepTensor) -> np.ndarray:
        return as_device_type(self._inputs[tensor.name], tensor).reshape(tensor.layout)

    def target(self, tensor: StepTensor) -> np.ndarray | None:
        return self._outputs[tensor.name].reshape(tensor.layout)

    def store(self, tensor: StepTensor, value: np.ndarray) -> None:
        self._outputs[tensor.name].reshape(-1)[...] = value.reshape(-1)
