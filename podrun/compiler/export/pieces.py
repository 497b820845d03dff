"""Pieces: numerical functions over named buffers, and their export to StableHLO.

A piece becomes one Computation of the Executable. The bytes depend only on what is computed: source locations
and the names of Python functions never enter them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from podrun.compiler import jaxprs
from podrun.compiler.abstract import buffer
from podrun.compiler.export import rewrites
from podrun.core import own_pieces
from podrun.core.executable import Computation
from podrun.private_apis.jax import without_locations


@dataclass(frozen=True, slots=True)
class PieceFunction:
    """``function(buffers) -> buffers``, by name; ``inputs`` gives what each buffer it reads holds, in
    order."""

    name: str
    function: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    inputs: Mapping[str, jax.ShapeDtypeStruct]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TracedPiece:
    """A piece as a jaxpr: positional arguments ``inputs``, results ``outputs``, by buffer name."""

    name: str
    jaxpr: ClosedJaxpr
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def trace_piece(piece: PieceFunction) -> TracedPiece:
    """Trace the piece, without the inputs and equations that no output needs."""

    def flat(*arguments: Any) -> tuple[Any, ...]:
        results = piece.function(dict(zip(piece.inputs, arguments, strict=True)))
        return tuple(results[name] for name in piece.outputs)

    closed = jaxprs.pruned(jax.make_jaxpr(flat)(*piece.inputs.values()))
    read = jaxprs.read_arguments(closed.jaxpr)
    named = zip(piece.inputs, closed.jaxpr.invars, strict=True)
    kept = [(name, variable) for name, variable in named if variable in read]
    variables = [variable for _, variable in kept]
    narrow = jaxprs.sub_jaxpr(closed, variables, closed.jaxpr.eqns, closed.jaxpr.outvars)
    return TracedPiece(piece.name, narrow, tuple(name for name, _ in kept), piece.outputs)


def export_traced(traced: TracedPiece) -> Computation:
    """The piece as StableHLO for the CPU."""
    closed = traced.jaxpr

    def run(*arguments: Any) -> tuple[Any, ...]:
        return tuple(rewrites.evaluate(closed, arguments))

    # The name is all of the function that reaches the bytes: one for all, so that pieces which compute the same are
    # equal to the byte, and compiled once.
    run.__name__ = "piece"
    specs = [buffer(aval.shape, str(aval.dtype)) for aval in closed.in_avals]
    exported = jax.export.export(jax.jit(run), platforms=("cpu",))(*specs)
    data = bytes(without_locations(exported).serialize())
    own_pieces.note(data)
    return Computation(traced.name, data, traced.inputs, traced.outputs)


def export_piece(piece: PieceFunction) -> Computation:
    """Trace and export."""
    return export_traced(trace_piece(piece))
