"""Random numbers by name: each entity has a stream of its own for each purpose.

A stream's numbers depend on the seed and on its names alone, never on who drew before. So a changed policy, or one
machine more, meets the same failures (common random numbers), and two runs of one seed are equal.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from numpy.random import Generator, Philox


class RandomStreams:
    """The streams of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._streams: dict[tuple[str, str], Generator] = {}

    def of(self, entity: str, purpose: str) -> Generator:
        """The stream of an entity (``ipum12``) for a purpose (``failures``). The same object each time."""
        known = self._streams.get((entity, purpose))
        if known is None:
            name = f"{self.seed}\0{entity}\0{purpose}".encode()
            key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
            known = self._streams[entity, purpose] = Generator(Philox(key=key))
        return known

    def snapshot(self) -> list[Any]:
        """The place in each stream, as JSON values."""
        return [
            [entity, purpose, _plain(stream.bit_generator.state)]
            for (entity, purpose), stream in sorted(self._streams.items())
        ]

    def restore(self, snapshot: list[Any]) -> None:
        """Go on from the places of a snapshot."""
        self._streams.clear()
        for entity, purpose, state in snapshot:
            self.of(entity, purpose).bit_generator.state = _arrays(state)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return [int(entry) for entry in value] if isinstance(value, np.ndarray) else value


def _arrays(value: object) -> Any:
    if isinstance(value, dict):
        return {name: _arrays(entry) for name, entry in value.items()}
    return np.array(value, np.uint64) if isinstance(value, list) else value


def lognormal(stream: Generator, median: float, mean: float) -> float:
    """A time with this median and this mean, which is not below the median: sigma is sqrt(2 ln(mean/median))."""
    sigma = math.sqrt(max(0.0, 2.0 * math.log(mean / median)))
    return median * math.exp(sigma * float(stream.standard_normal()))


def weibull_left(stream: Generator, shape: float, scale: float, age: float) -> float:
    """The time until the next failure of something that has lived for ``age`` without one: the Weibull distribution,
    given that it is beyond its age."""
    survived = (age / scale) ** shape
    return float(scale * (survived + stream.standard_exponential()) ** (1.0 / shape) - age)


def lemon_factor(stream: Generator, shape: float) -> float:
    """How often one unit fails, as a multiple of the mean: gamma with mean 1, the more uneven the smaller its shape."""
    return float(stream.gamma(shape, 1.0 / shape))


def truncated(draw: float, longest: float) -> float:
    """A time that was drawn, cut off at a longest one (0: none)."""
    return min(draw, longest) if longest > 0 else draw
