"""The stages of a model while its step is traced: every call of a layer lies on the IPU of its stage.

Keras' classes for layers, calls and models note scopes when models are made, and of the assignment when they run.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

import tensorflow as tf

from podrun.core.quick_dataclass import dataclass
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.keras.accumulating_optimizers import on_ipu, replace_method
from podrun.tensorflow.keras.model_options import options_of
from podrun.tensorflow.keras.stage_assignment import (
    STAGE,
    assignment_of,
    calls_of,
    check_scopes,
    entry_stages,
    is_built_subclass,
    is_functional,
    is_sequential,
    layer_entries,
)
from podrun.tensorflow.keras.stage_classes import MAPPINGS, SEEN, StageAssignment, at_stage, current_stage

if TYPE_CHECKING:
    from tf_keras import Model
    from tf_keras.layers import Layer
    from tf_keras.src.engine.node import Node


@dataclass(slots=True)
class StageTable:
    """The stages of a model's calls: by node of a graph of layers, else by layer and how often it was called before.
    A model inside has a table of its own.
    """

    by_node: dict[int, int | StageTable] = field(default_factory=dict)
    by_call: dict[tuple[int, int], int | StageTable] = field(default_factory=dict)
    called: dict[int, int] = field(default_factory=dict)
    pending: Node | None = None
    """The node whose layer is called next."""

    def entry(self, layer: Layer) -> int | StageTable | None:
        """The stage of this call of a layer; None for a layer that is not the model's own."""
        node, self.pending = self.pending, None
        if node is not None and node.layer is layer and id(node) in self.by_node:
            return self.by_node[id(node)]
        count = self.called.get(id(layer), 0)
        self.called[id(layer)] = count + 1
        own = self.by_call.get((id(layer), count))
        return own if own is not None else self.by_call.get((id(layer), 0))


def stage_table(model: Model, assignment: Sequence[StageAssignment]) -> StageTable:
    """The table of an assignment that keeps the rules."""

    def value(entry: StageAssignment) -> int | StageTable:
        if hasattr(entry, "pipeline_stage_assignments"):
            return stage_table(entry.called, entry.pipeline_stage_assignments)
        return int(getattr(entry, "pipeline_stage", 0))

    table = StageTable()
    if is_sequential(model):
        table.by_call = {(id(entry.called), 0): value(entry) for entry in assignment}
    elif is_functional(model):
        pairs = zip(calls_of(model), assignment, strict=True)
        table.by_node = {id(node): value(entry) for node, entry in pairs}
    else:
        counts: dict[int, int] = {}
        for entry in assignment:
            key = id(entry.called)
            table.by_call[key, counts.get(key, 0)] = value(entry)
            counts[key] = counts.get(key, 0) + 1
    return table


def pipeline_assignment(model: Model) -> list[StageAssignment] | None:
    """The stages of a model that is a pipeline; None for another, or where only running its code tells."""
    options = options_of(model)
    if options.assignment is None and not (is_sequential(model) or is_functional(model)):
        return None
    assignment = assignment_of(model)
    stages = entry_stages(assignment)
    if not stages or any(stage is None for stage in stages):
        return None
    return assignment


def may_be_pipelined(model: Model) -> bool:
    """Whether a model is a pipeline, or may turn out to be one when its code runs."""
    if is_sequential(model) or is_functional(model):
        return pipeline_assignment(model) is not None
    return options_of(model).assignment is not None or options_of(model).pipeline_steps is not None


def checked_mapping(model: Model, stages: Sequence[int]) -> list[int]:
    """The IPU of each stage from 0 on. RuntimeError for a stage without layers, ValueError if the mapping has another
    length or the device not enough IPUs.
    """
    count = max(stages) + 1
    empty = sorted(set(range(count)) - set(stages))
    if empty:
        raise RuntimeError(
            "All stages in a pipeline must have at lease one layer assigned to them. The highest stage with an "
            f"assignment is stage {count - 1}, however the preceeding stages {empty} had no assignments."
        )
    mapping = options_of(model).device_mapping
    if mapping is not None and len(mapping) != count:
        raise ValueError(f"Each stage must be mapped to an IPU: {len(mapping)} mappings != {count} stages")
    mapping = list(range(count)) if mapping is None else mapping
    needed = 1 << (max(len(set(mapping)), max(mapping) + 1) - 1).bit_length()
    available = DEVICES.count(model.distribute_strategy.ordinal)
    if available % needed:
        raise ValueError(
            f"Current device has {available} IPUs attached, however the current model requires a multiple of {needed} "
            f"IPUs: {model.name} is a pipeline."
        )
    return mapping


def check_shared_layers(assignment: Sequence[StageAssignment], mapping: Sequence[int]) -> None:
    """ValueError for a layer with weights that has calls on two IPUs."""
    homes: dict[int, int] = {}
    for entry in layer_entries(assignment):
        layer, stage = entry.called, int(getattr(entry, "pipeline_stage", 0))
        ipu = mapping[stage]
        if layer.weights and homes.setdefault(id(layer), ipu) != ipu:
            raise ValueError(
                f"Layer {layer.name} is called in pipeline stages on IPUs {homes[id(layer)]} and {ipu}. Its weights "
                "are an input of both, and an input can only be used by pipeline stages on the same IPU: map all its "
                "stages to one IPU with `device_mapping`."
            )


_tables: list[StageTable] = []


@contextlib.contextmanager
def tracing_stages(model: Model, assignment: Sequence[StageAssignment] | None) -> Iterator[set[int]]:
    """Calls of the model's layers go to their stages. Gives the set of stages seen so far."""
    MAPPINGS.append(options_of(model).device_mapping)
    SEEN.append(set())
    if assignment is not None:
        _tables.append(stage_table(model, assignment))
    try:
        yield SEEN[-1]
    finally:
        MAPPINGS.pop()
        SEEN.pop()
        if assignment is not None:
            _tables.pop()


def _called(layer: Layer, plain: Callable[..., object], *args: object, **kwargs: object) -> object:
    entry = _tables[-1].entry(layer) if _tables else None
    if isinstance(entry, StageTable):
        _tables.append(entry)
        try:
            return plain(layer, *args, **kwargs)
        finally:
            _tables.pop()
    if entry is None and MAPPINGS and current_stage() is None:
        entry = getattr(layer, STAGE, None) if not _tables else None
    if entry is None:
        return plain(layer, *args, **kwargs)
    with at_stage(entry):
        return plain(layer, *args, **kwargs)


def _noted(node: Node, plain: Callable[..., object], tensors: object) -> object:
    if _tables:
        _tables[-1].pending = node
    return plain(node, tensors)


def _node_made(node: Node, plain: Callable[..., object], *args: object, **kwargs: object) -> None:
    plain(node, *args, **kwargs)
    if current_stage() is not None and not node.is_input:
        setattr(node, STAGE, current_stage())


def _layer_named(layer: Layer, plain: Callable[..., object], *args: object, **kwargs: object) -> None:
    plain(layer, *args, **kwargs)
    if current_stage() is not None:
        object.__setattr__(layer, STAGE, current_stage())


def _graph_made(model: Model, plain: Callable[..., object], *args: object, **kwargs: object) -> None:
    plain(model, *args, **kwargs)
    if is_functional(model) and on_ipu(model):
        check_scopes(model)


def _built(model: Model, plain: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Build a model, and check the stages of one that is to be a pipeline and whose code calls its layers. A subclass
    takes symbolic inputs too, which say types.
    """
    shape = args[0] if args else kwargs.get("input_shape")
    inputs, symbol = tf.nest.flatten(shape), importlib.import_module("tf_keras.src.engine.keras_tensor")
    result: object = None
    if inputs and all(isinstance(t, symbol.KerasTensor) for t in inputs) and on_ipu(model):
        _built_of_inputs(model, shape)
    else:
        result = plain(model, *args, **kwargs)
    options = options_of(model)
    if not importlib.import_module("tf_keras.src.engine.base_layer_utils").call_context().in_call:
        options.built_by_program = True
    pipelined = options.device_mapping is not None or options.pipeline_steps is not None
    if pipelined and on_ipu(model) and is_built_subclass(model) and options.assignment is None:
        check_scopes(model)
    return result


def _built_of_inputs(model: Model, inputs: object) -> None:
    """Make the weights of a model whose inputs have the shapes and types of symbolic ones."""
    specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), inputs)
    tf.function(lambda values: model(values)).get_concrete_function(specs)
    layer = importlib.import_module("tf_keras.src.engine.base_layer").Layer
    layer.build(model, tf.nest.map_structure(lambda spec: spec.shape, specs))


def _layers_changed(model: Model, plain: Callable[..., object], *args: object, **kwargs: object) -> object:
    result = plain(model, *args, **kwargs)
    options = options_of(model)
    options.assignment, options.version = None, options.version + 1
    return result


def _layer_made(
    layer: Layer, plain: Callable[..., object], trainable: object = True, *args: object, **kwargs: object
) -> object:
    """``trainable`` may be any value with a truth, as in Keras 2.6: programs give a layer's name there, or None."""
    trainable = bool(trainable) if trainable is None or isinstance(trainable, str) else trainable
    return plain(layer, trainable, *args, **kwargs)


_METHODS = (
    ("base_layer", "Layer", {"__init__": _layer_made, "__call__": _called, "_init_set_name": _layer_named}),
    ("node", "Node", {"__init__": _node_made, "map_arguments": _noted}),
    ("functional", "Functional", {"_init_graph_network": _graph_made}),
    ("training", "Model", {"build": _built}),
    ("sequential", "Sequential", {"add": _layers_changed, "pop": _layers_changed}),
)
"""Module of Keras' engine, class, and its methods with what stands for them."""


def install_stages() -> None:
    """Let Keras' layers, calls and models know stages."""
    for module, owner, methods in _METHODS:
        for name, function in methods.items():
            kind = getattr(importlib.import_module(f"tf_keras.src.engine.{module}"), owner)
            replace_method(kind, name, function)
