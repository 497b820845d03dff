"""How well a drill went: points for the diagnosis in time, less for wrong answers, hints and damage. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from podrun.core.quick_dataclass import dataclass
from podrun.core.telemetry import ControlEvent
from podrun.drill.scenario import DrillScenario, normal_answer

FULL = 100
WRONG_ANSWER, HINT, DAMAGE = 10, 10, 15
"""Points that each costs."""
LATE = 60
"""Points that are lost between par and limit."""


class Judgement(enum.StrEnum):
    """How far an answer names what broke and where."""

    RIGHT = "right"
    PLACE = "right place, wrong kind"
    KIND = "right kind, wrong place"
    WRONG = "wrong"


def judge(scenario: DrillScenario, answer: str) -> Judgement:
    """Hold an answer against the right ones."""
    normal = normal_answer(answer)
    if normal in scenario.answers:
        return Judgement.RIGHT
    target, place, kind = (*normal.split(":"), "", "")[:3]
    rights = [right.split(":") for right in scenario.answers]
    if any((target, place) == (right[0], right[1]) for right in rights):
        return Judgement.PLACE
    if any((target, kind) == (right[0], right[2]) for right in rights):
        return Judgement.KIND
    return Judgement.WRONG


@dataclass(frozen=True, slots=True)
class DrillScore:
    """The result. ``seconds``: from the first strike to the right answer (with repair: to the healthy POD); None if
    there was none. ``damage``: changes of the POD that did not help, in words."""

    drill: str
    solved: bool
    seconds: float | None
    wrong_answers: int
    hints: int
    damage: tuple[str, ...]
    points: int

    def plain(self) -> dict[str, Any]:
        """The score as values of JSON."""
        return asdict(self)


def score_drill(
    scenario: DrillScenario, seconds: float | None, wrong_answers: int, hints: int, damage: Sequence[str]
) -> DrillScore:
    """Full points up to the par time, then fewer and fewer up to the limit, and none without a diagnosis."""
    points = 0.0
    if seconds is not None:
        over = max(seconds - scenario.par_s, 0.0) / max(scenario.limit_s - scenario.par_s, 1e-9)
        points = FULL - LATE * min(over, 1.0)
        points -= WRONG_ANSWER * wrong_answers + HINT * hints + DAMAGE * len(damage)
    return DrillScore(
        scenario.name,
        seconds is not None,
        None if seconds is None else round(seconds, 1),
        wrong_answers,
        hints,
        tuple(damage),
        max(round(points), 0),
    )


def collateral_damage(
    scenario: DrillScenario,
    events: Mapping[str, Iterable[ControlEvent]],
    ended_jobs: Iterable[str],
) -> list[str]:
    """Changes of partitions after the drill began that its file does not allow. ``events``: of the control log, by
    partition; ``ended_jobs``: partitions whose job ended although no fault ends it."""
    changes = [
        f"{event.did} {event.what}".strip() + f" (partition {partition})"
        for partition, told in events.items()
        for event in told
        if event.did not in (*scenario.allowed, "machine lost")
    ]
    return [*changes, *(f"the job of partition {partition} ended" for partition in ended_jobs)]
