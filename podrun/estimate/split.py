"""Cutting a chain of layers into consecutive runs, one for each IPU: as even in time as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Fits = Callable[[int, int, int], bool]
"""``fits(ipu, first, end)``: does IPU ``ipu`` hold layers ``[first, end)``?"""


def cut(
    costs: Sequence[float], ipus: int, fits: Fits = lambda ipu, first, end: True
) -> tuple[int, ...] | None:
    """Where each IPU's layers end, so that the dearest IPU is as cheap as can be; every IPU has a layer.

    None if there are fewer layers than IPUs, or no cut that fits is found. Found by bisection over the
    dearest cost, each IPU taking as many layers as limit and memory allow.
    """
    if len(costs) < ipus:
        return None
    low, high = max(costs), sum(costs)
    best = _greedy(costs, ipus, high, fits)
    if best is None:
        return None
    for _ in range(50):
        middle = (low + high) / 2
        found = _greedy(costs, ipus, middle, fits)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _greedy(costs: Sequence[float], ipus: int, limit: float, fits: Fits) -> tuple[int, ...] | None:
    ends: list[int] = []
    first = 0
    for ipu in range(ipus):
        most = len(costs) - (ipus - 1 - ipu)
        end, held = first, 0.0
        while end < most and held + costs[end] <= limit * (1 + 1e-12) and fits(ipu, first, end + 1):
            held += costs[end]
            end += 1
        if end == first:
            return None
        ends.append(end)
        first = end
    return tuple(ends) if first == len(costs) else None
