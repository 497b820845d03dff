"""Planner for reductions: what tiles reduce of their own, and in how many stages the rest is joined.

Every tile reduces what it holds. What is left of an output lies on many tiles; one further stage brings all
partial results of an output to one tile, two stages bring them to some tiles first and then to one. The
library adds stages while many partial results are left; here the cheapest is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from podrun.device.target import Chip
from podrun.device.tiles import vertices
from podrun.device.tiles.exchange import exchange_cycles, launch_cycles, sync_cycles
from podrun.device.tiles.flatten import Equation, Tensor
from podrun.device.tiles.plan import Plan

GRAIN = 8
"""Elements that stay together when a tensor is spread over tiles."""
PARTIAL_BYTES = 4.0
"""Bytes of a partial sum between tiles."""
LEAST_BYTES = 128
"""Least that a tile holds of a tensor spread over tiles. Published: the library's linear mapper."""
MOST_OUTPUTS = 8
"""Outputs that a tile joins at most where others are free."""
DEPTH_HELD = 64.0
"""Most values of an output that a tile holds when other dimensions than the fastest are reduced. Assumed."""


def spread(chip: Chip, elements: float) -> tuple[int, int]:
    """Tiles used and elements on the fullest, for ``elements`` spread evenly in grains of eight."""
    tiles = max(1, min(chip.tiles, math.ceil(elements / GRAIN)))
    return tiles, math.ceil(elements / tiles)


@dataclass(frozen=True, slots=True)
class Joined:
    """The stages behind the first: cycles, and the bytes that the fullest tile receives."""

    compute: float = 0.0
    exchange: float = 0.0
    stages: int = 0
    received: float = 0.0


def _joins(chip: Chip, outputs: int, partials: int) -> Iterator[Joined]:
    """Ways to join so many partial results of each output: outputs per tile, and tiles that share an output."""
    for here in (1, 2, 4, MOST_OUTPUTS):
        groups = math.ceil(outputs / here)
        if groups > chip.tiles and here < MOST_OUTPUTS:
            continue
        if groups > chip.tiles:
            here = math.ceil(outputs / chip.tiles)
            groups = math.ceil(outputs / here)
        sharing = 1
        while sharing == 1 or (groups * sharing <= chip.tiles and sharing**2 <= 2 * partials):
            share = math.ceil(partials / sharing)
            first = here * share * PARTIAL_BYTES
            compute = vertices.reduce_cycles(here, share, "float32")
            exchange = exchange_cycles(chip, first, fragmented=share > 8)
            if sharing > 1:
                compute += vertices.reduce_cycles(here, sharing, "float32")
                exchange += exchange_cycles(chip, here * sharing * PARTIAL_BYTES, fragmented=sharing > 8)
            yield Joined(compute, exchange, 1 if sharing == 1 else 2, first)
            sharing *= 2


def join(chip: Chip, outputs: int, partials: int) -> Joined:
    """The cheapest way to join ``partials`` partial results of each of ``outputs``, which lie on as many tiles."""
    if partials <= 1:
        return Joined()
    stage = launch_cycles(chip) + sync_cycles(chip)
    return min(
        _joins(chip, outputs, partials), key=lambda way: way.compute + way.exchange + way.stages * stage
    )


def plan_reduction(chip: Chip, equation: Equation, share: float = 0.0) -> Plan:
    """Reduce what each tile holds and join what lies on several tiles; or, of what is too small for that, bring all
    of an output to one tile. ``share``: part of the source on its fullest tile (0: spread evenly).
    """
    source, result = equation.operands[0], equation.results[0]
    if source.size == 0 or result.size == 0:
        return Plan("reduction")
    depth = source.size / result.size
    fastest = len(source.shape) - 1 in equation.params.get("axes", ())
    plan = _where_it_lies(chip, source, result.size, depth, fastest, share)
    if source.size <= GRAIN * chip.tiles and (fastest or result.size < MOST_OUTPUTS):
        plan = min(plan, _brought(chip, source, result.size, depth), key=lambda way: way.cycles(chip))
    detail = f"{result.size} outputs of {depth:.0f}"
    return replace(plan, flops=float(source.size), vertices=0.8, detail=detail)


def _where_it_lies(
    chip: Chip, source: Tensor, outputs: int, depth: float, fastest: bool, share: float
) -> Plan:
    """Each tile reduces what it holds of the source; partial results are joined."""
    tiles, even = spread(chip, source.size)
    elements = max(even, math.ceil(source.size * share))
    outputs_here = max(1.0, min(outputs, elements / max(1.0, min(depth, elements))))
    if not fastest:
        outputs_here = min(float(outputs), max(outputs_here, elements / min(depth, DEPTH_HELD)))
    local_depth = max(1.0, elements / outputs_here)
    cycles = vertices.continuous_reduce_cycles if fastest else vertices.reduce_cycles
    partials = math.ceil(depth / local_depth)
    joined = join(chip, outputs, partials)
    return Plan(
        "reduction",
        compute=cycles(outputs_here, local_depth, source.dtype) + joined.compute,
        exchange=joined.exchange,
        compute_sets=1 + joined.stages,
        exchanges=joined.stages,
        temporary_bytes=outputs_here * PARTIAL_BYTES + joined.received,
        tiles=tiles,
        fragments=6.0 * min(1, joined.stages),
    )


def _brought(chip: Chip, source: Tensor, outputs: int, depth: float) -> Plan:
    """All values of an output come to one tile, which reduces them at once. So little of them lies there already."""
    tiles = min(chip.tiles, outputs)
    here = math.ceil(outputs / tiles)
    nbytes = here * depth * source.nbytes / source.size
    moved = 0.0 if nbytes <= LEAST_BYTES else nbytes
    return Plan(
        "reduction",
        compute=vertices.continuous_reduce_cycles(here, depth, source.dtype),
        exchange=exchange_cycles(chip, moved),
        compute_sets=1,
        exchanges=1 if moved else 0,
        temporary_bytes=moved,
        tiles=tiles,
        fragments=6.0 if moved else 0.0,
    )


def plan_arg_reduce(chip: Chip, equation: Equation, share: float = 0.0) -> Plan:
    """Arg-max and arg-min: a reduction that carries the index with the value, twice the cycles per element."""
    plan = plan_reduction(chip, equation, share)
    return replace(
        plan,
        compute=2.0 * plan.compute,
        exchange=2.0 * plan.exchange,
        temporary_bytes=2.0 * plan.temporary_bytes,
    )
