"""Incidents: what went wrong in a launch, with its evidence, the suspected component and its cost.

An incident is one strike of a fault with the errors that it explains. Errors that no fault explains, between two runs
that went well, are one. Incidents are made from a record alone, so a replay with the same events gives the same
incidents to the byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from podrun.core.error_codec import cause_from_dict
from podrun.core.quick_dataclass import dataclass
from podrun.faults import FaultSpec, FaultTarget
from podrun.record.events import LAUNCH, SERVICE, Event, Record
from podrun.record.goodput import progress_of
from podrun.record.strikes import explains

SCHEMA = 1
MOST_EVIDENCE = 12


@dataclass(frozen=True, slots=True)
class Incident:
    """One incident.

    ``batch``: how far instance 0 was (batches done). ``instances``: those that reported an error. ``error``: type,
    code, where, recovery action and message of the first error. ``component``: the suspect, in words. ``action``: what
    was done. ``evidence``: events in words, in causal order. ``lost_batches``: batches that each instance repeated.
    ``stalled_seconds``: for which the fault was planned to stall something. ``final``: no instance went on after it.
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
    stalled_seconds: float = 0.0
    final: bool = False

    @property
    def text(self) -> str:
        """The incident in one sentence."""
        error = dict(self.error)
        cause = f" (fault {', '.join(self.faults)})" if self.faults else ""
        batches = f"{self.lost_batches} batch{'' if self.lost_batches == 1 else 'es'} lost"
        if self.final and self.batch:
            batches = "what was computed since the last checkpoint is lost"
        if self.stalled_seconds:
            batches += f", {self.stalled_seconds:g} s stalled"
        return (
            f"{self.id}: {error['message']}{cause}; after {self.batch} batches; suspected: {self.component}; "
            f"{self.action}; {batches}"
        )

    @property
    def plain(self) -> dict[str, Any]:
        """The incident as values of JSON."""
        return {
            "id": self.id,
            "faults": list(self.faults),
            "batch": self.batch,
            "instances": list(self.instances),
            "error": dict(self.error),
            "component": self.component,
            "action": self.action,
            "evidence": list(self.evidence),
            "cost": {"lost_batches": self.lost_batches, "stalled_seconds": self.stalled_seconds},
        }


def incidents_json(record: Record) -> str:
    """The incidents of a record as JSON text; equal records give equal bytes."""
    document = {"schema_version": SCHEMA, "incidents": [incident.plain for incident in incidents_of(record)]}
    return json.dumps(document, indent=2) + "\n"


def incidents_of(record: Record) -> list[Incident]:
    """The incidents of a record, in order."""
    groups = _groups(record.events)
    return [
        _incident(number, group, record.events, groups[number:]) for number, group in enumerate(groups, 1)
    ]


@dataclass(slots=True)
class _Group:
    """A fault, if one was planned, and errors, by their places among all events. ``specs``: of the faults."""

    faults: list[int]
    specs: list[FaultSpec]
    errors: list[int]

    @property
    def first(self) -> int:
        """The place at which it begins."""
        return min([*self.faults, *self.errors])


def _groups(events: Sequence[Event]) -> list[_Group]:
    """In the order of their beginnings."""
    groups: list[_Group] = []
    under_way: list[_Group] = []
    for place, event in enumerate(events):
        if event.fault is not None:
            under_way.append(_Group([place], [event.fault], []))
            groups.append(under_way[-1])
        elif event.kind == "error" or _is_crash(event, events, under_way):
            group = _group_of(event, events, under_way)
            if group is None:
                group = _Group([], [], [])
                under_way.append(group)
                groups.append(group)
            group.errors.append(place)
        elif event.kind == "ran":
            under_way = [group for group in under_way if not _is_over(group, event, events)]
    return sorted(groups, key=lambda group: group.first)


def _group_of(event: Event, events: Sequence[Event], under_way: Sequence[_Group]) -> _Group | None:
    """The incident that an error belongs to: that of the fault which explains it, else the last one under way."""
    for group in reversed(under_way):
        if any(explains(spec, event) for spec in group.specs):
            return group
    return under_way[-1] if under_way else None


def _is_over(group: _Group, ran: Event, events: Sequence[Event]) -> bool:
    """True iff a run without error shows that an incident is over. After an error that is a later run, because other
    instances may complete the run in which one failed. A fault without an error is over when its own run is complete.
    """
    first = events[group.first]
    if group.errors:
        first = events[group.errors[0]]
        return (ran.life, ran.clock) > (first.life, first.clock)
    return (ran.life, ran.clock) >= (first.life, first.clock)


def _is_crash(event: Event, events: Sequence[Event], under_way: Sequence[_Group]) -> bool:
    """True iff an instance ended without reporting why: by a signal, or a failure of its own."""
    if event.kind != "ended" or not event.data.get("code"):
        return False
    said = [place for group in under_way for place in group.errors]
    return not any(events[place].life == event.life for place in said)


def _incident(number: int, group: _Group, events: Sequence[Event], after: Sequence[_Group]) -> Incident:
    first = events[group.errors[0]] if group.errors else events[group.first]
    refused = _refusal_before(events, group)
    heard = sorted({_instance(events[place]) for place in group.errors})
    faults = tuple(spec.text for spec in group.specs)
    end = min((g.first for g in after if g.errors), default=len(events))
    watched = f"instance {heard[0] if heard and heard[0] >= 0 else 0}"
    batch, lost = _progress(events, watched, group.first, end)
    batch += _batches_of_failed_run(events, group)
    error = _error(refused or first, faults)
    name = hashlib.sha256(json.dumps([number, faults, batch, error]).encode()).hexdigest()[:8]
    return Incident(
        id=f"incident-{number}-{name}",
        faults=faults,
        batch=batch,
        instances=tuple(instance for instance in heard if instance >= 0),
        error=error,
        component=_ended_from_outside(events, first) or _component(refused or first, faults),
        action=_action(events, group, end),
        evidence=tuple(_evidence(events, group, end)[:MOST_EVIDENCE]),
        lost_batches=lost if group.errors else 0,
        stalled_seconds=sum(spec.number("seconds") for spec in group.specs),
        final=bool(group.errors) and not _goes_on(events[group.errors[-1] :]),
    )


def _goes_on(events: Sequence[Event]) -> bool:
    """True iff a launch starts instances again, or one of them goes on, after an error."""
    return any(event.kind in ("restart", "load", "resumed") for event in events)


def _refusal_before(events: Sequence[Event], group: _Group) -> Event | None:
    """The last refusal of broken IPUs to an instance that then ended without IPUs and without an error of its own."""
    if not group.errors or events[group.errors[0]].kind != "ended":
        return None
    ended = events[group.errors[0]]
    instance = f"instance {ended.data.get('instance')}"
    own = [
        e for e in events if (e.actor, e.life) == (instance, ended.life) and e.kind in ("attach", "refused")
    ]
    return own[-1] if own and own[-1].kind == "refused" else None


def _batches_of_failed_run(events: Sequence[Event], group: _Group) -> int:
    """The batches that a run of several had done when it failed, as the cause of its error says."""
    if not group.errors:
        return 0
    error = events[group.errors[0]]
    cause = cause_from_dict(error.data.get("cause"))
    runs = [e for e in events[: group.errors[0]] if e.actor == error.actor and e.kind == "run"]
    if cause is None or cause.batch is None or error.data.get("during") != "run" or not runs:
        return 0
    done = cause.batch - int(runs[-1].data.get("batch", 0))
    return done if 0 <= done < int(runs[-1].data.get("batches", 1)) else 0


def _evidence(events: Sequence[Event], group: _Group, end: int) -> list[str]:
    """Events in words: the fault, the first error of each instance (later ones may depend on which process was faster),
    and what the service did until the next run without error. Its time is left out: it is no operation of instances.
    """
    evidence = []
    for place in sorted([*group.faults, *group.errors]):
        event = events[place]
        if event.fault is not None and event.fault.target is FaultTarget.SERVICE:
            evidence.append(f"{SERVICE}: fault {event.fault.text}")
        elif event.fault is not None or not any(
            events[other].actor == event.actor for other in group.errors if other < place
        ):
            evidence.append(event.text)
    refused = _refusal_before(events, group)
    if refused is not None:
        evidence.insert(0, refused.text)
    first = events[group.first]
    for event in events[group.first : end]:
        if event.kind == "ran" and (event.life, event.clock) > (first.life, first.clock):
            break
        if event.kind == "control" and event.data.get("did") in _CHANGES:
            why = f" ({event.data['why']})" if "why" in event.data else ""
            evidence.append(f"{SERVICE}: {event.data['did']} {event.data.get('what', '')}".rstrip() + why)
    return evidence


_CHANGES = ("partition reset", "IPUs reset", "machine power-cycled", "machine lost", "machine replaced")
"""What the service does that an incident tells."""


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
    if event.kind in ("error", "refused"):
        names = ("error", "code", "where", "action", "message")
        return tuple((name, str(event.data[name])) for name in names if name in event.data)
    if event.kind == "ended":
        return (
            ("error", "process ended"),
            ("message", f"instance {event.data.get('instance')} ended with {event.data.get('how')}"),
        )
    return (("error", "none"), ("message", f"fault {', '.join(faults)} struck, and no instance saw an error"))


def _component(event: Event, faults: Sequence[str]) -> str:
    """The component at fault: the target of the fault, else what the error's cause names."""
    if event.data.get("where"):
        return str(event.data["where"])
    if faults:
        return faults[0].partition("@")[0].replace(":", " ")
    cause = cause_from_dict(event.data.get("cause"))
    ended = (
        (event.data.get("instance"),) if event.kind == "ended" else () if cause is None else cause.instances
    )
    if ended:
        return f"instance {', '.join(map(str, ended))}: the program or its host"
    return "the program"


def _ended_from_outside(events: Sequence[Event], first: Event) -> str:
    """What ended the machines that the service lost at the time of an error, in words: not the machines, but something
    of their host that the service knows. Empty if there is no such thing.
    """
    cause = cause_from_dict(first.data.get("cause"))
    if cause is None or cause.machine is None or cause.fault is not None:
        return ""
    lost = [e for e in events if e.kind == "control" and "why" in e.data and e.life == first.life]
    ended: dict[str, list[str]] = {}
    for event in lost:
        ended.setdefault(str(event.data["why"]), []).append(str(event.data.get("what", "")))
    return "; ".join(
        f"machine{'s' * (len(agents) > 1)} {', '.join(agents)}: {why}" for why, agents in ended.items()
    )


_DECISIONS = ("restart", "repair", "verdict")
"""What a launch notes about a recovery."""


def _is_acted_on(events: Sequence[Event]) -> bool:
    """True iff a launch recovers, or gives up, before instances use their IPUs again."""
    kinds = (event.kind for event in events)
    return next(
        (kind in _DECISIONS for kind in kinds if kind in (*_DECISIONS, "ran", "load", "attach")), False
    )


def _action(events: Sequence[Event], group: _Group, end: int) -> str:
    """What was done about it, according to the events after it."""
    done = []
    last = max([*group.faults, *group.errors])
    in_reset = any(spec.during == "partition-reset" for spec in group.specs)
    is_quiet = not group.errors and not (in_reset and _is_acted_on(events[last:]))
    if is_quiet and any(event.kind in ("ran", "load", "attach") for event in events[last:]):
        return "none was needed"
    for event in events[last:end]:
        if event.actor == LAUNCH and event.kind in _DECISIONS:
            done.append(str(event.data.get("text", event.kind)))
        elif event.kind == "load" and "the program was loaded again" not in done:
            done.append("the program was loaded again")
        elif event.kind == "resumed":
            text = f"resumed from batch {event.data.get('batch')}"
            if text not in done:
                done.append(text)
    return ", ".join(done) or "the launch ended"
