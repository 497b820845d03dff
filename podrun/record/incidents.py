"""Incidents: what went wrong in a launch, with its evidence, the suspected component and its cost.

An incident is all errors between two runs without error. It is made from a record alone, so a replay with the same
events gives the same incidents to the byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from podrun.record.events import LAUNCH, SERVICE, Event, Record
from podrun.record.goodput import progress_of

SCHEMA = 1
MOST_EVIDENCE = 12


@dataclass(frozen=True, slots=True)
class Incident:
    """One incident.

    ``batch``: how far instance 0 was (batches done). ``instances``: those that reported an error. ``error``: type,
    code, where, recovery action and message of the first error. ``component``: the suspect, in words. ``action``: what
    was done. ``evidence``: events in words, in causal order. ``lost_batches``: batches that each instance repeated.
    """

    id: str
    faults: tuple[str, ...]
    batch: int
    instances: tuple[int, ...]
    error: tuple[tuple[str, str], ...]
    component: str
    action: str
    evidence: tuple[str, ...]
    lost_batches: int

    @property
    def text(self) -> str:
        """In one sentence."""
        error = dict(self.error)
        cause = f" (fault {', '.join(self.faults)})" if self.faults else ""
        batches = f"{self.lost_batches} batch{'' if self.lost_batches == 1 else 'es'} lost"
        return (
            f"{self.id}: {error['message']}{cause}; after {self.batch} batches; suspected: {self.component}; "
            f"{self.action}; {batches}"
        )

    @property
    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "id": self.id,
            "faults": list(self.faults),
            "batch": self.batch,
            "instances": list(self.instances),
            "error": dict(self.error),
            "component": self.component,
            "action": self.action,
            "evidence": list(self.evidence),
            "cost": {"lost_batches": self.lost_batches},
        }


def incidents_json(record: Record) -> str:
    """The incidents of a record as JSON text; equal records give equal bytes."""
    found = {"schema_version": SCHEMA, "incidents": [incident.plain for incident in incidents_of(record)]}
    return json.dumps(found, indent=2) + "\n"


def incidents_of(record: Record) -> list[Incident]:
    """The incidents of a record, in order."""
    groups = list(_groups(record.events))
    return [
        _incident(number, group, record.events, groups[number : number + 1])
        for number, group in enumerate(groups, 1)
    ]


@dataclass(slots=True)
class _Group:
    """Faults and errors, by their places among all events."""

    faults: list[int]
    errors: list[int]


def _groups(events: Sequence[Event]) -> Iterator[_Group]:
    group = _Group([], [])
    for place, event in enumerate(events):
        if event.kind == "fault":
            group.faults.append(place)
        elif event.kind == "error" or _is_crash(event, events[:place], group):
            group.errors.append(place)
        elif event.kind == "ran" and (group.errors or group.faults):
            # A run that other instances of a joint operation complete is no sign of recovery.
            first = events[(group.errors or group.faults)[0]]
            if (event.life, event.clock) > (first.life, first.clock):
                yield group
                group = _Group([], [])
    if group.errors or group.faults:
        yield group


def _is_crash(event: Event, before: Sequence[Event], group: _Group) -> bool:
    """True iff an instance ended without reporting why: by a signal, or a failure of its own."""
    if event.kind != "ended" or not event.data.get("code"):
        return False
    return not any(before[place].life == event.life for place in group.errors)


def _incident(number: int, group: _Group, events: Sequence[Event], after: Sequence[_Group]) -> Incident:
    places = sorted([*group.faults, *group.errors])
    first = events[group.errors[0]] if group.errors else events[places[0]]
    heard = sorted({_instance(events[place]) for place in group.errors})
    faults = tuple(str(events[place].data["fault"]) for place in group.faults)
    end = min((min([*g.faults, *g.errors]) for g in after), default=len(events))
    watched = f"instance {heard[0] if heard and heard[0] >= 0 else 0}"
    batch, lost = _progress(events, watched, places[0], end)
    error = _error(first, faults)
    evidence = []
    for (
        place
    ) in places:  # The first error of each instance: later ones may depend on which process was faster.
        event = events[place]
        if event.kind == "fault" or not any(
            events[p].actor == event.actor for p in group.errors if p < place
        ):
            evidence.append(event.text)
    name = hashlib.sha256(json.dumps([number, faults, batch, error]).encode()).hexdigest()[:8]
    return Incident(
        id=f"incident-{number}-{name}",
        faults=faults,
        batch=batch,
        instances=tuple(instance for instance in heard if instance >= 0),
        error=error,
        component=_component(first, faults),
        action=_action(events, places[-1], end),
        evidence=tuple(evidence[:MOST_EVIDENCE]),
        lost_batches=lost,
    )


def _instance(event: Event) -> int:
    if event.kind == "ended":
        return int(event.data.get("instance", -1))
    return -1 if event.actor in (LAUNCH, SERVICE) else int(event.actor.split()[1])


def _progress(events: Sequence[Event], actor: str, start: int, end: int) -> tuple[int, int]:
    """Batches that an instance had done at an event, and how many of them it lost between the two events."""
    own = [(place, event) for place, event in enumerate(events) if event.actor == actor]
    progress = progress_of([event for _, event in own])
    places = [place for place, _ in own]
    before = [run for run in progress.runs if places[run.place] < start]
    lost = sum(count for place, count in progress.lost_at.items() if start < places[place] < end)
    return (before[-1].batch + before[-1].batches if before else 0), lost


def _error(event: Event, faults: Sequence[str]) -> tuple[tuple[str, str], ...]:
    if event.kind == "error":
        names = ("error", "code", "where", "action", "message")
        return tuple((name, str(event.data[name])) for name in names if name in event.data)
    if event.kind == "ended":
        return (
            ("error", "process ended"),
            ("message", f"instance {event.data.get('instance')} ended with {event.data.get('how')}"),
        )
    return (("error", "none"), ("message", f"fault {', '.join(faults)} struck, and no instance saw an error"))


def _component(event: Event, faults: Sequence[str]) -> str:
    """The component at fault, as far as the error tells."""
    if event.kind == "ended":
        return f"instance {event.data.get('instance')}: the program or its host"
    if event.data.get("where"):
        return str(event.data["where"])
    return "the program" if not faults else faults[0].partition("@")[0].replace(":", " ")


def _action(events: Sequence[Event], last: int, end: int) -> str:
    """What was done about it, according to the events after it."""
    done = []
    for event in events[last:end]:
        if event.actor == LAUNCH and event.kind in ("restart", "repair", "verdict"):
            done.append(str(event.data.get("text", event.kind)))
        elif event.kind == "load" and "the program was loaded again" not in done:
            done.append("the program was loaded again")
        elif event.kind == "resumed":
            text = f"resumed from batch {event.data.get('batch')}"
            if text not in done:
                done.append(text)
    return ", ".join(done) or "the launch ended"
