"""A flat training step cut into segments, each on one place (an IPU, or a pipeline stage) without a break.

The compiler cuts the program that runs the same way (`podrun.compiler.tracing.split`); here the step is cut after
its operators got the library's form and after recomputation, so what crosses between segments is what the
library keeps and sends. Values keep their numbers: the result of one segment is the argument of another
under the same number.

An equation without a place is where the latest of its producers is, else where its first consumer is. One
that reads nothing (constants), random keys and views, which move nothing, are made anew wherever they are
read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from podrun.device.tiles.flatten import Equation, FlatJaxpr
from podrun.device.tiles.primitives import VIEWS
from podrun.device.tiles.recompute import BACKWARD, REMADE

Spot = Callable[[str], tuple[int, int | None] | None]
"""Place and rank that a scope says, None if it says none. A rank orders the work; None: program order."""
KEYS = frozenset(
    {"random_wrap", "random_seed", "random_fold_in", "random_split", "random_clone", "random_unwrap"}
)


@dataclass(frozen=True, slots=True)
class FlatSegment:
    """A part of a step: ``flat.arguments`` is all it reads of others, ``flat.outputs`` all that others
    read, then the results of the whole step that it makes. ``crossing``: those outputs that other segments
    read.
    """

    place: int
    rank: int
    flat: FlatJaxpr
    crossing: tuple[int, ...]


def split_flat(flat: FlatJaxpr, spot: Spot) -> tuple[FlatSegment, ...]:
    """The segments of a step in an order in which they can run; equation for equation the step itself."""
    return _Splitter(flat, spot).segments()


class _Splitter:
    def __init__(self, flat: FlatJaxpr, spot: Spot) -> None:
        self.flat, self.equations = flat, flat.equations
        self.producer = {n: i for i, equation in enumerate(self.equations) for n in equation.outputs}
        arguments = set(flat.arguments)
        self.repeated = [
            e.primitive in KEYS
            or e.primitive in VIEWS
            or not any(n in self.producer or n in arguments for n in e.inputs)
            for e in self.equations
        ]
        self.reads: list[list[int]] = []
        for equation in self.equations:
            self.reads.append([m for n in equation.inputs if n is not None for m in self._behind(n)])
        self.makers = [
            sorted({self.producer[n] for n in reads if n in self.producer}) for reads in self.reads
        ]
        self._hold_back()
        self.indices = [i for i in range(len(self.equations)) if not self.repeated[i]]
        self.spots = self._placed({e.scope: spot(e.scope) for e in self.equations})

    def _behind(self, number: int) -> list[int]:
        """What has to be there to have a value: itself, or what the equation reads that is made anew."""
        made = self.producer.get(number)
        return [number] if made is None or not self.repeated[made] else self.reads[made]

    def _hold_back(self) -> None:
        """Copies of forward work wait for the backward work before them, or they would be done, and kept,
        at once.
        """
        last: int | None = None
        for i, equation in enumerate(self.equations):
            if self.repeated[i] or BACKWARD not in equation.scope:
                continue
            if REMADE in equation.scope:
                self.makers[i] = [*self.makers[i], *([last] if last is not None else [])]
            elif self.makers[i]:
                last = i

    def _placed(self, said: Mapping[str, tuple[int, int | None] | None]) -> dict[int, tuple[int, int]]:
        """Place and rank of every equation that is not made anew."""
        found: dict[int, tuple[int, int]] = {}
        for i in self.indices:
            where = said[self.equations[i].scope]
            if where is not None:
                found[i] = (where[0], i if where[1] is None else where[1])
            else:
                self._follow(i, found)
        first: dict[int, int] = {}
        for i in self.indices:
            for maker in self.makers[i]:
                first.setdefault(maker, i)
        for i in reversed(self.indices):
            if i not in found and first.get(i) in found:
                found[i] = found[first[i]]
        homes: dict[int, tuple[int, int]] = {}
        for i in self.indices:
            for number in self.reads[i] if i in found else ():
                homes.setdefault(number, found[i])
        for i in self.indices:
            if i not in found:
                self._follow(i, found)
            if i not in found:
                found[i] = next((homes[n] for n in self.reads[i] if n in homes), (0, 0))
        return found

    def _follow(self, index: int, found: dict[int, tuple[int, int]]) -> None:
        placed = [found[m] for m in self.makers[index] if m in found]
        if placed:
            found[index] = placed[-1]

    def _groups(self) -> list[list[int]]:
        """Equations of each segment: of those that can run, those of the place of the lowest rank."""
        waits = {i: len(set(self.makers[i])) for i in self.indices}
        readers: dict[int, list[int]] = {}
        for i in self.indices:
            for maker in set(self.makers[i]):
                readers.setdefault(maker, []).append(i)
        left = list(self.indices)
        groups: list[list[int]] = []
        while left:
            ready = min((i for i in left if not waits[i]), key=lambda i: (self.spots[i][1], i))
            place = self.spots[ready][0]
            group = []
            for i in left:
                if self.spots[i][0] == place and not waits[i]:
                    group.append(i)
                    for reader in readers.get(i, ()):
                        waits[reader] -= 1
            groups.append(group)
            done = set(group)
            left = [i for i in left if i not in done]
        return groups or [[]]

    def segments(self) -> tuple[FlatSegment, ...]:
        groups = self._groups()
        where = {i: number for number, group in enumerate(groups) for i in group}
        crossing: list[dict[int, None]] = [{} for _ in groups]
        for number, group in enumerate(groups):
            for read in (read for i in group for read in self.reads[i]):
                made = self.producer.get(read)
                if made is not None and where[made] != number:
                    crossing[where[made]][read] = None
        owned: list[list[int]] = [[] for _ in groups]
        for output in self.flat.outputs:
            if output is not None:
                makers = [self.producer[n] for n in self._behind(output) if n in self.producer]
                owned[max((where[m] for m in makers), default=0)].append(output)
        return tuple(
            self._segment(group, tuple(sorted(crossing[number])), owned[number])
            for number, group in enumerate(groups)
        )

    def _segment(self, group: list[int], crossing: tuple[int, ...], owned: list[int]) -> FlatSegment:
        equations = self._with_repeated(group, [*crossing, *owned])
        made = {n for equation in equations for n in equation.outputs}
        read = {n: None for e in equations for n in e.inputs if n is not None and n not in made}
        read |= {n: None for n in owned if n not in made}
        constants = [n for n in self.flat.constants if n in read]
        arguments = [n for n in read if n not in set(constants)]
        outputs: list[int | None] = [*crossing, *owned]
        part = replace(
            self.flat,
            arguments=arguments,
            constants=constants,
            results=[*crossing, *owned],
            outputs=outputs,
            equations=equations,
        )
        place, rank = min((self.spots[i] for i in group), key=lambda spot: spot[1], default=(0, 0))
        return FlatSegment(place, rank, part, crossing)

    def _with_repeated(self, group: list[int], outputs: list[int]) -> list[Equation]:
        """The group's equations with those that are made anew for them, in program order."""
        chosen = set(group)
        wanted = [n for i in group for n in self.equations[i].inputs if n is not None] + outputs
        while wanted:
            made = self.producer.get(wanted.pop())
            if made is not None and self.repeated[made] and made not in chosen:
                chosen.add(made)
                wanted += [n for n in self.equations[made].inputs if n is not None]
        return [self.equations[i] for i in sorted(chosen)]
