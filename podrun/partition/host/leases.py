"""Who is taken to be gone: leases of queued requests and of partitions, by signs of life, time and what runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from podrun.partition.host.holders import lives

QUEUE_LEASE_S = 15.0
"""Seconds after which a queued request that nobody asks about leaves the queue: its client has vanished."""
HOLD_LEASE_S = 60.0
"""Seconds without a sign of life after which a partition ends whose holder the server cannot see."""


class SignsOfLife:
    """When a client last asked about each queued request, and when each holder of a partition last gave a sign.

    ``clock`` does not jump. ``see`` says whether a holder's process runs, None if it cannot be seen: see `lives`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        see: Callable[[str], bool | None] = lives,
    ) -> None:
        self._clock, self._see = clock, see
        self._lock = threading.Lock()
        self._heard: dict[str, float] = {}
        self._since: dict[str, float] = {}  # When a name of which nothing was heard was first looked at.

    def note(self, name: str) -> None:
        """Note a sign of life for the request or partition of this name."""
        with self._lock:
            self._heard[name] = self._clock()

    def vanished(self, waiting: Mapping[str, str]) -> list[str]:
        """Of requests in the queue, with their holders ("": none), those whose client is gone, or has not asked for
        `QUEUE_LEASE_S`."""
        there = self._there(waiting)
        silent = self._silent(waiting, QUEUE_LEASE_S)
        return [name for name in waiting if name in silent or there[name] is False]

    def orphans(self, held: Mapping[str, str]) -> list[str]:
        """Of partitions, with their holders, those whose holder is gone, or cannot be seen and has given no sign for
        `HOLD_LEASE_S`."""
        there = self._there(held)
        silent = self._silent(held, HOLD_LEASE_S)
        return [name for name in held if there[name] is False or (there[name] is None and name in silent)]

    def absent(self, waiting: Mapping[str, str]) -> frozenset[str]:
        """Of requests in the queue those that must not be served now: their client is gone, or it cannot be seen and
        has not asked since the server started."""
        there = self._there(waiting)
        with self._lock:
            return frozenset(
                name
                for name, seen in there.items()
                if seen is False or (seen is None and name not in self._heard)
            )

    def forget(self, but: Collection[str]) -> None:
        """Forget all names but these."""
        with self._lock:
            self._heard = {name: at for name, at in self._heard.items() if name in but}
            self._since = {name: at for name, at in self._since.items() if name in but}

    def _there(self, names: Mapping[str, str]) -> dict[str, bool | None]:
        """Whether each name's holder runs; None for what cannot be seen, or has no holder."""
        alive = {holder: self._see(holder) for holder in set(names.values()) if holder}
        return {name: alive.get(holder) for name, holder in names.items()}

    def _silent(self, names: Iterable[str], lease: float) -> set[str]:
        """Names of which nothing has been heard for so many seconds."""
        with self._lock:
            now = self._clock()
            last = {name: self._heard.get(name, self._since.setdefault(name, now)) for name in names}
        return {name for name, at in last.items() if now - at > lease}
