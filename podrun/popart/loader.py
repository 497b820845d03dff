"""Reading ONNX models: from a file, from bytes, and refusing what cannot be right before anything is done
with it.

What a hostile file can claim is bounded by the file's own size: data outside the protobuf is read only from
beside the model (``onnx`` refuses paths that leave the folder), and shapes are checked against the bytes
that are there.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.popart import names
from podrun.popart.errors import popart_exception
from podrun.popart.tensor_info import InputShapeInfo, data_type_from_onnx

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, TensorProto

OLDEST_IR = 3
"""The first IR version with operator set imports."""

MAX_BYTES = 2**31
"""Protobuf's own limit on one message."""


def read_model(source: str | bytes | os.PathLike[str]) -> ModelProto:
    """A ModelProto from a path or from bytes, its external data loaded. popart_exception if it is no
    model."""
    import onnx
    from google.protobuf.message import DecodeError

    if isinstance(source, (bytes, bytearray, memoryview)):
        data, base, label = bytes(source), "", "the bytes given"
    elif isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        base, label = os.path.dirname(os.path.abspath(path)), repr(path)
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            raise popart_exception(
                f"Failed to load a ModelProto from the string {_shorten(path)}: it is neither a serialised "
                f"model nor a valid path ({error})."
            ) from error
    else:
        raise TypeError(
            f"(): incompatible function arguments. A model is a path or bytes, not {type(source).__name__}."
        )
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise popart_exception(f"Failed to load a ModelProto from {label}: {error}.") from error
    if not model.HasField("graph") or not model.opset_import:
        raise popart_exception(
            f"Failed to load a ModelProto from {label}: it is no ONNX model (no graph or no operator set "
            "imports)."
        )
    _check_sizes(model.graph, label, base)
    return model


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "...")


def _check_sizes(graph: GraphProto, label: str, base: str) -> None:
    """Refuse tensors that claim more data than they bring, and load external data from beside the model."""
    from onnx import TensorProto, external_data_helper

    for tensor in graph.initializer:
        if any(dim < 0 for dim in tensor.dims):
            raise popart_exception(
                f"Initializer {tensor.name!r} in {label} has a negative dimension: {list(tensor.dims)}."
            )
        if tensor.data_location == TensorProto.EXTERNAL:
            _check_external(tensor, label, base)
            external_data_helper.load_external_data_for_tensor(tensor, base)
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]
        _check_data(tensor, label)


def _check_external(tensor: TensorProto, label: str, base: str) -> None:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    path = os.path.realpath(os.path.join(base, location))
    if (
        not location
        or os.path.isabs(location)
        or os.path.commonpath([os.path.realpath(base), path]) != os.path.realpath(base)
    ):
        raise popart_exception(
            f"Initializer {tensor.name!r} in {label} keeps its data in {location!r}, which is not beside the "
            "model."
        )
    if not os.path.isfile(path):
        raise popart_exception(
            f"Initializer {tensor.name!r} in {label} keeps its data in {path!r}, which is not a file."
        )
    wanted = _elements(tensor) * data_type_size(tensor)
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries["length"]) if "length" in entries else wanted
    except ValueError as error:
        raise popart_exception(
            f"Initializer {tensor.name!r} in {label} has a bad offset or length: {error}."
        ) from error
    if offset < 0 or length < 0 or offset + length > os.path.getsize(path) or length != wanted:
        raise popart_exception(
            f"Initializer {tensor.name!r} in {label} wants {wanted} bytes; its external data are {length} "
            f"bytes at {offset} of a file of {os.path.getsize(path)}."
        )


def _elements(tensor: TensorProto) -> int:
    count = 1
    for dim in tensor.dims:
        count *= dim
    return count


def data_type_size(tensor: TensorProto) -> int:
    """Bytes of one element."""
    return int(np.dtype(data_type_from_onnx(tensor.data_type) and _numpy_type(tensor.data_type)).itemsize)


def _numpy_type(value: int) -> Any:
    from onnx import helper

    return helper.tensor_dtype_to_np_dtype(value)


def _check_data(tensor: TensorProto, label: str) -> None:
    from onnx import TensorProto

    wanted = _elements(tensor)
    if tensor.data_type in (TensorProto.UNDEFINED, TensorProto.STRING):
        kind = TensorProto.DataType.Name(tensor.data_type)
        raise popart_exception(
            f"Initializer {tensor.name!r} in {label} has type {kind}, which the IPU does not have."
        )
    if tensor.HasField("raw_data"):
        if tensor.data_type not in TensorProto.DataType.values():
            raise popart_exception(
                f"Initializer {tensor.name!r} in {label} has unknown type {tensor.data_type}."
            )
        size = _numpy_type(tensor.data_type).itemsize
        held, wanted_bytes = len(tensor.raw_data), wanted * size
        if held != wanted_bytes and size * 8 >= 8 and not _packed(tensor.data_type):
            raise popart_exception(
                f"Initializer {tensor.name!r} in {label} has shape {list(tensor.dims)}, {wanted_bytes} "
                f"bytes, but holds {held}."
            )
        return
    held = max(
        len(tensor.float_data),
        len(tensor.int32_data),
        len(tensor.int64_data),
        len(tensor.double_data),
        len(tensor.uint64_data),
    )
    if held != wanted and not _packed(tensor.data_type) and held != 2 * wanted:
        raise popart_exception(
            f"Initializer {tensor.name!r} in {label} has shape {list(tensor.dims)}, {wanted} elements, but "
            f"holds {held}."
        )


def _packed(data_type: int) -> bool:
    """True for types of fewer than eight bits, of which one entry holds several."""
    from onnx import TensorProto

    return any(kind in TensorProto.DataType.Name(data_type) for kind in ("INT4", "INT2", "FLOAT4"))


def check_model(model: ModelProto) -> None:
    """popart_exception for what no session can take: what onnx.checker refuses, names PopART reserves."""
    from onnx import checker

    if model.ir_version < OLDEST_IR:
        raise popart_exception(
            f"The model has IR version {model.ir_version}; versions from {OLDEST_IR} on are read. Convert it "
            "with "
            "onnx.version_converter."
        )
    try:
        checker.check_model(model)
    except checker.ValidationError as error:
        raise popart_exception(f"onnx.checker refuses the model: {error}") from error
    _check_names(model.graph)


def _check_names(graph: GraphProto) -> None:
    initializers = {tensor.name for tensor in graph.initializer}
    for name in _all_names(graph):
        prefix = names.reserved_prefix_of(name)
        if prefix is None or (name in initializers and prefix in names.STATE_PREFIXES):
            continue
        raise popart_exception(
            f"Tensor {name!r} starts with {prefix!r}, which PopART reserves for tensors that it makes "
            "itself. Rename it."
        )


def _all_names(graph: GraphProto) -> list[str]:
    found = [value.name for value in graph.input]
    found += [tensor.name for tensor in graph.initializer]
    found += [output for node in graph.node for output in node.output if output]
    return found


def input_shapes(model: ModelProto, info: InputShapeInfo) -> dict[str, tuple[int, ...]]:
    """Shapes that InputShapeInfo gives, for the inputs of ``model``; popart_exception for one that
    contradicts it.
    """
    from podrun.popart.tensor_proto import info_from_type

    initializers = {tensor.name for tensor in model.graph.initializer}
    shapes = {}
    for value in model.graph.input:
        if value.name in initializers:
            continue
        known = info_from_type(value.type)
        if info.has(value.name):
            given = info.get(value.name)
            _check_agrees(value.name, known, given)
            shapes[value.name] = tuple(int(dim) for dim in given.shape())
        elif known is None or not known.is_static:
            unknown = "no shape" if known is None else f"shape {known.shape()}"
            raise popart_exception(
                f"Input {value.name!r} has {unknown} in the model. Give type and shape with an "
                f"InputShapeInfo: info.add({value.name!r}, popart.TensorInfo(...))."
            )
    return shapes


def _check_agrees(name: str, known: Any, given: Any) -> None:
    if known is None:
        return
    fits = known.rank() == given.rank() and all(
        isinstance(dim, str) or dim < 0 or dim == fixed
        for dim, fixed in zip(known.shape(), given.shape(), strict=True)
    )
    if known.dataType() is not given.dataType() or not fits:
        raise popart_exception(f"InputShapeInfo says {given} for input {name!r}, but the model says {known}.")
