"""The memory of one IPU and of its fullest tile: the one place that adds memory up, with the liveness of values.

A `Demand` lists the contents: lasting contents by name, the activations alive at the fullest
moment, the temporary data of the step that runs then, and code. The compiler makes one for each IPU of a
program (`podrun.compiler.ipu_memory`), `podrun estimate` one for each IPU of a layout, `cost_jaxpr` one for a
traced function by itself. `section` turns it into the report's ``memory``; whether a program fits is read
from there and from nowhere else.

Everything is taken as spread over all tiles: the library begins each operation's work on another tile to
make it so. The fullest tile holds `TILE_IMBALANCE` times the mean; a line from there to as much below the
mean stands for the rest. Held against the published totals and maxima of networks in docs/fidelity.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.equations import FlatJaxpr
from podrun.costmodel.schedule import PlannedOperation
from podrun.costmodel.target import Chip

TILE_IMBALANCE = 1.06
"""Fullest tile over mean tile for programs that fill a chip. Published: 1.05 to 1.2."""
BANDS = 8
"""Number of runs of tiles that a report shows apart."""
WEIGHTS, STATE, ACCUMULATORS = "weights", "optimizer_state", "accumulators"
STREAMS, STASH, CONSTANTS, ARGUMENTS = "streams", "stash", "constants", "arguments"
LASTING = (WEIGHTS, STATE, ACCUMULATORS, STREAMS, STASH, CONSTANTS, ARGUMENTS)
"""Names of contents that are always live, in the order they are shown. ``streams``: buffers of inputs and anchors.
``stash``: activations kept for micro-batches in flight. ``arguments``: of a function costed by itself.
"""
ACTIVATIONS, TEMPORARY = "activations", "temporary"


def in_flight(stages: int, stage: int) -> int:
    """Micro-batches whose activations stage ``stage`` of ``stages`` keeps in training.

    Its backward work comes ``2 (stages - 1 - stage)`` pipeline cycles after its forward work.
    """
    return 2 * (stages - 1 - stage) + 1


@dataclass(frozen=True, slots=True)
class Demand:
    """The contents of one IPU: bytes on the whole chip.

    ``lasting``: by the names of `LASTING`. ``activations``: other values alive at the fullest moment. ``temporary``:
    data of the step that runs then, beside its operands and results. ``code``: by category.
    """

    lasting: Mapping[str, int]
    activations: int
    temporary: int = 0
    code: Mapping[str, float] = field(default_factory=dict)

    @property
    def always(self) -> int:
        """Bytes that are live all the time, code not counted."""
        return sum(self.lasting.values())

    def by_content(self) -> dict[str, int]:
        """Bytes on the chip by content, without empty contents."""
        sizes: dict[str, float] = {name: self.lasting.get(name, 0) for name in LASTING}
        sizes |= {ACTIVATIONS: self.activations, TEMPORARY: self.temporary, **self.code}
        return {name: round(size) for name, size in sizes.items() if round(size)}


def _on_tile(chip: Chip, demand: Demand, share: float) -> dict[str, int]:
    """Bytes by category on a tile that has ``share`` of the mean. Whole bytes, so that sums agree everywhere."""
    share_of_tile = share / chip.tiles
    spread: dict[str, float] = {"always_live": demand.always, "not_always_live": demand.activations}
    spread |= {TEMPORARY: demand.temporary, **demand.code}
    content = {name: round(size * share_of_tile) for name, size in spread.items()}
    return {name: size for name, size in content.items() if size}


def fullest_tile(chip: Chip, demand: Demand) -> int:
    """Bytes on the fullest tile."""
    return sum(_on_tile(chip, demand, TILE_IMBALANCE).values())


def fits(chip: Chip, demand: Demand) -> bool:
    """True iff the fullest tile holds its share."""
    return fullest_tile(chip, demand) <= chip.tile_bytes


def by_tile(chip: Chip, demand: Demand) -> list[dict[str, Any]]:
    """Tiles ``[first, last)`` and the bytes by category on each of them, all tiles in order, the fullest first."""
    edges = [chip.tiles * band // BANDS for band in range(BANDS + 1)]
    ranges = []
    for band, (first, last) in enumerate(itertools.pairwise(edges)):
        share = TILE_IMBALANCE - 2 * (TILE_IMBALANCE - 1) * band / (BANDS - 1)
        content = _on_tile(chip, demand, share)
        ranges.append({"first": first, "last": last, "bytes": dict(sorted(content.items()))})
    return ranges


def section(
    chip: Chip,
    demand: Demand,
    *,
    largest: Iterable[tuple[str, int]] = (),
    curve: Sequence[int] = (),
    peak_step: int = 0,
) -> dict[str, Any]:
    """The ``memory`` of a report: plain data, bytes.

    ``largest``: the largest contents by name. ``curve``: not-always-live bytes along the schedule.
    """
    content = demand.by_content()
    fullest = fullest_tile(chip, demand)
    return {
        "always_live_bytes": demand.always,
        "not_always_live_peak_bytes": demand.activations + demand.temporary,
        "activations_peak_bytes": max(curve, default=demand.activations),
        "temporary_bytes": demand.temporary,
        "code": {name: round(size) for name, size in demand.code.items()},
        "total_bytes": sum(content.values()),
        "max_tile_bytes": fullest,
        "tile_bytes": chip.tile_bytes,
        "fits": fullest <= chip.tile_bytes,
        "peak_step": peak_step,
        "by_content": content,
        "by_tile": by_tile(chip, demand),
        "by_time": thinned(curve),
        "largest": [{"scope": scope, "bytes": size} for scope, size in largest],
    }


TIME_POINTS = 256
"""Most points of the liveness curve that a report keeps."""


def thinned(curve: Sequence[int]) -> list[int]:
    """The curve, or the largest value of each of `TIME_POINTS` equal parts of it."""
    if len(curve) <= TIME_POINTS:
        return list(curve)
    edges = [index * len(curve) // TIME_POINTS for index in range(TIME_POINTS + 1)]
    return [max(curve[first:last]) for first, last in itertools.pairwise(edges)]


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """Bytes on the chip. ``curve[i]`` holds not-always-live bytes while step ``i`` runs, ``peak`` its largest.

    ``contents``: the largest values alive at the peak, (scope of the maker, bytes), largest first.
    """

    always: int
    peak: int
    peak_step: int
    curve: tuple[int, ...]
    contents: tuple[tuple[str, int], ...]


def measure_live_bytes(
    flat: FlatJaxpr, steps: Sequence[PlannedOperation], *, results_stay: bool | Sequence[bool] = True
) -> LiveBytes:
    """LiveBytes of ``steps`` made from ``flat``.

    ``results_stay``: results are held to the end (gradients that wait for the update); otherwise each is used
    up as it is made (gradients added to accumulators, values stored elsewhere). For all results, or for each.
    """
    held = {*flat.arguments, *flat.constants}
    last = _last_reads(flat, steps, results_stay)
    makers: dict[int, str] = {}
    deaths: dict[int, list[int]] = {}
    live = 0
    alive: set[int] = set()
    curve: list[int] = []
    peak, peak_step, at_peak = 0, 0, set[int]()
    for index, step in enumerate(steps):
        inner = set(step.aliases)
        for number in step.writes:
            if number in inner or number in held:
                continue
            end = last.get(number)
            if end is None:
                continue
            alive.add(number)
            makers[number] = f"{step.scope or step.primitive}"
            live += flat.tensors[number].nbytes
            deaths.setdefault(end, []).append(number)
        curve.append(live)
        if live > peak:
            peak, peak_step, at_peak = live, index, set(alive)
        for number in deaths.get(index, ()):
            alive.discard(number)
            live -= flat.tensors[number].nbytes
    contents = sorted(
        ((makers[n], flat.tensors[n].nbytes) for n in at_peak), key=lambda item: (-item[1], item[0])
    )
    always = sum(flat.tensors[n].nbytes for n in held)
    return LiveBytes(always, peak, peak_step, tuple(curve), tuple(contents[:16]))


def _last_reads(
    flat: FlatJaxpr, steps: Sequence[PlannedOperation], results_stay: bool | Sequence[bool]
) -> dict[int, int]:
    """The last step that reads each value or a view of it; past the end for results that stay."""
    owner: dict[int, int] = {}
    last: dict[int, int] = {}

    def root(number: int) -> int:
        while number in owner and owner[number] != number:
            number = owner[number]
        return number

    for index, step in enumerate(steps):
        for number in step.reads:
            last[root(number)] = index
        for number in step.aliases:
            if step.primitive != "chain":
                owner[number] = step.reads[0] if step.reads else number
    stay = [results_stay] * len(flat.outputs) if isinstance(results_stay, bool) else results_stay
    for output, stays in zip(flat.outputs, stay, strict=True):
        if stays and output is not None:
            last[root(output)] = len(steps)
    return last
