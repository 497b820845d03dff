"""Goodput: of a launch's time, how much went into batches that count, and where the rest went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from podrun.record.events import LAUNCH
from podrun.record.merge import TimedEvent
from podrun.record.progress import progress_of

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Goodput:
    """Seconds of wall time, the mean over instances; they add up to ``total_seconds``.

    ``useful``: in runs whose batches count. ``recomputed``: in runs whose batches were lost and done again.
    ``detecting``: from the start of a run that failed to its error, or from an instance's last event to its end.
    ``recovering``: from there to the next run. ``waiting``: the rest: starting, compiling, data, saving.
    """

    total_seconds: float
    useful_seconds: float
    recomputed_seconds: float
    detecting_seconds: float
    recovering_seconds: float
    waiting_seconds: float
    batches: int
    recomputed_batches: int
    incidents: int = 0

    @property
    def text(self) -> str:
        """In one sentence."""
        share = self.useful_seconds / self.total_seconds if self.total_seconds > 0 else 0.0
        again = f" ({self.recomputed_batches} batches)" if self.recomputed_batches else ""
        return (
            f"goodput: {share:.1%} of {self.total_seconds:.2f} s: useful {self.useful_seconds:.2f} s "
            f"({self.batches} batches), recomputed {self.recomputed_seconds:.2f} s{again}, "
            f"detecting {self.detecting_seconds:.2f} s, recovering {self.recovering_seconds:.2f} s, "
            f"waiting {self.waiting_seconds:.2f} s"
        )

    @property
    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"schema_version": SCHEMA, **asdict(self)}


def goodput_of(events: Sequence[TimedEvent], *, incidents: int = 0) -> Goodput | None:
    """The goodput of a launch whose events these are, in causal order; None if no instance ran anything."""
    if not events:
        return None
    start = min(timed.seconds for timed in events)
    end = max(timed.seconds for timed in events)
    actors = sorted({timed.event.actor for timed in events} - {LAUNCH})
    each = [_of_one([timed for timed in events if timed.event.actor == actor], events) for actor in actors]
    if not each:
        return None
    count, total = len(each), end - start
    useful, recomputed, detecting, recovering = (
        sum(found.seconds[k] for found in each) / count for k in range(4)
    )
    return Goodput(
        total_seconds=total,
        useful_seconds=useful,
        recomputed_seconds=recomputed,
        detecting_seconds=detecting,
        recovering_seconds=recovering,
        waiting_seconds=max(0.0, total - useful - recomputed - detecting - recovering),
        batches=max(found.batches for found in each),
        recomputed_batches=max(found.lost for found in each),
        incidents=incidents,
    )


@dataclass(frozen=True, slots=True)
class _Spent:
    """``seconds``: useful, recomputed, detecting, recovering."""

    seconds: tuple[float, float, float, float]
    batches: int
    lost: int


def _of_one(own: Sequence[TimedEvent], events: Sequence[TimedEvent]) -> _Spent:
    progress = progress_of([timed.event for timed in own])
    lost = {run.place for run in progress.runs if run.lost}
    useful = recomputed = detecting = recovering = 0.0
    began: float | None = None
    failed: float | None = None
    for place, timed in enumerate(own):
        if place and timed.event.life != own[place - 1].event.life and failed is None:
            last = own[place - 1]
            failed = _end_of_life(last, events)
            detecting += max(0.0, failed - (last.seconds if began is None else began))
        match timed.event.kind:
            case "run":
                began = timed.seconds
                if failed is not None:
                    recovering += max(0.0, timed.seconds - failed)
                    failed = None
            case "ran" if began is not None:
                if place in lost:
                    recomputed += timed.seconds - began
                else:
                    useful += timed.seconds - began
                began = None
            case "error":
                if began is not None:
                    detecting += timed.seconds - began
                    began = None
                failed = timed.seconds if failed is None else failed
    kept = [run for run in progress.runs if not run.lost]
    batches = sum(run.batches for run in kept)
    return _Spent(
        (useful, recomputed, detecting, recovering),
        batches,
        sum(run.batches for run in progress.runs) - batches,
    )


def _end_of_life(last: TimedEvent, events: Sequence[TimedEvent]) -> float:
    """When podrun knew that the instances of a life had ended."""
    ends = [t.seconds for t in events if t.event.kind == "ended" and t.event.life == last.event.life]
    return min(ends, default=last.seconds)
