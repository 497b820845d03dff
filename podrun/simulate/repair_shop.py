"""Fresh machines on the shelf, and machines that are repaired: lognormal times, a number of crews, failing repairs."""

from __future__ import annotations

from collections import deque

from podrun.simulate.engine import Order, VirtualEngine, nanoseconds
from podrun.simulate.rates import RepairTimes
from podrun.simulate.streams import RandomStreams, lognormal, truncated


class RepairShop:
    """``shelf``: fresh machines; a machine that was repaired lies there too. ``away``: machines in repair."""

    def __init__(self, engine: VirtualEngine, streams: RandomStreams, spares: int) -> None:
        self.engine, self.streams = engine, streams
        self.spares = self.shelf = spares
        self.away = 0
        self._at_work = 0
        self._waiting: deque[tuple[int, RepairTimes]] = deque()
        self._used_for: dict[int, int] = {}
        self._looked = 0

    def take(self) -> bool:
        """Take a fresh machine; False if there is none."""
        if not self.shelf:
            return False
        self.note(self.engine.now)
        self.shelf -= 1
        return True

    def send(self, machine: int, repair: RepairTimes) -> None:
        """Send a machine to be repaired. One whose repair takes no time is back at once."""
        self.note(self.engine.now)
        self.away += 1
        if repair.crews and self._at_work >= repair.crews:
            self._waiting.append((machine, repair))
            return
        self._begin(machine, repair)

    def _begin(self, machine: int, repair: RepairTimes) -> None:
        self._at_work += 1
        stream = self.streams.of(f"machine {machine}", "repairs")
        hours = 0.0
        while repair.median_h:
            draw = lognormal(stream, repair.median_h, repair.mean_h or repair.median_h)
            hours += truncated(draw, repair.longest_h)
            if float(stream.random()) >= repair.fails:
                break
        self.engine.after(nanoseconds(hours * 3600), Order.END, "repaired")

    def repaired(self) -> None:
        """Note that a machine is repaired, and begin with the next one that waits."""
        self.note(self.engine.now)
        self.away -= 1
        self._at_work -= 1
        self.shelf += 1
        if self._waiting:
            self._begin(*self._waiting.popleft())

    def note(self, now: int) -> None:
        """Add the time since the last look to the time for which so many spares were used."""
        used = max(0, self.spares - self.shelf)
        self._used_for[used] = self._used_for.get(used, 0) + now - self._looked
        self._looked = now

    def usage(self, now: int) -> list[int]:
        """Spares used at the median, 95 %, 99 % of the time, and at most."""
        self.note(now)
        total, summed = sum(self._used_for.values()), 0
        wanted, result = [0.5, 0.95, 0.99], []
        for used, spent in sorted(self._used_for.items()):
            summed += spent
            while wanted and summed >= wanted[0] * total:
                result.append(used)
                wanted.pop(0)
        return [*result, max((used for used, spent in self._used_for.items() if spent), default=0)]
