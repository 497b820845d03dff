"""Pieces: numerical functions over named buffers, and their export to StableHLO.

A piece becomes one Computation of the Executable. The bytes depend only on what is computed: source locations
and the names of Python functions never enter them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from podrun.compiler import jax_internals
from podrun.executable import Computation


@dataclass(frozen=True, slots=True)
class Piece:
    """``function(buffers) -> buffers``, by name; ``inputs`` gives what each buffer it reads holds, in
    order."""

    name: str
    function: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    inputs: Mapping[str, jax.ShapeDtypeStruct]
    outputs: tuple[str, ...]


def export_piece(piece: Piece) -> Computation:
    """Trace the piece, prune the inputs it does not read, and export it for the CPU."""

    def flat(*arguments: Any) -> tuple[Any, ...]:
        results = piece.function(dict(zip(piece.inputs, arguments, strict=True)))
        return tuple(results[name] for name in piece.outputs)

    closed = jax_internals.pruned(jax.make_jaxpr(flat)(*piece.inputs.values()))
    read = jax_internals.read_arguments(closed.jaxpr)
    kept = [i for i, variable in enumerate(closed.jaxpr.invars) if variable in read]
    names, specs = list(piece.inputs), list(piece.inputs.values())

    def run(*arguments: Any) -> tuple[Any, ...]:
        given: list[Any] = [None] * len(specs)
        for position, argument in zip(kept, arguments, strict=True):
            given[position] = argument
        return tuple(jax_internals.evaluate(closed.jaxpr, closed.consts, given))

    run.__name__ = "".join(c if c.isalnum() else "_" for c in piece.name)
    exported = jax.export.export(jax.jit(run), platforms=("cpu",))(*(specs[i] for i in kept))
    data = bytes(jax_internals.without_locations(exported).serialize())
    return Computation(piece.name, data, tuple(names[i] for i in kept), piece.outputs)
