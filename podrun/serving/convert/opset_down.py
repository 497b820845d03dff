"""Down to an earlier version of ONNX's operators, one node at a time.

ONNX's own converter has few rules downwards. Between most versions an operator only gained types, or attributes with
defaults: such a node stays, its defaults go. Where operands became inputs (axes, sizes) they become attributes again,
and Softmax over an inner axis, which meant something else before version 13, moves that axis last.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import NodeProto, helper

from podrun.serving.convert.graph_edit import GraphEditor
from podrun.serving.convert.graph_walk import ONNX_DOMAINS, attribute, set_attribute
from podrun.serving.convert.type_rules import signature_of


class CannotLowerOpset(Exception):
    """A node that has no form in the wanted version; the message says why."""


def lower_node(graph: GraphEditor, node: NodeProto, now: int, version: int) -> None:
    """Put a node into its form of an earlier version. `CannotLowerOpset` if it has none."""
    if node.domain not in ONNX_DOMAINS:
        return
    if not onnx.defs.has(node.op_type, version, ""):
        raise CannotLowerOpset(f"opset {version} has no {node.op_type}")
    new, old = (onnx.defs.get_schema(node.op_type, v, "") for v in (now, version))
    if new.since_version == old.since_version:
        return
    rule = _RULES.get(node.op_type)
    if rule is not None:
        rule(graph, node, version)
    for one in list(node.attribute):
        if one.name.startswith("__") or one.name in old.attributes:
            continue
        default = new.attributes[one.name].default_value if one.name in new.attributes else None
        held = helper.get_attribute_value(default) if default is not None and default.name else None
        if attribute(node, one.name) != held:
            raise CannotLowerOpset(f"{node.op_type} of opset {version} has no {one.name}")
        set_attribute(node, one.name, None)
    while node.input and not node.input[-1]:
        node.input.pop()
    if len(node.input) > old.max_input or len(node.output) > old.max_output:
        raise CannotLowerOpset(f"{node.op_type} of opset {version} has fewer operands")
    _check_types(graph, node, version)


def _check_types(graph: GraphEditor, node: NodeProto, version: int) -> None:
    told = signature_of(node, version)
    for index, name in enumerate(node.input):
        formal, element = (
            told.input(index) if told is not None else None,
            graph.element(name) if name else None,
        )
        if formal is None or not element:
            continue
        dtype = helper.tensor_dtype_to_np_dtype(element).name
        text = f"tensor({ {'float32': 'float', 'float64': 'double'}.get(dtype, dtype) })".replace(" ", "")
        if text not in formal.allowed:
            raise CannotLowerOpset(f"{node.op_type} of opset {version} takes no {dtype}")


def _taken(graph: GraphEditor, node: NodeProto, index: int) -> np.ndarray | None:
    """The constant at an input, which is taken away; None if there is none."""
    if len(node.input) <= index or not node.input[index]:
        return None
    value = graph.constant(node.input[index])
    if value is None:
        raise CannotLowerOpset(f"operand {index} of {node.op_type} is computed")
    node.input[index] = ""
    while node.input and not node.input[-1]:
        node.input.pop()
    graph.touch()
    return value


def _axes(graph: GraphEditor, node: NodeProto, version: int) -> None:
    schema = onnx.defs.get_schema(node.op_type, version, "")
    if "axes" in schema.attributes and (value := _taken(graph, node, 1)) is not None:
        set_attribute(node, "axes", [int(axis) for axis in value.reshape(-1)])


def _split(graph: GraphEditor, node: NodeProto, version: int) -> None:
    schema = onnx.defs.get_schema("Split", version, "")
    if "split" not in schema.attributes:
        if attribute(node, "num_outputs") is None:
            return
        _even_split(graph, node)
        sizes = graph.add_constant(np.asarray(attribute(node, "split"), np.int64), "split_sizes")
        set_attribute(node, "split", None)
        node.input.append(sizes)
        graph.touch()
        return
    value = _taken(graph, node, 1)
    if value is not None:
        set_attribute(node, "split", [int(size) for size in value.reshape(-1)])
    elif attribute(node, "num_outputs") is not None:
        _even_split(graph, node)


def _even_split(graph: GraphEditor, node: NodeProto) -> None:
    """Sizes of a Split into a number of parts: equal ones, the last may be smaller."""
    sizes, count = graph.sizes(node.input[0]), int(attribute(node, "num_outputs"))
    if sizes is None:
        raise CannotLowerOpset("the sizes of a Split are not known")
    whole = sizes[attribute(node, "axis", 0)]
    part = -(-whole // count)
    set_attribute(node, "split", [min(part, whole - part * i) for i in range(count)])
    set_attribute(node, "num_outputs", None)


def _softmax(graph: GraphEditor, node: NodeProto, version: int) -> None:
    if version >= 13 or graph.owner.opset < 13:
        return
    sizes = graph.sizes(node.input[0])
    if sizes is None:
        raise CannotLowerOpset(f"the rank of {node.op_type}'s input is not known")
    rank = len(sizes)
    axis = int(attribute(node, "axis", -1)) % rank
    set_attribute(node, "axis", rank - 1)
    if axis == rank - 1:
        return
    order = [a for a in range(rank) if a != axis] + [axis]
    back = [order.index(a) for a in range(rank)]
    graph.lead_input(node, 0, "Transpose", perm=order)
    graph.lead_result(node, "Transpose", perm=back)


def _pad(graph: GraphEditor, node: NodeProto, version: int) -> None:
    if version >= 18 or len(node.input) < 4 or not node.input[3]:
        return
    axes, pads, sizes = (
        graph.constant(node.input[3]),
        graph.constant(node.input[1]),
        graph.sizes(node.input[0]),
    )
    if axes is None or pads is None or sizes is None:
        raise CannotLowerOpset("the axes of a Pad are computed")
    whole = np.zeros(2 * len(sizes), np.int64)
    half = len(pads) // 2
    for place, axis in enumerate(int(a) % len(sizes) for a in axes):
        whole[axis], whole[axis + len(sizes)] = pads[place], pads[half + place]
    node.input[1] = graph.add_constant(whole, "pads")
    node.input[3] = ""
    graph.touch()


def _resize(graph: GraphEditor, node: NodeProto, version: int) -> None:
    if version < 13 and len(node.input) > 1:
        for index in (1, 2):
            if index < len(node.input) and not node.input[index]:
                node.input[index] = graph.add_constant(np.zeros(0, np.float32), "no_value")
        graph.touch()
    if attribute(node, "coordinate_transformation_mode", b"half_pixel") == b"half_pixel_symmetric":
        raise CannotLowerOpset("Resize with half_pixel_symmetric is of opset 19")


def _batch_norm(graph: GraphEditor, node: NodeProto, version: int) -> None:
    if attribute(node, "training_mode", 0):
        raise CannotLowerOpset("BatchNormalization that trains")


def _dropout(graph: GraphEditor, node: NodeProto, version: int) -> None:
    ratio = _taken(graph, node, 1)
    if version < 12 and len(node.input) > 2:
        raise CannotLowerOpset("Dropout that trains")
    if version < 12 and ratio is not None:
        set_attribute(node, "ratio", float(ratio.reshape(-1)[0]))


_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
_RULES: dict[str, Callable[[GraphEditor, NodeProto, int], None]] = {
    **{f"Reduce{kind}": _axes for kind in _REDUCTIONS},
    **dict.fromkeys(("Squeeze", "Unsqueeze"), _axes),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _softmax),
    "Split": _split,
    "Pad": _pad,
    "Resize": _resize,
    "BatchNormalization": _batch_norm,
    "Dropout": _dropout,
}
