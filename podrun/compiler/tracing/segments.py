"""Segments: one traced piece cut into parts that each run on one place (an IPU, or a pipeline stage).

Equations carry their place in their name scopes, and differentiation keeps it, so backward work lands where its
forward work is; `podrun.costmodel.splitting` says where everything else goes. What crosses between segments has a name
of its own. Between places it travels over IPU-Links; what comes back to its own place later is the stash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from podrun.compiler import jaxprs
from podrun.compiler.export.pieces import TracedPiece
from podrun.core.buffer_names import CROSSING
from podrun.core.scopes import is_local
from podrun.costmodel.splitting import DependencyGraph, Spot, earliest

Place = Callable[[JaxprEqn], Spot | None]


@dataclass(frozen=True, slots=True)
class PieceSegment:
    """A part of a piece that runs on one place without a break; ``rank`` is the lowest of its equations."""

    place: int
    rank: int
    piece: TracedPiece


def split(piece: TracedPiece, place: Place) -> tuple[PieceSegment, ...]:
    """The segments of ``piece`` in an order in which they can run, named ``NAME.0``, ``NAME.1`` ...

    Together they compute what the piece computes, equation for equation.
    """
    return _Splitter(piece, place).segments()


class _Splitter:
    def __init__(self, piece: TracedPiece, place: Place) -> None:
        self.piece = piece
        self.jaxpr = piece.jaxpr.jaxpr
        self.equations: list[JaxprEqn] = list(self.jaxpr.eqns)
        known = {v for equation in self.equations for v in equation.outvars}.union(self.jaxpr.invars)
        direct = [[v for v in e.invars if not isinstance(v, Literal)] for e in self.equations]
        self.graph = DependencyGraph[Var](
            direct,
            [equation.outvars for equation in self.equations],
            # Constants, and random keys (which have no form outside of a trace), are made anew wherever they are read.
            [
                not any(v in known for v in reads) or _anew(equation)
                for equation, reads in zip(self.equations, direct, strict=True)
            ],
        )
        # Gradients of a value meet where the last of them is made, whichever the program names last.
        sums = {i for i, equation in enumerate(self.equations) if equation.primitive.name == "add_any"}
        self.spots = self.graph.placed(lambda i: place(self.equations[i]), joins=sums)

    def segments(self) -> tuple[PieceSegment, ...]:
        groups = self._postponed(self.graph.groups(self.spots))
        where = {i: number for number, group in enumerate(groups) for i in group}
        crossing = self.graph.crossing(groups)
        outputs = self._outputs(groups, where)
        names = {v: f"{CROSSING}{n}" for n, v in enumerate(crossing)}
        found = []
        for number, group in enumerate(groups):
            made = {v for i in group for v in self.equations[i].outvars}
            wanted = [(names[v], v) for v in crossing if v in made] + outputs[number]
            found.append(self._segment(number, group, names, wanted))
        return tuple(found)

    @property
    def _changing(self) -> set[Var]:
        """Arguments that the piece also writes (accumulators): read early, they would be those of another time."""
        written = set(self.piece.outputs)
        return {v for v, name in zip(self.jaxpr.invars, self.piece.inputs, strict=True) if name in written}

    def _postponed(self, groups: list[list[int]]) -> list[list[int]]:
        """The groups, with what is made of changing arguments alone moved to the first group that needs it.

        So an accumulator is read where it is added to: in a pipeline it changes meanwhile, and which operations XLA
        fuses, hence the last bit, does not depend on whether places have ranks.
        """
        reads = self.graph.reads
        where = {i: number for number, group in enumerate(groups) for i in group}
        consumers, movable = self.graph.consumers(), self._made_of_changing()
        for i in sorted(movable, key=lambda i: (i not in consumers, -i)):
            # What is only an output goes where the same arguments are read.
            alike = [k for k in movable if k != i and not set(reads[k]).isdisjoint(reads[i])]
            first = min(consumers.get(i) or alike, key=where.__getitem__, default=i)
            if self.spots[first].place == self.spots[i].place:
                where[i] = max(where[i], where[first])
        found = [sorted(i for i in where if where[i] == number) for number in range(len(groups))]
        return [group for group in found if group] or [[]]

    def _made_of_changing(self) -> list[int]:
        """Equations that read nothing but arguments, changing ones among them, and what such equations make."""
        fixed, made = set(self.jaxpr.invars) - self._changing, set(self._changing)
        found = []
        for i in self.graph.indices:
            reads = self.graph.reads[i]
            if not made.isdisjoint(reads) and made.union(fixed).issuperset(reads):
                found.append(i)
                made.update(self.equations[i].outvars)
        return found

    def _outputs(self, groups: list[list[int]], where: Mapping[int, int]) -> list[list[tuple[str, Any]]]:
        """The piece's outputs, by the segment that gives them."""
        found: list[list[tuple[str, Any]]] = [[] for _ in groups]
        for name, atom in zip(self.piece.outputs, self.jaxpr.outvars, strict=True):
            made = None if isinstance(atom, Literal) else self.graph.producer.get(atom)
            found[where.get(made, 0) if made is not None else 0].append((name, atom))
        return found

    def _segment(
        self, number: int, group: list[int], names: Mapping[Var, str], wanted: list[tuple[str, Any]]
    ) -> PieceSegment:
        atoms = [atom for _, atom in wanted]
        results = [atom for atom in atoms if not isinstance(atom, Literal)]
        equations = [self.equations[i] for i in self.graph.with_repeated(group, results)]
        made = {v for equation in equations for v in equation.outvars}
        read = {v: None for e in equations for v in e.invars if not isinstance(v, Literal) and v not in made}
        read |= {v: None for v in results if v not in made}
        arguments = dict(zip(self.jaxpr.invars, self.piece.inputs, strict=True))
        inputs = [(name, v) for v, name in arguments.items() if v in read]
        inputs += [(name, v) for v, name in names.items() if v in read]
        closed = jaxprs.sub_jaxpr(self.piece.jaxpr, [v for _, v in inputs], equations, atoms)
        first = earliest(group, self.spots)
        traced = TracedPiece(
            f"{self.piece.name}.{number}",
            closed,
            tuple(name for name, _ in inputs),
            tuple(name for name, _ in wanted),
        )
        return PieceSegment(first.place, first.rank, traced)


def _anew(equation: JaxprEqn) -> bool:
    scopes = jaxprs.name_scopes(equation)
    return (bool(scopes) and is_local(scopes[-1])) or _makes_keys(equation)


def _makes_keys(equation: JaxprEqn) -> bool:
    dtypes = (getattr(variable.aval, "dtype", np.dtype(bool)) for variable in equation.outvars)
    return any(jax.numpy.issubdtype(dtype, jax.dtypes.extended) for dtype in dtypes)
