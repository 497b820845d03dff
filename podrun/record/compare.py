"""What differs between two records: the first event that is not the same in both."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from podrun.record.events import Event, Record


@dataclass(frozen=True, slots=True)
class Difference:
    """``number``: of the event, from 1. ``ours`` and ``theirs``: what the records have there; None: nothing.

    ``fields``: the names of the fields that differ, with dots (``data.inputs.x``).
    """

    number: int
    ours: Event | None
    theirs: Event | None
    fields: tuple[str, ...]

    @property
    def text(self) -> str:
        """In words, on several lines."""
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
    """How the launches were started differently, in words."""
    found = []
    for name in ("words", "faults", "directory"):
        a, b = getattr(ours.header, name), getattr(theirs.header, name)
        if a != b:
            shown = [" ".join(value) if isinstance(value, tuple) else value for value in (a, b)]
            found.append(f"{name}: {shown[0] or 'none'} / {shown[1] or 'none'}")
    return found


def _plain(event: Event) -> dict[str, Any]:
    return {
        "actor": event.actor,
        "life": event.life,
        "clock": event.clock,
        "kind": event.kind,
        "data": dict(event.data),
    }


def _fields(a: Any, b: Any, place: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        names = [*a, *(name for name in b if name not in a)]
        return [
            field
            for name in names
            for field in _fields(a.get(name), b.get(name), f"{place}.{name}" if place else name)
        ]
    return [] if a == b else [place]
