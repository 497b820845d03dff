"""The cost of one micro-batch of an ONNX model on one chip."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from podrun.core.errors import PodrunError, UsageError
from podrun.core.executable import TensorSpec, numpy_dtype
from podrun.costmodel import plan_cache
from podrun.costmodel.cost import cost_flat
from podrun.costmodel.equations import FlatJaxpr
from podrun.costmodel.flatten import flatten
from podrun.costmodel.recompute import Recompute, recomputed
from podrun.costmodel.schedule import PlanOptions
from podrun.costmodel.target import Chip
from podrun.estimate.layers import Layer, layers_of
from podrun.estimate.layout import ProgramLayout, check_counts
from podrun.estimate.reading import batched_shapes, completed, model_batch

if TYPE_CHECKING:
    import onnx

    from podrun.onnx_models.lowering import Lowered


@dataclass(frozen=True, slots=True)
class Traced:
    """What one micro-batch costs on one chip: forward alone, (in training) forward and backward, and these
    with recomputation between checkpoints. The latter two's gradients are used up as they are made;
    ``step_waiting`` and ``remade_waiting`` are their memory if gradients wait for the update.
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


def trace(model: onnx.ModelProto, chip: Chip, layout: ProgramLayout, *, train: bool) -> Traced:
    """Lower, trace and cost one micro-batch. The first dimension of every input is the batch.

    Training differentiates the mean of the first floating-point output (`completed` says which outputs there are): a
    model in a file has no loss, and a loss is small.
    Answers are kept on disk (`podrun.costmodel.plan_cache`), so that a repeat needs no tracing.

    Raises what `podrun.onnx_models.lowering.lower` raises, and UsageError for a model without inputs.
    """
    check_counts(layout)
    model = completed(model)
    shapes = batched_shapes(model, layout.micro_batch)
    question = (
        "estimate",
        hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest(),
        shapes,
        (chip.name, {name: fact.value for name, fact in chip.facts.items()}),
        (layout.partials_type, layout.proportion, train),
        plan_cache.sources("popart", "estimate", "compiler"),
    )
    found = plan_cache.remembered(question, lambda: asdict(_trace(model, chip, layout, shapes, train=train)))
    return Traced(**{**found, "layers": tuple(Layer(**layer) for layer in found["layers"])})


def _trace(
    model: onnx.ModelProto,
    chip: Chip,
    layout: ProgramLayout,
    shapes: dict[str, tuple[int, ...]],
    *,
    train: bool,
) -> Traced:
    lowered = _lowered(model, layout.micro_batch, shapes, train=train)
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

    # What the forward pass itself replaces (running statistics) is part of a step, and read by nothing in it.
    updates = tuple(lowered.state_updates.values())
    stateful = replace(lowered, returns=(*lowered.returns, *updates))

    def forward(parameters: Any, inputs: Any, key: Any) -> Any:
        return lowered.forward(parameters, inputs, key)[first]

    def step(parameters: Any, inputs: Any, key: Any) -> Any:
        floating = {n: p for n, p in parameters.items() if jnp.issubdtype(p.dtype, jnp.floating)}

        def loss(chosen: Any) -> Any:
            made = stateful.forward({**parameters, **chosen}, inputs, key)
            return jnp.mean(made[first].astype(jnp.float32)), [made[name] for name in updates]

        return jax.value_and_grad(loss, has_aux=True)(floating)

    ahead = flatten(jax.make_jaxpr(forward)(parameters, inputs, key))
    if not train:
        return [ahead]
    both = flatten(jax.make_jaxpr(step)(parameters, inputs, key))
    return [ahead, both, recomputed(both, Recompute("standard"))]


def _measured(lowered: Lowered, *, train: bool) -> str:
    """The output that is computed: the first; in training the first that can be differentiated. UsageError for none."""
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


def _lowered(
    model: onnx.ModelProto, micro_batch: int, shapes: dict[str, tuple[int, ...]], *, train: bool
) -> Lowered:
    """Raises FixedBatchError if a model that can be lowered as it is cannot be at this micro-batch."""
    from podrun.onnx_models.lowering import lower

    own = model_batch(model)
    if own in (None, micro_batch):
        return lower(model, training=train, input_shapes=shapes)
    try:
        return lower(model, training=train, input_shapes=shapes)
    except PodrunError as error:
        raise FixedBatchError(
            f"the model takes no micro-batch of {micro_batch}: {error}",
            hint=f"It is written for {own}: type --micro-batch {own}, or write it with shapes that follow the batch.",
        ) from error


class FixedBatchError(UsageError):
    """A model whose shapes hold the micro-batch it was written for cannot be estimated at another."""


def _abstract(spec: TensorSpec) -> Any:
    import jax

    return jax.ShapeDtypeStruct(spec.shape, numpy_dtype(spec.dtype))  # type: ignore[no-untyped-call]
