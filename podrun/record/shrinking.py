"""The smallest part of a plan that still fails: delta debugging (Zeller and Hildebrandt, 2002)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def smallest(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """A subset, in order, for which ``fails`` holds and without any one of whose items it does not.

    ``fails`` has to hold for all items, and is called once for each subset that is tried.
    """
    known: dict[tuple[int, ...], bool] = {}

    def still(chosen: Sequence[int]) -> bool:
        key = tuple(chosen)
        if key not in known:
            known[key] = fails([items[place] for place in chosen])
        return known[key]

    left, parts = list(range(len(items))), 2
    if left and still([]):
        return []
    while len(left) > 1:
        groups = _groups(left, parts)
        others = [[place for place in left if place not in group] for group in groups]
        part = next((group for group in groups if still(group)), None)
        if part is not None:
            left, parts = part, 2
            continue
        rest = next((other for other in others if len(groups) > 2 and still(other)), None)
        if rest is not None:
            left, parts = rest, max(parts - 1, 2)
            continue
        if parts >= len(left):
            break
        parts = min(2 * parts, len(left))
    return [items[place] for place in left]


def _groups(places: Sequence[int], parts: int) -> list[list[int]]:
    """``places`` in ``parts`` groups of about the same size."""
    bounds = [len(places) * k // parts for k in range(parts + 1)]
    return [list(places[a:b]) for a, b in itertools.pairwise(bounds) if b > a]
