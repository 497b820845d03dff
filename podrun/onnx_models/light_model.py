"""ONNX models whose large initial values lie beside them as arrays.

A protobuf is copied, checked and written as a whole, and nearly all of a model is its weights. Without them a model is
small whatever it computes: passes copy it freely, and a weight's bytes are touched only where it comes in and where
it goes out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import field
from typing import TYPE_CHECKING

import numpy as np

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.onnx_models.tensor_proto import (
    ELEMENT_TYPES,
    element_type,
    packed,
    packed_field,
    packed_halves,
    raw_data,
    to_array,
    to_proto,
    typed_data,
    unpacked,
)

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from onnx import ModelProto, TensorProto

MOST_HELD = 4096
"""Most elements of a value that stays in the model, because passes read axes, shapes and scales."""
_DATA = ("float_data", "int32_data", "raw_data")
"""The fields that hold values."""
_MOST_BYTES = 2**31 - 1
"""Most bytes of one protobuf message."""


@dataclass(frozen=True, slots=True)
class LightModel:
    """A model, and by name the ``values`` of those of its initializers that have no data themselves (FLOAT and FLOAT16
    above `MOST_HELD` elements). Values are not to be written to."""

    proto: ModelProto
    values: Mapping[str, np.ndarray] = field(default_factory=dict)

    def value(self, tensor: TensorProto) -> np.ndarray:
        """The value of an initializer of this model."""
        held = self.values.get(tensor.name)
        return to_array(tensor) if held is None else held

    def copy(self) -> LightModel:
        """A copy whose nodes can be changed, with the same values."""
        from onnx import ModelProto

        proto = ModelProto()
        proto.CopyFrom(self.proto)
        return LightModel(proto, self.values)

    @contextmanager
    def checkable(self) -> Iterator[ModelProto]:
        """A context in which onnx.checker accepts the model: initializers whose data lie beside it are empty
        meanwhile.
        """
        apart = [
            (tensor, list(tensor.dims))
            for tensor in self.proto.graph.initializer
            if tensor.name in self.values and not any(len(getattr(tensor, data)) for data in _DATA)
        ]
        for tensor, _ in apart:
            tensor.dims[:] = [0]
        try:
            yield self.proto
        finally:
            for tensor, dims in apart:
                tensor.dims[:] = dims

    def to_bytes(self, *, standard: bool = False) -> bytes:
        """The whole model as PopART writes it: as protobuf would, with halves and bytes packed into int32_data
        (`packed_tensors`), unless it has to be ``standard`` ONNX. UsageError beyond 2 GB.
        """
        small = not standard and any(len(tensor.int32_data) for tensor in self.proto.graph.initializer)
        if not self.values and not small:
            return self.proto.SerializeToString(deterministic=True)
        graph = self.proto.graph
        before, behind = _around(graph, "initializer")
        parts: list[bytes | memoryview] = [before]
        for tensor in graph.initializer:
            parts += packed_field(graph, "initializer", *self._written(tensor, standard))
        parts.append(behind)
        before, behind = _around(self.proto, "graph")
        whole = [before, *packed_field(self.proto, "graph", *parts), behind]
        size = sum(len(part) for part in whole)
        if size > _MOST_BYTES:
            raise UsageError(
                f"The model has {size} bytes; a ModelProto has at most {_MOST_BYTES}.",
                hint="builder.saveInitializersExternally(ids, filename) puts weights in a file beside it.",
            )
        return b"".join(whole)

    def _written(self, tensor: TensorProto, standard: bool) -> list[bytes | memoryview]:
        value = self.values.get(tensor.name)
        if value is None:
            return [(tensor if standard else packed(tensor)).SerializeToString(deterministic=True)]
        data: bytes | memoryview
        if tensor.HasField("raw_data"):
            name, data = "raw_data", raw_data(value)
        elif value.dtype == np.float16 and not standard:
            name, data = "int32_data", packed_halves(value)
        else:
            name, data = typed_data(value)
        before, behind = _around(tensor, name)
        return [before, *packed_field(tensor, name, data), behind]


def lightened(model: LightModel, at_least: int = MOST_HELD) -> LightModel:
    """``model`` with all values of more than ``at_least`` elements beside it. The caller must not use ``model`` any
    more.
    """
    values = dict(model.values)
    for tensor in model.proto.graph.initializer:
        if tensor.name not in values and (value := _taken(tensor, at_least)) is not None:
            values[tensor.name] = value
    if len(values) == len(model.values):
        return model
    return LightModel(model.proto, values).copy()  # The memory is freed with the parsed message.


def put_beside(values: MutableMapping[str, np.ndarray], name: str, value: np.ndarray) -> TensorProto:
    """An initializer for ``value``. A large value goes into ``values``, and nobody may change it from then on."""
    from onnx import TensorProto

    kind = element_type(value.dtype)
    if value.size <= MOST_HELD or kind not in ("float32", "float16"):
        return to_proto(name, value)
    values[name] = value
    return TensorProto(name=name, data_type=ELEMENT_TYPES[kind], dims=value.shape)


def _taken(tensor: TensorProto, at_least: int) -> np.ndarray | None:
    """The data of a tensor, taken out of it. None if the tensor keeps them: small ones, and malformed ones, which
    checks must find.
    """
    from onnx import TensorProto, helper

    count = math.prod(tensor.dims)
    if tensor.data_type not in (TensorProto.FLOAT, TensorProto.FLOAT16) or count <= at_least:
        return None
    if tensor.data_location == TensorProto.EXTERNAL or tensor.HasField("segment"):
        return None
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).newbyteorder("<")
    typed = "float_data" if tensor.data_type == TensorProto.FLOAT else "int32_data"
    filled = [f.name for f, _ in tensor.ListFields() if f.name == "raw_data" or f.name.endswith("_data")]
    if filled == ["raw_data"] and len(tensor.raw_data) == count * dtype.itemsize:
        value = np.frombuffer(tensor.raw_data, dtype)
    elif filled == [typed] and len(getattr(tensor, typed)) == count:
        value = np.asarray(getattr(tensor, typed), np.float32 if typed == "float_data" else np.int32)
        value = value if typed == "float_data" else value.astype(np.uint16).view(np.float16)
    elif filled == ["int32_data"] and (halves := unpacked(tensor)) is not None:
        value = halves
    else:
        return None
    tensor.ClearField(filled[0])
    if filled == ["raw_data"]:
        tensor.raw_data = b""  # The data leave in the form in which they came.
    value.flags.writeable = False
    return value.astype(dtype.newbyteorder("="), copy=False).reshape(tensor.dims)


def _around(message: Message, name: str) -> tuple[bytes, bytes]:
    """The bytes that protobuf writes of a message before and behind one of its fields."""
    number = message.DESCRIPTOR.fields_by_name[name].number
    before, behind = type(message)(), type(message)()
    before.CopyFrom(message)
    for entry, value in message.ListFields():
        if entry.number >= number:
            before.ClearField(entry.name)
        if entry.number <= number:
            continue
        if entry.is_repeated:
            getattr(behind, entry.name).extend(value)
        elif entry.message_type is not None:
            getattr(behind, entry.name).CopyFrom(value)
        else:
            setattr(behind, entry.name, value)
    return before.SerializeToString(deterministic=True), behind.SerializeToString(deterministic=True)
