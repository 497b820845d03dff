"""Splitting: one traced piece as segments, each on one place (an IPU, or a pipeline stage).

Equations carry their place in their name scopes, and differentiation keeps it, so backward work lands where
its forward work is. An equation without a place joins the latest of its producers that has one, else the
first of its consumers. Segments are then cut greedily in program order: take the place of the first equation
that is left and run everything of that place that can run. For a chain of stages 0, 1, 2 in training this
gives 0, 1, 2 (forward and backward), 1, 0. What crosses between segments has a name of its own; between
places it is what travels over IPU-Links, and what comes back to its own place later is the stash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from podrun.compiler import jax_internals
from podrun.compiler.pieces import TracedPiece

Place = Callable[[JaxprEqn], int | None]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a piece that runs on one place without a break."""

    place: int
    piece: TracedPiece


def crossing_name(number: int) -> str:
    """The temporary that holds a value that crosses between segments."""
    return f"value:{number}"


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
        self.reads = [[v for v in e.invars if not isinstance(v, Literal)] for e in self.equations]
        # Equations that read nothing (constants) are repeated wherever they are needed.
        arguments = set(self.jaxpr.invars)
        self.constant = [not any(v in self.producer or v in arguments for v in r) for r in self.reads]
        self.places = self._placed(place)

    def _placed(self, place: Place) -> list[int]:
        """The place of every equation."""
        found: list[int | None] = [place(equation) for equation in self.equations]
        indices = [i for i in range(len(self.equations)) if not self.constant[i]]
        for i in indices:
            if found[i] is None:
                found[i] = self._latest_producer(i, found)
        consumers: dict[int, list[int]] = {}
        for i in indices:
            for producer in self._producers(i):
                consumers.setdefault(producer, []).append(i)
        for i in reversed(indices):
            if found[i] is None:
                found[i] = next((found[c] for c in consumers.get(i, []) if found[c] is not None), None)
        homes = argument_places(self.piece, found)
        for i in indices:
            if found[i] is None:
                found[i] = self._latest_producer(i, found)
            if found[i] is None:
                found[i] = next((homes[v] for v in self.reads[i] if v in homes), None)
        return [0 if value is None else value for value in found]

    def _producers(self, index: int) -> list[int]:
        """Equations, other than constants, whose results an equation reads."""
        found = {self.producer[v] for v in self.reads[index] if v in self.producer}
        return sorted(i for i in found if not self.constant[i])

    def _latest_producer(self, index: int, found: Sequence[int | None]) -> int | None:
        return next((found[p] for p in reversed(self._producers(index)) if found[p] is not None), None)

    def segments(self) -> tuple[Segment, ...]:
        groups = self._groups()
        where = {i: number for number, group in enumerate(groups) for i in group}
        crossing = self._crossing(groups, where)
        outputs = self._outputs(groups, where)
        names = {v: crossing_name(n) for n, v in enumerate(crossing)}
        found = []
        for number, group in enumerate(groups):
            made = {v for i in group for v in self.equations[i].outvars}
            wanted = [(names[v], v) for v in crossing if v in made] + outputs[number]
            found.append(self._segment(number, group, names, wanted))
        return tuple(found)

    def _groups(self) -> list[list[int]]:
        """Equations of each segment, in program order."""
        left = [i for i in range(len(self.equations)) if not self.constant[i]]
        done: set[int] = set()
        groups: list[list[int]] = []
        while left:
            place = self.places[left[0]]
            group = []
            for i in left:
                if self.places[i] == place and all(p in done for p in self._producers(i)):
                    group.append(i)
                    done.add(i)
            groups.append(group)
            left = [i for i in left if i not in done]
        return groups or [[]]

    def _crossing(self, groups: list[list[int]], where: Mapping[int, int]) -> list[Var]:
        """Variables made in one segment and read in another, in program order."""
        crossing: dict[Var, None] = {}
        for number, group in enumerate(groups):
            for i in group:
                for variable in self.reads[i]:
                    made = self.producer.get(variable)
                    if made is not None and not self.constant[made] and where[made] != number:
                        crossing[variable] = None
        order = {v: k for k, e in enumerate(self.equations) for v in e.outvars}
        return sorted(crossing, key=lambda v: (order[v], self.equations[order[v]].outvars.index(v)))

    def _outputs(self, groups: list[list[int]], where: Mapping[int, int]) -> list[list[tuple[str, Any]]]:
        """The piece's outputs, by the segment that gives them."""
        found: list[list[tuple[str, Any]]] = [[] for _ in groups]
        for name, atom in zip(self.piece.outputs, self.jaxpr.outvars, strict=True):
            made = None if isinstance(atom, Literal) else self.producer.get(atom)
            found[0 if made is None or self.constant[made] else where[made]].append((name, atom))
        return found

    def _segment(
        self, number: int, group: list[int], names: Mapping[Var, str], wanted: list[tuple[str, Any]]
    ) -> Segment:
        atoms = [atom for _, atom in wanted]
        equations = self._with_constants(group, atoms)
        made = {v for equation in equations for v in equation.outvars}
        read = {v: None for e in equations for v in e.invars if not isinstance(v, Literal) and v not in made}
        read |= {v: None for v in atoms if not isinstance(v, Literal) and v not in made}
        arguments = dict(zip(self.jaxpr.invars, self.piece.inputs, strict=True))
        inputs = [(name, v) for v, name in arguments.items() if v in read]
        inputs += [(name, v) for v, name in names.items() if v in read]
        closed = jax_internals.sub_jaxpr(self.piece.jaxpr, [v for _, v in inputs], equations, atoms)
        place = self.places[group[0]] if group else 0
        traced = TracedPiece(
            f"{self.piece.name}.{number}",
            closed,
            tuple(name for name, _ in inputs),
            tuple(name for name, _ in wanted),
        )
        return Segment(place, traced)

    def _with_constants(self, group: list[int], atoms: Sequence[Any]) -> list[JaxprEqn]:
        """The group's equations with the constants they and the outputs read, in program order."""
        chosen = set(group)
        wanted = [v for i in group for v in self.reads[i]] + [v for v in atoms if not isinstance(v, Literal)]
        while wanted:
            made = self.producer.get(wanted.pop())
            if made is not None and self.constant[made] and made not in chosen:
                chosen.add(made)
                wanted += self.reads[made]
        return [self.equations[i] for i in sorted(chosen)]


def argument_places(piece: TracedPiece, places: Sequence[int | None]) -> dict[Var, int]:
    """Where each argument is first read by an equation that has a place."""
    found: dict[Var, int] = {}
    arguments = set(piece.jaxpr.jaxpr.invars)
    for equation, place in zip(piece.jaxpr.jaxpr.eqns, places, strict=True):
        for variable in equation.invars:
            if place is not None and not isinstance(variable, Literal) and variable in arguments:
                found.setdefault(variable, place)
    return found
