"""Small elements in int32_data: as ONNX stores them, and as PopART does.

ONNX gives each element of less than four bytes an int32_data entry of its own. PopART copies the elements' bytes into
the field, so that an entry holds two halves or four bytes, the first in the low bits (graphcore/popart,
willow/src/builder_impl.cpp). Published programs view the field as raw halves. podrun computes with ONNX's form, writes
PopART's form in the models that PopART's API makes, and reads both: the number of entries says which it is. (One
element has one entry in both forms, and its bits are the low ones.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
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
"""By TensorProto.DataType: UINT8, INT8, UINT16, INT16, BOOL, FLOAT16."""
_AT_ONCE = 1 << 20
"""Numbers of which varints are made at a time: what lies between stays small."""
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
    made = type(proto)()
    made.CopyFrom(proto)
    made.int32_data[:] = _words(bits).tolist()
    return made


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
    there = np.stack([np.ones(len(wide), bool), *(wide >= 1 << 7 * k for k in range(1, _LONGEST))], axis=1)
    more = np.concatenate([there[:, 1:], np.zeros((len(wide), 1), bool)], axis=1)
    groups = (np.stack(parts, axis=1) & 0x7F) | more.astype(np.uint8) << 7
    return bytes(groups[there])
