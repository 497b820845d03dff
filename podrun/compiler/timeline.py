"""Modelled time of a batch on the IPUs of a replica: when its pieces run, and how long data takes to move.

**Schedules.** Times are in seconds; the order is that of `podrun.compiler.schedule.Timetable`.

- Sequential: one piece after the other. What comes from streaming memory for a piece may come while the one before
  it computes (``preload``).
- Grouped (PopART's pipeline): cycles in lock-step. In a cycle each IPU does what it has, then all copy; a cycle is as
  long as its busiest IPU and its slowest copy. With F forward stages and training, a batch of N micro-batches takes
  N + 2F - 2 cycles: 2F - 2 to fill, as many to flush.
- Interleaved: forward and backward work take turns, IPUs wait for data only.

**Collectives inside a model** take their time from the link model: forward, and backward where their values lead to
the loss.

**Replicated tensor sharding.** A weight, its optimizer state or its accumulator may be cut over the replicas of a
sharding domain (`podrun.costmodel.tile_memory.Location.shards`). Numbers do not change. What changes is:

* weights cut: each replica gathers a weight before a segment uses it, once for each micro-batch; gradients are
  scattered to their shards and nothing is gathered after the update;
* accumulators cut: gradients are scattered for each micro-batch, not once for each batch;
* accumulators or state cut, weights whole: the new weights are gathered after the update, which with the scattering is
  what an all-reduce does;
* whatever is cut, each replica updates its shard only;
* a domain of fewer than all replicas: shards are all-reduced between domains.

Machines of the emulator keep one copy of weights and state on a host and update them by slices, cut or not.

**Streaming memory.** Variables whose location is off chip move for every use: weights for each segment that reads them,
accumulators there and back for each gradient, optimizer state there and back for the update. Activations that wait on
their IPU go there when they are made and come back for each segment that reads them; between neighbouring execution
phases they stay on chip. A variable cut over replicas moves its shard only. The rate is that of a machine, shared by
what streams at the same time: the replicas of the machine, and in a pipeline their stages.

**Host data** take time in programs that arrange their transfers (`podrun.compiler.program.Transfers`); in others they
are there in time. An IPU waits for what crosses beside nothing; what crosses beside micro-batches is waited for so far
as it takes longer than one, and at the ends of a batch or of a run. The rate is that of a machine's host link.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal

from podrun.collectives.timing import all_gather_time, reduce_scatter_time
from podrun.compiler.arenas import Memory, WeightGroup, replicas_reduced
from podrun.compiler.forward_trace import Trace
from podrun.compiler.ipu_memory import SegmentWork
from podrun.compiler.model_collectives import ExchangeKind, exchanges
from podrun.compiler.program import Beside, PipelineOrder, Program, layout_of
from podrun.core.executable import Retrieval, TensorSpec, numpy_dtype
from podrun.core.names import gradient_buffer
from podrun.costmodel.batch import STREAMING_BYTES_PER_SECOND
from podrun.costmodel.exchange import (
    STREAM_BYTES_PER_SECOND,
    TRANSFER_CYCLES,
    all_reduce_seconds,
    fabric_of,
)
from podrun.costmodel.target import IPUS_PER_MACHINE, Chip
from podrun.costmodel.tile_memory import Location

CAUSES = ("compute", "copies", "streaming", "update", "all_reduce", "collectives")
"""What `makespan` tells apart. A program that arranges its transfers has one more, ``host``:
`host_transfer_seconds`.
"""


@dataclass(frozen=True, slots=True)
class SegmentTask:
    """A piece of every micro-batch: where, in which cycle of the micro-batch, and seconds by cause.

    ``streaming``: to and from streaming memory. ``update`` and ``all_reduce``: of weights that change right after the
    piece, where batches overlap. ``collectives``: those of the model, and of weights that are gathered for the piece.
    ``preload``: what it streams comes while the piece before it computes.
    """

    ipu: int
    cycle: int
    compute: float
    copies: float
    streaming: float = 0.0
    update: float = 0.0
    all_reduce: float = 0.0
    collectives: float = 0.0
    preload: bool = False

    def busy(self, causes: Iterable[str]) -> float:
        """Seconds of work on its IPU; copies are counted apart."""
        return sum(float(getattr(self, cause)) for cause in causes if cause != "copies")


def seconds_by_cause(
    tasks: Sequence[SegmentTask], micro_batches: int, schedule: PipelineOrder | None
) -> dict[str, float]:
    """Seconds that each of `CAUSES` adds to the time of a batch, in their order. ``schedule``: None without a pipeline.

    ``streaming`` is left out if nothing streams, ``collectives`` if there are none.
    """
    by_cause: dict[str, float] = {}
    before = 0.0
    for count in range(1, len(CAUSES) + 1):
        total = makespan(tasks, micro_batches, schedule, CAUSES[:count])
        by_cause[CAUSES[count - 1]] = max(0.0, total - before)
        before = max(before, total)
    for cause in ("streaming", "collectives"):
        if not any(getattr(task, cause) for task in tasks):
            del by_cause[cause]
    return by_cause


def makespan(
    tasks: Sequence[SegmentTask],
    micro_batches: int,
    schedule: PipelineOrder | None,
    causes: Sequence[str] = CAUSES,
) -> float:
    """Seconds from the first piece's begin to the last one's end, with only some causes of time."""
    run: Callable[[Sequence[SegmentTask], int, Sequence[str]], float] = {
        None: _sequential,
        PipelineOrder.GROUPED: _in_cycles,
        PipelineOrder.INTERLEAVED: _as_data_arrive,
    }[schedule]
    return run(tasks, micro_batches, causes)


def idle_share(tasks: Sequence[SegmentTask], micro_batches: int, schedule: PipelineOrder | None) -> float:
    """The share of time in which an IPU does not work, on average over the IPUs with work: the bubble."""
    ipus = {task.ipu for task in tasks}
    total = makespan(tasks, micro_batches, schedule)
    if not total:
        return 0.0
    busy = micro_batches * sum(task.busy(CAUSES) for task in tasks)
    return 1.0 - busy / (total * len(ipus))


def _sequential(tasks: Sequence[SegmentTask], micro_batches: int, causes: Sequence[str]) -> float:
    copies, streaming = "copies" in causes, "streaming" in causes
    seconds = 0.0
    for place, task in enumerate(tasks):
        seconds += task.busy(causes) + copies * task.copies
        if streaming and task.preload:
            # Tensors come while the previous piece (for the first piece: the last one) computes, as far as its time
            # suffices.
            seconds -= min(task.streaming, tasks[place - 1].compute)
    # For the first micro-batch there is no previous piece.
    hidden = min(tasks[0].streaming, tasks[-1].compute) if streaming and tasks[0].preload else 0.0
    return micro_batches * seconds + hidden


def _in_cycles(tasks: Sequence[SegmentTask], micro_batches: int, causes: Sequence[str]) -> float:
    total = 0.0
    for cycle in range(micro_batches + max(task.cycle for task in tasks)):
        busy: dict[int, float] = {}
        copies = 0.0
        for task in tasks:
            if 0 <= cycle - task.cycle < micro_batches:
                busy[task.ipu] = busy.get(task.ipu, 0.0) + task.busy(causes)
                copies = max(copies, task.copies)
        total += max(busy.values(), default=0.0) + ("copies" in causes) * copies
    return total


def _as_data_arrive(tasks: Sequence[SegmentTask], micro_batches: int, causes: Sequence[str]) -> float:
    """A piece begins when its IPU is free and the piece before it has handed over its results."""
    chain = sorted(tasks, key=lambda task: task.cycle)
    period = PipelineOrder.INTERLEAVED.period
    order = sorted(
        (task.cycle + period * m, -task.cycle, place, m)
        for place, task in enumerate(chain)
        for m in range(micro_batches)
    )
    free: dict[int, float] = {}
    arrived = [0.0] * micro_batches
    for _, _, place, m in order:
        task = chain[place]
        end = max(free.get(task.ipu, 0.0), arrived[m]) + task.busy(causes)
        free[task.ipu] = end
        arrived[m] = end + ("copies" in causes) * task.copies
    return max(free.values())


def collective_seconds(
    program: Program, traced: Trace, chip: Chip
) -> tuple[tuple[JaxprEqn, float, float], ...]:
    """The collectives of a micro-batch, in order: the equation, and seconds forward and backward (0 for one whose
    value does not lead to the loss)."""
    equations = exchanges(traced.jaxpr)
    differentiated = _leading_to(traced, program.loss) if equations and program.loss is not None else set()
    return tuple(
        (equation, *_exchange_seconds(equation, program, chip, backward=id(equation) in differentiated))
        for equation in equations
    )


def _exchange_seconds(
    equation: JaxprEqn, program: Program, chip: Chip, *, backward: bool
) -> tuple[float, float]:
    """A collective and, with ``backward``, its transpose: of a sum the same, of a gathering a scattered sum."""
    kind, ranks = equation.params["kind"], len(equation.params["groups"][0])
    aval: Any = equation.invars[0].aval
    nbytes, ipus = aval.size * aval.dtype.itemsize, program.ipus_per_replica
    if kind is ExchangeKind.POSITION or ranks == 1:
        return 0.0, 0.0
    if kind is ExchangeKind.SUM:
        seconds = all_reduce_seconds(chip, ranks, nbytes, ipus_per_replica=ipus)
        return seconds, backward * seconds
    fabric = fabric_of(chip)
    return (
        all_gather_time(nbytes * ranks, ranks, fabric, ipus_per_rank=ipus).seconds,
        backward * reduce_scatter_time(nbytes * ranks, ranks, fabric, ipus_per_rank=ipus).seconds,
    )


def _leading_to(traced: Trace, loss: str) -> set[int]:
    """Identities of the floating-point exchanges from which a chain of equations leads to the loss."""
    wanted: set[Any] = {traced.variable(loss)}
    ancestors = set()
    for equation in reversed(traced.jaxpr.jaxpr.eqns):
        if wanted.isdisjoint(equation.outvars):
            continue
        wanted |= {v for v in equation.invars if not isinstance(v, Literal)}
        if any(jnp.issubdtype(getattr(v.aval, "dtype", bool), jnp.floating) for v in equation.outvars):
            ancestors.add(id(equation))
    return ancestors


@dataclass(frozen=True, slots=True)
class Shards:
    """The number of parts into which a weight, its state and its accumulator are cut; 1: not cut."""

    weight: int
    state: int
    accumulator: int

    @property
    def update(self) -> int:
        """The number of parts into which the update of the weight is cut."""
        return max(self.weight, self.state, self.accumulator)


def shards_of(program: Program, weight: str) -> Shards:
    """The shards of a weight and of its state and accumulator, never more than the replicas that share the weight."""
    where, rule, spec = program.locations, program.update, program.parameters[weight].spec
    most = replicas_reduced(program, weight)

    def parts(place: Location, elements: int) -> int:
        return min(place.shards, most) if place.elements(elements) < elements else 1

    states = [] if rule is None else [state for state, _ in rule.state(spec).values()]
    return Shards(
        parts(where.of(weight, where.weights), spec.size),
        max((parts(where.of(s.name, where.optimizer_state), s.size) for s in states), default=1),
        parts(where.of(gradient_buffer(weight), where.accumulators), spec.size) if program.accumulates else 1,
    )


def update_spec(program: Program, weight: str) -> TensorSpec:
    """The part of a weight that one replica updates: all of it, or its shard, which is flat."""
    spec, parts = program.parameters[weight].spec, shards_of(program, weight).update
    return spec if parts == 1 else TensorSpec(spec.name, spec.dtype, (-(-spec.size // parts),))


def reduction_seconds(program: Program, memory: Memory, chip: Chip) -> dict[int, float]:
    """Seconds to reduce the gradients of a batch and to gather what the update made, by IPU of a replica.

    IPUs do theirs side by side. What is cut alike travels together, padding of arenas included where nothing is cut.
    """
    by_ipu: dict[int, float] = {}
    for group in memory.groups:
        by_ipu.setdefault(group.home, 0.0)
    for home in by_ipu:
        groups = [group for group in memory.groups if group.home == home]
        by_ipu[home] = sum(
            _reduction(program, chip, replicas, shards, gradient, weight)
            for (replicas, shards), (gradient, weight) in _sizes(program, groups).items()
        )
    return dict(sorted(by_ipu.items()))


def gather_seconds(program: Program, work: SegmentWork, chip: Chip) -> float:
    """Seconds of a micro-batch in which the sharded weights that a segment reads are gathered for it."""
    fabric, ipus = fabric_of(chip), program.ipus_per_replica
    sizes: dict[int, float] = {}
    for name in sorted(work.reads & program.parameters.keys()):
        parts = shards_of(program, name).weight
        if parts > 1:
            sizes[parts] = sizes.get(parts, 0.0) + program.parameters[name].spec.nbytes
    return sum(
        all_gather_time(size, parts, fabric, ipus_per_rank=ipus).seconds for parts, size in sizes.items()
    )


def _sizes(
    program: Program, groups: Sequence[WeightGroup]
) -> Mapping[tuple[int, Shards], tuple[float, float]]:
    """Bytes of gradients and of weights that are reduced over equally many replicas and cut alike."""
    sizes: dict[tuple[int, Shards], tuple[float, float]] = {}
    for group in groups:
        wide = numpy_dtype(group.gradient_dtype).itemsize
        stored = max(1, sum(weight.size for weight in group.weights))
        for weight in group.weights:
            replicas, spec = replicas_reduced(program, weight.name), program.parameters[weight.name].spec
            shards = shards_of(program, weight.name)
            shards = Shards(shards.weight, 1, shards.accumulator)  # State does not travel.
            gradient, moved = sizes.get((replicas, shards), (0.0, 0.0))
            padded = group.size / stored if shards.update == 1 else 1.0
            sizes[replicas, shards] = (gradient + spec.size * wide * padded, moved + spec.nbytes)
    return sizes


def _reduction(
    program: Program, chip: Chip, replicas: int, shards: Shards, gradient: float, weight: float
) -> float:
    ipus, fabric = program.ipus_per_replica, fabric_of(chip)
    parts = max(shards.weight, shards.accumulator)
    if parts == 1:
        return all_reduce_seconds(chip, replicas, gradient, ipus_per_replica=ipus)
    times = program.accumulation_factor if shards.accumulator > 1 else 1
    seconds = times * reduce_scatter_time(gradient, parts, fabric, ipus_per_rank=ipus).seconds
    if replicas > parts:
        seconds += all_reduce_seconds(chip, replicas // parts, gradient / parts, ipus_per_replica=ipus)
    if shards.weight == 1:
        seconds += all_gather_time(weight, parts, fabric, ipus_per_rank=ipus).seconds
    return seconds


def streamed_segment_bytes(
    program: Program, works: Sequence[SegmentWork], gradients: Sequence[Collection[str]]
) -> tuple[int, ...]:
    """Bytes that each segment moves for a micro-batch; ``gradients[i]``: weights whose gradients ``works[i]`` makes."""
    nbytes = [
        _streamed_variables(program, work, computed) for work, computed in zip(works, gradients, strict=True)
    ]
    activations = program.locations.activations
    for maker, work in enumerate(works):
        for name, size in work.crossing:
            if not activations.streamed(size):
                continue
            readers = [
                i
                for i, other in enumerate(works)
                if name in other.reads and _waits_off_chip(program, work, other)
            ]
            nbytes[maker] += size * bool(readers)
            for reader in readers:
                nbytes[reader] += size
    return tuple(nbytes)


def streamed_update_bytes(program: Program, groups: Sequence[WeightGroup]) -> int:
    """Bytes that the update of the groups of one IPU moves."""
    where = program.locations
    total = 0
    for group in groups:
        rule = program.update_rule
        for weight in (program.parameters[weight.name].spec for weight in group.weights):
            total += 2 * _streamed_bytes(weight, where.of(weight.name, where.weights))
            for spec, _ in rule.state(weight).values():
                total += 2 * _streamed_bytes(spec, where.of(spec.name, where.optimizer_state))
            if program.accumulates:
                name = gradient_buffer(weight.name)
                accumulator = TensorSpec(name, group.gradient_dtype, weight.shape)
                total += _streamed_bytes(accumulator, where.of(name, where.accumulators))
    return total


def streaming_seconds(program: Program, nbytes: int, streams: int = 1) -> float:
    """Seconds for ``nbytes`` on each of ``streams`` IPUs of a replica at once (at most those of a machine)."""
    sharing = layout_of(program).replicas_per_machine * min(streams, IPUS_PER_MACHINE)
    return nbytes * sharing / STREAMING_BYTES_PER_SECOND


def _streamed_variables(program: Program, work: SegmentWork, computed: Collection[str]) -> int:
    where = program.locations
    total = 0
    for name, parameter in program.parameters.items():
        if name in work.reads:
            total += _streamed_bytes(parameter.spec, where.of(name, where.weights))
        if name in computed and program.accumulates:
            total += 2 * _streamed_bytes(parameter.spec, where.of(gradient_buffer(name), where.accumulators))
    return total


def _waits_off_chip(program: Program, maker: SegmentWork, reader: SegmentWork) -> bool:
    """True iff a value that ``maker`` makes goes off chip until ``reader`` needs it."""
    if maker.ipu != reader.ipu or maker is reader:
        return False
    return program.phases is None or reader.cycle - maker.cycle > 1


def _streamed_bytes(spec: TensorSpec, place: Location) -> int:
    return place.elements(spec.size) * numpy_dtype(spec.dtype).itemsize if place.streamed(spec.size) else 0


def host_transfer_seconds(program: Program, traced: Trace, chip: Chip, compute: float) -> float:
    """Seconds of a batch in which an IPU waits for data from and to the host. ``compute``: seconds of a micro-batch."""
    transfers = program.transfers
    if transfers is None:
        return 0.0
    sharing = layout_of(program).replicas_per_machine
    per_batch, once = dict.fromkeys(Beside, 0.0), dict.fromkeys(Beside, 0.0)

    def seconds(nbytes: int, copies: int) -> float:
        return TRANSFER_CYCLES / chip.clock_hz + nbytes * copies / STREAM_BYTES_PER_SECOND

    for name, item in program.inputs.items():
        per_batch[transfers.of(name)] += seconds(item.spec.nbytes, 1 if item.broadcast else sharing)
    for anchor in program.anchors:
        if anchor.name not in traced.outputs:
            continue  # Weights, gradients and states: not what programs overlap.
        every = anchor.retrieval in (Retrieval.ALL, Retrieval.EVERY_N)
        seconds_of = per_batch if every else once
        seconds_of[transfers.of(anchor.name)] += (
            seconds(traced.spec(anchor.name).nbytes, sharing) / anchor.period
        )
    count, near, far = program.accumulation_factor, Beside.MICRO_BATCHES, Beside.BATCHES
    waits = count * per_batch[Beside.NOTHING] + once[Beside.NOTHING] + once[near]
    waits += per_batch[near] + (count - 1) * max(0.0, per_batch[near] + per_batch[far] - compute)
    return waits + max(0.0, per_batch[far] + once[far] - compute)
