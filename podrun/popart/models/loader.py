"""Reads ONNX models for sessions: PopART's wording and rules on top of `podrun.onnx_models.model_loader`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from podrun.core.errors import UsageError
from podrun.onnx_models.light_model import MOST_HELD, LightModel
from podrun.popart.values.exceptions import incompatible, popart_exception
from podrun.popart.values.tensor_info import InputShapeInfo, TensorInfo
from podrun.runtime.tensor_names import STATE_PREFIXES, reserved_prefix_of

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TypeProto

    from podrun.onnx_models.external_data import ExternalPlace

_log = logging.getLogger("podrun.popart")

OLDEST_IR = 3
"""The first IR version with operator set imports."""

written: set[Path] = set()
"""Files of external data that this process wrote. A model may name them wherever they lie."""


def read_model(source: str | bytes | os.PathLike[str]) -> ModelProto:
    """A ModelProto from a path or from bytes, its external data loaded. popart_exception if it is not a model.

    Sizes that the model states are checked against the existing bytes before memory is taken.
    """
    from podrun.onnx_models.model_loader import MOST_MODEL_BYTES

    return read_light_model(source, at_least=MOST_MODEL_BYTES).proto


def read_light_model(
    source: str | bytes | os.PathLike[str],
    places: MutableMapping[str, ExternalPlace] | None = None,
    at_least: int = MOST_HELD,
) -> LightModel:
    """`read_model` with initial values of more than ``at_least`` elements beside the model."""
    from podrun.onnx_models import model_loader

    if isinstance(source, (bytearray, memoryview)):
        source = bytes(source)
    if not isinstance(source, (bytes, str, os.PathLike)):
        raise incompatible("", f"A model is a path or bytes, not {type(source).__name__}.")
    try:
        light = model_loader.read_light_onnx_model(source, trusted=written, places=places, at_least=at_least)
    except UsageError as error:
        what = f"of {len(source)} bytes" if isinstance(source, bytes) else _shorten(os.fspath(source))
        raise popart_exception(
            f"Failed to load a ModelProto from the string {what}: {error.message}. Check that it is either a valid "
            "path to an existing onnx model file, or is a valid onnx ModelProto string.",
            hint=error.hint,
        ) from error
    _check_text(light.proto)
    if not light.proto.opset_import:
        raise popart_exception(
            "Failed to load a ModelProto: it imports no operator set, so it is no ONNX model."
        )
    return light


def standard_model(source: str | bytes | os.PathLike[str]) -> bytes:
    """A model that PopART's API wrote, in the form that ONNX Runtime and other tools read: each half and each small
    integer of an initializer has an int32_data entry of its own.

        Path("for_others.onnx").write_bytes(standard_model("trained.onnx"))
    """
    return read_light_model(source).to_bytes(standard=True)


def check_model(light: LightModel, info: InputShapeInfo) -> dict[str, tuple[int, ...]]:
    """The shapes of `input_shapes`. popart_exception for a model that no session can take: inputs without a shape that
    ``info`` does not give either, errors of onnx.checker, names that PopART reserves.
    """
    from onnx import TensorProto

    from podrun.onnx_models import model_loader

    model = light.proto
    _check_versions(model)
    fixed = input_shapes(model, info)
    shapeless = [
        value.type.tensor_type
        for value in (*model.graph.input, *model.graph.output)
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape")
    ]
    typeless = [value for value in model.graph.output if not value.HasField("type")]
    for (
        kind
    ) in shapeless:  # The checker wants shapes, which PopART does not: inputs have theirs from elsewhere.
        kind.shape.SetInParent()
    for value in typeless:  # The result of a custom operator, or of an operator behind it.
        value.type.tensor_type.elem_type = TensorProto.FLOAT
        value.type.tensor_type.shape.SetInParent()
    unknown = list(_take_unknown(model.graph, {entry.domain: entry.version for entry in model.opset_import}))
    try:
        with light.checkable() as checked:
            model_loader.check_onnx_model(checked)
    except UsageError as error:
        raise popart_exception(
            f"onnx.checker refuses the model{_refused_node(model)}: {error.message}", hint=error.hint
        ) from error
    finally:
        for node, attribute in unknown:
            node.attribute.append(attribute)
        for kind in shapeless:
            kind.ClearField("shape")
        for value in typeless:
            value.ClearField("type")
    _check_names(model.graph)
    return fixed


def _check_versions(model: ModelProto) -> None:
    """popart_exception for an IR version or an opset of ai.onnx that is not read."""
    from onnx import defs

    if model.ir_version < OLDEST_IR:
        raise popart_exception(
            f"The model has IR version {model.ir_version}; versions from {OLDEST_IR} on are read.",
            hint="Convert it with onnx.version_converter.",
        )
    newest = defs.onnx_opset_version()
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx") and not 1 <= entry.version <= newest:
            raise popart_exception(
                f"The model imports ai.onnx opset {entry.version}; opsets 1 to {newest} are known."
            )


def _refused_node(model: ModelProto) -> str:
    """The first node that the checker refuses by itself, for a message: builders leave nodes without names."""
    from onnx import checker

    context = checker.C.CheckerContext()
    context.ir_version = model.ir_version
    context.opset_imports = {entry.domain: entry.version for entry in model.opset_import}
    for node in model.graph.node:
        try:
            checker.check_node(node, context)
        except checker.ValidationError:
            outputs = ", ".join(repr(output) for output in node.output if output)
            return f" at {node.domain or 'ai.onnx'}.{node.op_type} (making {outputs})"
    return ""


def _take_unknown(graph: GraphProto, opsets: Mapping[str, int]) -> Iterator[tuple[NodeProto, AttributeProto]]:
    """Remove attributes that ONNX's operators do not have. Programs put their own there (``addNodeAttribute``), and
    PopART reads some of later opsets, as Resize's. The checker would refuse them.
    """
    from onnx import AttributeProto, defs

    for node in graph.node:
        version = opsets.get(node.domain, opsets.get("ai.onnx", 1) if node.domain == "" else 1)
        if node.domain == "" and defs.has(node.op_type, version, ""):
            known = defs.get_schema(node.op_type, version, "").attributes
            for attribute in [
                a for a in node.attribute if a.name not in known and not a.name.startswith("__")
            ]:
                if attribute.name not in defs.get_schema(node.op_type).attributes:
                    _log.warning(
                        "%s %r: ONNX has no attribute %r; ignored.", node.op_type, node.name, attribute.name
                    )
                kept = AttributeProto()
                kept.CopyFrom(attribute)
                node.attribute.remove(attribute)
                yield node, kept
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                yield from _take_unknown(inner, opsets)


def _check_text(message: Message) -> None:
    """popart_exception for names that are not UTF-8, which protobuf passes on as bytes."""
    for field, value in message.ListFields():
        items = (
            value if isinstance(value, (list, Sequence)) and not isinstance(value, (str, bytes)) else [value]
        )
        if field.type == field.TYPE_STRING and any(isinstance(item, bytes) for item in items):
            raise popart_exception(
                f"Failed to load a ModelProto: {field.full_name} holds {_shorten(repr(value))}, which is no UTF-8."
            )
        if field.type == field.TYPE_MESSAGE:
            for item in items:
                _check_text(item)


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "...")


def _check_names(graph: GraphProto) -> None:
    initializers = {tensor.name for tensor in graph.initializer}
    for name in _all_names(graph):
        prefix = reserved_prefix_of(name)
        if prefix is None or (name in initializers and prefix in STATE_PREFIXES):
            continue
        raise popart_exception(
            f"Tensor {name!r} starts with {prefix!r}, which PopART reserves for tensors that it makes "
            "itself. Rename it."
        )


def _all_names(graph: GraphProto) -> list[str]:
    names = [value.name for value in graph.input]
    names += [tensor.name for tensor in graph.initializer]
    names += [output for node in graph.node for output in node.output if output]
    return names


def input_shapes(model: ModelProto, info: InputShapeInfo) -> dict[str, tuple[int, ...]]:
    """Shapes that InputShapeInfo gives, for the inputs of ``model``; popart_exception for one that contradicts it."""
    from podrun.popart.values.tensor_info import info_from_type

    initializers = {tensor.name for tensor in model.graph.initializer}
    shapes = {}
    for value in model.graph.input:
        if value.name in initializers:
            continue
        known = info_from_type(value.type)
        if info.has(value.name):
            stated = info.get(value.name)
            _check_agrees(value.name, known, stated)
            shapes[value.name] = tuple(int(dim) for dim in stated.shape())
        elif known is None or not known.is_static:
            raise popart_exception(
                f"Input tensor '{value.name}' must be specified in InputShapeInfo, as it has "
                f"{_unknown(value.type, known)}.",
                hint=f"info = popart.InputShapeInfo(); info.add({value.name!r}, popart.TensorInfo(...))",
            )
    return shapes


def _unknown(kind: TypeProto, known: TensorInfo | None) -> str:
    """The unknown parts of an input's shape, in PopART's words."""
    if known is None:
        return "no shape in the model"
    dims = [dim.dim_param or str(dim.dim_value) for dim in kind.tensor_type.shape.dim]
    which = next(d for d, size in zip(dims, known.shape(), strict=True) if isinstance(size, str) or size < 0)
    return f"shape [{', '.join(dims)}], which uses an unknown value '{which}'"


def _check_agrees(name: str, known: TensorInfo | None, stated: TensorInfo) -> None:
    if known is None:
        return
    fits = known.rank() == stated.rank() and all(
        isinstance(dim, str) or dim < 0 or dim == fixed
        for dim, fixed in zip(known.shape(), stated.shape(), strict=True)
    )
    if known.dataType() is not stated.dataType() or not fits:
        raise popart_exception(
            f"InputShapeInfo says {stated} for input {name!r}, but the model says {known}."
        )
