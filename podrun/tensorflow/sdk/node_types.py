"""Types of the nodes of a frozen graph: what they are, other ones, and casts where they differ."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import tensorflow as tf

from podrun.private_apis.tensorflow import private_module

if TYPE_CHECKING:
    from tensorflow.core.framework.graph_pb2 import GraphDef
    from tensorflow.core.framework.node_def_pb2 import NodeDef


def refuse_calls(graph_def: GraphDef, option: str) -> None:
    """NotImplementedError for a node that calls a function, such as a loop: the types in functions stay as they are."""
    functions = {function.signature.name for function in graph_def.library.function}
    for node in graph_def.node:
        values = node.attr.values()
        called = {f.name for value in values for f in (value.func, *value.list.func) if f.name}
        if node.op in functions or called & functions:
            raise NotImplementedError(
                f"{option} does not reach into the functions that the node {node.name} ({node.op}) calls: convert "
                "without it, or save the model without branches and loops."
            )


def change_types(node: NodeDef, old: set[int], new: int) -> None:
    """Let a node compute another type: its attributes, and its constant."""
    for name, value in node.attr.items():
        if name.startswith("_"):
            continue
        if value.type in old:
            value.type = new
        elif value.HasField("list"):
            value.list.type[:] = [new if kind in old else kind for kind in value.list.type]
        elif value.HasField("tensor") and value.tensor.dtype in old:
            array = tf.make_ndarray(value.tensor)
            narrow = array.astype(tf.as_dtype(new).as_numpy_dtype)
            if array.dtype.kind == "i" and (narrow != array).any():
                raise OverflowError(f"the constant {node.name} has integers that 32 bits cannot hold")
            value.tensor.CopyFrom(tf.make_tensor_proto(narrow))


def with_casts(graph_def: GraphDef, kinds: set[int]) -> GraphDef:
    """The graph with a cast wherever a node reads one of two types where it wants the other."""
    result = type(graph_def)()
    result.versions.CopyFrom(graph_def.versions)
    result.library.CopyFrom(graph_def.library)
    made_by = {node.name: tensor_types(node, "output_arg") for node in graph_def.node}
    for node in graph_def.node:
        changed = copy.deepcopy(node)
        for place, (name, wanted) in enumerate(
            zip(node.input, tensor_types(node, "input_arg"), strict=False)
        ):
            source, _, output = name.partition(":")
            types = made_by.get(source, [])
            number = int(output or 0)
            actual = types[number] if number < len(types) else None
            if {actual, wanted} == kinds:
                cast = result.node.add(
                    name=f"{node.name}/CastInsertion_{place}", op="Cast", device=node.device, input=[name]
                )
                cast.attr["SrcT"].type, cast.attr["DstT"].type = actual, wanted
                changed.input[place] = cast.name
        result.node.append(changed)
    return result


def tensor_types(node: NodeDef, side: str) -> list[int | None]:
    """The types of a node's inputs or outputs, as its operation declares them."""
    declared = private_module("framework.op_def_registry").get(node.op)
    types: list[int | None] = []
    for argument in getattr(declared, side, ()):
        if argument.type_list_attr:
            types.extend(node.attr[argument.type_list_attr].list.type)
        else:
            kind = node.attr[argument.type_attr].type if argument.type_attr else argument.type
            types.extend([kind] * (node.attr[argument.number_attr].i if argument.number_attr else 1))
    return types
