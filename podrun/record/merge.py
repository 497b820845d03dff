"""From the files of a launch's processes to one record, and to the times that goodput is counted from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from podrun.faults import FaultTarget, error_for, parse_fault
from podrun.record.events import LAUNCH, Event, causal_order, normalised

_NAME = re.compile(r"(?:instance-(\d{1,6})|launch)\.\d{1,6}\.\d{1,10}\.jsonl", re.ASCII)
AT_END = -1
"""The clock of an event of podrun's that comes after all that the instances of its life do."""


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """An event, and when its process wrote it: seconds of the wall clock."""

    event: Event
    seconds: float


def read_parts(folder: Path) -> list[TimedEvent]:
    """The events of all processes of a launch, in causal order, without a line that a killed process did not end."""
    found: list[TimedEvent] = []
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            actor = LAUNCH if match[1] is None else f"instance {int(match[1])}"
            found += [_timed(line, actor) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    return ordered(found)


def _timed(line: str, actor: str) -> TimedEvent:
    fields = json.loads(line)
    return TimedEvent(
        Event(actor, fields["life"], fields["clock"], fields["kind"], fields["data"]), fields["time"]
    )


def ordered(events: Iterable[TimedEvent]) -> list[TimedEvent]:
    """Events in causal order; those of podrun's with the clock `AT_END` after all others of their life."""
    given = list(events)
    last: dict[int, int] = {}
    for timed in given:
        last[timed.event.life] = max(last.get(timed.event.life, 0), timed.event.clock)
    placed = [
        TimedEvent(_at(t.event, last[t.event.life] + 1), t.seconds) if t.event.clock == AT_END else t
        for t in given
    ]
    seconds = {id(timed.event): timed.seconds for timed in placed}
    return [
        TimedEvent(event, seconds[id(event)]) for event in causal_order([timed.event for timed in placed])
    ]


def _at(event: Event, clock: int) -> Event:
    return Event(event.actor, event.life, clock, event.kind, event.data)


def without_ends_after_errors(events: Sequence[TimedEvent]) -> list[TimedEvent]:
    """The events without ends of instances that have said why: which of them ended first is a matter of luck."""
    said = {timed.event.life for timed in events if timed.event.kind == "error"}
    return [t for t in events if t.event.kind != "ended" or t.event.life not in said]


def with_faults(events: Sequence[TimedEvent], struck: Iterable[str]) -> list[TimedEvent]:
    """The events with one for each fault that struck, right before the first error that it explains.

    A fault whose error nobody heard, such as one in the last batch of a killed launch, comes at the end.
    """
    errors = [timed for timed in events if timed.event.kind in ("error", "ended")]
    found = list(events)
    for text in struck:
        cause = next((timed for timed in errors if _explains(text, timed.event)), None)
        if cause is not None:
            errors = [
                timed for timed in errors if not _is_of_same_operation(cause.event, timed.event)
            ] or errors
            fault = Event(LAUNCH, cause.event.life, cause.event.clock, "fault", {"fault": text})
            found.append(TimedEvent(fault, cause.seconds))
        else:
            life = max((timed.event.life for timed in events), default=0)
            end = max((timed.event.clock for timed in events if timed.event.life == life), default=0)
            seconds = max((timed.seconds for timed in events), default=0.0)
            found.append(TimedEvent(Event(LAUNCH, life, end, "fault", {"fault": text}), seconds))
    return ordered(found)


def _is_of_same_operation(first: Event, other: Event) -> bool:
    return (other.life, other.clock) == (first.life, first.clock)


_IN_BATCH = re.compile(r"\bin batch \d+")


def _explains(text: str, event: Event) -> bool:
    """True iff an error, or the end of an instance, is what a fault gives rise to."""
    spec = parse_fault(text)
    where = str(event.data.get("where", ""))
    if event.kind == "ended":
        return spec.target is FaultTarget.INSTANCE and event.data.get("instance") in spec.indices
    if not spec.raises:
        return (
            spec.kind == "corrupt" and event.data.get("during") == "check" and _names(where, spec.indices[0])
        )
    error = error_for(spec)
    if event.data.get("error") != error.type:
        return False
    messages = (normalised(error.message), str(event.data.get("message")))
    if len({_IN_BATCH.sub("in a batch", message) for message in messages}) == 1:
        return True
    return spec.kind == "lost" and where == error.where


def _names(where: str, ipu: int) -> bool:
    """True iff ``ipus 4-7, ipu 9`` names an IPU."""
    ranges = re.findall(r"ipus? (\d+)(?:-(\d+))?", where)
    return any(int(first) <= ipu <= int(last or first) for first, last in ranges)
