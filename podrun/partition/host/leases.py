"""Who is taken to be gone: leases of queued requests and of partitions, as functions of signs of life, state and time.

`LeaseBook` looks at no process and no clock: ``alive`` says which holders run, and ``now`` is any clock that does not
jump. `SignsOfLife` is the book of a service, with its clock, its threads and its look at processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from podrun.partition.host.holders import lives

QUEUE_LEASE_S = 15.0
"""Seconds after which a queued request that nobody asks about leaves the queue: its client has vanished."""
HOLD_LEASE_S = 60.0
"""Seconds without a sign of life after which a partition ends whose holder the server cannot see."""

Alive = Mapping[str, bool | None]
"""Whether each holder's process runs, by its text; None: it cannot be seen."""


@dataclass(slots=True)
class LeaseBook:
    """When a client last asked about each queued request, and when each holder of a partition last gave a sign.
    ``since``: when a name of which nothing was heard was first looked at."""

    heard: dict[str, float] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, now: float) -> None:
        """Note a sign of life for the request or partition of this name."""
        self.heard[name] = now

    def vanished(self, waiting: Mapping[str, str], alive: Alive, now: float) -> list[str]:
        """Of requests in the queue, with their holders ("": none), those whose client is gone, or has not asked for
        `QUEUE_LEASE_S`."""
        silent = self._silent(waiting, QUEUE_LEASE_S, now)
        return [
            name for name, holder in waiting.items() if name in silent or (holder and alive[holder] is False)
        ]

    def orphans(self, held: Mapping[str, str], alive: Alive, now: float) -> list[str]:
        """Of partitions, with their holders, those whose holder is gone, or cannot be seen and has given no sign for
        `HOLD_LEASE_S`."""
        silent = self._silent(held, HOLD_LEASE_S, now)
        return [
            name
            for name, holder in held.items()
            if alive[holder] is False or (alive[holder] is None and name in silent)
        ]

    def absent(self, waiting: Mapping[str, str], alive: Alive) -> frozenset[str]:
        """Of requests in the queue those that must not be served now: their client is gone, or it cannot be seen and
        has not asked since the server started."""
        seen = {name: alive[holder] if holder else None for name, holder in waiting.items()}
        return frozenset(
            name for name, there in seen.items() if not there and (there is False or name not in self.heard)
        )

    def forget(self, but: Collection[str]) -> None:
        """Forget all names but these."""
        self.heard = {name: at for name, at in self.heard.items() if name in but}
        self.since = {name: at for name, at in self.since.items() if name in but}

    def _silent(self, names: Iterable[str], lease: float, now: float) -> set[str]:
        """Names of which nothing has been heard for so many seconds."""
        last = {name: self.heard.get(name, self.since.setdefault(name, now)) for name in names}
        return {name for name, at in last.items() if now - at > lease}


class SignsOfLife:
    """When a client last asked about each queued request, and when each holder of a partition last gave a sign.
    ``see``: see `lives`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        see: Callable[[str], bool | None] = lives,
    ) -> None:
        self._clock, self._see = clock, see
        self._lock = threading.Lock()
        self._book = LeaseBook()

    def note(self, name: str) -> None:
        """Note a sign of life for the request or partition of this name."""
        with self._lock:
            self._book.note(name, self._clock())

    def vanished(self, waiting: Mapping[str, str]) -> list[str]:
        """See `LeaseBook.vanished`."""
        alive = self._alive(waiting)
        with self._lock:
            return self._book.vanished(waiting, alive, self._clock())

    def orphans(self, held: Mapping[str, str]) -> list[str]:
        """See `LeaseBook.orphans`."""
        alive = self._alive(held)
        with self._lock:
            return self._book.orphans(held, alive, self._clock())

    def absent(self, waiting: Mapping[str, str]) -> frozenset[str]:
        """See `LeaseBook.absent`."""
        alive = self._alive(waiting)
        with self._lock:
            return self._book.absent(waiting, alive)

    def forget(self, but: Collection[str]) -> None:
        """Forget all names but these."""
        with self._lock:
            self._book.forget(but)

    def _alive(self, holders: Mapping[str, str]) -> dict[str, bool | None]:
        return {holder: self._see(holder) for holder in set(holders.values()) if holder}
