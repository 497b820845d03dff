"""TensorFlow's tensors on the wire and NumPy's arrays. What comes is checked before memory is taken for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from podrun.core.errors import UsageError
from podrun.protos import tfserving_pb2 as pb

NUMBERS: Mapping[int, tuple[str, str, str]] = {
    1: ("DT_FLOAT", "float32", "float_val"),
    2: ("DT_DOUBLE", "float64", "double_val"),
    3: ("DT_INT32", "int32", "int_val"),
    4: ("DT_UINT8", "uint8", "int_val"),
    5: ("DT_INT16", "int16", "int_val"),
    6: ("DT_INT8", "int8", "int_val"),
    9: ("DT_INT64", "int64", "int64_val"),
    10: ("DT_BOOL", "bool", "bool_val"),
    17: ("DT_UINT16", "uint16", "int_val"),
    19: ("DT_HALF", "float16", "half_val"),
    22: ("DT_UINT32", "uint32", "uint32_val"),
    23: ("DT_UINT64", "uint64", "uint64_val"),
}
"""DataType -> TensorFlow's name, NumPy's name, the list of values."""
_OTHERS = {7: "DT_STRING", 8: "DT_COMPLEX64", 14: "DT_BFLOAT16", 18: "DT_COMPLEX128"}
_BY_NUMPY = {numpy: number for number, (_, numpy, _) in NUMBERS.items()}
MOST_BYTES = 1 << 30
"""Of one tensor."""


def type_number(dtype: np.dtype[np.generic]) -> int:
    """The DataType of an array's type."""
    return _BY_NUMPY[dtype.name]


def type_name(dtype: np.dtype[np.generic]) -> str:
    """TensorFlow's name of an array's type."""
    return NUMBERS[type_number(dtype)][0]


def array_from_wire(name: str, message: pb.TensorValue) -> np.ndarray:
    """The array of a tensor. UsageError that names the tensor for a type that IPUs do not compute, for an unknown
    shape, and for values that are not as many as the shape says.
    """
    if message.dtype not in NUMBERS:
        kind = _OTHERS.get(message.dtype, f"DataType {message.dtype}")
        raise UsageError(f"input {name!r} has {kind}, which IPUs do not compute")
    _, numpy_name, field = NUMBERS[message.dtype]
    dtype = np.dtype(numpy_name)
    shape = tuple(dim.size for dim in message.tensor_shape.dim)
    if message.tensor_shape.unknown_rank or any(size < 0 for size in shape):
        raise UsageError(f"input {name!r} has no shape")
    count = math.prod(shape)
    if count * dtype.itemsize > MOST_BYTES:
        raise UsageError(f"input {name!r} with shape {list(shape)} is more than {MOST_BYTES} bytes")
    if message.tensor_content:
        if len(message.tensor_content) != count * dtype.itemsize:
            raise UsageError(
                f"input {name!r} has {len(message.tensor_content)} bytes; {numpy_name}{list(shape)} has "
                f"{count * dtype.itemsize}"
            )
        return np.frombuffer(message.tensor_content, dtype).reshape(shape)
    values = getattr(message, field)
    if len(values) > count or (count and not len(values)):
        raise UsageError(f"input {name!r} has {len(values)} values; its shape {list(shape)} has {count}")
    array = _from_values(name, values, dtype)
    if len(array) < count:  # TensorFlow repeats the last value.
        array = np.concatenate([array, np.full(count - len(array), array[-1], dtype)])
    return array.reshape(shape)


def _from_values(name: str, values: object, dtype: np.dtype[Any]) -> np.ndarray:
    wide = np.array(values)
    if dtype == np.float16:  # The bits of each half, in an integer.
        return wide.astype(np.uint16).view(np.float16)
    if dtype.kind in "iu" and wide.size:
        bounds = np.iinfo(dtype)
        if wide.min() < bounds.min or wide.max() > bounds.max:
            raise UsageError(f"input {name!r} has values that {dtype} does not hold")
    return wide.astype(dtype)


def array_to_wire(array: np.ndarray) -> pb.TensorValue:
    """The tensor of an array."""
    return pb.TensorValue(
        dtype=type_number(array.dtype),
        tensor_shape=pb.TensorShape(dim=[pb.Dimension(size=size) for size in array.shape]),
        tensor_content=np.ascontiguousarray(array).tobytes(),
    )
