"""What the IPUs of a machine do with their time: the model's split of a batch, and shares of the last second.

`activity_of_batches` reads the tile model's report of a program when it is loaded. While it runs, `Usage` notes the
begin and end of each run, and `TrafficCounters` adds up bytes; shares are computed when somebody asks.

The shares come from the *model*: while a program runs batch after batch, an IPU spends its time as the model's batch
does, however long the emulation takes for one. The host's own work between two runs is not modelled, and the
emulation's is mixed with it: a gap counts as idle time only if it is a *pause*, longer than `PAUSE_S` and than the run
before it. So neither a slow host nor other load on it changes how busy a program seems.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podrun.core.executable import (
    AllGather,
    AllReduce,
    Executable,
    Instruction,
    LoadStream,
    ReduceScatter,
    StoreStream,
    numpy_dtype,
)
from podrun.core.quick_dataclass import dataclass

ACTIVITIES = ("compute", "exchange", "sync", "link", "host")
"""What an IPU does: its tiles compute; they exchange data; they wait for each other or for other IPUs; IPU-Links carry
data between IPUs; the host link carries streams or streaming memory's data."""
LINK_CAUSES = ("copies", "all_reduce", "collectives")
"""Causes of modelled time that are spent on links between IPUs."""
HOST_CAUSES = ("streaming", "host")
PACKET_BYTES = 64
"""Bytes of an IPU-Link packet. Assumed: the block in which gc-hosttraffictest counts its transfers."""


@dataclass(frozen=True, slots=True)
class BatchActivity:
    """One batch on one IPU. ``seconds``: modelled, by `ACTIVITIES`; their sum is the batch's time. ``link_bytes`` go
    out on its IPU-Links, ``host_bytes`` both ways between it and the host. ``tile_bytes``: of its fullest tile, of
    ``tile_capacity_bytes``; None: the program has no model of its memory."""

    seconds: tuple[float, ...]
    link_bytes: int
    host_bytes: int
    tile_bytes: int | None = None
    tile_capacity_bytes: int | None = None


def activity_of_batches(executable: Executable) -> tuple[BatchActivity, ...] | None:
    """The activity of a batch for each IPU of a replica; None if the program has no model of its time."""
    report = executable.tile_report
    step = report.get("step")
    if not isinstance(step, Mapping) or not step.get("seconds"):
        return None
    passes = executable.batches_per_pass
    memory = {int(entry["ipu"]): entry["memory"] for entry in report.get("ipus", ())}
    shared = int(step.get("sent_bytes", 0)) + _collective_bytes(executable)
    result = []
    for ipu, work in enumerate(executable.instructions):
        own = [s for s in report.get("segments", ()) if int(s["ipu"]) == ipu]
        sent = sum(int(s.get("sent_bytes", 0)) for s in own) * executable.accumulation_factor
        held = memory.get(ipu)
        result.append(
            BatchActivity(
                tuple(seconds / passes for seconds in _split(executable, ipu, step, own)),
                (sent + shared) // passes,
                _stream_bytes(executable, work) // passes,
                None if held is None else int(held["max_tile_bytes"]),
                None if held is None else int(held["tile_bytes"]),
            )
        )
    return tuple(result)


def _split(
    executable: Executable, ipu: int, step: Mapping[str, Any], own: Sequence[Mapping[str, Any]]
) -> tuple[float, ...]:
    """Seconds of a pass by `ACTIVITIES`. What an IPU of a pipeline does not work, it waits at a sync."""
    total = float(step["seconds"])
    causes: Mapping[str, float] = step.get("seconds_by_cause", {})
    link = min(sum(float(causes.get(name, 0.0)) for name in LINK_CAUSES), total)
    host = min(sum(float(causes.get(name, 0.0)) for name in HOST_CAUSES), total - link)
    chip = total - link - host
    if "segments" not in executable.tile_report:
        return chip, 0.0, 0.0, link, host
    updates = [u["report"] for u in executable.tile_report.get("update", ()) if int(u["ipu"]) == ipu]
    compute = exchange = sync = 0.0
    for times, reports in ((executable.accumulation_factor, [s["report"] for s in own]), (1, updates)):
        for one in reports:
            cycles = one["step"].get("by_cause", {"compute": one["step"]["cycles"]})
            scale = times * float(one["step"]["seconds"]) / (float(one["step"]["cycles"]) or 1.0)
            compute += scale * cycles.get("compute", 0)
            exchange += scale * (cycles.get("exchange", 0) + cycles.get("rearrange", 0))
            sync += scale * (cycles.get("sync", 0) + cycles.get("launch", 0))
    busy = compute + exchange + sync
    fits = min(1.0, chip / busy) if busy else 0.0  # Transfers may hide behind work.
    compute, exchange = compute * fits, exchange * fits
    return compute, exchange, max(chip - compute - exchange, 0.0), link, host


def _collective_bytes(executable: Executable) -> int:
    """Bytes that an IPU sends for the reductions of a pass: those of a ring over the replicas, for the arenas on it."""
    replicas, layout = executable.layout.replicas, executable.layout
    if replicas == 1:
        return 0
    names = [
        (i.arena, 2 if isinstance(i, AllReduce) else 1)
        for i in executable.instructions[0]
        if isinstance(i, ReduceScatter | AllReduce | AllGather)
    ]
    total = sum(
        times * executable.arenas[name].size * numpy_dtype(executable.arenas[name].dtype).itemsize
        for name, times in names
    )
    return total * (replicas - 1) // replicas // layout.ipus_per_replica


def _stream_bytes(executable: Executable, work: Sequence[Instruction]) -> int:
    streams = executable.streams
    return sum(
        streams[i.stream].spec.nbytes * i.count for i in work if isinstance(i, LoadStream | StoreStream)
    )


@dataclass(slots=True)
class TrafficCounters:
    """Counters of one IPU since its machine took its place: bytes out on IPU-Links, bytes on the host link, and packets
    that a degraded link sent again."""

    link_bytes: int = 0
    host_bytes: int = 0
    link_errors: float = 0.0

    def add(self, activity: BatchActivity, batches: int, error_rate: float = 0.0) -> None:
        """Count ``batches`` batches; ``error_rate``: share of packets that are sent again."""
        self.link_bytes += activity.link_bytes * batches
        self.host_bytes += activity.host_bytes * batches
        if error_rate:
            packets = activity.link_bytes * batches / PACKET_BYTES
            self.link_errors += packets * error_rate / (1.0 - error_rate)


WINDOW_S = 1.0
PAUSE_S = 0.1
"""Seconds of the host's clock between two runs after which IPUs count as idle."""
_KEPT = 256


@dataclass(frozen=True, slots=True)
class _Run:
    """A run from ``start`` to ``stop`` by the host's clock. ``modelled_s``: None without a model; ``split``: see
    `BatchActivity`, for each IPU of a replica."""

    start: float
    stop: float
    modelled_s: float | None
    split: tuple[BatchActivity, ...] | None

    def pause_until(self, later: float) -> float:
        """Seconds from the run's end to ``later``, if that is a pause."""
        gap = later - self.stop
        return gap if gap > max(PAUSE_S, self.stop - self.start) else 0.0


class Usage:
    """What the IPUs of one host process did since ``begin`` (seconds): in the last second, and in all."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._paused = 0.0
        self._runs: deque[_Run] = deque([_Run(begin, begin, None, None)], maxlen=_KEPT)
        """The first one stands for the attaching: the time to the first run is a pause."""
        self._now: tuple[float, Callable[[], float | None], tuple[BatchActivity, ...] | None] | None = None

    def start(
        self, start: float, modelled_s: Callable[[], float | None], split: tuple[BatchActivity, ...] | None
    ) -> None:
        """A run begins; ``modelled_s`` tells how many modelled seconds of it are done, whenever it is asked."""
        self._now = (start, modelled_s, split)

    def add(
        self,
        start: float,
        stop: float,
        modelled_s: float | None = None,
        split: tuple[BatchActivity, ...] | None = None,
    ) -> None:
        """A run took from ``start`` to ``stop``; runs come in order."""
        self._now = None
        self._paused += self._runs[-1].pause_until(start)
        self._runs.append(_Run(start, stop, modelled_s, split))

    def _all_runs(self, now: float) -> list[_Run]:
        if self._now is None:
            return list(self._runs)
        start, modelled_s, split = self._now
        return [*self._runs, _Run(start, max(now, start), modelled_s(), split)]

    def shares(self, now: float, ipu: int = 0) -> tuple[float | None, ...]:
        """The share (0 to 1) of each of `ACTIVITIES` in the last second, or in the time since the beginning if that is
        less; of IPU ``ipu`` of a replica. None for all where a program without a model ran."""
        since, busy = now - WINDOW_S, self.recent_percent(now) / 100
        by_activity, whole = [0.0] * len(ACTIVITIES), 0.0
        for run in self._all_runs(now):
            inside = min(run.stop, now) - max(run.start, since)
            if inside <= 0:
                continue
            if run.split is None or run.modelled_s is None:
                return (None,) * len(ACTIVITIES)
            parts = run.split[ipu % len(run.split)].seconds
            # A run under way whose first batch is not done yet counts as much as its time by the host's clock.
            weight = (run.modelled_s or inside) * inside / (run.stop - run.start) / (sum(parts) or 1.0)
            for k, part in enumerate(parts):
                by_activity[k] += weight * part
                whole += weight * part
        return tuple(busy * part / whole if whole else 0.0 for part in by_activity)

    def recent_percent(self, now: float) -> float:
        """Share of the last second (or of the time since the beginning, if that is less) without pauses, 0 to 100."""
        runs, since = self._all_runs(now), max(now - WINDOW_S, self._begin)
        ends = [run.start for run in runs[1:]] + [now]
        idle = 0.0
        for run, end in zip(runs, ends, strict=True):
            if run.pause_until(end):
                idle += max(end - max(run.stop, since), 0.0)
        return 100.0 - _percent(idle, now - since) if now > since else 0.0

    def session_percent(self, now: float) -> float:
        """Share of the time since the beginning without pauses, 0 to 100."""
        last = now if self._now is None else self._now[0]
        idle = self._paused + self._runs[-1].pause_until(last)
        return 100.0 - _percent(idle, now - self._begin) if now > self._begin else 0.0


def _percent(part: float, whole: float) -> float:
    return min(max(100.0 * part / whole, 0.0), 100.0) if whole > 0 else 0.0
