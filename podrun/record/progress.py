"""How far an instance's training was at each of its events: which batches count, and which were done again.

The batch of a run is that of the checkpoint it resumed from plus the batches run since. A program that keeps no
`podrun.checkpoint` is taken to have gone back, after an error or a new start, to the last run that had the same inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from podrun.record.events import Event


@dataclass(slots=True)
class DoneRun:
    """A run that went well. ``place``: of its ``ran`` among the instance's events. ``lost``: it was done again."""

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
    """What one instance's events say."""
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
        """True after an error or a new start, until it is clear where the program goes on."""
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
