"""ONNX TensorProtos from NumPy arrays and back, in typed fields: raw_data is never produced, as by
PopART's builder (graphcore/popart, willow/src/builder_impl.cpp).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.onnx_models.packed_tensors import unpacked
from podrun.session.enums import DataType
from podrun.session.exceptions import popart_exception
from podrun.session.tensor_info import TensorInfo, data_type_from_onnx, data_type_of, onnx_data_type

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from onnx import TensorProto, TypeProto

_REFUSED = {
    DataType.DOUBLE,
    DataType.BFLOAT16,
    DataType.COMPLEX64,
    DataType.COMPLEX128,
    DataType.STRING,
    DataType.FLOAT8_143,
    DataType.FLOAT8_152,
}

_PACKED = {
    DataType.FLOAT,
    DataType.DOUBLE,
    DataType.FLOAT16,
    DataType.BFLOAT16,
    DataType.FLOAT8_143,
    DataType.FLOAT8_152,
}
"""Types whose data are written to the wire at once (`typed_data`)."""
_LENGTH_DELIMITED = 2
"""The wire type of packed fields, bytes and messages."""
_BITS = {1: np.uint8, 2: np.uint16}
_AT_ONCE = 1 << 20
"""Numbers of which varints are made at a time: what lies between stays small."""


def to_proto(name: str, array: np.ndarray) -> TensorProto:
    """``array`` as a TensorProto in its type's own field. Small types take one int32_data entry each, as
    ONNX says.
    """
    from onnx import TensorProto

    kind = data_type_of(array.dtype)
    proto = TensorProto(name=name, data_type=onnx_data_type(kind), dims=array.shape)
    flat = np.ascontiguousarray(array).reshape(-1)
    if kind in _PACKED:
        # A list of Python numbers in between takes many times as long.
        proto.MergeFromString(b"".join(packed_field(proto, *typed_data(array))))
    elif kind is DataType.INT64:
        proto.int64_data.extend(flat.tolist())
    elif kind in (DataType.UINT32, DataType.UINT64):
        proto.uint64_data.extend(flat.tolist())
    elif kind in (DataType.COMPLEX64, DataType.COMPLEX128, DataType.STRING):
        raise popart_exception(f"Tensor {name!r} of type {kind.name} cannot be stored in a model.")
    else:
        proto.int32_data.extend(flat.astype(np.int32).tolist())
    return proto


def typed_data(array: np.ndarray) -> tuple[str, bytes | memoryview]:
    """The field of a TensorProto for an array of floating-point numbers, and its content on the wire."""
    kind, flat = data_type_of(array.dtype), np.ascontiguousarray(array).reshape(-1)
    if kind in (DataType.FLOAT, DataType.DOUBLE):
        return "float_data" if kind is DataType.FLOAT else "double_data", raw_data(array)
    bits = flat.view(_BITS[flat.itemsize])
    parts = [_small_varints(bits[start : start + _AT_ONCE]) for start in range(0, len(bits), _AT_ONCE)]
    return "int32_data", b"".join(parts)


def raw_data(array: np.ndarray) -> memoryview:
    """An array's bytes as ONNX has them, without a copy where it lies so."""
    flat = np.ascontiguousarray(array).reshape(-1)
    little: Any = flat.astype(flat.dtype.newbyteorder("<"), copy=False).view(np.uint8)
    return memoryview(little)


def packed_field(message: Message, name: str, *data: bytes | memoryview) -> list[bytes | memoryview]:
    """A field of packed numbers, bytes or a message, on the wire: its tag, its length and ``data``."""
    tag = message.DESCRIPTOR.fields_by_name[name].number << 3 | _LENGTH_DELIMITED
    return [wire_length(tag) + wire_length(sum(len(part) for part in data)), *data]


def wire_length(number: int) -> bytes:
    """A length or a tag on the wire: seven bits a byte, the lowest first; the eighth says that more follow."""
    groups = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes(group | 0x80 for group in groups[:-1]) + bytes(groups[-1:])


def _small_varints(numbers: np.ndarray) -> bytes:
    """`wire_length` of each of many numbers below 2^16."""
    wide = numbers.astype(np.uint32)
    more = np.stack([wide >= 1 << 7, wide >= 1 << 14, np.zeros(len(wide), bool)], axis=1)
    groups = np.stack([wide & 0x7F, wide >> 7 & 0x7F, wide >> 14], axis=1) | more.astype(np.uint32) << 7
    there = np.concatenate([np.ones((len(wide), 1), bool), more[:, :2]], axis=1)
    return bytes(groups[there].astype(np.uint8))


def to_array(proto: TensorProto, base_dir: str = "") -> np.ndarray:
    """The array that a TensorProto holds in ONNX's form or in PopART's (external data are read from beside
    ``base_dir``).
    """
    from onnx import numpy_helper

    if (value := unpacked(proto)) is not None:
        return value
    # Not ascontiguousarray, which makes a scalar an array of one.
    return np.asarray(numpy_helper.to_array(proto, base_dir=base_dir), order="C")


def check_initializer(array: Any) -> np.ndarray:
    """``array`` as an initial value PopART takes, or TypeError or popart_exception saying why not."""
    if not isinstance(array, np.ndarray):
        raise TypeError(
            "addInitializedInputTensor(): incompatible function arguments. The initial value is a "
            "numpy.ndarray, not "
            f"{type(array).__name__}."
        )
    kind = data_type_of(array.dtype)
    if kind in _REFUSED:
        raise popart_exception(
            f"Initial values of type {kind.name} ({array.dtype}) are not taken. Pass array.astype('float32') "
            "or another "
            "type that the IPU has."
        )
    return array


def type_proto(info: TensorInfo) -> TypeProto:
    """ONNX's TypeProto for a TensorInfo; negative dimensions become unknown ones, strings symbols."""
    from onnx import helper

    dims = [None if isinstance(dim, int) and dim < 0 else dim for dim in info.shape()]
    return helper.make_tensor_type_proto(onnx_data_type(info.dataType()), dims)


def info_from_type(proto: TypeProto) -> TensorInfo | None:
    """The TensorInfo that an ONNX TypeProto says, or None where it says too little (no type, no rank, no
    tensor).
    """
    if not proto.HasField("tensor_type"):
        return None
    tensor = proto.tensor_type
    if not tensor.elem_type or not tensor.HasField("shape"):
        return None
    dims: list[int | str] = []
    for dim in tensor.shape.dim:
        which = dim.WhichOneof("value")
        dims.append(dim.dim_value if which == "dim_value" else dim.dim_param if which == "dim_param" else -1)
    return TensorInfo(data_type_from_onnx(tensor.elem_type), dims)
