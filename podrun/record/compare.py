"""The difference between two records: the first event that is not the same in both.

`smallest` is the smallest part of a plan that still fails: delta debugging (Zeller and Hildebrandt, 2002).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from podrun.core.quick_dataclass import dataclass
from podrun.record.events import Event, Record


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference. ``number``: of the event, from 1. ``ours`` and ``theirs``: the events there; None: the
    record has ended. ``fields``: the names of the fields that differ, with dots (``data.inputs.x``).
    """

    number: int
    ours: Event | None
    theirs: Event | None
    fields: tuple[str, ...]

    @property
    def text(self) -> str:
        """The difference in words, on several lines."""
        lines = [f"event {self.number} differs" + (f" in {', '.join(self.fields)}" if self.fields else "")]
        for name, event in (("A", self.ours), ("B", self.theirs)):
            lines.append(f"  {name}: {'(the record ends)' if event is None else event.text}")
        return "\n".join(lines)


def first_difference(ours: Record, theirs: Record) -> Difference | None:
    """The first event that differs; None for records of the same events."""
    for number, (a, b) in enumerate(zip_longest(ours.events, theirs.events), 1):
        if a != b:
            fields = () if a is None or b is None else tuple(_fields(_plain(a), _plain(b), ""))
            return Difference(number, a, b, fields)
    return None


def header_differences(ours: Record, theirs: Record) -> list[str]:
    """How the starts of the two launches differ, in words."""
    lines = []
    for name in ("words", "faults", "directory"):
        a, b = getattr(ours.header, name), getattr(theirs.header, name)
        if a != b:
            shown = [" ".join(map(str, value)) if isinstance(value, tuple) else value for value in (a, b)]
            lines.append(f"{name}: {shown[0] or 'none'} / {shown[1] or 'none'}")
    return lines


def _plain(event: Event) -> dict[str, Any]:
    return {
        "actor": event.actor,
        "life": event.life,
        "clock": event.clock,
        "kind": event.kind,
        "data": dict(event.data),
    }


def _fields(a: object, b: object, place: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        names = [*a, *(name for name in b if name not in a)]
        return [
            field
            for name in names
            for field in _fields(a.get(name), b.get(name), f"{place}.{name}" if place else name)
        ]
    return [] if a == b else [place]


T = TypeVar("T")


def smallest(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """A subset, in order, for which ``fails`` holds and stops holding if any one item is removed.

    ``fails`` has to hold for all items, and is called once for each subset that is tried.
    """
    known: dict[tuple[int, ...], bool] = {}

    def still(chosen: Sequence[int]) -> bool:
        key = tuple(chosen)
        if key not in known:
            known[key] = fails([items[place] for place in chosen])
        return known[key]

    left, parts = list(range(len(items))), 2
    if left and still([]):
        return []
    while len(left) > 1:
        groups = _groups(left, parts)
        others = [[place for place in left if place not in group] for group in groups]
        part = next((group for group in groups if still(group)), None)
        if part is not None:
            left, parts = part, 2
            continue
        rest = next((other for other in others if len(groups) > 2 and still(other)), None)
        if rest is not None:
            left, parts = rest, max(parts - 1, 2)
            continue
        if parts >= len(left):
            break
        parts = min(2 * parts, len(left))
    return [items[place] for place in left]


def _groups(places: Sequence[int], parts: int) -> list[list[int]]:
    """``places`` in ``parts`` groups of about the same size."""
    bounds = [len(places) * k // parts for k in range(parts + 1)]
    return [list(places[a:b]) for a, b in itertools.pairwise(bounds) if b > a]
