"""Events of a launch as plain data, and the file that holds them.

A record is lines of JSON. The first line is the header: how the launch was started and which faults were planned. Each
following line is one event, in causal order. The last line has their number and SHA-256. Nothing in a record depends
on clocks, process ids, ports or the order in which processes happened to run, so that the same launch gives the same
bytes.

Causal order: each process counts its joint operations (loads and runs, which all instances of a program do together).
``life`` counts how often instances were started, ``clock`` the joint operations that a process has finished. An event
can depend on another process only if that one's ``(life, clock)`` is smaller, so sorting by them is a causal order.

`read_parts` and `ordered` bring the files of a launch's processes to one record, and to the times that goodput is
counted from.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from podrun.core.documents import read_text
from podrun.core.errors import ConfigError, NotFoundError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.core.telemetry import PROCESS_ENDED, ControlEvent
from podrun.faults import FaultSpec, parse_fault

VERSION = 1
FIRST_BYTES = b'{"podrun_record":'
"""The first bytes of a record's file."""
LARGEST_LINE = 1 << 20
AFTER = 1 << 20
"""Sorts behind all instances in the order of actors."""
LAUNCH = "launch"
"""The actor that stands for podrun itself; instances are ``instance N``."""
SERVICE = "service"
"""The actor that is the partition service."""
_ACTOR = re.compile(r"launch|service|instance \d{1,6}", re.ASCII)
_KIND = re.compile(r"[a-z-]{1,30}", re.ASCII)


_WRITE = "podrun --record FILE ... writes one."
LARGEST_RECORD = 1 << 30
"""Bytes of a record that is read."""


class RecordError(UsageError):
    """A record that differs from what was written; names the file and the line."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint or _WRITE)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened: who, when (see the module docstring), what. ``data``: JSON values by name. ``fault``:
    the fault whose strike it is, which ``data`` has as a text.
    """

    actor: str
    life: int
    clock: int
    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)
    fault: FaultSpec | None = field(default=None, compare=False)

    @property
    def text(self) -> str:
        """The event in words, for people: ``instance 1, after 17 joint operations: run batch=17 ...``."""
        said = " ".join(f"{name}={_short(value)}" for name, value in self.data.items())
        return f"{self.actor}, start {self.life}, after {self.clock} joint operations: {self.kind} {said}".rstrip()


@dataclass(frozen=True, slots=True)
class LaunchHeader:
    """How a launch was started: the words after ``podrun`` without faults and record, and where; the planned faults."""

    words: tuple[str, ...]
    directory: str
    faults: tuple[FaultSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one launch: its header and its events, in causal order."""

    header: LaunchHeader
    events: tuple[Event, ...]


_ADDRESS = r"(?:\b\d{1,3}(?:\.\d{1,3}){3}:\d+\b|\[[0-9a-f:]+\]:\d+\b|\blocalhost:\d+\b|\bADDRESS\b)"
_TIME = r"(?:\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)?|\bTIME\b)"
"""What differs between launches; earlier records hold a word in capitals in its place."""


def normalised(text: str) -> str:
    """A message without parts that differ between launches: addresses, process ids, and names that hold one."""
    text = re.sub(rf"(?<=\bIPU-M) {_ADDRESS}| at {_ADDRESS}", "", text)
    text = re.sub(_ADDRESS, "an address", text)
    text = re.sub(rf" (?:since|at) {_TIME}", "", text)
    text = re.sub(_TIME, "a time", text)
    text = re.sub(r"\bpodrun-\d+\b", "podrun-PID", text)
    text = re.sub(r"\b(its |the |a |)process (?:PID|\d+)\b", lambda m: f"{m[1] or 'a '}process", text)
    text = re.sub(r"\bpid (?:PID|\d+)\b", "pid", text)
    text = re.sub(r":launch=[0-9A-Za-z-]+", "", text)
    text = re.sub(r"(\bprocess PID \(\S+ )\S*/", r"\1", text)  # the folder of its script
    return re.sub(r"\bgeneration \d+\b", "generation N", text)


def to_lines(record: Record) -> list[str]:
    """The lines of a record's file."""
    head = {
        "podrun_record": VERSION,
        "words": list(record.header.words),
        "directory": record.header.directory,
        "faults": [fault.text for fault in record.header.faults],
    }
    lines = [_line(head)]
    for event in record.events:
        fields = {"actor": event.actor, "life": event.life, "clock": event.clock, "kind": event.kind}
        lines.append(_line(fields | {"data": dict(event.data)}))
    lines.append(_line({"events": len(record.events), "sha256": _digest(lines)}))
    return lines


def read_record(path: str | Path) -> Record:
    """The record in a file. Raises RecordError that names the line, NotFoundError if there is none."""
    place = Path(path)
    try:
        text = read_text(place, LARGEST_RECORD, hint=_WRITE)
    except NotFoundError as error:
        raise NotFoundError(f"there is no record {place}", hint=_WRITE) from error
    except ConfigError as error:
        raise RecordError(f"the record {error.message}", hint=error.hint) from error
    return parse_record(text, str(place))


def parse_record(text: str, name: str) -> Record:
    """The record in a text. Raises RecordError."""
    lines = text.split("\n")
    if not text.endswith("\n") or len(lines) < 3:
        raise RecordError(
            f"the record {name} is not whole: its last line is missing",
            hint="It was cut off, or its launch has not ended.",
        )
    lines.pop()
    parsed = [_parse(line, name, number) for number, line in enumerate(lines, 1)]
    last = parsed[-1]
    if last.keys() != {"events", "sha256"} or last["events"] != len(lines) - 2:
        raise RecordError(f"the record {name}, line {len(lines)}: this is not the end of a record")
    if last["sha256"] != _digest(lines[:-1]):
        raise RecordError(f"the record {name} was changed: its digest is not that of its lines")
    return Record(
        _header(parsed[0], name),
        tuple(_event(fields, name, number) for number, fields in enumerate(parsed[1:-1], 2)),
    )


def _parse(line: str, name: str, number: int) -> dict[str, Any]:
    try:
        if len(line) > LARGEST_LINE:
            raise ValueError(f"it is longer than {LARGEST_LINE} characters")
        fields = json.loads(line)
        if isinstance(fields, dict):
            return fields
        raise ValueError("it is no JSON object")
    except json.JSONDecodeError as error:
        if number == 1:
            raise RecordError(f"{name} is no record of a launch: its first line is no JSON") from error
        raise RecordError(f"the record {name}, line {number}: it is no JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"the record {name}, line {number}: {error}") from error


def _header(fields: Mapping[str, Any], name: str) -> LaunchHeader:
    version = fields.get("podrun_record")
    if version != VERSION:
        raise RecordError(
            f"the record {name}, line 1: this is no record of version {VERSION} (podrun_record: {version})"
        )
    words, directory, faults = (fields.get(key) for key in ("words", "directory", "faults"))
    if not _are_texts(words) or not isinstance(directory, str) or not _are_texts(faults):
        raise RecordError(f"the record {name}, line 1: words, directory or faults are missing")
    try:
        planned = tuple(parse_fault(text) for text in faults or ())
    except UsageError as error:
        raise RecordError(f"the record {name}, line 1: {error.message}", hint=error.hint) from error
    return LaunchHeader(tuple(words or ()), directory, planned)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _event(fields: Mapping[str, Any], name: str, number: int) -> Event:
    actor, kind, data = fields.get("actor"), fields.get("kind"), fields.get("data")
    life, clock = fields.get("life"), fields.get("clock")
    if (
        not (isinstance(actor, str) and _ACTOR.fullmatch(actor))
        or not (isinstance(kind, str) and _KIND.fullmatch(kind))
        or not isinstance(data, dict)
        or type(life) is not int
        or type(clock) is not int
    ):
        raise RecordError(f"the record {name}, line {number}: this is no event")
    if kind != "fault":
        return Event(actor, life, clock, kind, data)
    try:
        return Event(actor, life, clock, kind, data, parse_fault(str(data.get("fault"))))
    except UsageError as error:
        raise RecordError(f"the record {name}, line {number}: {error.message}", hint=error.hint) from error


def strike_event(life: int, clock: int, fault: FaultSpec) -> Event:
    """The event of a fault that strikes."""
    return Event(LAUNCH, life, clock, "fault", {"fault": fault.text}, fault)


def struck_faults(events: Iterable[Event]) -> list[FaultSpec]:
    """The faults that struck, each once, in the order of their first strikes."""
    return list(dict.fromkeys(event.fault for event in events if event.fault is not None))


def _line(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=True, separators=(",", ":"))


def _digest(lines: Iterable[str]) -> str:
    whole = hashlib.sha256()
    for line in lines:
        whole.update(line.encode() + b"\n")
    return whole.hexdigest()


def _short(value: object) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= 80 else text[:77] + "..."


def causal_order(events: Sequence[Event]) -> list[Event]:
    """Events of all actors in causal order; events of one actor keep their order."""

    def place(event: Event) -> tuple[int, int, int, str]:
        # podrun starts instances before, and hears of them after, all that they do; instances count with numbers. What
        # the service did comes after that which it answers to.
        order = {LAUNCH: 0, SERVICE: AFTER if event.clock else 0}.get(event.actor, len(event.actor))
        return (event.life, event.clock, order, event.actor)

    return sorted(events, key=place)


_NAME = re.compile(r"(?:instance-(\d{1,6})|launch)\.\d{1,6}\.\d{1,10}\.jsonl", re.ASCII)
AT_END = -1
"""The clock of podrun's events that come after everything that the instances of their life do."""


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """An event, and when its process wrote it: seconds of the wall clock."""

    event: Event
    seconds: float


def read_parts(folder: Path) -> list[TimedEvent]:
    """The events of all processes of a launch, in causal order, without an unfinished last line of a killed process."""
    timed: list[TimedEvent] = []
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            actor = LAUNCH if match[1] is None else f"instance {int(match[1])}"
            timed += [_timed(line, actor) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    return ordered(timed)


def _timed(line: str, actor: str) -> TimedEvent:
    fields = json.loads(line)
    return TimedEvent(
        Event(actor, fields["life"], fields["clock"], fields["kind"], fields["data"]), fields["time"]
    )


def ordered(events: Iterable[TimedEvent]) -> list[TimedEvent]:
    """Events in causal order; podrun's events with the clock `AT_END` come after all others of their life."""
    listed = list(events)
    last: dict[int, int] = {}
    for timed in listed:
        last[timed.event.life] = max(last.get(timed.event.life, 0), timed.event.clock)
    placed = [
        TimedEvent(_at(t.event, last[t.event.life] + 1), t.seconds) if t.event.clock == AT_END else t
        for t in listed
    ]
    seconds = {id(timed.event): timed.seconds for timed in placed}
    return [
        TimedEvent(event, seconds[id(event)]) for event in causal_order([timed.event for timed in placed])
    ]


def _at(event: Event, clock: int) -> Event:
    return replace(event, clock=clock)


def with_control(events: Sequence[TimedEvent], control: Iterable[ControlEvent]) -> list[TimedEvent]:
    """The events, with those of the service (`MachineReport.control_events`): each after the last event that was
    written before it. Machines that are lost at once come in the order of their names.
    """
    reported = []
    for entry in control:
        seconds = entry.time_s
        life, clock = operation_at(events, seconds)
        data = {"did": entry.did}
        for key, told in (("what", entry.what), ("why", entry.why)):
            text = normalised(told)
            if text and text != PROCESS_ENDED:  # Chance decides when a process ended, not why.
                data[key] = text
        reported.append(TimedEvent(Event(SERVICE, life, clock, "control", data), seconds))
    placed = []
    for lost, same in itertools.groupby(reported, lambda t: t.event.data["did"] == "machine lost"):
        group = list(same)
        placed += sorted(group, key=lambda t: t.event.text) if lost else group
    return ordered([*events, *placed])


def without_ends_after_errors(events: Sequence[TimedEvent]) -> list[TimedEvent]:
    """The events without the ends of instances that have reported an error, because chance decides which of these ended
    first.
    """
    said = {timed.event.life for timed in events if timed.event.kind == "error"}
    return [t for t in events if t.event.kind != "ended" or t.event.life not in said]


def without_errors_since(events: Sequence[TimedEvent], seconds: float) -> list[TimedEvent]:
    """The events without errors from a moment on: when a launch is ended by a signal, instances see the others end."""
    return [t for t in events if t.event.kind != "error" or t.seconds < seconds]


def operation_at(events: Sequence[TimedEvent], seconds: float) -> tuple[int, int]:
    """Life and clock of the last event of an instance that was written before a moment."""
    before = [t.event for t in events if t.seconds <= seconds and t.event.actor not in (LAUNCH, SERVICE)]
    return max(((event.life, event.clock) for event in before), default=(0, 0))
