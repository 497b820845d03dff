"""What is held when: bytes of values by liveness on the schedule.

Arguments and constants are always live; everything else from the step that makes it to the step that reads
it last.
A view lives in its operand's memory. Values are spread evenly over tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podrun.device.tiles.flatten import FlatJaxpr
from podrun.device.tiles.schedule import Step


@dataclass(frozen=True, slots=True)
class Liveness:
    """Bytes on the chip. ``curve[i]`` holds not-always-live bytes while step ``i`` runs, ``peak`` its
    largest.

    ``contents``: the largest values alive at the peak, (scope of the maker, bytes), largest first.
    """

    always: int
    peak: int
    peak_step: int
    curve: tuple[int, ...]
    contents: tuple[tuple[str, int], ...]


def measure(
    flat: FlatJaxpr, steps: Sequence[Step], *, results_stay: bool | Sequence[bool] = True
) -> Liveness:
    """Liveness of ``steps`` made from ``flat``.

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
    return Liveness(always, peak, peak_step, tuple(curve), tuple(contents[:16]))


def _last_reads(
    flat: FlatJaxpr, steps: Sequence[Step], results_stay: bool | Sequence[bool]
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
