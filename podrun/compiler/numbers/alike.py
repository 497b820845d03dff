"""Updates that differ in names alone are traced and exported once.

A deep network with settings for each weight (a streamed learning rate of its own, as `insertSpecific` gives) has one
group for each weight, and hundreds of updates of which few differ: those of weights with equal shapes and equal
constants compute the same from buffers of other names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from podrun.compiler.export.pieces import Piece
from podrun.compiler.program import RNG, UpdateRule
from podrun.compiler.state.arenas import Memory, WeightGroup
from podrun.executable import Computation


class Alike:
    """The updates so far; `twin` finds one that is like another, `renamed` makes the other of it."""

    def __init__(self, memory: Memory, rule: UpdateRule | None) -> None:
        self._memory, self._rule = memory, rule
        self._first: dict[Any, Piece] = {}

    def twin(self, group: WeightGroup, piece: Piece) -> Piece | None:
        """An earlier piece that computes the same from buffers of other names, in the same order."""
        if RNG in group.scalars:  # Every group rounds by a stream of its own.
            return None
        first = self._first.setdefault(self._key(group, piece), piece)
        return None if first is piece else first

    def _key(self, group: WeightGroup, piece: Piece) -> Any:
        assert self._rule is not None
        position = {name: index for index, name in enumerate(group.scalars)}
        return (
            _positions(self._rule.group_key(group.weights[0].name), position),
            tuple((w.shape, w.dtype, self._memory.group_of.get(w.name, ())) for w in group.weights),
            tuple((f.prefix, f.dtype, f.scalar) for f in group.states),
            tuple(member.offset for member in self._memory.arenas[group.weight_arena].members),
            (group.elementwise, group.size, group.gradient_dtype),
            tuple((spec.shape, str(spec.dtype)) for spec in piece.inputs.values()),
        )


def _positions(key: Any, position: Mapping[str, int]) -> Any:
    """A group's key with the places of its streamed scalars instead of their names."""
    if isinstance(key, tuple):
        return tuple(_positions(part, position) for part in key)
    return ("scalar", position[key]) if isinstance(key, str) and key in position else key


def renamed(computation: Computation, first: Piece, piece: Piece) -> Computation:
    """The exported ``first`` on the buffers of ``piece``."""
    names = dict(zip((*first.inputs, *first.outputs), (*piece.inputs, *piece.outputs), strict=True))
    return replace(
        computation,
        name=piece.name,
        inputs=tuple(names[name] for name in computation.inputs),
        outputs=tuple(names[name] for name in computation.outputs),
        donated=tuple(names[name] for name in computation.donated),
    )
