"""Types and shapes of what ai.graphcore's and custom operators make, while a model is built.

ONNX infers its own operators. The table of ai.graphcore has a rule for most of its operators; those whose shapes follow
from a formula too long for it are traced: the operator's own JAX function tells, as it does when a session is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from podrun.errors import PodrunError
from podrun.popart import custom
from podrun.popart.building.graph import GRAPHCORE_DOMAIN, Scope
from podrun.popart.building.graphcore_ops import OPS, GraphcoreOp
from podrun.popart.errors import popart_exception
from podrun.popart.models.tensor_proto import info_from_type, type_proto
from podrun.popart.tensor_info import TensorInfo, data_type_of

if TYPE_CHECKING:
    from onnx import NodeProto

Infos = list[TensorInfo | None]

BY_TYPE = {op.op_type: op for op in OPS.values()}
"""ai.graphcore's operators by the type of their nodes."""


def infer_graphcore(scope: Scope, op: GraphcoreOp, node: NodeProto, attributes: Mapping[str, Any]) -> Infos:
    """What is known of an ai.graphcore node's outputs. popart_exception if it cannot take its inputs."""
    infos = [scope.info(name) if name else None for name in node.input]
    if op.op_type == "Call":
        found = [info_from_type(output.type) for output in attributes["callee"].output]
    elif op.rule is None:
        found = _traced(scope, node, infos)
    else:
        try:
            found = op.rule(infos, attributes)
        except (ValueError, IndexError, TypeError) as error:
            inputs = ", ".join(f"{name!r} {info}" for name, info in zip(node.input, infos, strict=True))
            raise popart_exception(f"{node.op_type} cannot take its inputs ({inputs}): {error}") from error
    return _as_many(found, node)


def infer_custom(scope: Scope, node: NodeProto, version: int, attributes: Mapping[str, Any]) -> Infos:
    """What is known of the outputs of a node that customOp adds: one of ai.graphcore's, or a registered operator."""
    if node.domain == GRAPHCORE_DOMAIN and node.op_type in BY_TYPE:
        op = BY_TYPE[node.op_type]
        given = {name: default for name, default in op.attributes if name not in attributes}
        try:
            return infer_graphcore(scope, op, node, {**given, **attributes})
        except popart_exception:  # The attributes are as a program spelled them: the session will tell.
            return _as_many([], node)
    if not custom.registered(node.domain, node.op_type):
        return _as_many([], node)
    infos = [scope.info(tensor) if tensor else None for tensor in node.input]
    return _as_many(custom.infer(node.domain, node.op_type, version, infos, attributes), node)


def _as_many(found: Sequence[TensorInfo | None], node: NodeProto) -> Infos:
    return [*found, *[None] * len(node.output)][: len(node.output)]


def _traced(scope: Scope, node: NodeProto, infos: Infos) -> Infos:
    """The outputs by tracing the node alone, for static inputs; nothing is known of them if it does not go."""
    known = {name: info for name, info in zip(node.input, infos, strict=True) if name}
    if not node.output or any(info is None or not info.is_static for info in known.values()):
        return []
    from onnx import helper

    from podrun.popart.lowering import lower

    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    graph = helper.make_graph([node], "node", [], outputs)
    for name, info in known.items():
        constant = scope.constant(name)
        if constant is not None:
            graph.initializer.add().CopyFrom(constant)
            graph.initializer[-1].name = name
        elif info is not None:
            graph.input.append(helper.make_value_info(name, type_proto(info)))
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid(GRAPHCORE_DOMAIN, 1), helper.make_opsetid("", 10)]
    )
    try:
        tensors = lower(model).tensors
    except PodrunError:
        return []
    return [
        TensorInfo(data_type_of(tensors[name].dtype), tensors[name].shape) if name in tensors else None
        for name in node.output
    ]
