"""Recomputation: forward values that the backward pass needs are made again there instead of being kept.

A traced training step lists its forward equations, then its backward ones (scope ``transpose(...)``). Where a
backward equation reads a value that is to be made again, copies of the forward equations that lead to it are put just
before that reader, once, and read from there on; so the value lives from its maker to its last forward reader, and
again from its copy to its last backward reader. Copies keep their layer and their IPU (``transpose(remat(...))``) and
so land in the backward work of their own pipeline stage. Liveness, cycles and code of the changed trace are then what
they are: saving and price are both counted, neither is assumed. Numbers do not change, only costs are read here.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from podrun.device.tiles.flatten import tensor_of
from podrun.device.tiles.primitives import VIEWS

BACKWARD = "transpose("
"""In the scope of every backward equation."""
Place = Callable[[Any], int | None]
"""The place (pipeline stage or IPU) of an equation, None if it has none."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """What is made again.

    ``rule``: ``"none"``; ``"standard"``: all but checkpoints chosen so that peak memory is small; ``"pipeline"``:
    everything in all forward stages but the last; ``"all"``: everything. Whatever the rule, operators whose scope is
    in ``scopes`` are made again, and those in ``kept`` are checkpoints.
    """

    rule: str = "none"
    scopes: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()

    @property
    def active(self) -> bool:
        """True iff anything is made again."""
        return self.rule != "none" or bool(self.scopes)


NOTHING = Recompute()


def recomputed(closed: Any, what: Recompute, place: Place | None = None) -> Any:
    """The training step ``closed`` (a ``ClosedJaxpr``) with recomputation; itself if nothing is to be made again.

    What crosses from another ``place`` was sent here in the forward pass: it is kept, not made again.
    """
    if not what.active:
        return closed
    return _Remaker(closed, what, place or (lambda equation: None)).run()


def _scope(equation: Any) -> str:
    return str(equation.source_info.name_stack)


def _in(equation: Any, scopes: frozenset[str]) -> bool:
    """True iff one of the equation's name scopes is in ``scopes``; transformations among them have no scope's name."""
    return any(getattr(part, "name", None) in scopes for part in equation.source_info.name_stack.stack)


class _Remaker:
    """Carries the copies that were made so far."""

    def __init__(self, closed: Any, what: Recompute, place: Place) -> None:
        self.closed, self.what = closed, what
        self.equations = list(closed.jaxpr.eqns)
        self.backward = [BACKWARD in _scope(equation) for equation in self.equations]
        self.maker = {v: i for i, equation in enumerate(self.equations) for v in equation.outvars}
        self.places: list[int | None] = []
        for equation in self.equations:
            # An equation without a place is where the latest of its producers is, as when a piece is split.
            made = [self.maker[v] for v in equation.invars if not hasattr(v, "val") and v in self.maker]
            own = place(equation)
            if own is None and made:
                own = self.places[max(made)]
            self.places.append(own)
        self.again = self._chosen()
        self.copies: dict[int, list[Any]] = {}
        self.gates: dict[tuple[Any, int | None], Any] = {}

    def _chosen(self) -> list[bool]:
        """For each equation: is it made again where the backward pass needs it?"""
        rule = self.what.rule
        forward = [i for i, backward in enumerate(self.backward) if not backward]
        chosen = [False] * len(self.equations)
        if rule == "standard":
            for i in _between_checkpoints(self.equations, self.backward):
                chosen[i] = True
        elif rule == "pipeline":
            last = max((p for i in forward if (p := self.places[i]) is not None), default=0)
            for i in forward:
                chosen[i] = self.places[i] != last
        elif rule == "all":
            for i in forward:
                chosen[i] = True
        for i in forward:
            if _in(self.equations[i], self.what.scopes):
                chosen[i] = True
            elif _in(self.equations[i], self.what.kept):
                chosen[i] = False
        return chosen

    def run(self) -> Any:
        from jax.extend.core import ClosedJaxpr
        from jax.interpreters import partial_eval

        made: list[Any] = []
        for i, equation in enumerate(self.equations):
            if self.backward[i]:
                inputs = [self._here(v, i, made) for v in equation.invars]
                equation = equation.replace(invars=inputs)
            made.append(equation)
        jaxpr = self.closed.jaxpr.replace(eqns=made)
        # Forward work that only the backward pass needed (a derivative) is now done there alone.
        jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
        return ClosedJaxpr(jaxpr, self.closed.consts)

    def _here(self, variable: Any, reader: int, made: list[Any]) -> Any:
        """What stands for ``variable`` in the backward equation ``reader``; copies go to the end of ``made``."""
        index = self._maker(variable)
        if index is None or not self._is_remade(index, self.places[reader]):
            return variable
        # Depth first without recursion: a chain of copies can be as long as the model.
        waiting = [index]
        while waiting:
            i = waiting[-1]
            makers = (self._maker(v) for v in self.equations[i].invars)
            missing = [
                m
                for m in makers
                if m is not None and self._is_remade(m, self.places[i]) and m not in self.copies
            ]
            if missing and i not in self.copies:
                waiting += missing
                continue
            waiting.pop()
            if i not in self.copies:
                self._copy(i, reader, made)
        return self._copied(variable, index)

    def _maker(self, variable: Any) -> int | None:
        return None if hasattr(variable, "val") else self.maker.get(variable)

    def _is_remade(self, index: int, place: int | None) -> bool:
        own = self.places[index]
        return self.again[index] and (own is None or place is None or own == place)

    def _copied(self, variable: Any, index: int) -> Any:
        return self.copies[index][list(self.equations[index].outvars).index(variable)]

    def _copy(self, index: int, reader: int, made: list[Any]) -> None:
        from jax.extend.core import Var

        equation = self.equations[index]
        inputs = []
        for v in equation.invars:
            maker = self._maker(v)
            if maker is not None and self._is_remade(maker, self.places[index]):
                inputs.append(self._copied(v, maker))
            else:
                inputs.append(v if hasattr(v, "val") else self._gated(v, equation, reader, made))
        outputs = [Var(v.aval) for v in equation.outvars]
        made.append(self._late(equation, invars=inputs, outvars=outputs))
        self.copies[index] = outputs

    def _gated(self, variable: Any, equation: Any, reader: int, made: list[Any]) -> Any:
        """``variable`` once the backward pass is there: a copy that could run earlier would be run, and kept."""
        from jax.extend.core import Var
        from jax.lax import optimization_barrier_p

        where = (variable, self.places[reader])
        if where in self.gates:
            return self.gates[where]
        inputs = self.equations[reader].invars
        token = next((v for v in inputs if (m := self._maker(v)) is not None and self.backward[m]), None)
        if token is None:
            return variable
        outputs = [Var(variable.aval), Var(token.aval)]
        gate = equation.replace(primitive=optimization_barrier_p, params={}, effects=frozenset())
        made.append(self._late(gate, invars=[variable, token], outvars=outputs))
        self.gates[where] = outputs[0]
        return outputs[0]

    @staticmethod
    def _late(equation: Any, **changes: Any) -> Any:
        """An equation as part of the backward work of its own layer and place."""
        stack = equation.source_info.name_stack
        wrapped = stack[:0].transform("transpose").transform("remat") + stack
        return equation.replace(source_info=equation.source_info.replace(name_stack=wrapped), **changes)


MOST_SEGMENTS = 32
"""Most runs between checkpoints that are tried."""


def _between_checkpoints(equations: list[Any], backward: list[bool]) -> set[int]:
    """Forward equations that are made again when checkpoints are chosen to make kept plus remade bytes small.

    With checkpoints after some equations, what forward work still reads from before each of them is kept, and of the
    runs between them one at a time is made again. Tried are 2 to `MOST_SEGMENTS` runs of equal bytes, each border
    moved to where least is alive nearby. The last run is not made again: its backward work follows at once.
    """
    forward = [i for i, late in enumerate(backward) if not late]
    facts = _ForwardFacts(equations, backward, forward)
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
    kept_variables = {v for border in chosen for v in facts.alive_after(border)}
    return {
        i
        for position, i in enumerate(forward)
        if position <= chosen[-1] and not any(v in kept_variables for v in equations[i].outvars)
    }


class _ForwardFacts:
    """By position in the forward pass: bytes saved for the backward pass so far, bytes alive behind it."""

    def __init__(self, equations: list[Any], backward: list[bool], forward: list[int]) -> None:
        self.root: dict[Any, Any] = {}
        self.made: dict[Any, int] = {}
        self.last: dict[Any, int] = {}
        for position, i in enumerate(forward):
            equation = equations[i]
            reads = list(_variables(equation.invars))
            self.last |= {self._of(v): position for v in reads}
            if equation.primitive.name in VIEWS and reads:
                self.root |= dict.fromkeys(equation.outvars, self._of(reads[0]))
            else:
                self.made |= dict.fromkeys(equation.outvars, position)
        late = {self._of(v) for i, e in enumerate(equations) if backward[i] for v in _variables(e.invars)}
        self.sizes = {v: tensor_of(v.aval).nbytes for v in self.made}
        self.saved = [0] * len(forward)
        change = [0] * (len(forward) + 1)
        for v, position in self.made.items():
            self.saved[position] += self.sizes[v] if v in late else 0
            if self.last.get(v, position) > position:
                change[position] += self.sizes[v]
                change[self.last[v]] -= self.sizes[v]
        self.alive = []
        total = alive = 0
        for position in range(len(forward)):
            total += self.saved[position]
            alive += change[position]
            self.saved[position] = total
            self.alive.append(alive)

    def _of(self, variable: Any) -> Any:
        return self.root.get(variable, variable)

    def borders(self, runs: int) -> Iterator[int]:
        """For each border between ``runs`` runs of equal saved bytes the position nearby where least is alive."""
        whole, count = self.saved[-1], len(self.saved)
        for run in range(1, runs):
            low = bisect_left(self.saved, whole * (run - 0.5) / runs)
            high = bisect_left(self.saved, whole * (run + 0.5) / runs)
            yield min(
                range(low, min(max(high, low + 1), count)), key=lambda p: (self.alive[p], p), default=low
            )

    def alive_after(self, position: int) -> Iterator[Any]:
        """Variables made at or before ``position`` and read behind it in the forward pass."""
        for v, made in self.made.items():
            if made <= position < self.last.get(v, made):
                yield v


def _variables(atoms: Any) -> Iterator[Any]:
    return (v for v in atoms if not hasattr(v, "val"))
