"""Cutting a chain of layers into consecutive runs, one for each IPU: as even in time as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Fits = Callable[[int, int, int], bool]
"""``fits(ipu, first, end)``: does IPU ``ipu`` hold layers ``[first, end)``?"""


def cut(
    costs: Sequence[float],
    ipus: int,
    fits: Fits = lambda ipu, first, end: True,
    *,
    last: Sequence[float] | None = None,
) -> tuple[int, ...] | None:
    """Where each IPU's layers end, so that the dearest IPU is as cheap as can be; every IPU has a layer.

    ``last``: costs on the last IPU, where they are lower. None if there are fewer layers than IPUs, or no cut that
    fits is found. Found by bisection over the dearest cost, each IPU taking as many layers as limit and memory allow.
    """
    if len(costs) < ipus:
        return None
    each = (*(costs for _ in range(ipus - 1)), costs if last is None else last)
    low, high = max(map(min, zip(costs, each[-1], strict=True))), sum(costs)
    best = _greedy(each, high, fits)
    if best is None:
        return None
    for _ in range(50):
        middle = (low + high) / 2
        found = _greedy(each, middle, fits)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _greedy(each: Sequence[Sequence[float]], limit: float, fits: Fits) -> tuple[int, ...] | None:
    """A cut under ``limit``, if there is one; ``each``: the layers' costs on each IPU."""
    ends: list[int] = []
    first, layers = 0, len(each[0])
    for ipu, costs in enumerate(each):
        most = layers - (len(each) - 1 - ipu)
        end, held = first, 0.0
        while end < most and held + costs[end] <= limit * (1 + 1e-12) and fits(ipu, first, end + 1):
            held += costs[end]
            end += 1
        if end == first:
            return None
        ends.append(end)
        first = end
    return tuple(ends) if first == layers else None
