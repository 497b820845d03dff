"""The frame of a model: inputs, outputs, shapes, names, where constants stand, the order of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper

from podrun.core.errors import UsageError
from podrun.serving.convert.graph_edit import GraphEditor, ModelEditor
from podrun.serving.convert.graph_walk import graphs_within, inner_graphs, names_used, rename_in, sorted_nodes
from podrun.serving.convert.pass_manager import Pass, register, rewrite
from podrun.serving.convert.type_inference import infer_types, value_of_type


def true_inputs(model: ModelProto) -> dict[str, ValueInfoProto]:
    """Inputs of the main graph that are no initializers, by name."""
    held = {tensor.name for tensor in model.graph.initializer}
    return {value.name: value for value in model.graph.input if value.name not in held}


def adapted(values: dict[str, np.ndarray], model: ModelProto) -> dict[str, np.ndarray]:
    """Values in the types that a model's inputs have; inputs that it does not have are left out."""
    inputs = true_inputs(model)
    return {
        name: values[name].astype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        for name, value in inputs.items()
        if name in values
    }


@register("add_checkpoints")
class AddCheckpoints(Pass):
    """Tensors within the model become outputs too. UsageError for one that does not exist."""

    def __init__(self, checkpoints: Sequence[str] = ()) -> None:
        self.checkpoints = list(checkpoints)

    def run(self, model: ModelProto) -> ModelProto:
        owner = ModelEditor(model)
        types = owner.types if self.checkpoints else {}
        for name in self.checkpoints:
            if owner.main.producer(name) is None and name not in true_inputs(model):
                raise UsageError(f"checkpoints: no node of the model makes a tensor {name!r}")
            if owner.main.is_output(name):
                continue
            kind = types.get(name)
            value = ValueInfoProto(name=name) if kind is None else value_of_type(name, kind)
            if owner.main.producer(name) is None:
                result = owner.new_name(f"{name}_checkpoint")
                owner.main.nodes.append(owner.main.node("Identity", [name], result))
                owner.main.touch()
                value.name = result
            model.graph.output.append(value)
        owner.commit()
        return model


@register("remove_outputs")
class RemoveOutputs(Pass):
    """Outputs go, and the nodes that only they need. UsageError for one that does not exist, and for all of them."""

    def __init__(self, remove_outputs: Sequence[str] = ()) -> None:
        self.remove_outputs = list(remove_outputs)

    def run(self, model: ModelProto) -> ModelProto:
        names = [value.name for value in model.graph.output]
        for name in self.remove_outputs:
            if name not in names:
                raise UsageError(
                    f"remove_outputs: the model has no output {name!r}; it has {', '.join(names)}"
                )
        kept = [value for value in model.graph.output if value.name not in self.remove_outputs]
        if not kept:
            raise UsageError("remove_outputs: nothing would be left of the model")
        kept = [_copied(value) for value in kept]
        del model.graph.output[:]
        model.graph.output.extend(kept)
        if self.remove_outputs:
            owner = ModelEditor(model)
            owner.main.drop_dead()
            owner.commit()
        return model


def _copied(value: ValueInfoProto) -> ValueInfoProto:
    copy = ValueInfoProto()
    copy.CopyFrom(value)
    return copy


def _forget_shapes(model: ModelProto) -> None:
    """Forget what the model states of tensors within it and of its outputs: inputs decide them."""
    for graph in graphs_within(model.graph):
        del graph.value_info[:]
    for value in model.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")


def _state_outputs(model: ModelProto) -> None:
    """State the shapes of outputs as they are inferred now."""
    types = infer_types(model)
    for value in model.graph.output:
        kind = types.get(value.name)
        if kind is not None and kind.element:
            value.CopyFrom(value_of_type(value.name, kind))


@register("const_input_shape")
class ConstInputShape(Pass):
    """Inputs get fixed shapes. UsageError for an unknown input, or a known size that would change."""

    def __init__(self, input_shape: Mapping[str, Sequence[int]] | None = None) -> None:
        self.input_shape = dict(input_shape or {})

    def run(self, model: ModelProto) -> ModelProto:
        inputs = true_inputs(model)
        for name, shape in self.input_shape.items():
            if name not in inputs:
                raise UsageError(
                    f"input_shape: the model has no input {name!r}; it has {', '.join(sorted(inputs))}"
                )
            if any(isinstance(s, bool) or not isinstance(s, (int, np.integer)) or s < 1 for s in shape):
                raise UsageError(f"input_shape: {name}={list(shape)}: a shape is numbers above 0")
            tensor = inputs[name].type.tensor_type
            if tensor.HasField("shape"):
                _check_fits(name, tensor.shape.dim, shape)
                del tensor.shape.dim[:]
            for size in shape:
                tensor.shape.dim.add().dim_value = int(size)
        if self.input_shape:
            _forget_shapes(model)
            _state_outputs(model)
        return model


def _check_fits(name: str, dims: Sequence[object], shape: Sequence[int]) -> None:
    told = [getattr(d, "dim_value", 0) or getattr(d, "dim_param", "") or "?" for d in dims]
    if len(told) != len(shape) or any(
        isinstance(t, int) and t > 0 and t != s for t, s in zip(told, shape, strict=True)
    ):
        raise UsageError(f"input {name!r} has shape {told}, which cannot become {list(shape)}")


@register("const_batch_size")
class ConstBatchSize(Pass):
    """All inputs get this size along an axis, where it is open. UsageError where no input leaves it open."""

    def __init__(self, batch_size: int = 1, batch_axis: int = 0) -> None:
        if batch_size < 1 or batch_axis < 0:
            raise UsageError("batch_size is above 0 and batch_axis not below")
        self.batch_size, self.batch_axis = batch_size, batch_axis

    def run(self, model: ModelProto) -> ModelProto:
        changed = False
        for name, value in true_inputs(model).items():
            dims = value.type.tensor_type.shape.dim
            if self.batch_axis >= len(dims):
                continue
            size = dims[self.batch_axis].dim_value
            if size > 0 and size != self.batch_size:
                raise UsageError(
                    f"batch_size: input {name!r} has {size} along axis {self.batch_axis}, "
                    f"which cannot become {self.batch_size}"
                )
            dims[self.batch_axis].dim_value = self.batch_size
            changed = changed or size <= 0
        if changed:
            _forget_shapes(model)
            _state_outputs(model)
        return model


def check_shapes_known(model: ModelProto) -> None:
    """UsageError naming an input whose shape is not known, with what to type."""
    for name, value in true_inputs(model).items():
        if not value.type.HasField("tensor_type"):
            raise UsageError(f"input {name!r} is no tensor", hint="IPUs take tensors alone.")
        tensor = value.type.tensor_type
        if not tensor.HasField("shape") or any(dim.dim_value <= 0 for dim in tensor.shape.dim):
            like = ",".join(str(d.dim_value if d.dim_value > 0 else 8) for d in tensor.shape.dim) or "1,8"
            raise UsageError(
                f"the shape of input {name!r} is not known",
                hint=f"Give it: --input_shape {name}={like} (input_shape={{{name!r}: [{like}]}} in Python).",
            )


@register("shape_inference")
class ShapeInference(Pass):
    """The model states the types and shapes of all tensors of the main graph."""

    def run(self, model: ModelProto) -> ModelProto:
        types = infer_types(model)
        stated = {v.name for v in (*model.graph.input, *model.graph.output)}
        stated |= {t.name for t in model.graph.initializer}
        del model.graph.value_info[:]
        for node in model.graph.node:
            for name in node.output:
                if name in types and name not in stated:
                    model.graph.value_info.append(value_of_type(name, types[name]))
        _state_outputs(model)
        return model


@register("remove_initializer_from_input")
class RemoveInitializerFromInput(Pass):
    """Initializers are no inputs too, as in files of the first versions of ONNX."""

    def run(self, model: ModelProto) -> ModelProto:
        for graph in graphs_within(model.graph):
            held = {tensor.name for tensor in graph.initializer}
            for index in reversed([i for i, value in enumerate(graph.input) if value.name in held]):
                del graph.input[index]
        model.ir_version = max(model.ir_version, 4)
        return model


@register("move_subgraph_initializer")
class MoveSubgraphInitializer(Pass):
    """Initializers of inner graphs move to the main graph, where alone PopART looks for them."""

    def run(self, model: ModelProto) -> ModelProto:
        owner = ModelEditor(model)
        for node in owner.main.nodes:
            for inner in inner_graphs(node):
                for graph in graphs_within(inner):
                    _move_initializers(owner, graph)
        owner.commit()
        return model


def _move_initializers(owner: ModelEditor, graph: GraphProto) -> None:
    for tensor in list(graph.initializer):
        old = tensor.name
        new = owner.new_name(f"{graph.name or 'inner'}_{old}")
        tensor.name = new
        owner.main.graph.initializer.append(tensor)
        for node in graph.node:
            rename_in(node, old, new)
        if any(value.name == old for value in graph.output):
            graph.node.append(owner.main.node("Identity", [new], old))
    del graph.initializer[:]


@rewrite("sort_graph")
def _sort_graph(graph: GraphEditor) -> None:
    """Nodes stand in an order in which every tensor is made before it is used."""
    makers = {name for node in graph.nodes for name in node.output}
    known = {name for node in graph.nodes for name in names_used(node)} - makers
    ordered = sorted_nodes(graph.nodes, known)
    if [id(n) for n in ordered] != [id(n) for n in graph.nodes]:
        graph.nodes = ordered
        graph.touch()


@register("unique_name_for_nodes")
class UniqueNameForNodes(Pass):
    """Every node has a name of its own: ``Conv_0``, ``Conv_1`` where there was none."""

    def run(self, model: ModelProto) -> ModelProto:
        nodes = [node for graph in graphs_within(model.graph) for node in graph.node]
        taken: set[str] = set()
        nameless: list[NodeProto] = []
        for node in nodes:
            if not node.name or node.name in taken:
                nameless.append(node)
            else:
                taken.add(node.name)
        counts: dict[str, int] = {}
        for node in nameless:
            base = node.name or node.op_type
            number = counts.get(base, 0)
            while f"{base}_{number}" in taken:
                number += 1
            counts[base] = number + 1
            node.name = f"{base}_{number}"
            taken.add(node.name)
        return model


@rewrite("extract_constant_to_initializer")
def _extract_constant(graph: GraphEditor) -> None:
    """Constant nodes become initializers, those of inner graphs too."""
    for node in list(graph.nodes):
        if node.op_type != "Constant" or node.domain or graph.is_output(node.output[0]):
            continue
        value = graph.constant(node.output[0])
        if value is not None:
            graph.remove([node])
            graph.hold(numpy_helper.from_array(value, node.output[0]))


@rewrite("remove_duplicated_initializer")
def _remove_duplicated(graph: GraphEditor) -> None:
    """Of initializers with the same type, shape and bytes one stays (as eliminate_duplicate_initializer)."""
    from podrun.serving.convert.cleanup_passes import merge_equal_initializers

    merge_equal_initializers(graph)
