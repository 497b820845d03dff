"""Data over links: both ends of each send each other known words, and every word that arrives is compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from podrun.monitor.tool_programs import payload, traffic

if TYPE_CHECKING:
    from podrun.device.connection import Connection, IpuRange
    from podrun.monitor.holding import Bench

CHUNK = 100
"""Iterations of one run: Ctrl-C and faults are noticed between two."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What was done so far: iterations, modelled seconds of them, seconds of this host's clock."""

    iterations: int = 0
    modelled_s: float = 0.0
    emulation_s: float = 0.0


class LinkCheck:
    """A check of ``pairs`` of IPUs, all at once, on ``ipus``, which ``connection`` holds.

    ``words``: 32-bit words each way and iteration; ``seconds``: modelled time of an iteration.
    """

    def __init__(
        self,
        bench: Bench,
        connection: Connection,
        ipus: IpuRange,
        pairs: Sequence[tuple[int, int]],
        words: int,
        seconds: float,
    ) -> None:
        self._connection, self._pairs, self._words = connection, pairs, words
        self._first = [
            [np.random.default_rng((link, end)).integers(0, 2**32, words, np.uint32) for end in (0, 1)]
            for link in range(len(pairs))
        ]
        inside = [(a - ipus.first, b - ipus.first) for a, b in pairs]
        connection.load(traffic(bench.chip, ipus.count, inside, words, seconds))
        connection.write_variables(
            {payload(link, end): self._first[link][end] for link in range(len(pairs)) for end in (0, 1)}
        )
        self.done = Progress()

    def run(self, iterations: int | None) -> Iterator[Progress]:
        """Run so many iterations, or for ever (None), a few at a time."""
        left = iterations
        while left is None or left > 0:
            count = CHUNK if left is None else min(CHUNK, left)
            result = self._connection.run(count, {})
            done = self.done
            self.done = Progress(
                done.iterations + count,
                done.modelled_s + result.modelled_seconds,
                done.emulation_s + result.emulation_seconds,
            )
            left = None if left is None else left - count
            yield self.done

    def errors(self) -> list[int]:
        """Words that are not what they have to be after the iterations done, by pair."""
        done = self.done.iterations
        names = [payload(link, end) for link in range(len(self._pairs)) for end in (0, 1)]
        found = self._connection.read_variables(names)
        return [
            sum(
                int(
                    np.count_nonzero(
                        found[payload(link, end)] != self._first[link][(end + done) % 2] + np.uint32(done)
                    )
                )
                for end in (0, 1)
            )
            for link in range(len(self._pairs))
        ]
