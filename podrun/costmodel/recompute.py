"""Recomputation: the backward pass computes forward values that it needs again instead of keeping them.

A flat training step lists its forward equations, then its backward ones (scope ``transpose(...)``). Where a backward
equation reads a value that is to be made again, copies of the forward equations that lead to it are put just before
that reader, once, and read from there on; so the value lives from its maker to its last forward reader, and again from
its copy to its last backward reader. Copies keep their layer and their IPU (``transpose(checkpoint(...))``) and so
belong to the backward work of their own pipeline stage. Liveness and cycles of the changed step are then counted as
usual: saving and price are both counted, neither is assumed. No bit of a result depends on it.

A copy is like its original, on the same IPU, so outlining makes one function of the two: vertices, their state and the
exchange's code are there once, and a run of copies is a call (`podrun.costmodel.equations.CALL_CODE`). A copy whose
original is gone, because only the backward pass read it, has code of its own; so has every copy where a program
switches outlining off.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace

from podrun.core.names import parse_scope, recomputing
from podrun.costmodel.equations import Equation, FlatJaxpr, needed
from podrun.costmodel.planners import VIEWS
from podrun.costmodel.settings import Recompute

IpuOfScope = Callable[[str], int | None]
"""The place (pipeline stage or IPU) that a scope names, None if it names none."""


def recomputed(flat: FlatJaxpr, what: Recompute, place: IpuOfScope = lambda scope: None) -> FlatJaxpr:
    """The training step ``flat`` with recomputation; ``flat`` itself if nothing is recomputed.

    A value from another ``place`` was sent here in the forward pass: it is kept, not recomputed.
    """
    return _Remaker(flat, what, place).run() if what.active else flat


class _Remaker:
    """Holds the copies made so far."""

    def __init__(self, flat: FlatJaxpr, what: Recompute, place: IpuOfScope) -> None:
        self.flat, self.what = flat, what
        self.equations = flat.equations
        self.tensors = dict(flat.tensors)
        self.next = 1 + max(self.tensors, default=-1)
        self.backward = [parse_scope(equation.scope).backward for equation in self.equations]
        self.maker = {n: i for i, equation in enumerate(self.equations) for n in equation.outputs}
        self.places: list[int | None] = []
        known: dict[str, int | None] = {}
        for equation in self.equations:
            if equation.scope not in known:
                known[equation.scope] = place(equation.scope)
            own = known[equation.scope]
            # An equation without a place is where the latest of its producers is, as when a step is split.
            makers = [m for n in equation.inputs if (m := self._maker(n)) is not None]
            self.places.append(self.places[max(makers)] if own is None and makers else own)
        self.again = self._chosen()
        self.copies: dict[int, int] = {}
        """Numbers of copies, by the numbers of the values they stand for."""
        self.originals: dict[int, int] = {}
        """The other way round, of each copy's first value."""

    def _maker(self, number: int | None) -> int | None:
        return None if number is None else self.maker.get(number)

    def _chosen(self) -> list[bool]:
        """Whether the backward pass recomputes each equation where it needs it."""
        rule = self.what.rule
        forward = [i for i, backward in enumerate(self.backward) if not backward]
        chosen = [False] * len(self.equations)
        if rule == "standard":
            for i in _between_checkpoints(self.flat, forward, self.backward):
                chosen[i] = True
        elif rule == "pipeline":
            last = max((p for i in forward if (p := self.places[i]) is not None), default=0)
            for i in forward:
                chosen[i] = self.places[i] != last
        elif rule == "all":
            for i in forward:
                chosen[i] = True
        named = self.what.scopes | self.what.kept
        for i in forward if named else ():
            operator = parse_scope(self.equations[i].scope).within(named)
            makers = [m for n in self.equations[i].inputs if (m := self._maker(n)) is not None]
            if operator is not None:
                chosen[i] = operator in self.what.scopes
            elif self.equations[i].primitive in VIEWS and makers:
                # Another name for the same bytes, which stands outside of the operator.
                chosen[i] = chosen[makers[0]]
        return chosen

    def run(self) -> FlatJaxpr:
        written: list[Equation] = []
        for i, equation in enumerate(self.equations):
            if self.backward[i]:
                inputs = tuple(self._here(n, self.places[i], written) for n in equation.inputs)
                equation = replace(equation, inputs=inputs)
            written.append(equation)
        # Forward work that only the backward pass needed (a derivative) now happens there alone.
        kept = needed(written, self.flat.results)
        return replace(self.flat, equations=self._outlined(kept), tensors=self.tensors)

    def _outlined(self, written: list[Equation]) -> list[Equation]:
        """``made``, where copies whose original is there are calls of it."""
        if not self.what.outlined:
            return written
        there = {number for equation in written for number in equation.outputs}
        return [
            replace(equation, outlined=True)
            if equation.outputs and self.originals.get(equation.outputs[0]) in there
            else equation
            for equation in written
        ]

    def _here(self, number: int | None, place: int | None, written: list[Equation]) -> int | None:
        """The value's substitute in the backward pass at ``place``; copies go to the end of ``made``."""
        index = self._remade(number, place)
        if index is None or number is None:
            return number
        # Depth first without recursion: a chain of copies can be as long as the model.
        waiting = [index]
        while waiting:
            i = waiting[-1]
            if self.equations[i].outputs[0] in self.copies:
                waiting.pop()
                continue
            makers = {self._remade(n, self.places[i]) for n in self.equations[i].inputs}
            missing = sorted(
                m for m in makers if m is not None and self.equations[m].outputs[0] not in self.copies
            )
            if missing:
                waiting += missing
            else:
                self._copy(waiting.pop(), written)
        return self.copies[number]

    def _remade(self, number: int | None, place: int | None) -> int | None:
        """The forward equation whose copy makes a value at ``place``; None if the value itself is read."""
        index = self._maker(number)
        if index is None or not self.again[index]:
            return None
        own = self.places[index]
        return index if own is None or place is None or own == place else None

    def _copy(self, index: int, written: list[Equation]) -> None:
        equation, place = self.equations[index], self.places[index]
        inputs = tuple(
            self.copies[n] if n is not None and self._remade(n, place) is not None else n
            for n in equation.inputs
        )
        for number in equation.outputs:
            self.copies[number] = self.next
            self.tensors[self.next] = self.tensors[number]
            self.next += 1
        outputs = tuple(self.copies[number] for number in equation.outputs)
        self.originals[outputs[0]] = equation.outputs[0]
        scope = recomputing(equation.scope)
        written.append(replace(equation, inputs=inputs, outputs=outputs, scope=scope))


MOST_SEGMENTS = 32
"""Most runs between checkpoints to try."""


def _between_checkpoints(flat: FlatJaxpr, forward: list[int], backward: list[bool]) -> set[int]:
    """The forward equations that are recomputed if checkpoints are chosen to make kept plus recomputed bytes small.

    Checkpoints stand after some equations. The values from before a checkpoint that forward work still reads are kept,
    and one at a time of the runs between checkpoints is recomputed. The function tries 2 to `MOST_SEGMENTS` runs of
    equal bytes, with each border moved to the nearby position where the fewest bytes are alive. The last run is not
    recomputed: its backward work follows at once.
    """
    facts = _ForwardFacts(flat, forward, backward)
    whole = facts.saved[-1] if facts.saved else 0
    best, chosen = whole, list[int]()
    for runs in range(2, min(MOST_SEGMENTS, len(forward)) + 1):
        borders = sorted(set(facts.borders(runs)))
        kept = sum(facts.alive[b] for b in borders)
        edges = [0, *(facts.saved[b] for b in borders), whole]
        peak = kept + max(late - early for early, late in itertools.pairwise(edges))
        if peak < best:
            best, chosen = peak, borders
    if not chosen:
        return set()
    kept_values = {n for border in chosen for n in facts.alive_after(border)}
    return {
        i
        for position, i in enumerate(forward)
        if position <= chosen[-1] and kept_values.isdisjoint(flat.equations[i].outputs)
    }


class _ForwardFacts:
    """Facts by position in the forward pass: bytes saved for the backward pass so far, bytes alive behind it."""

    def __init__(self, flat: FlatJaxpr, forward: list[int], backward: list[bool]) -> None:
        self.root: dict[int, int] = {}
        self.made: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for position, i in enumerate(forward):
            equation = flat.equations[i]
            reads = [n for n in equation.inputs if n is not None]
            self.last |= {self._of(n): position for n in reads}
            if equation.primitive in VIEWS and reads:
                self.root |= dict.fromkeys(equation.outputs, self._of(reads[0]))
            else:
                self.made |= dict.fromkeys(equation.outputs, position)
        late = {
            self._of(n)
            for i, equation in enumerate(flat.equations)
            if backward[i]
            for n in equation.inputs
            if n is not None
        }
        self.saved = [0] * len(forward)
        change = [0] * (len(forward) + 1)
        for number, position in self.made.items():
            size = flat.tensors[number].nbytes
            self.saved[position] += size if number in late else 0
            if self.last.get(number, position) > position:
                change[position] += size
                change[self.last[number]] -= size
        self.saved = list(itertools.accumulate(self.saved))
        self.alive = list(itertools.accumulate(change[: len(forward)]))

    def _of(self, number: int) -> int:
        return self.root.get(number, number)

    def borders(self, runs: int) -> Iterator[int]:
        """For each border between ``runs`` runs of equal saved bytes, the position nearby with the fewest bytes
        alive.
        """
        whole, count = self.saved[-1], len(self.saved)
        for run in range(1, runs):
            low = bisect_left(self.saved, whole * (run - 0.5) / runs)
            high = bisect_left(self.saved, whole * (run + 0.5) / runs)
            nearby = range(low, min(max(high, low + 1), count))
            yield min(nearby, key=lambda p: (self.alive[p], p), default=low)

    def alive_after(self, position: int) -> Iterator[int]:
        """Values made at or before ``position`` and read behind it in the forward pass."""
        for number, produced in self.made.items():
            if produced <= position < self.last.get(number, produced):
                yield number
