"""When the pieces of a batch run on the IPUs of a replica, by schedule, and what part of the time nobody computes.

- Sequential: one piece after the other. What comes from streaming memory for a piece may come while the one before
  it computes (``preload``).
- Grouped (PopART's pipeline): cycles in lock-step. In a cycle each IPU does what it has, then all copy; a cycle is as
  long as its busiest IPU and its slowest copy. With F forward stages and training, a batch of N micro-batches takes
  N + 2F - 2 cycles: 2F - 2 to fill, as many to flush.
- Interleaved: forward and backward work take turns, IPUs wait for data only.

Times are in seconds; the order is that of `podrun.compiler.order.timetable.Timetable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from podrun.compiler.program import PipelineOrder

CAUSES = ("compute", "copies", "streaming", "update", "all_reduce", "collectives")


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
        """Seconds on its IPU; copies are counted apart."""
        return sum(float(getattr(self, cause)) for cause in causes if cause != "copies")


def seconds_by_cause(
    tasks: Sequence[SegmentTask], micro_batches: int, schedule: PipelineOrder | None
) -> dict[str, float]:
    """What each of `CAUSES` adds to the time of a batch, in their order. ``schedule``: None for no pipeline.

    ``streaming`` is left out if nothing streams, ``collectives`` if there are none.
    """
    found: dict[str, float] = {}
    before = 0.0
    for count in range(1, len(CAUSES) + 1):
        total = makespan(tasks, micro_batches, schedule, CAUSES[:count])
        found[CAUSES[count - 1]] = max(0.0, total - before)
        before = max(before, total)
    for cause in ("streaming", "collectives"):
        if not any(getattr(task, cause) for task in tasks):
            del found[cause]
    return found


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
    """The part of the time in which an IPU does not work, on average over those that have work: the bubble."""
    ipus = {task.ipu for task in tasks}
    total = makespan(tasks, micro_batches, schedule)
    if not total:
        return 0.0
    busy = micro_batches * sum(task.busy(CAUSES) for task in tasks)
    return 1.0 - busy / (total * len(ipus))


def _sequential(tasks: Sequence[SegmentTask], micro_batches: int, causes: Sequence[str]) -> float:
    copies, streaming = "copies" in causes, "streaming" in causes
    each = 0.0
    for place, task in enumerate(tasks):
        each += task.busy(causes) + copies * task.copies
        if streaming and task.preload:
            # It comes while the piece before computes (the last one's, for the first), so far as that is long enough.
            each -= min(task.streaming, tasks[place - 1].compute)
    # For the first micro-batch there is no piece before.
    hidden = min(tasks[0].streaming, tasks[-1].compute) if streaming and tasks[0].preload else 0.0
    return micro_batches * each + hidden


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
