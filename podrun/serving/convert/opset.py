"""Another version of ONNX's operators: upwards by ONNX's own converter, downwards by the rules of `opset_down`.

Operators that the wanted version does not have are written out first, by the bodies that ONNX publishes of them. Where
a model still cannot go down, it keeps its version, with a warning that names the operator: podrun compiles all of them.
"""

from __future__ import annotations

import logging
from typing import Any

import onnx
from onnx import ModelProto, NodeProto, helper

from podrun.core.errors import UsageError
from podrun.serving.convert.graph_edit import GraphEditor, ModelEditor
from podrun.serving.convert.graph_walk import ONNX_DOMAINS, attribute, set_attribute
from podrun.serving.convert.opset_down import CannotLowerOpset, lower_node
from podrun.serving.convert.pass_manager import Pass
from podrun.serving.convert.type_inference import MOST_VALUES, infer_types, value_of_type, without_weights

_log = logging.getLogger("poprt")
NEWEST = onnx.defs.onnx_opset_version()


def convert_opset(model: ModelProto, version: int) -> ModelProto:
    """The model in a version of ONNX's operators, or as it is, with a warning. UsageError for one that is none."""
    if isinstance(version, bool) or not isinstance(version, int) or not 7 <= version <= NEWEST:
        raise UsageError(
            f"convert_version is a version of ONNX's operators from 7 to {NEWEST}, not {version!r}"
        )
    now = ModelEditor(model).opset
    if now == version:
        return model
    if version < now:
        return _downwards(model, now, version)
    copy = without_weights(model, MOST_VALUES)
    others = [i for i in copy.opset_import if i.domain not in ONNX_DOMAINS]
    types = infer_types(copy)
    stated = {v.name for v in (*copy.graph.input, *copy.graph.output)} | {
        t.name for t in copy.graph.initializer
    }
    copy.graph.value_info.extend(value_of_type(n, k) for n, k in types.items() if n not in stated)
    try:
        converted = onnx.version_converter.convert_version(copy, version)
    except (
        Exception
    ) as error:  # ONNX's converter raises RuntimeError and errors of its own that it does not publish.
        _log.warning(
            "the model stays in opset %d: %s", now, str(error).splitlines()[0] if str(error) else error
        )
        return model
    _take_over(model, converted)
    _state_version(model, version, others)
    return model


def _state_version(model: ModelProto, version: int, others: list[onnx.OperatorSetIdProto]) -> None:
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", version))
    model.opset_import.extend(others)


def _downwards(model: ModelProto, now: int, version: int) -> ModelProto:
    lower = ModelProto()
    lower.CopyFrom(model)
    write_out(lower, version)
    lower = Pass.get_pass("replace_castlike").run(lower)
    owner = ModelEditor(lower)
    _ = owner.types  # Of the model as it is: they are asked for while it changes.
    try:
        for graph in owner.graphs():
            for node in list(graph.nodes):
                lower_node(graph, node, now, version)
            graph.drop_unused_initializers()
            graph.changed = True
    except CannotLowerOpset as error:
        _log.warning("the model stays in opset %d: %s", now, error)
        return model
    del lower.graph.value_info[:]
    _state_version(lower, version, [i for i in lower.opset_import if i.domain not in ONNX_DOMAINS])
    return lower


def _take_over(model: ModelProto, converted: ModelProto) -> None:
    """Put the nodes and the small constants of a converted model into the one that has the weights."""
    heavy = {value.name for value in converted.graph.input} - {value.name for value in model.graph.input}
    kept = [i for i, t in enumerate(model.graph.initializer) if t.name not in heavy]
    for index in reversed(kept):
        del model.graph.initializer[index]
    model.graph.initializer.extend(converted.graph.initializer)
    del model.graph.node[:]
    model.graph.node.extend(converted.graph.node)
    del model.graph.value_info[:]


def write_out(model: ModelProto, version: int) -> None:
    """Replace operators that are newer than a version by the bodies that ONNX publishes of them."""
    for _ in range(4):
        owner = ModelEditor(model)
        changed = False
        for graph in owner.graphs():
            for node in list(graph.nodes):
                if node.domain in ONNX_DOMAINS and not onnx.defs.has(node.op_type, version, ""):
                    changed = _write_out_node(graph, node) or changed
        owner.commit()
        if not changed:
            return


def _write_out_node(graph: GraphEditor, node: NodeProto) -> bool:
    schema: Any = onnx.defs.get_schema(node.op_type, graph.owner.opset, "")  # Its stub lacks the functions.
    body: onnx.FunctionProto | None = None
    opset = graph.owner.opset
    if schema.has_function:
        told = schema.get_function_with_opset_version(opset)
        body = onnx.FunctionProto.FromString(told) if told else schema.function_body
    elif schema.has_context_dependent_function:
        kinds = [graph.kind(name) if name else None for name in node.input]
        if any(name and kind is None for name, kind in zip(node.input, kinds, strict=True)):
            return False
        types = [value_of_type("t", k).type.SerializeToString() if k else b"" for k in kinds]
        body = onnx.FunctionProto.FromString(
            schema.get_context_dependent_function_with_opset_version(opset, node.SerializeToString(), types)
            or schema.get_context_dependent_function(node.SerializeToString(), types)
        )
    if body is None or not body.node:
        return False
    names = dict(zip(body.input, node.input, strict=False))
    names |= dict(zip(body.output, node.output, strict=False))
    for missing in body.input[len(node.input) :]:
        names[missing] = ""
    new = []
    for inner in body.node:
        copied = NodeProto()
        copied.CopyFrom(inner)
        copied.name = graph.owner.new_name(f"{node.name or node.op_type}_{inner.op_type}")
        for node_names in (copied.input, copied.output):
            for index, name in enumerate(node_names):
                if name and name not in names:
                    names[name] = graph.owner.new_name(f"{node.output[0]}_{name}")
                node_names[index] = names.get(name, "")
        _bind(copied, node, schema)
        new.append(copied)
    graph.replace([node], new)
    return True


def _bind(copied: NodeProto, node: NodeProto, schema: onnx.defs.OpSchema) -> None:
    """Give a body's node the attributes that it takes from the operator's."""
    for one in list(copied.attribute):
        if one.ref_attr_name:
            value = attribute(node, one.ref_attr_name)
            if value is None and one.ref_attr_name in schema.attributes:
                default = schema.attributes[one.ref_attr_name].default_value
                value = helper.get_attribute_value(default) if default.name else None
            set_attribute(copied, one.name, value)
