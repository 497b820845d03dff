"""Which tiles hold what, as intervals: ``[first, last)`` tiles with the same bytes on each.

Poplar's linear mapping spreads a tensor over tiles from the first on; operations take as many tiles as their plan
uses. So bytes by tile are a few steps, and 1,472 tiles need no array of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from podrun.device.target import Chip
from podrun.device.tiles.code import CONTROL_CODE, FRAGMENT_CODE, REPEATED, VERTEX_STATE
from podrun.device.tiles.plan import Plan


@dataclass(frozen=True, slots=True)
class Interval:
    """Tiles ``[first, last)``; ``content`` bytes by category on each of them."""

    first: int
    last: int
    content: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Bytes on each tile."""
        return sum(self.content.values())


def stack(chip: Chip, pieces: Iterable[tuple[str, int, float]]) -> tuple[Interval, ...]:
    """Lay ``(category, tiles, bytes on each)`` over the first ``tiles`` tiles; the intervals that result."""
    listed = [
        (category, min(tiles, chip.tiles), size) for category, tiles, size in pieces if tiles > 0 and size
    ]
    edges = sorted({0, chip.tiles, *(tiles for _, tiles, _ in listed)})
    steps: dict[int, dict[str, float]] = {edge: {} for edge in edges[1:]}
    for category, tiles, size in listed:
        steps[tiles][category] = steps[tiles].get(category, 0.0) + size
    intervals: list[Interval] = []
    held: dict[str, float] = {}
    for first, last in reversed(list(itertools.pairwise(edges))):
        for category, size in steps[last].items():
            held[category] = held.get(category, 0.0) + size
        intervals.append(Interval(first, last, dict(held)))
    return tuple(reversed(intervals))


def by_tile(
    chip: Chip, plans: Sequence[Plan], always: float, live: float, busiest: Plan | None, vertex_code: float
) -> tuple[Interval, ...]:
    """Bytes on each tile at the fullest moment: lasting and live values, temporary data, code and vertex state."""
    pieces: list[tuple[str, int, float]] = [
        ("always_live", chip.tiles, always / chip.tiles),
        ("not_always_live", chip.tiles, live / chip.tiles),
        ("vertex_code", chip.tiles, vertex_code / chip.tiles),
    ]
    if busiest is not None:
        pieces.append(("temporary", busiest.tiles, busiest.temporary_bytes))
    steps = sum(bool(plan.exchanges) + bool(plan.compute_sets) for plan in plans)
    pieces.append(("control_code", chip.tiles, float(CONTROL_CODE * steps)))
    seen: set[tuple[str, str, int]] = set()
    summed: dict[tuple[str, int], float] = {}
    for plan in plans:
        key = (plan.family, plan.detail, plan.tiles)
        share = REPEATED if key in seen else 1.0
        seen.add(key)
        for category, size in (
            ("vertex_state", plan.vertices * VERTEX_STATE),
            ("exchange_code", plan.fragments * FRAGMENT_CODE * share),
        ):
            summed[category, plan.tiles] = summed.get((category, plan.tiles), 0.0) + size
    pieces += [(category, tiles, size) for (category, tiles), size in sorted(summed.items())]
    return stack(chip, pieces)
