"""From an ONNX model to throughput and fit on a system."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from podrun.device.target import Chip, System
from podrun.device.tiles.batch import UPDATE_PASSES, Batch, batch_seconds, slowest_stage
from podrun.device.tiles.cost import TILE_IMBALANCE, cost_jaxpr
from podrun.errors import InvalidOptionError, UsageError
from podrun.executable import TensorSpec, numpy_dtype

if TYPE_CHECKING:
    import onnx

STATES = {"sgd": 0, "momentum": 1, "lars": 1, "adam": 2, "lamb": 2}
"""Values of optimizer state per weight."""
PIPELINE_IMBALANCE = 1.1
"""Fullest over mean IPU of a pipeline, for memory. Assumed."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a program lies on the system: IPUs per replica, micro-batch, accumulation, and how it saves memory."""

    micro_batch: int = 1
    accumulation: int = 1
    ipus_per_replica: int = 1
    recompute: bool = False
    optimizer: str = "momentum"
    state_off_chip: bool = False
    partials_type: str = "float16"
    proportion: float = 0.6


@dataclass(frozen=True, slots=True)
class Traced:
    """What one micro-batch costs on one chip, forward alone and (in training) forward and backward."""

    forward: Mapping[str, Any]
    step: Mapping[str, Any]
    weights: int
    weight_bytes: int
    input_bytes: int
    boundary_bytes: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """The answer: ``seconds`` of a batch by cause; ``bottleneck`` is the largest; memory on the fullest tile."""

    layout: Layout
    replicas: int
    samples_per_second: float
    seconds: Mapping[str, float]
    max_tile_bytes: int
    tile_bytes: int
    bounds: Mapping[str, Any]

    @property
    def fits(self) -> bool:
        """True iff the fullest tile holds its share."""
        return self.max_tile_bytes <= self.tile_bytes

    @property
    def bottleneck(self) -> str:
        """The cause that takes most of a batch."""
        return max(self.seconds, key=lambda cause: self.seconds[cause])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for machines."""
        return {
            "micro_batch": self.layout.micro_batch,
            "accumulation": self.layout.accumulation,
            "ipus_per_replica": self.layout.ipus_per_replica,
            "recompute": self.layout.recompute,
            "replicas": self.replicas,
            "samples_per_second": self.samples_per_second,
            "seconds": dict(self.seconds),
            "bottleneck": self.bottleneck,
            "fits": self.fits,
            "max_tile_bytes": self.max_tile_bytes,
            "tile_bytes": self.tile_bytes,
            "bounds": dict(self.bounds),
        }


def trace(model: onnx.ModelProto, chip: Chip, layout: Layout, *, train: bool) -> Traced:
    """Lower, trace and cost one micro-batch. The first dimension of every input is the batch.

    Training differentiates the mean of the first output: a model in a file has no loss, and a loss is small.

    Raises what `podrun.popart.lowering.lower` raises, and UsageError for a model without inputs.
    """
    import jax
    import jax.numpy as jnp

    from podrun.popart.lowering import lower

    shapes = _batched(model, layout.micro_batch)
    lowered = lower(model, training=train, input_shapes=shapes)
    parameters = {name: _abstract(spec) for name, spec in lowered.parameters.items()}
    inputs = {name: _abstract(spec) for name, spec in lowered.inputs.items()}
    key = jax.eval_shape(lambda: jax.random.key(0))
    first = next(iter(lowered.outputs))

    def forward(parameters: Any, inputs: Any, key: Any) -> Any:
        return lowered.forward(parameters, inputs, key)[first]

    def step(parameters: Any, inputs: Any, key: Any) -> Any:
        floating = {n: p for n, p in parameters.items() if jnp.issubdtype(p.dtype, jnp.floating)}

        def loss(chosen: Any) -> Any:
            return jnp.mean(forward({**parameters, **chosen}, inputs, key).astype(jnp.float32))

        return jax.value_and_grad(loss)(floating)

    def cost(function: Callable[..., Any]) -> dict[str, Any]:
        jaxpr = jax.make_jaxpr(function)(parameters, inputs, key)
        return cost_jaxpr(
            jaxpr,
            chip,
            partials_type=layout.partials_type,
            available_memory_proportion=layout.proportion,
            results_stay=not train or layout.accumulation > 1,
        )

    ahead = cost(forward)
    specs = list(lowered.parameters.values())
    boundary = max((spec.nbytes for spec in lowered.outputs.values()), default=0)
    return Traced(
        ahead,
        cost(step) if train else ahead,
        sum(spec.size for spec in specs),
        sum(spec.nbytes for spec in specs),
        sum(spec.nbytes for spec in lowered.inputs.values()),
        max(boundary, _typical_activation(ahead)),
    )


def _abstract(spec: TensorSpec) -> Any:
    import jax

    return jax.ShapeDtypeStruct(spec.shape, numpy_dtype(spec.dtype))  # type: ignore[no-untyped-call]


def _batched(model: onnx.ModelProto, micro_batch: int) -> dict[str, tuple[int, ...]]:
    initial = {tensor.name for tensor in model.graph.initializer}
    shapes: dict[str, tuple[int, ...]] = {}
    for value in model.graph.input:
        if value.name in initial:
            continue
        dims = value.type.tensor_type.shape.dim
        rest = tuple(int(dim.dim_value) for dim in dims[1:])
        if any(dim <= 0 for dim in rest):
            raise UsageError(
                f"input {value.name!r} leaves a dimension open that is not the first (the batch)",
                hint="Fix the other dimensions in the model.",
            )
        shapes[value.name] = (micro_batch, *rest) if len(dims) else ()
    if not shapes:
        raise UsageError("the model has no inputs")
    return shapes


def _typical_activation(report: Mapping[str, Any]) -> int:
    """What crosses a cut through the model: the middle of the forward pass's liveness."""
    curve = sorted(report["memory"]["by_time"])
    return int(curve[len(curve) // 2]) if curve else 0


def estimate(traced: Traced, system: System, layout: Layout, *, train: bool) -> Estimate:
    """Throughput and fit of a traced model.

    Raises:
        InvalidOptionError: IPUs per replica that the system cannot hold or divide, or an unknown optimizer.
    """
    per = layout.ipus_per_replica
    if per < 1 or system.ipus % per:
        raise InvalidOptionError(
            f"{per} IPUs per replica do not divide the {system.ipus} IPUs of {system.name}",
            hint="Give a power of two that is not larger than the system.",
        )
    if layout.optimizer not in UPDATE_PASSES:
        raise InvalidOptionError(
            f"unknown optimizer {layout.optimizer!r}", hint=f"Known: {', '.join(UPDATE_PASSES)}."
        )
    cycles = _layer_cycles(traced, train and layout.recompute)
    batch = Batch(
        slowest_stage(cycles, per),
        per,
        layout.accumulation if train else 1,
        system.ipus // per,
        boundary_bytes=float(traced.boundary_bytes),
        weights=traced.weights / per,
        gradient_bytes=traced.weight_bytes / max(1, traced.weights),
        state_bytes=4.0 * STATES[layout.optimizer] if layout.state_off_chip else 0.0,
        optimizer=layout.optimizer,
        input_bytes=float(traced.input_bytes),
        training=train,
    )
    seconds = batch_seconds(system.chip, batch)
    samples = layout.micro_batch * batch.accumulation * batch.replicas
    return Estimate(
        layout,
        batch.replicas,
        samples / sum(seconds.values()),
        seconds,
        _fullest_tile(traced, system.chip, layout, train=train),
        system.chip.tile_bytes,
        traced.step["bounds"],
    )


def _layer_cycles(traced: Traced, recompute: bool) -> Sequence[float]:
    """Cycles of one micro-batch in pieces that a pipeline may be cut between: timeline entries of equal weight."""
    entries = [e["compute"] + e["exchange"] + e["sync"] for e in traced.forward["timeline"]]
    total = float(traced.step["step"]["cycles"]) + (traced.forward["step"]["cycles"] if recompute else 0.0)
    ahead = sum(entries) or 1
    # Backward work lands on the IPU of its forward work: each piece carries its share of the whole step.
    return [entry * total / ahead for entry in entries] or [total]


def _fullest_tile(traced: Traced, chip: Chip, layout: Layout, *, train: bool) -> int:
    """Bytes on the fullest tile: lasting values, what lives for a while, code, optimizer state."""
    memory, per = traced.step["memory"], layout.ipus_per_replica
    live = float(memory["not_always_live_peak_bytes"])
    if train and layout.recompute:
        # Checkpoints at every square root of the layers: as much is kept as is recomputed at once.
        layers = max(1, len(traced.forward["by_scope"]))
        live = min(
            live, 2.0 * live / math.sqrt(layers) + traced.forward["memory"]["not_always_live_peak_bytes"]
        )
    in_flight = (2 * per - 1) if train and per > 1 else 1
    stash = float(traced.boundary_bytes * (in_flight - 1))
    state = 0.0 if layout.state_off_chip or not train else 4.0 * STATES[layout.optimizer] * traced.weights
    spread = memory["always_live_bytes"] + live + state + sum(memory["code"].values())
    imbalance = TILE_IMBALANCE * (PIPELINE_IMBALANCE if per > 1 else 1.0)
    return int((spread / per + stash) / chip.tiles * imbalance)


def scan(
    model: onnx.ModelProto,
    system: System,
    base: Layout,
    *,
    train: bool,
    micro_batches: Sequence[int] = (1, 2, 4, 8, 16, 32),
    global_batch: int | None = None,
) -> list[Estimate]:
    """Estimates of many layouts, those that fit first and the fastest of them first.

    Tries micro-batches, one IPU per replica up to eight, with and without recomputation; accumulation follows from
    ``global_batch`` where it is given (layouts that do not divide it are left out).
    """
    found: list[Estimate] = []
    for micro_batch in micro_batches:
        traced = trace(model, system.chip, replace(base, micro_batch=micro_batch), train=train)
        layouts = _layouts(system, replace(base, micro_batch=micro_batch), global_batch, train=train)
        found += [estimate(traced, system, layout, train=train) for layout in layouts]
    return sorted(found, key=lambda e: (not e.fits, -e.samples_per_second, e.max_tile_bytes))


def _layouts(system: System, base: Layout, global_batch: int | None, *, train: bool) -> Iterator[Layout]:
    per = 1
    while per <= min(8, system.ipus):
        accumulation = base.accumulation
        if train and global_batch is not None:
            accumulation, rest = divmod(global_batch, base.micro_batch * (system.ipus // per))
            if rest or not accumulation:
                per *= 2
                continue
        for recompute in (False, True) if train else (False,):
            yield replace(base, ipus_per_replica=per, accumulation=accumulation, recompute=recompute)
        per *= 2
