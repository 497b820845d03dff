"""The greater initial values of a serialised model, found where they lie: neither parsed nor copied.

Protobuf's wire format (protobuf.dev/programming-guides/encoding) is fields of tag, length and content in any order.
Only what every writer makes of a model is understood here; anything else is left to the parser, which also says what
is wrong with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from podrun.onnx_models.tensor_proto import wire_length

if TYPE_CHECKING:
    from onnx import TensorProto

_GRAPH, _INITIALIZER = 7, 5
"""Numbers of ModelProto.graph and GraphProto.initializer (onnx.proto)."""
_FLOAT_DATA, _RAW_DATA = 4, 9
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Span = tuple[int, int, int, int, int]
"""A field: number, wire type, where it begins, where its content begins, where it ends."""


class _NotUnderstood(Exception):
    """For the parser."""


def set_apart(data: bytes, at_least: int) -> tuple[bytes, dict[str, np.ndarray]]:
    """A serialised ModelProto without the data of its FLOAT initializers (FLOAT16 too if in raw_data) of more than
    ``at_least`` elements, and those by name: read-only arrays that lie in ``data``. Of others ``data`` as they are, and
    nothing.
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
    """A graph's fields in pieces, its initializers' data left out, and these."""
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
    """A tensor without its data, and these; None if they are to stay."""
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
        thin.raw_data = b""  # It goes out as it came in.
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
    """A number of seven bits a byte, and what follows it."""
    number = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise _NotUnderstood
