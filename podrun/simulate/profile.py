"""How many processors are free from when on: the profile that conservative backfill plans in."""

from __future__ import annotations

import bisect


class FreeProfile:
    """Steps of time, each with the processors free from it until the next one. The last step holds for ever."""

    def __init__(self, processors: int) -> None:
        self._times = [0]
        self._free = [processors]

    def earliest(self, now: int, length: int, size: int) -> int:
        """The first time from ``now`` on at which ``size`` processors are free for ``length`` without a gap."""
        times, free = self._times, self._free
        index = max(0, bisect.bisect_right(times, now) - 1)
        begin = now
        while True:
            if free[index] < size:
                index += 1  # Everything is free after the last step, so a begin exists.
                begin = times[index]
                continue
            end = begin + length
            ahead = index + 1
            while ahead < len(times) and times[ahead] < end and free[ahead] >= size:
                ahead += 1
            if ahead >= len(times) or times[ahead] >= end:
                return begin
            index = ahead

    def take(self, begin: int, end: int, size: int) -> None:
        """Take processors from ``begin`` to ``end``."""
        self._add(begin, end, -size)

    def give_back(self, begin: int, end: int, size: int) -> None:
        """Give processors back that were taken."""
        self._add(begin, end, size)

    def forget_before(self, now: int) -> None:
        """Drop steps that are over."""
        first = bisect.bisect_right(self._times, now) - 1
        if first > 0:
            del self._times[:first]
            del self._free[:first]

    def free_at(self, time: int) -> int:
        """Processors free at a time."""
        return self._free[max(0, bisect.bisect_right(self._times, time) - 1)]

    def _add(self, begin: int, end: int, size: int) -> None:
        if begin >= end:
            return
        first, last = self._step(begin), self._step(end)
        for index in range(first, last):
            self._free[index] += size
        self._join(first, last)

    def _step(self, time: int) -> int:
        """The index of the step that begins at a time; makes one if there is none."""
        index = bisect.bisect_left(self._times, time)
        if index == len(self._times) or self._times[index] != time:
            self._times.insert(index, time)
            self._free.insert(index, self._free[index - 1] if index else self._free[0])
        return index

    def _join(self, first: int, last: int) -> None:
        """Drop the ends of a change where nothing changes any more."""
        for index in (last, first):
            if 0 < index < len(self._times) and self._free[index] == self._free[index - 1]:
                del self._times[index]
                del self._free[index]
