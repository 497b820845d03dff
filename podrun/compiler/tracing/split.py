"""Splitting: one traced piece as segments, each on one place (an IPU, or a pipeline stage).

Equations carry their place in their name scopes, and differentiation keeps it, so backward work lands where
its forward work is. An equation without a place joins the latest of its producers that has one, else the
first of its consumers: by rank, because programs may name the work of a later stage first. Segments are then cut
greedily: of the equations that can run, take the place of the one of lowest rank, and run everything of that place
that can run. For a chain of stages 0, 1, 2 in training this gives 0, 1, 2 (forward and backward), 1, 0. What crosses
between segments has a name of its own; between places it is what travels over IPU-Links, and what comes back to its
own place later is the stash.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from podrun.compiler import jax_internals
from podrun.compiler.export.pieces import TracedPiece


@dataclass(frozen=True, slots=True)
class Spot:
    """Where and when: ``rank`` orders the work; None leaves it in program order. ``late``: not with work of a lower
    rank, even if all that it reads is there."""

    place: int
    rank: int | None = None
    late: bool = False


Place = Callable[[JaxprEqn], Spot | None]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a piece that runs on one place without a break; ``rank`` is the lowest of its equations."""

    place: int
    rank: int
    piece: TracedPiece


ANEW = "anew"
"""The innermost scope of what is made anew wherever it is read, of arguments and constants. What differentiation makes
of it backward is not."""
_ANEW = re.compile(r"(?:(?:jvp|vmap)\()*anew\)*")
CROSSING_PREFIX = "value:"
"""Temporaries that hold what crosses between segments begin with this; a number follows."""


def split(piece: TracedPiece, place: Place) -> tuple[Segment, ...]:
    """The segments of ``piece`` in an order in which they can run, named ``NAME.0``, ``NAME.1`` ...

    Together they compute what the piece computes, equation for equation.
    """
    return _Splitter(piece, place).segments()


class _Splitter:
    def __init__(self, piece: TracedPiece, place: Place) -> None:
        self.piece = piece
        self.jaxpr = piece.jaxpr.jaxpr
        self.equations: list[JaxprEqn] = list(self.jaxpr.eqns)
        self.producer = {v: i for i, equation in enumerate(self.equations) for v in equation.outvars}
        arguments = set(self.jaxpr.invars)
        direct = [[v for v in e.invars if not isinstance(v, Literal)] for e in self.equations]
        # Constants, and random keys (which have no form outside of a trace), are made anew wherever they are
        # read.
        self.repeated = [
            not any(v in self.producer or v in arguments for v in reads) or _anew(equation)
            for equation, reads in zip(self.equations, direct, strict=True)
        ]
        self.reads: list[list[Var]] = []
        for reads in direct:
            self.reads.append(list(dict.fromkeys(w for v in reads for w in self._behind(v))))
        self.indices = [i for i in range(len(self.equations)) if not self.repeated[i]]
        self.late: set[int] = set()
        self.spots = self._placed(place)

    def _behind(self, variable: Var) -> list[Var]:
        """What has to be there to have ``variable``: itself, or what the equation reads that is made anew."""
        made = self.producer.get(variable)
        return [variable] if made is None or not self.repeated[made] else self.reads[made]

    def _placed(self, place: Place) -> dict[int, tuple[int, int]]:
        """Place and rank of every equation that is no constant."""
        found: dict[int, tuple[int, int]] = {}
        for i in self.indices:
            spot = place(self.equations[i])
            if spot is not None:
                found[i] = (spot.place, i if spot.rank is None else spot.rank)
                if self.equations[i].primitive.name == "add_any":
                    # Gradients of a value meet where the last of them is made, whichever the program names last.
                    self._follow(i, found)
                if spot.late:
                    self.late.add(i)
            else:
                self._follow(i, found)
        consumers = self._consumers()
        for i in reversed(self.indices):
            if i not in found:
                placed = [found[c] for c in consumers.get(i, []) if c in found]
                if placed:
                    found[i] = min(placed, key=_rank)
        homes = self._homes(found)
        for i in self.indices:
            if i not in found:
                self._follow(i, found)
            if i not in found:
                found[i] = next((homes[v] for v in self.reads[i] if v in homes), (0, 0))
        return found

    @property
    def _changing(self) -> set[Var]:
        """Arguments that the piece also writes (accumulators): read early, they would be those of another time."""
        written = set(self.piece.outputs)
        return {v for v, name in zip(self.jaxpr.invars, self.piece.inputs, strict=True) if name in written}

    def _follow(self, index: int, found: dict[int, tuple[int, int]]) -> None:
        """Give an equation the spot of the latest of its producers that has one, or leave its own if that is later."""
        placed = [found[p] for p in (*self._producers(index), index) if p in found]
        if placed:
            found[index] = max(placed, key=_rank)

    def _homes(self, found: Mapping[int, tuple[int, int]]) -> dict[Var, tuple[int, int]]:
        """The spot of the first placed equation that reads each argument."""
        homes: dict[Var, tuple[int, int]] = {}
        arguments = set(self.jaxpr.invars)
        for i in self.indices:
            for variable in self.reads[i]:
                if i in found and variable in arguments:
                    homes.setdefault(variable, found[i])
        return homes

    def _producers(self, index: int) -> list[int]:
        """Equations whose results an equation reads, in program order."""
        return sorted({self.producer[v] for v in self.reads[index] if v in self.producer})

    def _consumers(self) -> dict[int, list[int]]:
        """Equations that read the results of an equation, in program order."""
        found: dict[int, list[int]] = {}
        for i in self.indices:
            for producer in self._producers(i):
                found.setdefault(producer, []).append(i)
        return found

    def segments(self) -> tuple[Segment, ...]:
        groups = self._postponed(self._groups())
        where = {i: number for number, group in enumerate(groups) for i in group}
        crossing = self._crossing(groups, where)
        outputs = self._outputs(groups, where)
        names = {v: f"{CROSSING_PREFIX}{n}" for n, v in enumerate(crossing)}
        found = []
        for number, group in enumerate(groups):
            made = {v for i in group for v in self.equations[i].outvars}
            wanted = [(names[v], v) for v in crossing if v in made] + outputs[number]
            found.append(self._segment(number, group, names, wanted))
        return tuple(found)

    def _groups(self) -> list[list[int]]:
        """Equations of each segment, in program order."""
        left = list(self.indices)
        done: set[int] = set()
        groups: list[list[int]] = []
        while left:
            ready = [i for i in left if all(p in done for p in self._producers(i))]
            place, rank = self.spots[min(ready, key=lambda i: (self.spots[i][1], i))]
            group = []
            for i in left:
                own = self.spots[i][0] == place and (i not in self.late or self.spots[i][1] <= rank)
                if own and all(p in done for p in self._producers(i)):
                    group.append(i)
                    done.add(i)
            groups.append(group)
            left = [i for i in left if i not in done]
        return groups or [[]]

    def _postponed(self, groups: list[list[int]]) -> list[list[int]]:
        """The groups, with what is made of changing arguments alone moved to the first group that needs it.

        So an accumulator is read where it is added to: in a pipeline it changes meanwhile, and which operations XLA
        fuses, hence the last bit, does not depend on whether places have ranks.
        """
        where = {i: number for number, group in enumerate(groups) for i in group}
        consumers, movable = self._consumers(), self._made_of_changing()
        for i in sorted(movable, key=lambda i: (i not in consumers, -i)):
            # What is only an output goes where the same arguments are read.
            alike = [k for k in movable if k != i and not set(self.reads[k]).isdisjoint(self.reads[i])]
            first = min(consumers.get(i) or alike, key=where.__getitem__, default=i)
            if self.spots[first][0] == self.spots[i][0]:
                where[i] = max(where[i], where[first])
        found = [sorted(i for i in where if where[i] == number) for number in range(len(groups))]
        return [group for group in found if group] or [[]]

    def _made_of_changing(self) -> list[int]:
        """Equations that read nothing but arguments, changing ones among them, and what such equations make."""
        fixed, made = set(self.jaxpr.invars) - self._changing, set(self._changing)
        found = []
        for i in self.indices:
            if not made.isdisjoint(self.reads[i]) and made.union(fixed).issuperset(self.reads[i]):
                found.append(i)
                made.update(self.equations[i].outvars)
        return found

    def _crossing(self, groups: list[list[int]], where: Mapping[int, int]) -> list[Var]:
        """Variables made in one segment and read in another, in program order."""
        crossing: dict[Var, None] = {}
        for number, group in enumerate(groups):
            for i in group:
                for variable in self.reads[i]:
                    made = self.producer.get(variable)
                    if made is not None and where[made] != number:
                        crossing[variable] = None
        order = {v: k for k, e in enumerate(self.equations) for v in e.outvars}
        return sorted(crossing, key=lambda v: (order[v], self.equations[order[v]].outvars.index(v)))

    def _outputs(self, groups: list[list[int]], where: Mapping[int, int]) -> list[list[tuple[str, Any]]]:
        """The piece's outputs, by the segment that gives them."""
        found: list[list[tuple[str, Any]]] = [[] for _ in groups]
        for name, atom in zip(self.piece.outputs, self.jaxpr.outvars, strict=True):
            made = None if isinstance(atom, Literal) else self.producer.get(atom)
            found[where.get(made, 0) if made is not None else 0].append((name, atom))
        return found

    def _segment(
        self, number: int, group: list[int], names: Mapping[Var, str], wanted: list[tuple[str, Any]]
    ) -> Segment:
        atoms = [atom for _, atom in wanted]
        equations = self._with_repeated(group, atoms)
        made = {v for equation in equations for v in equation.outvars}
        read = {v: None for e in equations for v in e.invars if not isinstance(v, Literal) and v not in made}
        read |= {v: None for v in atoms if not isinstance(v, Literal) and v not in made}
        arguments = dict(zip(self.jaxpr.invars, self.piece.inputs, strict=True))
        inputs = [(name, v) for v, name in arguments.items() if v in read]
        inputs += [(name, v) for v, name in names.items() if v in read]
        closed = jax_internals.sub_jaxpr(self.piece.jaxpr, [v for _, v in inputs], equations, atoms)
        place, rank = min((self.spots[i] for i in group), key=lambda spot: spot[1], default=(0, 0))
        traced = TracedPiece(
            f"{self.piece.name}.{number}",
            closed,
            tuple(name for name, _ in inputs),
            tuple(name for name, _ in wanted),
        )
        return Segment(place, rank, traced)

    def _with_repeated(self, group: list[int], atoms: Sequence[Any]) -> list[JaxprEqn]:
        """The group's equations with those that are made anew for them and the outputs, in program order."""
        chosen = set(group)
        wanted = [v for i in group for v in self.equations[i].invars] + list(atoms)
        while wanted:
            atom = wanted.pop()
            made = None if isinstance(atom, Literal) else self.producer.get(atom)
            if made is not None and self.repeated[made] and made not in chosen:
                chosen.add(made)
                wanted += self.equations[made].invars
        return [self.equations[i] for i in sorted(chosen)]


def _rank(spot: tuple[int, int]) -> int:
    return spot[1]


def _anew(equation: JaxprEqn) -> bool:
    scopes = jax_internals.name_scopes(equation)
    return (bool(scopes) and _ANEW.fullmatch(scopes[-1]) is not None) or _makes_keys(equation)


def _makes_keys(equation: JaxprEqn) -> bool:
    dtypes = (getattr(variable.aval, "dtype", np.dtype(bool)) for variable in equation.outvars)
    return any(jax.numpy.issubdtype(dtype, jax.dtypes.extended) for dtype in dtypes)
