"""A job in virtual time: in which phase it is, and where each of its nanoseconds went.

Each nanosecond belongs to exactly one bin, so that the bins sum up to the wall time. Between failures time is closed
form: a run of length E with intervals of work dt and writes that hold it up for w has done E // (dt + w) checkpoints;
no event stands for a batch or a checkpoint.
"""

from __future__ import annotations

from dataclasses import field

from podrun.core.quick_dataclass import dataclass

BINS = (
    "queue",
    "provision",
    "load",
    "useful",
    "checkpoint",
    "lost",
    "undetected",
    "repair_wait",
    "restart",
    "degraded",
)
"""Where time goes. ``useful``: work that counts; ``degraded``: what slow units and missing replicas add to it;
``lost``: work that was repeated; ``undetected``: from a failure until it is known; ``repair_wait``: for a machine."""


@dataclass(slots=True)
class RunRhythm:
    """Nanoseconds of work between writes (0: none is written), by which a write holds the job up, and after which a
    failure finds it."""

    work: int
    hold: int
    durable: int = 0

    @property
    def cycle(self) -> int:
        """Time from one checkpoint to the next: work, and writing."""
        return self.work + self.hold

    def worked(self, elapsed: int) -> int:
        """Work of a run that has gone on for so long."""
        if not self.work:
            return elapsed
        cycles, rest = divmod(elapsed, self.cycle)
        return cycles * self.work + min(rest, self.work)

    def elapsed(self, work: int) -> int:
        """How long a run takes for so much work, the writes before it included."""
        if not self.work:
            return work
        cycles, rest = divmod(work, self.work)
        return cycles * self.cycle + rest

    def kept(self, elapsed: int) -> int:
        """The length of the run up to the last checkpoint that a failure now leaves."""
        if not self.work:
            return 0
        return max(0, elapsed - self.durable) // self.cycle * self.cycle


@dataclass(slots=True)
class VirtualJob:
    """The bins of a job. ``phase``: the bin of the time that passes now, or ``running``."""

    rhythm: RunRhythm
    bins: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BINS, 0))
    phase: str = "queue"
    since: int = 0
    lost_total: int = 0
    _slow: list[tuple[int, float]] = field(default_factory=list)
    """(length of the run from which it holds, by what factor work takes longer)."""

    def enter(self, phase: str, now: int) -> None:
        """Leave a phase other than ``running`` for the next one."""
        self.bins[self.phase] += now - self.since
        self.phase, self.since = phase, now

    def begin(self, now: int, factor: float = 1.0) -> None:
        """Let the job run from ``now`` on, slower by ``factor``."""
        self.enter("running", now)
        self._slow = [(0, factor)]

    def slowed(self, now: int, factor: float) -> None:
        """Work takes longer by a factor from now on."""
        self._slow.append((now - self.since, factor))

    def broken(self, now: int, phase: str = "undetected") -> int:
        """The run ends by a failure, and work since the last checkpoint that it finds is lost; how much that is."""
        lost = self._settle(now, self.rhythm.kept(now - self.since))
        self.phase, self.since = phase, now
        return lost

    def finish(self, now: int) -> None:
        """Settle the time up to now; a run that goes on has lost nothing."""
        if self.phase == "running":
            self._settle(now, now - self.since)
            self.since = now
        else:
            self.enter(self.phase, now)

    def _settle(self, now: int, kept: int) -> int:
        """Put a run into the bins, of which the first ``kept`` nanoseconds count."""
        elapsed, rhythm = now - self.since, self.rhythm
        counted = rhythm.worked(kept)
        lost = rhythm.worked(elapsed) - counted
        useful = 0
        ends = [begin for begin, _ in self._slow[1:]] + [kept]
        for (begin, factor), end in zip(self._slow, ends, strict=True):
            part = rhythm.worked(min(end, kept)) - rhythm.worked(min(begin, kept))
            useful += part if factor == 1.0 else int(part / factor)
        self.bins["useful"] += useful
        self.bins["degraded"] += counted - useful
        self.bins["lost"] += lost
        self.bins["checkpoint"] += elapsed - counted - lost
        self.lost_total += lost
        return lost

    @property
    def counted(self) -> int:
        """Nanoseconds of work that counts, up to the last run that ended."""
        return self.bins["useful"] + self.bins["degraded"]

    @property
    def wall(self) -> int:
        """Nanoseconds of all bins: the time from the job's start to the last moment that was settled."""
        return sum(self.bins.values())
