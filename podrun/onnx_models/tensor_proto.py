"""Converts NumPy arrays to ONNX's tensors and back, in each form that occurs in files.

`tensor_proto` writes typed fields; raw_data is never produced, as by PopART's builder (graphcore/popart,
willow/src/builder_impl.cpp).

**Small elements in int32_data.** ONNX gives each element of less than four bytes an int32_data entry of its own. PopART
copies the elements' bytes into the field, so that an entry holds two halves or four bytes, the first in the low bits
(same file). Published programs view the field as raw halves. podrun computes with ONNX's form, writes PopART's form in
the models that PopART's API makes, and reads both: the number of entries says which it is. (One element has one entry
in both forms, and its bits are the low ones.)

**The large initial values of a serialised model** are found in place: neither parsed nor copied. Protobuf's
wire format (protobuf.dev/programming-guides/encoding) is fields of tag, length and content in any order. Only what
every writer makes of a model is understood here; anything else is left to the parser, which also reports what is wrong
with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.errors import UsageError

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from onnx import TensorProto

_WORD = 4
_SMALL: dict[int, np.dtype[Any]] = {
    2: np.dtype("u1"),
    3: np.dtype("i1"),
    4: np.dtype("<u2"),
    5: np.dtype("<i2"),
    9: np.dtype("?"),
    10: np.dtype("<f2"),
}
"""Types with small elements, by TensorProto.DataType: UINT8, INT8, UINT16, INT16, BOOL, FLOAT16."""

_LONGEST = 10
"""Bytes of the longest varint: that of a negative number."""


def unpacked(proto: TensorProto) -> np.ndarray | None:
    """The elements of a tensor in PopART's form; None for a tensor in ONNX's form."""
    dtype, held = _SMALL.get(proto.data_type), len(proto.int32_data)
    if dtype is None or not held:
        return None
    count = math.prod(proto.dims)
    if held != entries(count, dtype) or (held == count and count > 1):
        return None
    words = np.asarray(proto.int32_data, "<i4")
    value = words.view(dtype)[:count].reshape(tuple(proto.dims))
    return value.astype(dtype.newbyteorder("="), copy=False)


def unpack(proto: TensorProto) -> None:
    """Bring ``proto`` into ONNX's form if it is in PopART's."""
    value = unpacked(proto)
    if value is not None:
        bits = value.view(np.uint16) if value.dtype == np.float16 else value
        proto.int32_data[:] = bits.astype(np.int32).reshape(-1).tolist()


def packed(proto: TensorProto) -> TensorProto:
    """A tensor in ONNX's form as PopART writes it; ``proto`` itself if it has one form only, or raw_data."""
    dtype, held = _SMALL.get(proto.data_type), len(proto.int32_data)
    if dtype is None or not held or held != math.prod(proto.dims):
        return proto
    bits = np.asarray(proto.int32_data, np.int32).astype(f"<u{dtype.itemsize}")
    copy = type(proto)()
    copy.CopyFrom(proto)
    copy.int32_data[:] = _words(bits).tolist()
    return copy


def packed_halves(halves: np.ndarray) -> bytes:
    """The content of int32_data on the wire for an array of float16 in PopART's form."""
    words = _words(np.ascontiguousarray(halves).reshape(-1).astype("<f2", copy=False))
    return b"".join(_varints(words[start : start + _AT_ONCE]) for start in range(0, len(words), _AT_ONCE))


def entries(count: int, dtype: np.dtype[Any]) -> int:
    """int32_data entries of ``count`` elements in PopART's form."""
    return -(-count * dtype.itemsize // _WORD)


def _words(elements: np.ndarray) -> np.ndarray:
    """The bytes of a flat array as int32 numbers, with zeros behind them."""
    words = np.zeros(entries(len(elements), elements.dtype), "<i4")
    words.view(elements.dtype)[: len(elements)] = elements
    return words


def _varints(numbers: np.ndarray) -> bytes:
    """int32 numbers on the wire: seven bits a byte, the lowest first, negative ones as 64 bits
    (protobuf.dev/programming-guides/encoding).
    """
    wide = numbers.astype(np.int64).view(np.uint64)
    parts = [(wide >> np.uint64(7 * k)).astype(np.uint8) for k in range(_LONGEST)]
    used = np.stack([np.ones(len(wide), bool), *(wide >= 1 << 7 * k for k in range(1, _LONGEST))], axis=1)
    more = np.concatenate([used[:, 1:], np.zeros((len(wide), 1), bool)], axis=1)
    groups = (np.stack(parts, axis=1) & 0x7F) | more.astype(np.uint8) << 7
    return bytes(groups[used])


ELEMENT_TYPES: dict[str, int] = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "object": 8,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "uint32": 12,
    "uint64": 13,
    "complex64": 14,
    "complex128": 15,
    "bfloat16": 16,
    # GFLOAT8 1.4.3 and 1.5.2 have no infinity and one NaN: ONNX's FNUZ kinds.
    "float8_e4m3fnuz": 18,
    "float8_e5m2fnuz": 20,
}
"""ONNX's numbers of element types (TensorProto.DataType) by NumPy's names; strings are objects."""

_PACKED = frozenset({"float32", "float64", "float16", "bfloat16", "float8_e4m3fnuz", "float8_e5m2fnuz"})
"""Types whose data are written to the wire at once (`typed_data`)."""
_LENGTH_DELIMITED = 2
"""The wire type of packed fields, bytes and messages."""
_BITS = {1: np.uint8, 2: np.uint16}
_AT_ONCE = 1 << 20
"""Numbers whose varints are made at a time, so that intermediate arrays stay small."""


def element_type(dtype: Any) -> str:
    """NumPy's name of a type that models can hold, for strings ``object``. UsageError for any other type."""
    name: str = np.dtype(dtype).name
    if name.startswith("str"):
        return "object"
    if name not in ELEMENT_TYPES:
        raise UsageError(f"NumPy type {name} has no PopART data type.")
    return name


def to_proto(name: str, array: np.ndarray) -> TensorProto:
    """``array`` as a TensorProto in its type's own field. Small types take one int32_data entry each, as ONNX says."""
    from onnx import TensorProto

    kind = element_type(array.dtype)
    proto = TensorProto(name=name, data_type=ELEMENT_TYPES[kind], dims=array.shape)
    flat = np.ascontiguousarray(array).reshape(-1)
    if kind in _PACKED:
        # A list of Python numbers in between takes many times as long.
        proto.MergeFromString(b"".join(packed_field(proto, *typed_data(array))))
    elif kind == "int64":
        proto.int64_data.extend(flat.tolist())
    elif kind in ("uint32", "uint64"):
        proto.uint64_data.extend(flat.tolist())
    elif kind in ("complex64", "complex128", "object"):
        what = "STRING" if kind == "object" else kind.upper()
        raise UsageError(f"Tensor {name!r} of type {what} cannot be stored in a model.")
    else:
        proto.int32_data.extend(flat.astype(np.int32).tolist())
    return proto


def typed_data(array: np.ndarray) -> tuple[str, bytes | memoryview]:
    """The field of a TensorProto for an array of floating-point numbers, and its content on the wire."""
    kind, flat = element_type(array.dtype), np.ascontiguousarray(array).reshape(-1)
    if kind in ("float32", "float64"):
        return "float_data" if kind == "float32" else "double_data", raw_data(array)
    bits = flat.view(_BITS[flat.itemsize])
    parts = [_small_varints(bits[start : start + _AT_ONCE]) for start in range(0, len(bits), _AT_ONCE)]
    return "int32_data", b"".join(parts)


def raw_data(array: np.ndarray) -> memoryview:
    """An array's bytes in ONNX's order, without a copy if the array lies in this order."""
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
    used = np.concatenate([np.ones((len(wide), 1), bool), more[:, :2]], axis=1)
    return bytes(groups[used].astype(np.uint8))


def to_array(proto: TensorProto, base_dir: str = "") -> np.ndarray:
    """The array that a TensorProto holds in ONNX's form or in PopART's (external data are read from beside
    ``base_dir``).
    """
    from onnx import numpy_helper

    if (value := unpacked(proto)) is not None:
        return value
    # Not ascontiguousarray, which makes a scalar an array of one.
    return np.asarray(numpy_helper.to_array(proto, base_dir=base_dir), order="C")


_GRAPH, _INITIALIZER = 7, 5
"""Numbers of ModelProto.graph and GraphProto.initializer (onnx.proto)."""
_FLOAT_DATA, _RAW_DATA = 4, 9
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Span = tuple[int, int, int, int, int]
"""A field: its number and wire type, its first byte, the first byte of its content, and its end."""


class _NotUnderstood(Exception):
    """This reader does not understand the bytes: leave them to the parser."""


def set_apart(data: bytes, at_least: int) -> tuple[bytes, dict[str, np.ndarray]]:
    """A serialised ModelProto without the data of its FLOAT initializers (FLOAT16 too if in raw_data) of more than
    ``at_least`` elements; and those data by name, as read-only arrays that lie in ``data``. For bytes that are not
    understood: ``data`` unchanged, and no arrays.
    """
    try:
        graphs = [field for field in _fields(data, 0, len(data)) if field[0] == _GRAPH]
        if len(graphs) != 1 or graphs[0][1] != _BYTES:
            return data, {}
        _, _, begin, content, end = graphs[0]
        kept, values = _graph(data, content, end, at_least)
    except (_NotUnderstood, IndexError):
        return data, {}
    if not values:
        return data, {}
    graph = b"".join(kept)
    return b"".join(
        (data[:begin], data[begin : begin + 1], wire_length(len(graph)), graph, data[end:])
    ), values


def _graph(data: bytes, start: int, end: int, at_least: int) -> tuple[list[bytes], dict[str, np.ndarray]]:
    """The pieces of a graph without its initializers' data, and these data."""
    kept: list[bytes] = []
    values: dict[str, np.ndarray] = {}
    done = start
    for number, kind, begin, content, stop in _fields(data, start, end):
        if number != _INITIALIZER or kind != _BYTES or stop - content <= 2 * at_least:
            continue
        thin, value = _tensor(data, content, stop, at_least)
        if value is None or thin.name in values or not isinstance(thin.name, str):
            continue
        values[thin.name] = value
        rest = thin.SerializeToString(deterministic=True)
        kept += (data[done:begin], data[begin : begin + 1], wire_length(len(rest)), rest)
        done = stop
    return [*kept, data[done:end]], values


def _tensor(data: bytes, start: int, end: int, at_least: int) -> tuple[TensorProto, np.ndarray | None]:
    """A tensor without its data, and these data; None if the tensor keeps them."""
    from google.protobuf.message import DecodeError
    from onnx import TensorProto

    spans = list(_fields(data, start, end))
    great = [span for span in spans if span[4] - span[3] > 2 * at_least]
    if len(great) != 1 or great[0][0] not in (_FLOAT_DATA, _RAW_DATA) or great[0][1] != _BYTES:
        return TensorProto(), None
    number, _, begin, content, stop = great[0]
    thin = TensorProto()
    try:
        thin.ParseFromString(data[start:begin] + data[stop:end])
    except DecodeError as error:
        raise _NotUnderstood from error
    halves = thin.data_type == TensorProto.FLOAT16 and number == _RAW_DATA
    if thin.data_type != TensorProto.FLOAT and not halves:
        return thin, None
    dtype, count = np.dtype("<f2" if halves else "<f4"), math.prod(thin.dims)
    alone = not any(field.name.endswith("_data") or field.name == "segment" for field, _ in thin.ListFields())
    fits = count > at_least and min(thin.dims, default=0) > 0 and count * dtype.itemsize == stop - content
    if not alone or not fits or thin.data_location == TensorProto.EXTERNAL:
        return thin, None
    if number == _RAW_DATA:
        thin.raw_data = b""  # The data leave in the form in which they came.
    value = np.frombuffer(data, dtype, count, content).astype(dtype.newbyteorder("="), copy=False)
    value.flags.writeable = False
    return thin, value.reshape(thin.dims)


def _fields(data: bytes, at: int, end: int) -> Iterator[Span]:
    """The fields between two places."""
    while at < end:
        begin = at
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        content = at
        if kind == _BYTES:
            length, content = _varint(data, at)
            at = content + length
        elif kind == _VARINT:
            _, at = _varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise _NotUnderstood
        if at > end:
            raise _NotUnderstood
        yield number, kind, begin, content, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and the position behind it."""
    number = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise _NotUnderstood
