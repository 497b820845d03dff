"""Several models in one program, of which a run computes one: `MFConverter`.

Tensors of model i are called ``graphI/NAME``. An input ``index`` says which model computes; outputs of the others are
zeros. Inputs of the others may hold anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from podrun.core.errors import UsageError
from podrun.serving.convert.graph_walk import graphs_within
from podrun.serving.convert.structure_passes import (
    RemoveInitializerFromInput,
    UniqueNameForNodes,
    check_shapes_known,
)
from podrun.serving.convert.type_inference import infer_types, value_of_type
from podrun.serving.fused_models import INDEX


class MFConverter:
    """Fuses models; see the module's text."""

    def convert(self, models: Sequence[ModelProto]) -> ModelProto:
        """The fused model. UsageError for one model alone, models of different opsets, and open shapes."""
        if len(models) < 2:
            raise UsageError("model fusion takes two or more models")
        for model in models:
            check_shapes_known(model)
        opsets = [{i.domain: i.version for i in model.opset_import} for model in models]
        merged = {domain: version for told in opsets for domain, version in told.items()}
        for number, told in enumerate(opsets):
            for domain, version in told.items():
                if merged[domain] != version:
                    raise UsageError(
                        f"model fusion: model {number} has opset {version}, another {merged[domain]}",
                        hint="Convert all with the same --convert_version.",
                    )
        graph = GraphProto(name="fused")
        graph.input.append(helper.make_tensor_value_info(INDEX, TensorProto.INT32, [1]))
        for number, model in enumerate(models):
            copy = ModelProto()
            copy.CopyFrom(model)
            _add(graph, UniqueNameForNodes().run(RemoveInitializerFromInput().run(copy)), number)
        imports = [helper.make_opsetid(domain, version) for domain, version in merged.items()]
        return helper.make_model(graph, opset_imports=imports, ir_version=max(m.ir_version for m in models))


def _add(fused: GraphProto, model: ModelProto, number: int) -> None:
    prefix = f"graph{number}/"
    _rename(model.graph, prefix)
    types = infer_types(model)
    values = [value_of_type(value.name, types[value.name]) for value in model.graph.output]
    fused.input.extend(model.graph.input)
    fused.initializer.extend(model.graph.initializer)
    fused.output.extend(values)
    place = f"{prefix}number"
    fused.initializer.append(numpy_helper.from_array(np.asarray([number], np.int32), place))
    fused.initializer.append(numpy_helper.from_array(np.asarray([], np.int64), f"{prefix}scalar"))
    equal = helper.make_node("Equal", [INDEX, place], [f"{prefix}chosen_1"], name=f"{prefix}Equal")
    flat = helper.make_node(
        "Reshape", [f"{prefix}chosen_1", f"{prefix}scalar"], [f"{prefix}chosen"], name=f"{prefix}Reshape"
    )
    computes = helper.make_graph(
        list(model.graph.node), f"{prefix}computes", [], _inner(values, prefix, "then")
    )
    _hand_out(computes, values, prefix, "then")
    idle = helper.make_graph(
        [_zeros(v, types[v.name].sizes, prefix) for v in values], f"{prefix}idle", [], []
    )
    idle.output.extend(_inner(values, prefix, "else"))
    chosen = helper.make_node(
        "If",
        [f"{prefix}chosen"],
        [value.name for value in values],
        name=f"{prefix}If",
        then_branch=computes,
        else_branch=idle,
    )
    fused.node.extend([equal, flat, chosen])


def _inner(values: Sequence[ValueInfoProto], prefix: str, branch: str) -> list[ValueInfoProto]:
    renamed = []
    for value in values:
        copy = ValueInfoProto()
        copy.CopyFrom(value)
        copy.name = f"{value.name}/{branch}"
        renamed.append(copy)
    return renamed


def _hand_out(branch: GraphProto, values: Sequence[ValueInfoProto], prefix: str, suffix: str) -> None:
    """Names of a branch's results differ from those of the If."""
    for value in values:
        inside, outside = f"{value.name}/made", f"{value.name}/{suffix}"
        for graph in graphs_within(branch):
            for node in graph.node:
                for names in (node.input, node.output):
                    for index, name in enumerate(names):
                        if name == value.name:
                            names[index] = inside
        branch.node.append(helper.make_node("Identity", [inside], [outside], name=f"{outside}/Identity"))


def _zeros(value: ValueInfoProto, sizes: tuple[int, ...] | None, prefix: str) -> NodeProto:
    if sizes is None:
        raise UsageError(f"model fusion: the shape of output {value.name!r} is not known")
    dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    zero = numpy_helper.from_array(np.zeros(sizes, dtype))
    name = f"{value.name}/else"
    return helper.make_node("Constant", [], [name], name=f"{name}/Constant", value=zero)


def _rename(graph: GraphProto, prefix: str) -> None:
    for inner in graphs_within(graph):
        for value in (*inner.input, *inner.output, *inner.value_info):
            value.name = prefix + value.name
        for tensor in inner.initializer:
            tensor.name = prefix + tensor.name
        for node in inner.node:
            node.name = prefix + node.name
            for names in (node.input, node.output):
                for index, name in enumerate(names):
                    if name:
                        names[index] = prefix + name
        del inner.value_info[:]
