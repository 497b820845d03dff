"""A recorded launch on the clock of the wall: when each event was written, and spans with a begin and an end. Pure.

A record has no times, so that equal launches give equal bytes. They lie beside it, in ``FILE.times.json``: seconds
since 1970, one for each event. `spans_of` makes of both what tracing systems show: the launch, its instances, ranges of
batches, loads, checkpoints, recoveries and incidents.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from podrun.core.documents import read_text
from podrun.core.errors import ConfigError
from podrun.core.quick_dataclass import dataclass
from podrun.record.events import LAUNCH, SERVICE, Event, Record, TimedEvent

TIMES_VERSION = 1
BATCHES_APART_S = 1.0
"""Runs of one instance that follow each other within this time are one range of batches."""
LARGEST_TIMES = 1 << 28


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """Something that took from ``start_s`` to ``end_s`` (seconds since 1970). ``parent``: the index of the span that it
    is a part of; None for the launch. ``failed``: the error that ended it, or empty."""

    name: str
    parent: int | None
    start_s: float
    end_s: float
    attributes: Mapping[str, str | int] = field(default_factory=dict)
    failed: str = ""


def times_text(events: Sequence[TimedEvent]) -> str:
    """The content of ``FILE.times.json``."""
    seconds = [round(timed.seconds, 6) for timed in events]
    return json.dumps({"podrun_times": TIMES_VERSION, "seconds": seconds}) + "\n"


def timed_events(record: Record, file: Path) -> list[TimedEvent]:
    """The events of a record with the times in a file. Raises ConfigError, NotFoundError."""
    try:
        plain = json.loads(read_text(file, LARGEST_TIMES))
        seconds = [float(second) for second in plain["seconds"]]
        version = plain["podrun_times"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} holds no times of a record", hint="podrun --record FILE ... writes one."
        ) from error
    if version != TIMES_VERSION or len(seconds) != len(record.events) or not all(map(math.isfinite, seconds)):
        raise ConfigError(f"{file} is not of this record", hint="Keep the files of one launch together.")
    return [TimedEvent(event, second) for event, second in zip(record.events, seconds, strict=True)]


def spans_of(events: Sequence[TimedEvent]) -> list[TraceSpan]:
    """The spans of a launch, parents before their parts. Empty without events."""
    if not events:
        return []
    start, end = min(t.seconds for t in events), max(t.seconds for t in events)
    spans = [TraceSpan("launch", None, start, end, _plain(events[0].event))]
    actors = sorted({t.event.actor for t in events} - {LAUNCH, SERVICE})
    for actor in actors:
        lives = sorted({t.event.life for t in events if t.event.actor == actor})
        for life in lives:
            own = [t for t in events if t.event.actor == actor and t.event.life == life]
            error = next((str(t.event.data.get("message", "")) for t in own if t.event.kind == "error"), "")
            times = [t.seconds for t in own]
            attributes: dict[str, str | int] = {"instance": int(actor.split()[1]), "start": life}
            spans.append(TraceSpan(actor, 0, min(times), max(times), attributes, error))
            parent = len(spans) - 1
            spans += [*_batch_ranges(own, parent), *_moments(own, parent)]
    spans += _recoveries(events)
    spans += [
        TraceSpan(f"{t.event.actor}: {t.event.kind}", 0, t.seconds, t.seconds, _plain(t.event))
        for t in events
        if t.event.actor in (LAUNCH, SERVICE) and t.event.kind in ("fault", "control", "verdict", "ended")
    ]
    return spans


def _batch_ranges(own: Sequence[TimedEvent], parent: int) -> Iterator[TraceSpan]:
    """Runs that follow each other are one span; a run that did not end has the error that ended it."""
    begin: TimedEvent | None = None
    first = last = 0
    start_s = end_s = -math.inf
    for timed in own:
        event = timed.event
        if event.kind == "run":
            begin = timed
        elif event.kind == "ran" and begin is not None:
            batch, count = int(event.data["batch"]), int(event.data["batches"])
            if start_s > -math.inf and (begin.seconds - end_s > BATCHES_APART_S or batch != last):
                yield _range(parent, start_s, end_s, first, last)
                start_s = -math.inf
            if start_s == -math.inf:
                start_s, first = begin.seconds, batch
            end_s, last, begin = timed.seconds, batch + count, None
        elif event.kind == "error" and begin is not None:
            batch = int(begin.event.data["batch"])
            yield TraceSpan(
                f"batches from {batch}", parent, begin.seconds, timed.seconds, {"first": batch},
                str(event.data.get("message", "error")),
            )  # fmt: skip
            begin = None
    if start_s > -math.inf:
        yield _range(parent, start_s, end_s, first, last)


def _range(parent: int, start_s: float, end_s: float, first: int, last: int) -> TraceSpan:
    name = f"batches {first} to {last - 1}"
    return TraceSpan(name, parent, start_s, end_s, {"first": first, "batches": last - first})


_MOMENTS = {
    "load": "load",
    "saving": "checkpoint",
    "resumed": "resume from checkpoint",
    "checked": "compare replicas",
}


def _moments(own: Sequence[TimedEvent], parent: int) -> Iterator[TraceSpan]:
    """Loads and checkpoints take until the instance's next event."""
    for k, timed in enumerate(own):
        if timed.event.kind in _MOMENTS:
            end = own[k + 1].seconds if k + 1 < len(own) else timed.seconds
            yield TraceSpan(
                _MOMENTS[timed.event.kind],
                parent,
                timed.seconds,
                max(end, timed.seconds),
                _plain(timed.event),
            )


def _recoveries(events: Sequence[TimedEvent]) -> Iterator[TraceSpan]:
    """From the first error of a life to the first run that went well after it: an incident, and within it the repair up
    to the new start."""
    waiting: TimedEvent | None = None
    for timed in events:
        kind = timed.event.kind
        if kind in ("error", "ended") and waiting is None:
            waiting = timed
        elif kind == "restart" and waiting is not None:
            yield TraceSpan(
                "recovery", 0, waiting.seconds, max(timed.seconds, waiting.seconds), _plain(timed.event)
            )
        elif kind in ("ran", "end") and waiting is not None and timed.seconds >= waiting.seconds:
            error = str(waiting.event.data.get("message", waiting.event.data.get("how", "")))
            failed = error if kind == "end" else ""
            yield TraceSpan("incident", 0, waiting.seconds, timed.seconds, {"error": error}, failed)
            waiting = None


def _plain(event: Event) -> dict[str, str | int]:
    return {
        key: value if isinstance(value, int) else str(value)
        for key, value in event.data.items()
        if value is not None and not isinstance(value, Mapping)
    }
