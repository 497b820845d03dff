"""The changes at the service, reported to those who watch; and figures of its calls.

An `EventLog` holds the last changes in order. A watcher gets the present state, then every change. With the token of
the last change that it saw, it goes on after that change, if the log still has it. A watcher that is too slow, or comes
from an earlier server, begins again with the present state: it misses no state, though it may miss changes between two
states.
"""

from __future__ import annotations

import secrets
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any

from podrun.core.errors import ExhaustedError, UsageError
from podrun.core.quick_dataclass import dataclass

KINDS = ("partition", "machine", "incident", "cluster", "allocation", "reservation", "user")
SYNCED = "synced"
"""Kind of the change that says: what is there has been told."""
KEPT = 4096
"""Number of changes that the log holds."""
WATCHERS = 32
"""Most watchers at a time; each takes a thread."""
BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper bounds of the classes in which durations of calls are counted."""


@dataclass(frozen=True, slots=True)
class Change:
    """A thing of one of `KINDS` as it is from now on; ``text`` is its JSON, empty if it is gone. ``allocation``: of a
    partition, so that it is told only to those who may see it."""

    number: int
    kind: str
    name: str
    text: str
    time: float
    allocation: str = ""

    @property
    def initial(self) -> bool:
        """Whether it tells what is there already, before `SYNCED`."""
        return self.number == 0 and self.kind != SYNCED


Told = tuple[str, str, str, str]
"""Kind, name, JSON (empty: it is gone), allocation."""
Snapshot = Callable[[], Iterable[Told]]
"""What is there."""


class EventLog:
    """The last changes, and their watchers. Thread-safe."""

    def __init__(self, snapshot: Snapshot, clock: Callable[[], float] = time.time) -> None:
        self._snapshot, self._clock = snapshot, clock
        self._id = secrets.token_hex(6)
        self._changed = threading.Condition()
        self._changes: deque[Change] = deque(maxlen=KEPT)
        self._last = 0
        self._closed = False
        self._told: dict[str, dict[str, str]] = {}
        self.watchers = 0

    def add(self, kind: str, name: str, text: str, allocation: str = "") -> None:
        """Add a change. ``text``: JSON; empty: the thing is gone."""
        with self._changed:
            self._last += 1
            self._changes.append(Change(self._last, kind, name, text, self._clock(), allocation))
            self._changed.notify_all()

    def tell(self, kind: str, there: Mapping[str, str]) -> None:
        """What there is of a kind, by name: what is new, another or gone since the last time is a change. The first
        time it is only noted."""
        with self._changed:
            before, self._told[kind] = self._told.get(kind), dict(there)
        if before is None:
            return
        for name, text in there.items():
            if before.get(name) != text:
                self.add(kind, name, text)
        for name in before.keys() - there.keys():
            self.add(kind, name, "")

    def there(self, kind: str) -> dict[str, str]:
        """What there is of a kind, as it was told last."""
        with self._changed:
            return dict(self._told.get(kind, {}))

    def close(self) -> None:
        """End all streams of watchers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def token(self, change: Change) -> str:
        """The token with which a watcher goes on after a change."""
        return f"{self._id}.{change.number}"

    def watch(
        self, token: str, kinds: Iterable[str], active: Callable[[], bool], patience: float = 1.0
    ) -> Iterator[Change]:
        """Changes of some kinds (none: of all) until ``active`` says no. Raises UsageError for an unknown kind,
        ExhaustedError if too many watch."""
        wanted = set(kinds) or set(KINDS)
        if wanted - set(KINDS):
            raise UsageError(
                f"nothing of kind {min(wanted - set(KINDS))!r} can be watched",
                hint=f"Kinds: {', '.join(KINDS)}.",
            )
        with self._changed:
            if self.watchers >= WATCHERS:
                raise ExhaustedError(
                    f"{self.watchers} clients watch this server", hint="Wait until one of them ends, or poll."
                )
            self.watchers += 1
        try:
            yield from self._watch(self._place_of(token), wanted, active, patience)
        finally:
            with self._changed:
                self.watchers -= 1

    def _place_of(self, token: str) -> int | None:
        """The number of the last change that a watcher has seen; None if it has to begin again."""
        server, _, number = token.partition(".")
        if server != self._id or not number.isdecimal():
            return None
        with self._changed:
            oldest = self._changes[0].number if self._changes else self._last + 1
            return int(number) if oldest - 1 <= int(number) <= self._last else None

    def _watch(
        self, seen: int | None, wanted: set[str], active: Callable[[], bool], patience: float
    ) -> Iterator[Change]:
        while active():
            if seen is None:
                with self._changed:
                    seen = (
                        self._last
                    )  # A change from here on is reported again, after the snapshot that may contain it.
                for kind, name, text, allocation in self._snapshot():
                    if kind in wanted:
                        yield Change(0, kind, name, text, self._clock(), allocation)
                yield Change(seen, SYNCED, "", "", self._clock())
            with self._changed:
                self._changed.wait_for(lambda last=seen: self._last > last or self._closed, patience)  # type: ignore[misc]
                if self._closed:
                    return
                behind = bool(self._changes) and self._changes[0].number > seen + 1
                news = [] if behind else [change for change in self._changes if change.number > seen]
            if behind:
                seen = None
                continue
            for change in news:
                seen = change.number
                if change.kind in wanted:
                    yield change


class Mirror:
    """What a client that watches knows: the last value of each thing that is there. ``synced``: it knows all."""

    def __init__(self) -> None:
        self.synced, self.incidents = False, 0
        self._there: dict[tuple[str, str], Any] = {}
        self._anew: dict[tuple[str, str], Any] = {}

    def take(self, kind: str, name: str, value: object, *, initial: bool) -> None:
        """A change. ``value``: None or empty if the thing is gone; ``initial``: it is told because the stream begins
        anew."""
        if kind == SYNCED:
            self._there, self._anew, self.synced = self._anew, {}, True
        elif initial:
            self._anew[kind, name] = value
        elif kind == "incident":
            self.incidents += 1
        elif value:
            self._there[kind, name] = value
        else:
            self._there.pop((kind, name), None)

    def all(self, kind: str) -> dict[str, Any]:
        """The values of a kind, by name."""
        return {
            name: value for (entry_kind, name), value in sorted(self._there.items()) if entry_kind == kind
        }


@dataclass(slots=True)
class CallFigures:
    """Calls of one name: how many, with an error, seconds in all, and how many within each of `BOUNDS_S`."""

    count: int = 0
    errors: int = 0
    seconds: float = 0.0
    within: list[int] = field(default_factory=lambda: [0] * len(BOUNDS_S))


class CallMeter:
    """Counts and times calls. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, CallFigures] = {}

    def note(self, call: str, seconds: float, *, failed: bool) -> None:
        """Note the end of a call."""
        with self._lock:
            figures = self._calls.setdefault(call, CallFigures())
            figures.count += 1
            figures.errors += failed
            figures.seconds += seconds
            for index in range(bisect_left(BOUNDS_S, seconds), len(BOUNDS_S)):
                figures.within[index] += 1

    def all(self) -> list[tuple[str, CallFigures]]:
        """The figures of each call, by name."""
        with self._lock:
            return [
                (name, CallFigures(f.count, f.errors, f.seconds, list(f.within)))
                for name, f in sorted(self._calls.items())
            ]
