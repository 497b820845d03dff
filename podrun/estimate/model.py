"""Throughput and fit on a system, from the cost of a micro-batch on one chip; scans over layouts for the best."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from podrun.core.errors import InternalError, InvalidOptionError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.core.terminal import report_step
from podrun.costmodel.batch import BatchWork, batch_seconds
from podrun.costmodel.exchange import RELEASE_SECONDS, WAIT_SECONDS
from podrun.costmodel.settings import Location
from podrun.costmodel.splitting import cut_chain
from podrun.costmodel.target import System
from podrun.estimate.layout import STATES, Layer, MemoryModel, ProgramLayout, check_layout
from podrun.estimate.tracing import FixedBatchError, ModelSource, Traced, trace_model

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class IpuShare:
    """The share of one IPU of a replica: layers by name, cycles of a micro-batch, bytes by content."""

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

    layout: ProgramLayout
    replicas: int
    samples_per_second: float
    seconds: Mapping[str, float]
    max_tile_bytes: int
    tile_bytes: int
    bounds: Mapping[str, Any]
    ipus: tuple[IpuShare, ...]
    training: bool = False
    modules: tuple[tuple[str, int, int], ...] = ()
    """Cycles of a micro-batch on one IPU and bytes of weights of each module (the path before an operator's name)."""

    @property
    def fits(self) -> bool:
        """True iff the fullest tile holds its share."""
        return self.max_tile_bytes <= self.tile_bytes

    @property
    def samples(self) -> int:
        """Samples of a batch, over all replicas."""
        return self.layout.micro_batch * self.layout.accumulation * self.replicas

    @property
    def waiting_seconds(self) -> float:
        """Seconds in which the IPUs wait for the host around a run: in inference each batch is a run of its own."""
        return 0.0 if self.training else WAIT_SECONDS + RELEASE_SECONDS

    @property
    def samples_per_second_in_a_run(self) -> float:
        """Throughput of batches that follow one another in one run, as reports count it."""
        return self.samples / (sum(self.seconds.values()) - self.waiting_seconds)

    @property
    def bottleneck(self) -> str:
        """The cause that takes most of a batch."""
        return max(self.seconds, key=lambda cause: self.seconds[cause])

    def to_dict(self) -> dict[str, Any]:
        """The estimate as values of JSON."""
        return {
            "micro_batch": self.layout.micro_batch,
            "accumulation": self.layout.accumulation,
            "ipus_per_replica": self.layout.ipus_per_replica,
            "recompute": self.layout.recompute,
            "replicas": self.replicas,
            "samples_per_second": self.samples_per_second,
            "samples_per_second_in_a_run": self.samples_per_second_in_a_run,
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
            "modules": [
                {"name": name, "cycles": cycles, "weight_bytes": weights}
                for name, cycles, weights in self.modules
            ],
            "bounds": dict(self.bounds),
        }


def estimate(traced: Traced, system: System, layout: ProgramLayout, *, train: bool) -> Estimate:
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
        train,
        _modules(traced.layers),
    )


def _modules(layers: Sequence[Layer]) -> tuple[tuple[str, int, int], ...]:
    """Cycles and bytes of weights of layers whose names have the same path, in the forward pass's order."""
    totals: dict[str, list[float]] = {}
    for layer in layers:
        entry = totals.setdefault(layer.name.rpartition("/")[0], [0.0, 0.0])
        entry[0] += layer.step_cycles
        entry[1] += layer.weight_bytes
    return tuple((name, round(cycles), int(weights)) for name, (cycles, weights) in totals.items())


def _memory(traced: Traced, system: System, layout: ProgramLayout, *, train: bool) -> MemoryModel:
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


def planned_batch(traced: Traced, system: System, layout: ProgramLayout, *, train: bool) -> BatchWork:
    """The work of a batch as `estimate` counts it, which a POD of another size shares but for its replicas."""
    recompute = train and layout.recompute
    memory = _memory(traced, system, layout, train=train)
    shares = _split(traced, memory, layout.ipus_per_replica, recompute=recompute)
    return _batch(traced, system, layout, shares, train=train)


def _batch(
    traced: Traced, system: System, layout: ProgramLayout, shares: Sequence[IpuShare], *, train: bool
) -> BatchWork:
    """The work of a batch of all replicas, with the layers over IPUs as in ``shares``."""
    ends = list(itertools.accumulate(share.layers for share in shares))
    return BatchWork(
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
    memory: Mapping[str, Any] = (traced.remade if recompute else traced.step)["memory"]
    return memory


def _split(traced: Traced, memory: MemoryModel, ipus: int, *, recompute: bool) -> tuple[IpuShare, ...]:
    """The layers over the IPUs: as even as memory allows; if nothing fits, as even as possible."""
    layers = traced.layers
    # The last IPU of a pipeline begins its backward work at once: what it keeps is not recomputed.
    last = [layer.step_cycles for layer in layers]
    costs = [layer.step_cycles + (layer.forward_cycles if recompute else 0.0) for layer in layers]
    if recompute and ipus == 1:
        # The recomputed bytes are known as a whole; layers take shares of them, as nobody cuts them apart.
        last = [cost * traced.remade["step"]["cycles"] / sum(costs) for cost in costs]
    ends = cut_chain(costs, ipus, memory.fits, last=last) or cut_chain(costs, ipus, last=last)
    if ends is None:
        raise InternalError(f"{len(layers)} layers are not to be cut for {ipus} IPUs")
    shares = []
    for ipu, (first, end) in enumerate(itertools.pairwise((0, *ends))):
        own = last if ipu == ipus - 1 else costs
        shares.append(
            IpuShare(
                layers[first].name,
                layers[end - 1].name,
                end - first,
                round(sum(own[first:end])),
                memory.tile_bytes(ipu, first, end),
                memory.demand(ipu, first, end).by_content(),
            )
        )
    return tuple(shares)


def _most_weights(layers: Sequence[Layer], ends: Sequence[int]) -> float:
    spans = itertools.pairwise((0, *ends))
    return float(max(sum(layer.weights for layer in layers[first:end]) for first, end in spans))


MOST_STAGES = 16
"""Longest pipeline that a scan tries."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What a scan tries: all combinations. ``global_batch``: accumulation follows from it, and layouts that do not
    divide it are left out; ``pipelines``: IPUs of a replica, None: powers of two up to `MOST_STAGES`.
    """

    micro_batches: Sequence[int] = (1, 2, 4, 8, 16, 32)
    accumulations: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    global_batch: int | None = None
    pipelines: Sequence[int] | None = None
    recomputing: Sequence[bool] = (False, True)


def scan(
    model: onnx.ModelProto | ModelSource,
    system: System,
    base: ProgramLayout,
    choices: Choices,
    *,
    train: bool,
) -> list[Estimate]:
    """Estimates of many layouts: layouts that fit come first, the fastest of them first.

    What is not among the ``choices`` is as in ``base``. Pipelines are split as evenly as memory allows; inference is
    tried without accumulation and recomputation.

    Raises UsageError if no layout gives that global batch.
    """
    if not train:
        choices = replace(choices, accumulations=(1,), recomputing=(False,))
    estimates: list[Estimate] = []
    fixed: FixedBatchError | None = None
    layouts = [
        list(_layouts(system, replace(base, micro_batch=micro_batch), choices))
        for micro_batch in choices.micro_batches
    ]
    total, before = sum(map(len, layouts)), 0
    for of_size in layouts:
        traced: Traced | None = None
        for number, layout in enumerate(of_size, 1):
            report_step("layout", before + number, total)
            if traced is None:
                try:
                    traced = trace_model(model, system.chip, layout, train=train)
                except FixedBatchError as error:
                    fixed = error
                    break
            if layout.ipus_per_replica <= len(traced.layers):
                estimates.append(estimate(traced, system, layout, train=train))
        before += len(of_size)
    if not estimates and fixed is not None:
        raise fixed
    if not estimates:
        raise UsageError(
            f"no layout of {system.name} makes a global batch of {choices.global_batch}",
            hint=f"Give a multiple of the number of replicas, as in --global-batch {system.ipus * 16}.",
        )
    return sorted(estimates, key=_rank)


def _rank(one: Estimate) -> tuple[bool, int, bool, int, float]:
    """Sort key: layouts that fit first, then by time (to a thousandth), then without recomputation, then by memory."""
    speed = round(1000 * math.log(one.samples_per_second))
    return (not one.fits, -speed, one.layout.recompute, one.max_tile_bytes, -one.samples_per_second)


def _layouts(system: System, base: ProgramLayout, choices: Choices) -> Iterator[ProgramLayout]:
    for per in choices.pipelines or _powers_of_two(min(MOST_STAGES, system.ipus)):
        factors = choices.accumulations
        if choices.global_batch is not None:
            factor, rest = divmod(choices.global_batch, base.micro_batch * (system.ipus // per))
            factors = (factor,) if factor and not rest else ()
        for factor in factors:
            for recompute in choices.recomputing:
                yield replace(base, ipus_per_replica=per, accumulation=factor, recompute=recompute)


def _powers_of_two(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2
