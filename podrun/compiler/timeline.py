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
sharding domain (`podrun.costmodel.settings.Location.shards`). Numbers do not change. What changes is:

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

from collections.abc import Callable, Collection, Iterable, Sequence

from podrun.compiler.arenas import WeightGroup
from podrun.compiler.forward_trace import Trace
from podrun.compiler.ipu_memory import SegmentWork
from podrun.compiler.program import Beside, PipelineOrder, Program, layout_of
from podrun.core.executable import Retrieval, TensorSpec, numpy_dtype
from podrun.core.names import gradient_buffer
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.batch import STREAMING_BYTES_PER_SECOND
from podrun.costmodel.exchange import transfer_seconds
from podrun.costmodel.settings import Location
from podrun.costmodel.target import IPUS_PER_MACHINE, Chip

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
        return transfer_seconds(chip, nbytes * copies)

    for name, item in program.inputs.items():
        if name in program.unsent:
            continue
        per_batch[transfers.of(name)] += seconds(item.spec.nbytes, 1 if item.broadcast else sharing)
    for anchor in program.anchors:
        if anchor.name not in traced.outputs or anchor.name in program.unsent:
            continue  # Weights, gradients and states are not what programs overlap.
        every = anchor.retrieval in (Retrieval.ALL, Retrieval.EVERY_N)
        seconds_of = per_batch if every else once
        seconds_of[transfers.of(anchor.name)] += (
            seconds(traced.spec(anchor.name).nbytes, sharing) / anchor.period
        )
    count, near, far = program.accumulation_factor, Beside.MICRO_BATCHES, Beside.BATCHES
    waits = count * per_batch[Beside.NOTHING] + once[Beside.NOTHING] + once[near]
    waits += per_batch[near] + (count - 1) * max(0.0, per_batch[near] + per_batch[far] - compute)
    return waits + max(0.0, per_batch[far] + once[far] - compute)
