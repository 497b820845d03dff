"""The loop of virtual time: events on a heap, in integer nanoseconds.

Events at one time run by their class (`Order`), and within a class in the order in which they were planned. An event is
a name and plain data, and the loop knows the function of each name; so what is planned can be written to JSON and read
back (`VirtualEngine.snapshot`), and a run that goes on from there gives the same results.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable
from typing import Any

from podrun.core.errors import InternalError

SECOND = 1_000_000_000
"""Nanoseconds of a second."""
Handler = Callable[[Any], None]
"""What happens at an event; takes the event's data."""
_Entry = tuple[int, int, int, str, Any]
"""Time, class, sequence, name, data."""


class Order(enum.IntEnum):
    """What comes first at one time: IPUs become free before they fail, and fail before anybody asks for them."""

    END = 0
    """Something ends."""
    FAILURE = 1
    """Something fails."""
    SUBMISSION = 2
    """Somebody asks for something."""
    PLAN = 3
    """Who waits is looked at."""


def nanoseconds(seconds: float) -> int:
    """Seconds as the clock counts them."""
    return round(seconds * SECOND)


class VirtualEngine:
    """A virtual clock and the events that are planned on it. ``now``: nanoseconds from the begin."""

    def __init__(self) -> None:
        self.now = 0
        self.handled = 0
        self._heap: list[_Entry] = []
        self._handlers: dict[str, Handler] = {}
        self._cancelled: set[int] = set()
        self._sequence = 0

    def on(self, name: str, handler: Handler) -> None:
        """Say what happens at events of a name."""
        self._handlers[name] = handler

    def at(self, time: int, order: Order, name: str, data: object = None) -> int:
        """Plan an event; returns the number that `cancel` takes. ``data``: a JSON value if a snapshot is to be taken.
        Raises InternalError for a time that is over."""
        if time < self.now:
            raise InternalError(f"an event {name} is planned {self.now - time} ns ago")
        self._sequence = sequence = self._sequence + 1
        heapq.heappush(self._heap, (time, order, sequence, name, data))
        return sequence

    def after(self, delay: int, order: Order, name: str, data: object = None) -> int:
        """Plan an event so many nanoseconds from now."""
        return self.at(self.now + delay, order, name, data)

    def cancel(self, sequence: int) -> None:
        """Take back an event that has not happened."""
        self._cancelled.add(sequence)

    def run(self, until: int | None = None) -> None:
        """Let events happen in their order, all of them or those up to a time; the clock then shows that time."""
        heap, handlers, cancelled = self._heap, self._handlers, self._cancelled
        pop = heapq.heappop
        handled = 0
        while heap and (until is None or heap[0][0] <= until):
            time, _, sequence, name, data = pop(heap)
            if cancelled and sequence in cancelled:
                cancelled.discard(sequence)
                continue
            self.now = time
            handled += 1
            handlers[name](data)
        self.handled += handled
        if until is not None:
            self.now = max(self.now, until)

    @property
    def next_time(self) -> int | None:
        """When the next event happens; None if nothing is planned."""
        while self._heap and self._heap[0][2] in self._cancelled:
            self._cancelled.discard(heapq.heappop(self._heap)[2])
        return self._heap[0][0] if self._heap else None

    def snapshot(self) -> dict[str, Any]:
        """The clock and what is planned, as JSON values."""
        entries = [list(entry) for entry in sorted(self._heap, key=lambda e: e[:3])]
        left = [entry for entry in entries if entry[2] not in self._cancelled]
        return {"now": self.now, "sequence": self._sequence, "handled": self.handled, "events": left}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go on from a snapshot; the functions of events stay those of this engine."""
        self.now, self._sequence = int(snapshot["now"]), int(snapshot["sequence"])
        self.handled = int(snapshot["handled"])
        self._cancelled.clear()
        self._heap[:] = [
            (int(time), int(order), int(sequence), str(name), data)
            for time, order, sequence, name, data in snapshot["events"]
        ]
        heapq.heapify(self._heap)
