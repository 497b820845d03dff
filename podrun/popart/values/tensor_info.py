"""TensorInfo: type and shape of a tensor, the mapping between element types, and conversions of plain values.

Element types are PopART's, ONNX's and NumPy's.

**Conversions** are those of pybind11, which PopART's bindings are made with. Programs pass NumPy scalars where they
mean numbers (a learning rate out of a schedule, a count out of a shape), and None or 1 where they mean a flag. Each
function gives the plain Python value, or raises TypeError for what no conversion exists for: no float is an integer,
and no string a number.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.executable import TensorSpec, numpy_dtype
from podrun.popart.values.enums import DataType
from podrun.popart.values.exceptions import incompatible, popart_exception

if TYPE_CHECKING:
    from onnx import TypeProto

# PopART type, NumPy (or ml_dtypes) name, ONNX TensorProto.DataType value, bytes per element.
_TABLE: tuple[tuple[DataType, str, int, int], ...] = (
    (DataType.UINT8, "uint8", 2, 1),
    (DataType.INT8, "int8", 3, 1),
    (DataType.UINT16, "uint16", 4, 2),
    (DataType.INT16, "int16", 5, 2),
    (DataType.INT32, "int32", 6, 4),
    (DataType.INT64, "int64", 7, 8),
    (DataType.UINT32, "uint32", 12, 4),
    (DataType.UINT64, "uint64", 13, 8),
    (DataType.BOOL, "bool", 9, 1),
    (DataType.FLOAT, "float32", 1, 4),
    (DataType.FLOAT16, "float16", 10, 2),
    (DataType.BFLOAT16, "bfloat16", 16, 2),
    (DataType.DOUBLE, "float64", 11, 8),
    (DataType.COMPLEX64, "complex64", 14, 8),
    (DataType.COMPLEX128, "complex128", 15, 16),
    # GFLOAT8 1.4.3 and 1.5.2 have no infinity and one NaN: ONNX's FNUZ kinds.
    (DataType.FLOAT8_143, "float8_e4m3fnuz", 18, 1),
    (DataType.FLOAT8_152, "float8_e5m2fnuz", 20, 1),
    (DataType.STRING, "object", 8, 1),
)

_NUMPY_NAME = {kind: name for kind, name, _, _ in _TABLE}
_ONNX_VALUE = {kind: value for kind, _, value, _ in _TABLE}
_FROM_NUMPY = {name: kind for kind, name, _, _ in _TABLE}
_FROM_ONNX = {value: kind for kind, _, value, _ in _TABLE}
_ITEM_SIZE = {kind: size for kind, _, _, size in _TABLE}


def parse_data_type(dtype: DataType | str | type | np.dtype[Any]) -> DataType:
    """The DataType that ``dtype`` is or names (``"FLOAT"``, ``numpy.float32``). popart_exception for an unknown one."""
    if isinstance(dtype, DataType):
        return dtype
    if isinstance(dtype, (type, np.dtype)):
        return data_type_of(dtype)
    if isinstance(dtype, str) and dtype.upper() in DataType.__members__:
        return DataType[dtype.upper()]
    known = ", ".join(DataType.__members__)
    raise popart_exception(f"Unknown data type {dtype!r}. PopART's data types are {known}.")


def data_type_of(dtype: Any) -> DataType:
    """The DataType of a NumPy dtype (or anything `numpy.dtype` takes). popart_exception where there is none."""
    name = np.dtype(dtype).name
    if name in _FROM_NUMPY:
        return _FROM_NUMPY[name]
    if name.startswith("str") or name == "object":
        return DataType.STRING
    raise popart_exception(f"NumPy type {name} has no PopART data type.")


def data_type_from_onnx(value: int) -> DataType:
    """The DataType for an ONNX ``TensorProto.DataType`` value. popart_exception where there is none."""
    if value in _FROM_ONNX:
        return _FROM_ONNX[value]
    raise popart_exception(f"ONNX data type number {value} has no PopART data type.")


def onnx_data_type(dtype: DataType) -> int:
    """The ONNX ``TensorProto.DataType`` value of a DataType."""
    return _ONNX_VALUE[dtype]


def numpy_name(dtype: DataType) -> str:
    """NumPy's (or ml_dtypes') name of a DataType. popart_exception for UNDEFINED."""
    if dtype not in _NUMPY_NAME:
        raise popart_exception(f"Data type {dtype.name} has no elements.")
    return _NUMPY_NAME[dtype]


class TensorInfo:
    """Type and shape of a tensor: ``TensorInfo("FLOAT", [2, 3])``, ``TensorInfo(DataType.INT32, ())`` or
    ``TensorInfo(numpy_array)``. Dimensions may be negative or strings (symbols) until an InputShapeInfo fixes them.
    """

    __slots__ = ("_dtype", "_meta_shape", "_shape")

    def __init__(
        self,
        dtype: DataType | str | type | np.dtype[Any] | np.ndarray,
        shape: Iterable[int | str] | None = None,
        metaShape: Iterable[int] = (),
    ) -> None:
        if isinstance(dtype, np.ndarray):
            if shape is not None:
                raise TypeError("TensorInfo(array) takes no shape: the array has one.")
            self._dtype, self._shape = data_type_of(dtype.dtype), tuple(dtype.shape)
        else:
            if shape is None or isinstance(shape, (int, str)):
                raise incompatible(
                    "__init__",
                    "TensorInfo takes a data type and a list of "
                    f'dimensions, as in TensorInfo("FLOAT", [2, 3]); got {dtype!r}, {shape!r}.',
                )
            self._dtype = parse_data_type(dtype)
            self._shape = tuple(dim if isinstance(dim, str) else int(dim) for dim in shape)
        self._meta_shape = tuple(metaShape)

    # -- PopART's accessors -----------------------------------------------------------------------

    def dataType(self) -> DataType:
        """The element type."""
        return self._dtype

    def data_type(self) -> str:
        """The element type's name: ``"FLOAT"``."""
        return self._dtype.name

    def data_type_lcase(self) -> str:
        """The element type's name as NumPy has it: ``"float32"``, ``"int32"``, ``"bool"``."""
        return _NUMPY_NAME.get(self._dtype, self._dtype.name.lower())

    def shape(self) -> list[Any]:
        """The sizes of the dimensions."""
        return list(self._shape)

    def metaShape(self) -> list[int]:
        """The meta shape of a sharded tensor; empty for all others."""
        return list(self._meta_shape)

    def dim(self, i: int) -> Any:
        """Dimension ``i``. popart_exception if there is none."""
        if not 0 <= i < len(self._shape):
            raise popart_exception(f"Dimension {i} asked of a tensor of rank {len(self._shape)}.")
        return self._shape[i]

    def rank(self) -> int:
        """Number of dimensions."""
        return len(self._shape)

    def nelms(self) -> int:
        """Number of elements. popart_exception while a dimension is unknown."""
        self._must_be_static()
        return int(np.prod(self._shape, dtype=np.int64))

    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.nelms() * self.getDataTypeSize()

    def getDataTypeSize(self) -> int:
        """Bytes of one element."""
        return _ITEM_SIZE[self._dtype]

    def strides(self, shape: Sequence[int] | None = None) -> list[int]:
        """Byte strides of a C-contiguous tensor of this type (of this shape unless another is given)."""
        dims = self._shape if shape is None else tuple(shape)
        steps, step = [], self.getDataTypeSize()
        for dim in reversed(dims):
            steps.append(step)
            step *= int(dim)
        return steps[::-1]

    def set(
        self, dtype: DataType | str, shape: Iterable[int | str] | None = None, metaShape: Iterable[int] = ()
    ) -> None:
        """Change type, and shape if given."""
        self._dtype = parse_data_type(dtype)
        if shape is not None:
            self._shape = tuple(dim if isinstance(dim, str) else int(dim) for dim in shape)
        self._meta_shape = tuple(metaShape)

    # -- podrun's own -----------------------------------------------------------------------------

    @property
    def is_static(self) -> bool:
        """True iff every dimension is a number of elements."""
        return all(isinstance(dim, int) and dim >= 0 for dim in self._shape)

    def numpy_dtype(self) -> np.dtype[Any]:
        """The NumPy (or ml_dtypes) dtype."""
        return np.dtype(object) if self._dtype is DataType.STRING else numpy_dtype(numpy_name(self._dtype))

    def spec(self, name: str) -> TensorSpec:
        """Type and shape in the form that the runtime takes, for the tensor ``name``."""
        self._must_be_static()
        return TensorSpec(name, numpy_name(self._dtype), tuple(int(dim) for dim in self._shape))

    def _must_be_static(self) -> None:
        if not self.is_static:
            raise popart_exception(
                f"Shape {list(self._shape)} is not known yet: give it with an InputShapeInfo when making the session."
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorInfo) and (self._dtype, self._shape) == (other._dtype, other._shape)

    def __hash__(self) -> int:
        return hash((self._dtype, self._shape))

    def __repr__(self) -> str:
        return f"TensorInfo({self._dtype.name}, {list(self._shape)})"


def getTensorInfo(array: np.ndarray) -> TensorInfo:
    """Type and shape of a NumPy array."""
    return TensorInfo(array)


def info_of(spec: TensorSpec) -> TensorInfo:
    """Type and shape of the runtime's tensor, as PopART gives them."""
    return TensorInfo(data_type_of(numpy_dtype(spec.dtype)), spec.shape)


class InputShapeInfo:
    """Shapes of model inputs that the model itself leaves open: ``info.add("x", TensorInfo("FLOAT", [4, 3]))``."""

    def __init__(self) -> None:
        self._infos: dict[str, TensorInfo] = {}

    def add(self, tensorId: str, info: TensorInfo) -> None:
        """Fix type and shape of input ``tensorId``."""
        self._infos[tensorId] = info

    def get(self, tensorId: str) -> TensorInfo:
        """What was added. popart_exception for an input that was not."""
        if tensorId not in self._infos:
            raise popart_exception(
                f"InputShapeInfo has no tensor {tensorId!r}; it has {sorted(self._infos)}."
            )
        return self._infos[tensorId]

    def has(self, tensorId: str) -> bool:
        """True iff ``tensorId`` was added."""
        return tensorId in self._infos


def boolean(value: object) -> bool:
    """A flag: True and False, None (False), and numbers."""
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, (str, bytes, list, tuple, set, dict)) or not hasattr(value, "__bool__"):
        raise TypeError(f"{value!r} is no flag")
    return bool(value)


def integer(value: Any) -> int:
    """A whole number: Python's, NumPy's, and flags."""
    return operator.index(value)


def number(value: Any) -> float:
    """A number: whatever has a float value, but strings."""
    if isinstance(value, (str, bytes)) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise TypeError(f"{value!r} is no number")
    return float(value)


_REFUSED = {
    DataType.DOUBLE,
    DataType.BFLOAT16,
    DataType.COMPLEX64,
    DataType.COMPLEX128,
    DataType.STRING,
    DataType.FLOAT8_143,
    DataType.FLOAT8_152,
}


def check_initializer(array: object) -> np.ndarray:
    """``array`` as an initial value that PopART takes. Raises TypeError or popart_exception with the reason if it is
    not one.
    """
    if not isinstance(array, np.ndarray):
        raise incompatible(
            "addInitializedInputTensor", f"The initial value is a numpy.ndarray, not {type(array).__name__}."
        )
    kind = data_type_of(array.dtype)
    if kind in _REFUSED:
        raise popart_exception(
            f"Initial values of type {kind.name} ({array.dtype}) are not taken. Pass array.astype('float32') or "
            "another type that the IPU has."
        )
    return array


def type_proto(info: TensorInfo) -> TypeProto:
    """ONNX's TypeProto for a TensorInfo; negative dimensions become unknown ones, strings symbols."""
    from onnx import helper

    dims = [None if isinstance(dim, int) and dim < 0 else dim for dim in info.shape()]
    return helper.make_tensor_type_proto(onnx_data_type(info.dataType()), dims)


def info_from_type(proto: TypeProto) -> TensorInfo | None:
    """The TensorInfo of an ONNX TypeProto, or None if the proto is incomplete (no type, no rank, no tensor)."""
    if not proto.HasField("tensor_type"):
        return None
    tensor = proto.tensor_type
    if not tensor.elem_type or not tensor.HasField("shape"):
        return None
    dims: list[int | str] = []
    for dim in tensor.shape.dim:
        kind = dim.WhichOneof("value")
        dims.append(dim.dim_value if kind == "dim_value" else dim.dim_param if kind == "dim_param" else -1)
    return TensorInfo(data_type_from_onnx(tensor.elem_type), dims)
