"""ONNX TensorProtos from NumPy arrays and back, in typed fields: raw_data is never produced, as by
PopART's builder (graphcore/popart, willow/src/builder_impl.cpp).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.popart.enums import DataType
from podrun.popart.errors import popart_exception
from podrun.popart.tensor_info import TensorInfo, data_type_from_onnx, data_type_of, onnx_data_type

if TYPE_CHECKING:
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

_LENGTH_DELIMITED = 2
"""The wire type of packed fields."""
_BITS = {1: np.uint8, 2: np.uint16}


def to_proto(name: str, array: np.ndarray) -> TensorProto:
    """``array`` as a TensorProto in its type's own field. Small types take one int32_data entry each, as
    ONNX says.
    """
    from onnx import TensorProto

    kind = data_type_of(array.dtype)
    proto = TensorProto(name=name, data_type=onnx_data_type(kind), dims=array.shape)
    flat = np.ascontiguousarray(array).reshape(-1)
    if kind in (DataType.FLOAT, DataType.DOUBLE):
        field = "float_data" if kind is DataType.FLOAT else "double_data"
        _fill(proto, field, flat.astype(flat.dtype.newbyteorder("<"), copy=False).tobytes())
    elif kind is DataType.INT64:
        proto.int64_data.extend(flat.tolist())
    elif kind in (DataType.UINT32, DataType.UINT64):
        proto.uint64_data.extend(flat.tolist())
    elif kind in (DataType.COMPLEX64, DataType.COMPLEX128, DataType.STRING):
        raise popart_exception(f"Tensor {name!r} of type {kind.name} cannot be stored in a model.")
    elif kind in (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT8_143, DataType.FLOAT8_152):
        _fill(proto, "int32_data", _small_varints(flat.view(_BITS[flat.itemsize])))
    else:
        proto.int32_data.extend(flat.astype(np.int32).tolist())
    return proto


def _fill(proto: TensorProto, field: str, data: bytes) -> None:
    """Fill a packed field with numbers as protobuf's wire format has them. A list of Python numbers in between takes
    many times as long."""
    tag = proto.DESCRIPTOR.fields_by_name[field].number << 3 | _LENGTH_DELIMITED
    proto.MergeFromString(_varint(tag) + _varint(len(data)) + data)


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    groups = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes(group | 0x80 for group in groups[:-1]) + bytes(groups[-1:])


def _small_varints(numbers: np.ndarray) -> bytes:
    """`_varint` of each of many numbers below 2^16."""
    wide = numbers.astype(np.uint32)
    more = np.stack([wide >= 1 << 7, wide >= 1 << 14, np.zeros(len(wide), bool)], axis=1)
    groups = np.stack([wide & 0x7F, wide >> 7 & 0x7F, wide >> 14], axis=1) | more.astype(np.uint32) << 7
    there = np.concatenate([np.ones((len(wide), 1), bool), more[:, :2]], axis=1)
    return bytes(groups[there].astype(np.uint8))


def to_array(proto: TensorProto, base_dir: str = "") -> np.ndarray:
    """The array that a TensorProto holds (external data are read from beside ``base_dir``)."""
    from onnx import numpy_helper

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
