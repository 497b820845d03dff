"""Which stage of a pipeline each call of a model's layers belongs to, and the rules that an assignment has to keep.

Functional models and subclasses of ``Model`` have an entry for each call of a layer, in the order of execution and
without inputs; sequential models have one for each layer. Entries come from the program
(`set_pipeline_stage_assignment`) or from the scopes `PipelineStage` in which layers were made or called.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from podrun.private_apis.tensorflow import symbol
from podrun.tensorflow.keras.model_options import options_of
from podrun.tensorflow.keras.stage_classes import (
    FunctionalLayerPipelineStageAssignment,
    FunctionalNestedModelPipelineStageAssignment,
    ModelLayerPipelineStageAssignment,
    NestedModelPipelineStageAssignment,
    SequentialLayerPipelineStageAssignment,
    SequentialNestedModelPipelineStageAssignment,
    StageAssignment,
    no_stage,
)

if TYPE_CHECKING:
    from tf_keras import Model
    from tf_keras.layers import Layer
    from tf_keras.src.engine.node import Node

STAGE = "_podrun_stage"
"""The attribute of a layer or of a call that a scope gave a stage."""
_NODES = "_podrun_calls"


def is_sequential(model: Model) -> bool:
    """Whether a model is a list of layers."""
    return isinstance(model, importlib.import_module("tf_keras.src.engine.sequential").Sequential)


def is_functional(model: Model) -> bool:
    """Whether a model is a graph of layers."""
    functional = importlib.import_module("tf_keras.src.engine.functional").Functional
    return isinstance(model, functional) and not is_sequential(model)


def is_model(layer: Layer) -> bool:
    """Whether a layer is a model with stages of its own: its layers are assigned one by one. A subclass of ``Model`` is
    one if the program called its ``build`` and symbolic inputs can run its ``call``.
    """
    if is_sequential(layer) or is_functional(layer):
        return True
    model_class = importlib.import_module("tf_keras.src.engine.training").Model
    if not isinstance(layer, model_class) or not options_of(layer).built_by_program:
        return False
    try:
        calls_of(layer)
    except RuntimeError:
        return False
    return True


def calls_of(model: Model) -> list[Node]:
    """The calls of layers in the order of execution, without inputs. RuntimeError where a subclass does not tell."""
    if is_functional(model):
        return _in_order(model.inputs, model._nodes_by_depth)
    specs = model._saved_model_inputs_spec
    cached: tuple[list[Node] | RuntimeError | None, object] = model.__dict__.get(_NODES, (None, None))
    known, seen = cached
    if known is None or (isinstance(known, RuntimeError) and specs is not seen):
        inputs = _symbolic_inputs(model)
        try:
            known = _calls_with(model, inputs)
        except Exception as error:  # The code is the program's own.
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            known = RuntimeError(
                f"Cannot get pipeline stage assignments for model `{model.name}`: its `call` cannot run with symbolic "
                f"inputs ({reason}). Let it take one argument and call layers, without branches or loops of TensorFlow."
            )
            known.__cause__ = error
        object.__setattr__(model, _NODES, (known, specs))
    if isinstance(known, RuntimeError):
        raise known
    return known


def _calls_with(model: Model, inputs: object) -> list[Node]:
    """The calls that a subclass makes with symbolic inputs. Its other operations go to a graph that nothing runs, and
    scopes of stages around this do not count.
    """
    flat, arguments = tf.nest.flatten(inputs), model._call_spec.full_argspec
    required = arguments.args[2 : len(arguments.args) - len(arguments.defaults or ())]
    filled = {"training": False} if "training" in required else {}
    mapped = importlib.import_module("tf_keras.src.engine.functional")._map_graph_network
    with symbol("framework.func_graph.FuncGraph")("calls").as_default(), no_stage():
        outputs = model.call(inputs, **filled)
    return _in_order(flat, mapped(flat, tf.nest.flatten(outputs))[1])


def _in_order(inputs: Sequence[object], by_depth: Mapping[int, Sequence[Node]]) -> list[Node]:
    """The calls from the deepest to the last ones, as Keras makes them: a call behind another has a smaller depth."""
    known = {str(id(tensor)) for tensor in inputs}
    nodes: list[Node] = []
    for depth in sorted(by_depth, reverse=True):
        for node in by_depth[depth]:
            if not node.is_input and known.issuperset(node.flat_input_ids):
                nodes.append(node)
                known.update(node.flat_output_ids)
    return nodes


def built_specs(model: Model) -> object:
    """Specs of the inputs of the shapes with which a subclass was built, in the type to which Keras casts inputs."""
    convert = importlib.import_module("tf_keras.src.utils.tf_utils").convert_shapes
    shapes = convert(model._build_input_shape, to_tuples=False)
    specs: object = tf.nest.map_structure(lambda shape: tf.TensorSpec(shape, model.compute_dtype), shapes)
    return specs


def casts_its_inputs(model: Model) -> bool:
    """Whether the type of a model's inputs is that of `built_specs`: no layer takes values as they come, such as the
    integers that an ``Embedding`` reads.
    """
    return all(layer._autocast for layer in model._flatten_layers(include_self=False))


def _symbolic_inputs(model: Model) -> object:
    """Symbolic inputs of the shapes with which a subclass of ``Model`` was built."""
    keras = importlib.import_module("tf_keras")
    specs = model._saved_model_inputs_spec
    shape = getattr(model, "_build_input_shape", None)
    if specs is None and shape is None:
        raise RuntimeError(
            f"Cannot get pipeline stage assignments for model `{model.name}` which has not been built yet, so that its "
            "layers are not known: call `build` with the shape of its inputs first."
        )
    specs = built_specs(model) if specs is None else specs
    symbols: object = tf.nest.map_structure(
        lambda s: keras.Input(shape=s.shape[1:], batch_size=s.shape[0], dtype=s.dtype), specs
    )
    return symbols


def node_index(node: Node) -> int:
    """Which call of its layer a node is."""
    return int(node.layer._inbound_nodes.index(node))


def stage_from_scopes(layer: Layer, node: Node | None = None) -> int | None:
    """The stage of the scope in which a call was made, or else its layer."""
    stage: int | None = None if node is None else getattr(node, STAGE, None)
    return getattr(layer, STAGE, None) if stage is None else stage


def assignment_of(model: Model) -> list[StageAssignment]:
    """The entries of a model: those that were set, else those of the scopes; stages that are not known are None."""
    options = options_of(model)
    if options.assignment is not None:
        return list(options.assignment)
    return list(_entries(model, None, scopes=not options.assignment_reset))


def unassigned_entries(model: Model) -> list[StageAssignment]:
    """The entries of a model without stages."""
    return list(_entries(model, None, scopes=False))


def _entries(
    model: Model, stage: int | None, *, scopes: bool, assigned: bool = True
) -> Iterator[StageAssignment]:
    """``stage``: of the call of the model itself, for layers that have none. ``scopes`` and ``assigned``: whether
    scopes, and assignments of models inside, give stages.
    """

    def staged(layer: Layer, node: Node | None = None) -> int | None:
        known = stage_from_scopes(layer, node) if scopes else None
        return stage if known is None else known

    def inside(layer: Layer, node: Node | None = None) -> list[StageAssignment]:
        own = options_of(layer).assignment if assigned else None
        entries = _entries(layer, staged(layer, node), scopes=scopes, assigned=assigned)
        return list(entries if own is None else own)

    if is_sequential(model):
        for layer in model.layers:
            if is_model(layer):
                yield SequentialNestedModelPipelineStageAssignment(layer, inside(layer))
            else:
                yield SequentialLayerPipelineStageAssignment(layer, staged(layer))
        return
    functional = is_functional(model)
    for node in calls_of(model):
        layer, index = node.layer, node_index(node)
        if is_model(layer):
            nested = (
                FunctionalNestedModelPipelineStageAssignment
                if functional
                else NestedModelPipelineStageAssignment
            )
            yield nested(layer, index, inside(layer, node))
        else:
            kind = FunctionalLayerPipelineStageAssignment if functional else ModelLayerPipelineStageAssignment
            yield kind(layer, index, staged(layer, node))


def layer_entries(assignment: Sequence[StageAssignment]) -> Iterator[StageAssignment]:
    """The entries of layers, also those of models inside."""
    for entry in assignment:
        if hasattr(entry, "pipeline_stage_assignments"):
            yield from layer_entries(entry.pipeline_stage_assignments)
        else:
            yield entry


def entry_stages(assignment: Sequence[StageAssignment]) -> list[int | None]:
    """The stage of each layer's entry."""
    return [getattr(entry, "pipeline_stage", None) for entry in layer_entries(assignment)]


def checked_assignment(model: Model, assignment: object) -> list[StageAssignment]:
    """What a program sets, once it keeps the rules. ValueError otherwise."""
    if not isinstance(assignment, list):
        raise ValueError("`pipeline_stage_assignment` needs to be a list.")
    if is_sequential(model):
        entries = _sequential_entries(model, assignment)
        _check_sequence(model, entries, None)
        return entries
    _check_entries(model, assignment)
    _check_order(model, assignment, None)
    return list(assignment)


def _sequential_entries(model: Model, assignment: Sequence[object]) -> list[StageAssignment]:
    layers = model.layers
    if len(assignment) != len(layers):
        raise ValueError(
            f"The length of the provided `pipeline_stage_assignment` ({len(assignment)}) does not match the number of "
            f"layers in the graph ({len(layers)}). Each layer needs to be assigned a pipeline stage."
        )
    if all(isinstance(entry, int) and not isinstance(entry, bool) for entry in assignment):
        return [_at_stage(layer, stage) for layer, stage in zip(layers, assignment, strict=True)]
    entries: list[StageAssignment] = []
    for place, (layer, entry) in enumerate(zip(layers, assignment, strict=True)):
        if isinstance(entry, list) and is_model(layer):
            entry = SequentialNestedModelPipelineStageAssignment(layer, checked_assignment(layer, entry))
        wanted = (
            SequentialNestedModelPipelineStageAssignment
            if is_model(layer)
            else SequentialLayerPipelineStageAssignment
        )
        if not isinstance(entry, wanted):
            raise ValueError(
                "All elements of `pipeline_stage_assignment` need to be integers, or instances of "
                f"`{wanted.__name__}` for {layer.name}; element {place} is a {type(entry).__name__}."
            )
        if entry.called is not layer:
            raise ValueError(
                f"The provided assignment at index {place} `pipeline_stage_assignment` is for layer "
                f"{entry.called.name}, but the layer in the Sequential model at index {place} is {layer.name}."
            )
        entries.append(entry)
    return entries


def _at_stage(layer: Layer, stage: object) -> StageAssignment:
    """A layer, or all layers of a model, at one stage."""
    number = int(stage) if isinstance(stage, int) else None
    if not is_model(layer):
        return SequentialLayerPipelineStageAssignment(layer, number)
    return SequentialNestedModelPipelineStageAssignment(layer, list(_entries(layer, number, scopes=False)))


def _check_sequence(model: Model, entries: Sequence[StageAssignment], before: int | None) -> int:
    """The last stage of a sequential model whose layers stay at a stage or go to the next one."""
    stage = before
    for place, entry in enumerate(layer_entries(entries)):
        own = getattr(entry, "pipeline_stage", None)
        name = entry.called.name
        if not isinstance(own, int):
            raise ValueError(
                f"Layer {name} has not been assigned a pipeline stage in `pipeline_stage_assignment`."
            )
        if stage is None and own != 0:
            raise ValueError(
                "The first layer in a pipelined sequential model needs to be assigned to the 0th pipeline stage, "
                f"however it was assigned to {own}."
            )
        if stage is not None and own not in (stage, stage + 1):
            raise ValueError(
                f"Layer {name} at sequential index {place} has been assigned to pipeline stage {own}, however the "
                f"previous layer in the Sequential model was assigned to pipeline stage {stage}. A layer in a "
                "Sequential model can only be assigned to the same pipeline stage as the previous layer or to the "
                "next pipeline stage."
            )
        stage = own
    return stage or 0


def _check_entries(model: Model, assignment: Sequence[object]) -> None:
    """The length, classes and order of the entries of a graph of layers."""
    nodes, functional = calls_of(model), is_functional(model)
    if len(assignment) != len(nodes):
        raise ValueError(
            f"The length of the provided `pipeline_stage_assignment` ({len(assignment)}) does not match the number of "
            f"layers in the graph ({len(nodes)}). Each layer needs to be assigned a pipeline stage (excluding input "
            "layers)."
        )
    for node, entry in zip(nodes, assignment, strict=True):
        layer, nested = node.layer, is_model(node.layer)
        prefix = "Functional" if functional else "" if nested else "Model"
        wanted = f"{prefix}{'NestedModel' if nested else 'Layer'}PipelineStageAssignment"
        kind = NestedModelPipelineStageAssignment if nested else ModelLayerPipelineStageAssignment
        fits = isinstance(entry, kind) and type(entry).__name__.startswith("Functional") is functional
        if not fits or not isinstance(entry, StageAssignment):
            raise ValueError(
                f"The pipeline stage assignment for {'nested model' if nested else 'layer'} {layer.name} in "
                f"{model.name} must be an instance of `{wanted}`. Instead the assignment was of type "
                f"{type(entry).__name__}."
            )
        if entry.called is not layer or getattr(entry, "node_index", 0) != node_index(node):
            raise ValueError(
                "The order of `pipeline_stage_assignment` does not match the post-order generated from the graph "
                f"({entry.called.name} != {layer.name}, or another call of it)."
            )
        if nested and not is_sequential(layer):
            _check_entries(layer, getattr(entry, "pipeline_stage_assignments", []))
        stage = getattr(entry, "pipeline_stage", None)
        if not nested and not isinstance(stage, int):
            raise ValueError(
                f"Layer {layer.name} with node_index {node_index(node)} has not been assigned a pipeline stage in "
                "`pipeline_stage_assignment`."
            )


def _check_order(
    model: Model, assignment: Sequence[StageAssignment], entering: Sequence[int] | None
) -> list[int]:
    """The stages of a model's outputs. ``entering``: those of its inputs. ValueError if a layer needs the result of a
    later stage.
    """
    if is_sequential(model):
        return [_check_sequence(model, assignment, max(entering or [0]))]
    stages: dict[str, int] = {}
    first = max(entering or [0])  # The inputs of a subclass have no places of their own.
    if is_functional(model):
        starts = entering or [0] * len(model.inputs)
        stages |= {str(id(t)): s for t, s in zip(model.inputs, starts, strict=False)}
    last = 0
    for node, entry in zip(calls_of(model), assignment, strict=True):
        sources = [stages.get(key, first) for key in node.flat_input_ids]
        if hasattr(entry, "pipeline_stage_assignments"):
            results = _check_order(node.layer, entry.pipeline_stage_assignments, sources)
        else:
            stage = int(getattr(entry, "pipeline_stage", 0))
            if stage < max(sources, default=0):
                raise ValueError(
                    f"Layer {node.layer.name} in pipeline stage {stage} has a dependency from a pipeline stage which "
                    "has not yet been executed. Layers can only use outputs from current or previous pipeline stages."
                )
            results = [stage]
        last = results[-1]
        for place, key in enumerate(node.flat_output_ids):
            stages[key] = results[min(place, len(results) - 1)]
    if not is_functional(model):
        return [last]
    return [stages.get(str(id(t)), 0) for t in tf.nest.flatten(model.outputs)]


def is_built_subclass(model: Model) -> bool:
    """Whether a model is a subclass of ``Model`` whose layers are known."""
    spec = getattr(model, "_saved_model_inputs_spec", None)
    known = spec is not None or getattr(model, "_build_input_shape", None) is not None
    return known and not is_sequential(model) and not is_functional(model)


def has_scopes(model: Model) -> bool:
    """Whether layers of a model are in scopes of stages, which the program has not taken away."""
    if options_of(model).assignment_reset:
        return False
    return any(stage is not None for stage in entry_stages(list(_entries(model, None, scopes=True))))


def check_scopes(model: Model) -> None:
    """ValueError if only some layers of a model are in scopes of stages, or in an order that cannot be."""
    scoped = entry_stages(list(_entries(model, None, scopes=True, assigned=False)))
    if all(stage is None for stage in scoped):
        return
    assignment = list(_entries(model, None, scopes=True))
    stages = entry_stages(assignment)
    for entry, stage in zip(layer_entries(assignment), stages, strict=True):
        if stage is None:
            raise ValueError(
                "All layers of a pipelined model must have an associated pipeline stage. However, "
                f"{entry.called.name} has not been assigned to one. Pipeline stages can be assigned when a layer is "
                "constructed, or each time a layer is called. Different pipeline stages can be assigned to each call."
            )
    _check_order(model, assignment, None)
