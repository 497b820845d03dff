"""The cost of one micro-batch of a model on one chip.

ONNX models are read from files, with outputs and without optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from podrun.core.errors import ConfigError, PodrunError, UsageError
from podrun.core.executable import TensorSpec, numpy_dtype
from podrun.core.names import library_errors_named
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel import plan_cache
from podrun.costmodel.cost import cost_flat
from podrun.costmodel.equations import FlatJaxpr
from podrun.costmodel.flatten import flatten_jaxpr
from podrun.costmodel.recompute import recomputed
from podrun.costmodel.settings import PlanOptions, Recompute
from podrun.costmodel.target import Chip
from podrun.estimate.layout import Layer, ProgramLayout, check_counts, layers_of
from podrun.runtime.digest import GraphDigest
from podrun.runtime.environment import import_jax
from podrun.runtime.graph import Model
from podrun.runtime.tensor_names import STATE_PREFIXES

if TYPE_CHECKING:
    import onnx

    from podrun.runtime.lowering import Lowered

DECIDING_ROOMS = (
    "onnx_models",
    "poptorch",
    "tensorflow",
    "runtime",
    "estimate",
    "compiler",
    "numerics",
    "popart",
)
"""Rooms whose text decides an estimate, so that a change makes new answers. PopART's has the custom operators."""
_SAVE = "Name a model in ONNX's format, such as builder.saveModelProto or session.modelToHost writes."


def load_onnx_file(path: Path) -> onnx.ModelProto:
    """The ONNX model in a file.

    Raises:
        ConfigError: there is no such file, or it holds no model.
    """
    from podrun.onnx_models.model_loader import read_onnx_model

    if path.is_dir():
        raise ConfigError(f"{path} is a directory", hint=f"Name a model in it: ls {path}")
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", hint=f"Look for one: ls {path.parent}")
    try:
        model = read_onnx_model(path)
    except UsageError as error:
        raise ConfigError(error.message, hint=error.hint or _SAVE) from error
    if not model.graph.node:
        raise ConfigError(f"'{path}' holds no model: its graph has no operators", hint=_SAVE)
    return model


def completed(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` in a form that can be traced.

    If it has no outputs (PopART's need none), the outputs are the tensors that no operator reads, in order of how much
    of the model they need. Optimizer state that modelToHost wrote into it is left out: the layout says what state there
    is.
    """
    from onnx import ModelProto

    graph = model.graph
    held = {t.name for t in graph.initializer if t.name.startswith(STATE_PREFIXES)}
    read = {name for node in graph.node for name in node.input}
    state = held - read
    if graph.output and not state:
        return model
    complete = ModelProto()
    complete.CopyFrom(model)
    tensors = [tensor for tensor in graph.initializer if tensor.name not in state]
    inputs = [value for value in graph.input if value.name not in state]
    del complete.graph.initializer[:], complete.graph.input[:]
    complete.graph.initializer.extend(tensors)
    complete.graph.input.extend(inputs)
    if not graph.output:
        for name in _unread(graph):
            complete.graph.output.add(name=name)
    return complete


def _unread(graph: onnx.GraphProto) -> list[str]:
    """Results of nodes that no node reads: first the one that needs most nodes, as a loss does, and of equals
    the last.
    """
    needs: dict[str, frozenset[int]] = {}
    inner = {
        name for node in graph.node for a in node.attribute for g in (a.g, *a.graphs) for name in _reads(g)
    }
    for number, node in enumerate(graph.node):
        own = frozenset({number}).union(*(needs.get(name, frozenset()) for name in node.input))
        needs |= dict.fromkeys(filter(None, node.output), own)
    read = inner.union(*(node.input for node in graph.node))
    unread = [name for name in reversed(needs) if name not in read]
    return sorted(unread, key=lambda name: -len(needs[name]))


def _reads(graph: onnx.GraphProto) -> set[str]:
    names = {name for node in graph.node for name in node.input}
    nested = (g for node in graph.node for a in node.attribute for g in (a.g, *a.graphs))
    return names.union(*(_reads(g) for g in nested))


class OnnxModel:
    """An ONNX model whose first dimension of every input is the batch: a `ModelSource`."""

    def __init__(self, model: onnx.ModelProto) -> None:
        import_jax()
        from podrun.onnx_models.graph_reader import read_graph
        from podrun.onnx_models.ops.registry import OPERATORS

        self._model = Model(read_graph(completed(model)), OPERATORS)

    @property
    def micro_batch(self) -> int | None:
        """The first dimension of the first input, if that is fixed."""
        graph = self._model.graph
        return next((shape[0] or None for name in graph.inputs if (shape := graph.types[name].shape)), None)

    def at(self, micro_batch: int) -> Model:
        """The model with the shapes of its inputs at a micro-batch. UsageError for a model that has no inputs, or with
        other open dimensions.
        """
        graph = self._model.graph
        types = dict(graph.types)
        for name in graph.inputs:
            shape = types[name].shape or ()
            if any(not dim or dim < 0 for dim in shape[1:]):
                raise UsageError(
                    f"input {name!r} leaves a dimension open that is not the first (the batch)",
                    hint="Fix the other dimensions in the model.",
                )
            types[name] = replace(types[name], shape=(micro_batch, *shape[1:]) if shape else ())
        if not graph.inputs:
            raise UsageError("the model has no inputs", hint="Samples come in through the model's inputs.")
        return self._model.with_graph(replace(graph, types=types))


@dataclass(frozen=True, slots=True)
class Traced:
    """The cost of one micro-batch on one chip: forward alone, (in training) forward and backward, and these with
    recomputation between checkpoints.

    The latter two's gradients are used up as they are made; ``step_waiting`` and ``remade_waiting`` are their memory if
    gradients wait for the update.
    """

    forward: Mapping[str, Any]
    step: Mapping[str, Any]
    remade: Mapping[str, Any]
    step_waiting: Mapping[str, Any]
    remade_waiting: Mapping[str, Any]
    weights: int
    weight_bytes: int
    input_bytes: int
    layers: tuple[Layer, ...]


@runtime_checkable
class ModelSource(Protocol):
    """A model that is built for each micro-batch, with fixed shapes of its inputs."""

    @property
    def micro_batch(self) -> int | None:
        """The micro-batch that it was written for."""

    def at(self, micro_batch: int) -> Model:
        """The model for a micro-batch."""


def trace_model(
    model: onnx.ModelProto | ModelSource, chip: Chip, layout: ProgramLayout, *, train: bool
) -> Traced:
    """Lower, trace and cost one micro-batch. The first dimension of every input is the batch.

    Training differentiates the mean of the first floating-point output (`completed` says which outputs there are): a
    model in a file has no loss, and a loss is small.
    Answers are kept on disk (`podrun.costmodel.plan_cache`), so that a repeat needs no tracing.

    Raises what `podrun.runtime.lowering.lower_graph` raises, and UsageError for a model without inputs.
    """
    check_counts(layout)
    source = model if isinstance(model, ModelSource) else OnnxModel(model)
    read = _at(source, layout.micro_batch)
    question = (
        "estimate",
        _digest(read),
        (chip.name, {name: fact.value for name, fact in chip.facts.items()}),
        (layout.partials_type, layout.proportion, train),
        plan_cache.sources(*DECIDING_ROOMS),
    )
    recorded = plan_cache.remembered(
        question, lambda: asdict(_trace(read, chip, layout, source.micro_batch, train=train))
    )
    return Traced(**{**recorded, "layers": tuple(Layer(**layer) for layer in recorded["layers"])})


def _digest(model: Model) -> str:
    digest, values = GraphDigest(), model.graph.initializers
    digest.graph(
        model.graph, without_values={name for name, value in values.items() if value.size > _MOST_READ}
    )
    return digest.hexdigest()


_MOST_READ = 4096
"""Most elements of a value that can decide a shape."""


def _at(model: ModelSource, micro_batch: int) -> Model:
    """The model at a micro-batch. FixedBatchError for a module that takes none of that size."""
    try:
        return model.at(micro_batch)
    except Exception as error:  # The user's own forward pass runs here.
        if isinstance(model, OnnxModel) or micro_batch == model.micro_batch:
            raise
        raise FixedBatchError(
            f"the module takes no micro-batch of {micro_batch}: {error}",
            hint=f"It is called with {model.micro_batch}: type --micro-batch {model.micro_batch}.",
        ) from error


def _trace(
    model: Model,
    chip: Chip,
    layout: ProgramLayout,
    written_for: int | None,
    *,
    train: bool,
) -> Traced:
    lowered = _lowered(model, layout.micro_batch, written_for, train=train)
    with library_errors_named("Tracing the model"):
        flats = _flats(lowered, train=train)
    options = PlanOptions(layout.partials_type, layout.proportion)
    reports = [cost_flat(flat, chip, options, results_stay=False) for flat in flats]
    waiting = [cost_flat(flat, chip, options) for flat in flats[1:]] or reports
    ahead, whole = reports[0], reports[train]
    specs = list(lowered.parameters.values())
    return Traced(
        ahead,
        whole,
        reports[-1],
        waiting[0]["memory"],
        waiting[-1]["memory"],
        sum(spec.size for spec in specs),
        sum(spec.nbytes for spec in specs),
        sum(spec.nbytes for spec in lowered.inputs.values()),
        layers_of(ahead, whole, flats[0], flats[train], len(specs)),
    )


def _flats(lowered: Lowered, *, train: bool) -> list[FlatJaxpr]:
    """The forward pass; in training also forward and backward, and these with recomputation."""
    import jax
    import jax.numpy as jnp

    parameters = {name: _abstract(spec) for name, spec in lowered.parameters.items()}
    inputs = {name: _abstract(spec) for name, spec in lowered.inputs.items()}
    key = jax.eval_shape(lambda: jax.random.key(0))
    first = _measured(lowered, train=train)

    # State that the forward pass replaces (running statistics) is part of a step, and nothing in the step reads it.
    updates = tuple(lowered.state_updates.values())
    stateful = replace(lowered, returns=(*lowered.returns, *updates))

    def forward(parameters: Any, inputs: Any, key: Any) -> Any:
        return lowered.forward(parameters, inputs, key)[first]

    def step(parameters: Any, inputs: Any, key: Any) -> Any:
        floating = {n: p for n, p in parameters.items() if jnp.issubdtype(p.dtype, jnp.floating)}

        def loss(chosen: Any) -> Any:
            outputs = stateful.forward({**parameters, **chosen}, inputs, key)
            return jnp.mean(outputs[first].astype(jnp.float32)), [outputs[name] for name in updates]

        return jax.value_and_grad(loss, has_aux=True)(floating)

    ahead = flatten_jaxpr(jax.make_jaxpr(forward)(parameters, inputs, key))
    if not train:
        return [ahead]
    both = flatten_jaxpr(jax.make_jaxpr(step)(parameters, inputs, key))
    return [ahead, both, recomputed(both, Recompute("standard"))]


def _measured(lowered: Lowered, *, train: bool) -> str:
    """The output that is computed: the first; in training the first one that can be differentiated. UsageError if there
    is none.
    """
    import jax.numpy as jnp

    names = list(lowered.outputs)
    if train:
        specs = lowered.outputs
        names = [n for n in names if jnp.issubdtype(numpy_dtype(specs[n].dtype), jnp.floating)]
    if not names:
        raise UsageError(
            "none of the model's outputs is a floating-point tensor, so there is nothing to train",
            hint="Leave --train out, or mark the loss as an output of the model: builder.addOutputTensor(loss)",
        )
    return names[0]


def _lowered(model: Model, micro_batch: int, written_for: int | None, *, train: bool) -> Lowered:
    """The lowered model. Raises FixedBatchError if a model that can be lowered as it is cannot be at this
    micro-batch.
    """
    from podrun.runtime.lowering import LoweringOptions, lower_graph

    try:
        return lower_graph(model.graph, model.operators, LoweringOptions(training=train))
    except PodrunError as error:
        if written_for in (None, micro_batch):
            raise
        raise FixedBatchError(
            f"the model takes no micro-batch of {micro_batch}: {error}",
            hint=f"It is written for {written_for}: type --micro-batch {written_for}, or write it with shapes that "
            "follow the batch.",
        ) from error


class FixedBatchError(UsageError):
    """A model whose shapes hold the micro-batch it was written for cannot be estimated at another."""


def _abstract(spec: TensorSpec) -> Any:
    import jax

    return jax.ShapeDtypeStruct(spec.shape, numpy_dtype(spec.dtype))  # type: ignore[no-untyped-call]
