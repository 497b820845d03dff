"""From an ONNX model to throughput and fit on a system."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from podrun.device.target import Chip, System
from podrun.device.tiles import plan_cache
from podrun.device.tiles.batch import UPDATE_PASSES, Batch, batch_seconds
from podrun.device.tiles.cost import cost_flat
from podrun.device.tiles.flatten import flatten
from podrun.device.tiles.matmul import check_proportion
from podrun.device.tiles.memory import Location
from podrun.device.tiles.recompute import Recompute, recomputed
from podrun.device.tiles.schedule import Options
from podrun.errors import InvalidOptionError, PodrunError, UsageError
from podrun.estimate.layers import Layer, layers_of
from podrun.estimate.memory import STATES, MemoryModel
from podrun.estimate.split import cut
from podrun.executable import TensorSpec, numpy_dtype

if TYPE_CHECKING:
    import onnx

    from podrun.popart.lowering import Lowered


@dataclass(frozen=True, slots=True)
class Layout:
    """How a program lies on the system: IPUs per replica, micro-batch, accumulation, and how it saves
    memory.
    """

    micro_batch: int = 1
    accumulation: int = 1
    ipus_per_replica: int = 1
    recompute: bool = False
    optimizer: str = "momentum"
    state_off_chip: bool = False
    shard_state: bool = False
    partials_type: str = "float16"
    proportion: float = 0.6


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


@dataclass(frozen=True, slots=True)
class IpuShare:
    """What one IPU of a replica has: layers by name, cycles of a micro-batch, bytes by content."""

    first_layer: str
    last_layer: str
    layers: int
    cycles: int
    max_tile_bytes: int
    bytes_by_content: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The answer: ``seconds`` of a batch by cause; ``bottleneck`` is the largest; memory on the fullest tile.

    ``ipus``: how the layers are split over the IPUs of a replica.
    """

    layout: Layout
    replicas: int
    samples_per_second: float
    seconds: Mapping[str, float]
    max_tile_bytes: int
    tile_bytes: int
    bounds: Mapping[str, Any]
    ipus: tuple[IpuShare, ...]

    @property
    def fits(self) -> bool:
        """True iff the fullest tile holds its share."""
        return self.max_tile_bytes <= self.tile_bytes

    @property
    def samples(self) -> int:
        """Samples of a batch, over all replicas."""
        return self.layout.micro_batch * self.layout.accumulation * self.replicas

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
            "global_batch_samples": self.samples,
            "seconds_by_cause": dict(self.seconds),
            "bottleneck": self.bottleneck,
            "fits": self.fits,
            "max_tile_bytes": self.max_tile_bytes,
            "tile_capacity_bytes": self.tile_bytes,
            "ipus": [
                {
                    "first_layer": ipu.first_layer,
                    "last_layer": ipu.last_layer,
                    "layers": ipu.layers,
                    "cycles": ipu.cycles,
                    "max_tile_bytes": ipu.max_tile_bytes,
                    "bytes_by_content": dict(ipu.bytes_by_content),
                }
                for ipu in self.ipus
            ],
            "bounds": dict(self.bounds),
        }


def trace(model: onnx.ModelProto, chip: Chip, layout: Layout, *, train: bool) -> Traced:
    """Lower, trace and cost one micro-batch. The first dimension of every input is the batch.

    Training differentiates the mean of the first output: a model in a file has no loss, and a loss is small.
    Answers are kept on disk (`podrun.device.tiles.plan_cache`), so that a repeat needs no tracing.

    Raises what `podrun.popart.lowering.lower` raises, and UsageError for a model without inputs.
    """
    _check_counts(layout)
    shapes = _batched(model, layout.micro_batch)
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
    model: onnx.ModelProto, chip: Chip, layout: Layout, shapes: dict[str, tuple[int, ...]], *, train: bool
) -> Traced:
    import jax
    import jax.numpy as jnp

    lowered = _lowered(model, layout.micro_batch, shapes, train=train)
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

    flats = [
        flatten(jax.make_jaxpr(function)(parameters, inputs, key))
        for function in (forward, step)[: 1 + train]
    ]
    if train:
        flats.append(recomputed(flats[1], Recompute("standard")))
    options = Options(layout.partials_type, layout.proportion)
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


def _lowered(
    model: onnx.ModelProto, micro_batch: int, shapes: dict[str, tuple[int, ...]], *, train: bool
) -> Lowered:
    """Raises FixedBatchError if a model that can be lowered as it is cannot be at this micro-batch."""
    from podrun.popart.lowering import lower

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


def model_batch(model: onnx.ModelProto) -> int | None:
    """The micro-batch that the model was written for: the first dimension of its first input, if it is
    fixed.
    """
    initial = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name not in initial and dims:
            return int(dims[0].dim_value) or None
    return None


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
        raise UsageError("the model has no inputs", hint="Samples come in through the model's inputs.")
    return shapes


def estimate(traced: Traced, system: System, layout: Layout, *, train: bool) -> Estimate:
    """Throughput and fit of a traced model.

    Raises:
        InvalidOptionError: IPUs per replica that the system cannot hold or divide, or an unknown optimizer.
    """
    check_layout(system, layout)
    per = layout.ipus_per_replica
    if per > len(traced.layers):
        raise InvalidOptionError(
            f"the model's {len(traced.layers)} layers cannot be split over {per} IPUs",
            hint=f"Type --ipus-per-replica {len(traced.layers)} or less.",
        )
    layout = layout if train else replace(layout, accumulation=1)
    recompute = train and layout.recompute
    shares = _split(traced, _memory(traced, system, layout, train=train), per, recompute=recompute)
    batch = _batch(traced, system, layout, shares, train=train)
    seconds = batch_seconds(system.chip, batch)
    samples = layout.micro_batch * batch.accumulation * batch.replicas
    return Estimate(
        layout,
        batch.replicas,
        samples / sum(seconds.values()),
        seconds,
        max(share.max_tile_bytes for share in shares),
        system.chip.tile_bytes,
        traced.step["bounds"],
        shares,
    )


def _memory(traced: Traced, system: System, layout: Layout, *, train: bool) -> MemoryModel:
    per, recompute = layout.ipus_per_replica, train and layout.recompute
    waiting = train and layout.accumulation == 1
    return MemoryModel(
        system.chip,
        traced.layers,
        _alone(traced, recompute=recompute and per == 1, waiting=waiting),
        train=train,
        ipus=per,
        accumulation=layout.accumulation,
        recompute=recompute,
        states=STATES[layout.optimizer],
        state_location=Location(layout.state_off_chip, system.ipus // per if layout.shard_state else 1),
        input_bytes=traced.input_bytes,
    )


def _batch(
    traced: Traced, system: System, layout: Layout, shares: Sequence[IpuShare], *, train: bool
) -> Batch:
    """What a batch of all replicas does, with the layers over IPUs as in ``shares``."""
    ends = list(itertools.accumulate(share.layers for share in shares))
    return Batch(
        max(share.cycles for share in shares),
        layout.ipus_per_replica,
        layout.accumulation,
        system.ipus // layout.ipus_per_replica,
        boundary_bytes=float(max((traced.layers[end - 1].crossing_bytes for end in ends[:-1]), default=0)),
        weights=_most_weights(traced.layers, ends),
        gradient_bytes=traced.weight_bytes / max(1, traced.weights),
        state_bytes=4.0 * STATES[layout.optimizer] if layout.state_off_chip else 0.0,
        optimizer=layout.optimizer,
        input_bytes=float(traced.input_bytes),
        training=train,
        weight_bytes=traced.weight_bytes / max(1, traced.weights),
        sharded=layout.shard_state,
    )


def _alone(traced: Traced, *, recompute: bool, waiting: bool) -> Mapping[str, Any]:
    """Memory of the step on an IPU that runs all of it."""
    if waiting:
        return traced.remade_waiting if recompute else traced.step_waiting
    found: Mapping[str, Any] = (traced.remade if recompute else traced.step)["memory"]
    return found


def check_layout(system: System, layout: Layout) -> None:
    """See that ``system`` can run ``layout``, before anything is traced.

    Raises:
        InvalidOptionError: IPUs per replica that the system cannot hold or divide, an unknown optimizer, or
        a memory
            proportion outside (0, 1].
        UsageError: a micro-batch or accumulation below one.
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
    check_proportion(layout.proportion)
    _check_counts(layout)


def _check_counts(layout: Layout) -> None:
    for name, value in (("micro-batch", layout.micro_batch), ("accumulation", layout.accumulation)):
        if value < 1:
            raise UsageError(f"--{name} must be at least 1, not {value}", hint=f"As in --{name} 4.")


def _split(traced: Traced, memory: MemoryModel, ipus: int, *, recompute: bool) -> tuple[IpuShare, ...]:
    """The layers over the IPUs: as even as memory allows, else as even as can be (and then it does not
    fit).
    """
    layers = traced.layers
    costs = [layer.step_cycles + (layer.forward_cycles if recompute else 0.0) for layer in layers]
    if recompute and ipus == 1:
        # What is made again is known; layers take shares of it, as nobody cuts them apart.
        costs = [cost * traced.remade["step"]["cycles"] / sum(costs) for cost in costs]
    ends = cut(costs, ipus, memory.fits) or cut(costs, ipus)
    assert ends is not None  # There are at least as many layers as IPUs.
    found = []
    for ipu, (first, end) in enumerate(itertools.pairwise((0, *ends))):
        found.append(
            IpuShare(
                layers[first].name,
                layers[end - 1].name,
                end - first,
                round(sum(costs[first:end])),
                memory.tile_bytes(ipu, first, end),
                memory.demand(ipu, first, end).by_content(),
            )
        )
    return tuple(found)


def _most_weights(layers: Sequence[Layer], ends: Sequence[int]) -> float:
    spans = itertools.pairwise((0, *ends))
    return float(max(sum(layer.weights for layer in layers[first:end]) for first, end in spans))
