"""Reading ONNX models from people: files or bytes that may be truncated, wrong or hostile.

Everything is checked before memory is taken for it: a tensor's stated size against the existing bytes,
external data against the model's own folder, functions against calling themselves, subgraphs against depth.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, MutableMapping
from pathlib import Path

import onnx
import onnx.external_data_helper
from google.protobuf.message import DecodeError, Message

from podrun.core.errors import UsageError
from podrun.onnx_models.external_data import ExternalPlace, entries_of, external_file
from podrun.onnx_models.light_model import MOST_HELD, LightModel, lightened
from podrun.onnx_models.tensor_proto import set_apart, unpack

_ONNX_FILES = "Name a model in ONNX's format, such as torch.onnx.export or session.modelToHost writes."
MOST_MODEL_BYTES = 2**31 - 1
"""Protobuf's own limit on one message; larger models keep their weights in external files."""
MOST_DEPTH = 16
"""Most subgraphs within subgraphs, and most functions calling functions."""
MOST_RANK = 64
"""Most axes of a tensor: NumPy's own limit."""


def load_model(source: str | os.PathLike[str] | bytes) -> onnx.ModelProto:
    """A model from a path or from serialised bytes, checked, with its external data loaded.

    Raises `UsageError` saying what is wrong and where: no such file, not a model, a tensor without its data, external
    data outside the model's folder, or a complaint of `onnx.checker`.
    """
    model = read_onnx_model(source)
    check_onnx_model(model)
    return model


def read_onnx_model(source: str | os.PathLike[str] | bytes) -> onnx.ModelProto:
    """`load_model` without `check_onnx_model`: the bytes exist, but the model may make no sense.

    External data lie beside a model that is a path; others are refused.
    """
    return read_light_onnx_model(source, at_least=MOST_MODEL_BYTES).proto


def read_light_onnx_model(
    source: str | os.PathLike[str] | bytes,
    *,
    trusted: Collection[Path] = (),
    places: MutableMapping[str, ExternalPlace] | None = None,
    at_least: int = MOST_HELD,
) -> LightModel:
    """`read_onnx_model` with initial values of more than ``at_least`` elements beside the model.

    External data may also lie in one of the ``trusted`` files, which the model names with ``basepath`` and
    ``location``. ``places`` is filled with the places of initializers' data.
    """
    folder: Path | None = None
    if isinstance(source, bytes):
        data, label = source, "the bytes given"
    else:
        path = Path(source)
        label = repr(os.fspath(source))
        data = _read(path, label)
        folder = path.resolve().parent
    data, values = set_apart(data, at_least)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, RuntimeError) as error:
        raise UsageError(f"{label} is not an ONNX model: {error}", hint=_ONNX_FILES) from error
    if not model.HasField("graph"):
        raise UsageError(f"{label} is not an ONNX model: it holds no graph", hint=_ONNX_FILES)
    light = LightModel(model, values)
    with light.checkable():
        check_tensors(model, folder, label, trusted)
    check_names(model.graph)
    for function in model.functions:
        check_names(function)
    if places is not None:
        external = (t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL)
        places.update({tensor.name: _place(tensor, folder, trusted) for tensor in external})
    if at_least >= MOST_MODEL_BYTES:
        _check_total(model, label)
    _load_external(model, folder, trusted)
    light = lightened(light, at_least)
    for tensor in light.proto.graph.initializer:
        unpack(tensor)
    return light


def _read(path: Path, label: str) -> bytes:
    try:
        if not path.is_file():
            raise UsageError(f"{label} is not a file", hint="Give the path of an .onnx file.")
        size = path.stat().st_size
        if size > MOST_MODEL_BYTES:
            raise UsageError(f"{label} has {size} bytes; an ONNX file has at most {MOST_MODEL_BYTES}")
        return path.read_bytes()
    except PermissionError as error:
        raise UsageError(f"{label} cannot be read: permission denied", hint=_may_read(path)) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{label} cannot be read: {error}") from error


def _may_read(path: Path) -> str:
    """A hint about a file that this user may not read."""
    return f"See who may read it: ls -l {path}"


def check_onnx_model(model: onnx.ModelProto) -> None:
    """Refuse a model that `onnx.checker` refuses or whose functions call themselves. Raises `UsageError`."""
    _check_functions(model)
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise UsageError(f"the model is not valid ONNX: {error}") from error


def check_names(graph: onnx.GraphProto | onnx.FunctionProto) -> None:
    """Refuse names that are not UTF-8: protobuf hands those over as bytes. Raises `UsageError` naming the node.

    `check_tensors` bounds how deep graphs lie in one another, so it comes first.
    """
    if isinstance(graph, onnx.GraphProto):
        declared = [value.name for value in (*graph.input, *graph.output, *graph.value_info)]
        held = [tensor.name for tensor in graph.initializer]
        _need_text(f"a tensor of graph {graph.name!r}", *declared, *held)
    for index, node in enumerate(graph.node, 1):
        names = (node.name, node.op_type, node.domain, *node.input, *node.output)
        _need_text(f"node {index} of graph {graph.name!r}", *names, *(a.name for a in node.attribute))
        for attribute in node.attribute:
            for inner in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
                check_names(inner)


def _need_text(where: str, *names: str | bytes) -> None:
    for name in names:
        if not isinstance(name, str):
            raise UsageError(f"{where} has a name that is not UTF-8: {name!r}")


def check_tensors(
    model: onnx.ModelProto, folder: Path | None, label: str = "the model", trusted: Collection[Path] = ()
) -> None:
    """Check every tensor of a model, in subgraphs, functions and attributes too, without taking memory for it.

    ``folder`` is where external data may lie (None: nowhere), beside the ``trusted`` files. Raises `UsageError` naming
    the tensor.
    """
    for tensor in _tensors(model, 0):
        if isinstance(tensor, onnx.SparseTensorProto):
            _check_sparse(tensor, label)
            continue
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _check_external(tensor, folder, label, trusted)
        else:
            _check_held(tensor, label)


def _tensors(message: Message, depth: int) -> Iterator[onnx.TensorProto | onnx.SparseTensorProto]:
    """Every tensor in a protobuf message, however deep. Raises `UsageError` beyond `MOST_DEPTH` graphs."""
    if depth > MOST_DEPTH:
        raise UsageError(f"the model's graphs lie deeper than {MOST_DEPTH} within one another")
    if isinstance(message, (onnx.TensorProto, onnx.SparseTensorProto)):
        yield message
        if isinstance(message, onnx.SparseTensorProto):
            yield message.values
            yield message.indices
        return
    if isinstance(message, onnx.ModelProto):
        yield from _tensors(message.graph, depth + 1)
        for function in message.functions:
            yield from _tensors(function, depth + 1)
    elif isinstance(message, (onnx.GraphProto, onnx.FunctionProto)):
        if isinstance(message, onnx.GraphProto):
            yield from message.initializer
            for sparse in message.sparse_initializer:
                yield from _tensors(sparse, depth)
        for node in message.node:
            for attribute in node.attribute:
                yield from _attribute_tensors(attribute, depth)


def _attribute_tensors(
    attribute: onnx.AttributeProto, depth: int
) -> Iterator[onnx.TensorProto | onnx.SparseTensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    if attribute.HasField("sparse_tensor"):
        yield from _tensors(attribute.sparse_tensor, depth)
    for sparse in attribute.sparse_tensors:
        yield from _tensors(sparse, depth)
    if attribute.HasField("g"):
        yield from _tensors(attribute.g, depth + 1)
    for graph in attribute.graphs:
        yield from _tensors(graph, depth + 1)


def _element_bits(tensor: onnx.TensorProto, label: str) -> int:
    """Bits of one element. `UsageError` for a type that ONNX does not have."""
    kind = tensor.data_type
    if kind == onnx.TensorProto.STRING:
        return 0
    if kind == onnx.TensorProto.UNDEFINED or kind not in onnx.TensorProto.DataType.values():
        raise UsageError(f"tensor '{tensor.name}' in {label} has the unknown element type {kind}")
    name = onnx.TensorProto.DataType.Name(kind)
    for bits, kinds in ((4, ("INT4", "UINT4", "FLOAT4E2M1")), (2, ("INT2", "UINT2")), (6, ("FLOAT6",))):
        if name.startswith(kinds):
            return 8 if bits == 6 else bits
    return int(onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize) * 8


def _claimed(tensor: onnx.TensorProto, label: str) -> int:
    """Number of elements according to the dimensions."""
    dims = list(tensor.dims)
    if len(dims) > MOST_RANK or any(d < 0 for d in dims):
        raise UsageError(f"tensor '{tensor.name}' in {label} cannot have the dimensions {dims[:8]}")
    return math.prod(dims)


def _check_held(tensor: onnx.TensorProto, label: str) -> None:
    """`UsageError` unless the message holds as many data as the dimensions state."""
    count, bits = _claimed(tensor, label), _element_bits(tensor, label)
    if tensor.HasField("raw_data"):
        held, wanted = len(tensor.raw_data), -(-count * bits // 8)
        if held != wanted:
            raise UsageError(
                f"tensor '{tensor.name}' in {label} claims {wanted} bytes ({list(tensor.dims)[:8]}), but holds {held}"
            )
        return
    fields = (
        tensor.float_data,
        tensor.int32_data,
        tensor.int64_data,
        tensor.double_data,
        tensor.uint64_data,
        tensor.string_data,
    )
    held = max(len(field) for field in fields)
    accepted = {count, 2 * count, -(-count * bits // 8), -(-count * bits // 32), -(-count // 2)}
    if held not in accepted:
        raise UsageError(
            f"tensor '{tensor.name}' in {label} claims {count} elements ({list(tensor.dims)[:8]}), but holds {held}"
        )


def _check_sparse(tensor: onnx.SparseTensorProto, label: str) -> None:
    """A sparse tensor is written out when it is used: refuse one whose dense form is out of all proportion."""
    dims = list(tensor.dims)
    if len(dims) > MOST_RANK or any(d <= 0 for d in dims) or math.prod(dims) > MOST_MODEL_BYTES:
        raise UsageError(
            f"sparse tensor '{tensor.values.name}' in {label} cannot have the dimensions {dims[:8]}"
        )


def _place(tensor: onnx.TensorProto, folder: Path | None, trusted: Collection[Path]) -> ExternalPlace:
    path, entries = external_file(tensor, folder, trusted), entries_of(tensor)
    offset = int(entries.get("offset") or 0)
    return ExternalPlace(path, offset, int(entries.get("length") or path.stat().st_size - offset))


def _check_external(
    tensor: onnx.TensorProto, folder: Path | None, label: str, trusted: Collection[Path]
) -> None:
    """`UsageError` unless external data lie in an allowed place and have as many bytes as the dimensions state."""
    path, entries = external_file(tensor, folder, trusted, label), entries_of(tensor)
    name = f"tensor '{tensor.name}' in {label}"
    try:
        offset = int(entries.get("offset") or 0)
        length = int(entries["length"]) if entries.get("length") else None
    except ValueError as error:
        raise UsageError(f"{name} has a bad offset or length: {error}") from error
    wanted = -(-_claimed(tensor, label) * _element_bits(tensor, label) // 8)
    available = path.stat().st_size - offset
    if offset < 0 or available < 0 or (length is not None and length != wanted) or wanted > available:
        raise UsageError(
            f"{name} claims {wanted} bytes; its external data are {length if length is not None else 'all'} "
            f"bytes from {offset} of a file of {path.stat().st_size}",
            hint=f"Save the model again with its data, or copy {path.name} whole.",
        )


def _check_total(model: onnx.ModelProto, label: str) -> None:
    """Refuse too many external data before they are read."""
    external = onnx.TensorProto.EXTERNAL
    tensors = (
        t for t in _tensors(model, 0) if isinstance(t, onnx.TensorProto) and t.data_location == external
    )
    total = sum(-(-_claimed(tensor, label) * _element_bits(tensor, label) // 8) for tensor in tensors)
    if total > MOST_MODEL_BYTES:
        raise UsageError(f"{label} has {total} bytes of external data; {MOST_MODEL_BYTES} is the most here")


def _load_external(model: onnx.ModelProto, folder: Path | None, trusted: Collection[Path]) -> None:
    for tensor in _tensors(model, 0):
        if isinstance(tensor, onnx.TensorProto) and tensor.data_location == onnx.TensorProto.EXTERNAL:
            path = external_file(tensor, folder, trusted)
            if not os.access(path, os.R_OK):
                raise UsageError(
                    f"the data of tensor '{tensor.name}' cannot be read from {path}: permission denied",
                    hint=_may_read(path),
                )
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = path.name
            try:
                onnx.external_data_helper.load_external_data_for_tensor(tensor, str(path.parent))
            except (onnx.checker.ValidationError, OSError, ValueError, RuntimeError) as error:
                raise UsageError(
                    f"the data of tensor '{tensor.name}' cannot be read from {path}: {error}",
                    hint="Put a file of its own there, with one name (no hard link).",
                ) from error
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]


def _check_functions(model: onnx.ModelProto) -> None:
    """`UsageError` for a function of the model that calls itself, directly or through others, or nests deeper than
    `MOST_DEPTH`.
    """
    bodies = {(f.domain, f.name): f for f in model.functions}
    depths: dict[tuple[str, str], int] = {}

    def depth(key: tuple[str, str], path: tuple[tuple[str, str], ...]) -> int:
        if key in path or len(path) > MOST_DEPTH:
            raise UsageError(
                f"function '{key[0]}.{key[1]}' of the model calls itself, or too many others in turn"
            )
        if key not in depths:
            calls = {(n.domain, n.op_type) for n in bodies[key].node} & bodies.keys()
            depths[key] = 1 + max((depth(c, (*path, key)) for c in calls), default=0)
        return depths[key]

    for key in bodies:
        depth(key, ())
