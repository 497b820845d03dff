"""Goodput: how much of a launch's time went into batches that count, and where the rest went.

`progress_of` says where an instance's training was at each of its events: which batches count, and which were repeated.
The batch of a run is that of the checkpoint it resumed from plus the batches run since. A program without
`podrun.checkpoint` counts as going back, after an error or a new start, to the last run with the same inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from podrun.core.quick_dataclass import dataclass
from podrun.record.events import LAUNCH, SERVICE, Event, TimedEvent


@dataclass(slots=True)
class DoneRun:
    """A run without error. ``place``: of its ``ran`` among the instance's events. ``lost``: it was repeated later."""

    place: int
    batch: int
    batches: int
    inputs: Mapping[str, Any]
    lost: bool = False


@dataclass(slots=True)
class TrainingProgress:
    """``runs`` in order; ``lost_at``: by place of the event that went back, how many batches were lost."""

    runs: list[DoneRun]
    lost_at: dict[int, int]


def progress_of(events: Iterable[Event]) -> TrainingProgress:
    """The progress of one instance, from its events."""
    follower = _Follower()
    for place, event in enumerate(events):
        follower.see(place, event)
    return TrainingProgress(follower.runs, follower.lost_at)


class _Follower:
    def __init__(self) -> None:
        self.runs: list[DoneRun] = []
        self.lost_at: dict[int, int] = {}
        self._batch = 0
        self._life = 0
        self._unsure = False
        """True after an error or a new start, until the events show where the program goes on."""
        self._inputs: Mapping[str, Any] = {}

    def see(self, place: int, event: Event) -> None:
        if event.life != self._life:
            self._life, self._unsure = event.life, True
        if event.kind == "resumed":
            self._go_back(place, int(event.data.get("batch", 0)))
        elif event.kind == "error":
            self._unsure = True
        elif event.kind == "run":
            self._inputs = event.data.get("inputs", {})
            if self._unsure:
                self._go_back(place, self._batch_of_same_inputs())
        elif event.kind == "ran":
            batches = int(event.data.get("batches", 0))
            self.runs.append(DoneRun(place, self._batch, batches, self._inputs))
            self._batch += batches

    def _go_back(self, place: int, batch: int) -> None:
        self._unsure = False
        lost = [run for run in self.runs if not run.lost and run.batch >= batch]
        for run in lost:
            run.lost = True
        if lost:
            self.lost_at[place] = sum(run.batches for run in lost)
        self._batch = batch

    def _batch_of_same_inputs(self) -> int:
        for run in reversed(self.runs):
            if not run.lost and run.inputs == self._inputs and self._inputs:
                return run.batch
        return self._batch


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
        """The share of useful time and what took the rest, in one sentence."""
        share = self.useful_seconds / self.total_seconds if self.total_seconds > 0 else 0.0
        again = f" ({self.recomputed_batches} batches)" if self.recomputed_batches else ""
        return (
            f"goodput: {share:.1%} of {self.total_seconds:.2f} s: useful {self.useful_seconds:.2f} s ({self.batches} "
            f"batches), recomputed {self.recomputed_seconds:.2f} s{again}, detecting {self.detecting_seconds:.2f} s, "
            f"recovering {self.recovering_seconds:.2f} s, waiting {self.waiting_seconds:.2f} s"
        )

    @property
    def plain(self) -> dict[str, Any]:
        """The shares of time as values of JSON."""
        return {"schema_version": SCHEMA, **asdict(self)}


def goodput_of(events: Sequence[TimedEvent], *, incidents: int = 0) -> Goodput | None:
    """The goodput of a launch with these events, in causal order; None if no instance ran anything."""
    if not events:
        return None
    start = min(timed.seconds for timed in events)
    end = max(timed.seconds for timed in events)
    actors = sorted({timed.event.actor for timed in events} - {LAUNCH, SERVICE})
    spent = [_of_one([timed for timed in events if timed.event.actor == actor], events) for actor in actors]
    if not spent:
        return None
    count, total = len(spent), end - start
    useful, recomputed, detecting, recovering = (
        sum(instance.seconds[k] for instance in spent) / count for k in range(4)
    )
    return Goodput(
        total_seconds=total,
        useful_seconds=useful,
        recomputed_seconds=recomputed,
        detecting_seconds=detecting,
        recovering_seconds=recovering,
        waiting_seconds=max(0.0, total - useful - recomputed - detecting - recovering),
        batches=max(instance.batches for instance in spent),
        recomputed_batches=max(instance.lost for instance in spent),
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
    """When podrun learned that the instances of a life had ended."""
    ends = [t.seconds for t in events if t.event.kind == "ended" and t.event.life == last.event.life]
    return min(ends, default=last.seconds)
