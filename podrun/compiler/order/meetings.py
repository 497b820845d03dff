"""Meetings: how a folded exchange is computed, on one machine and on several.

On one machine all replicas of a group are on the folded axis, and an exchange is arithmetic on it. On several, each
machine puts its replicas' operands into its slice of an arena, all gather, and each computes what its replicas get from
the whole. So a piece is cut into Computations around its meetings: one up to the first, one from there to the next, and
so on; exchanges that do not wait for each other share a meeting. What crosses between them is a temporary. What the
piece both reads and writes (accumulators, the seed) is written by the last, so that all read the same.

Sums go from replica to replica in order of the replicas of the whole program, so results do not depend on how replicas
are spread over machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal, Primitive, Var

from podrun.compiler import jax_internals
from podrun.compiler.exchange import (
    Groups,
    Kind,
    check_groups,
    exchange_p,
    exchanges,
    folded_p,
)
from podrun.compiler.export.pieces import TracedPiece
from podrun.compiler.layout import holders, position_of
from podrun.compiler.program import tap
from podrun.compiler.state.arenas import ALIGNMENT
from podrun.compiler.tracing.split import Spot, split
from podrun.errors import InternalError
from podrun.executable import REPLICA_OFFSET, AllGather, Arena, Compute, Instruction, Layout

LONGEST_CHAIN = 16
"""Replicas up to which a sum is written out; beyond, it is a loop, with the same order and bits."""

meet_p: Any = Primitive("meet")
"""``meet(part)``: the parts of all machines end to end."""
meet_p.def_abstract_eval(lambda part, *, machines: ShapedArray((part.shape[0] * machines,), part.dtype))
_LAST = "exchange:last"
_ARENA, _SLICE = "exchange:", "arena_slice:"


@dataclass(frozen=True, slots=True)
class Cut:
    """A piece as Computations and meetings: ``pieces`` in order, the instructions that run it, its arenas."""

    pieces: tuple[TracedPiece, ...]
    instructions: tuple[Instruction, ...]
    arenas: Mapping[str, Arena]


def cut(piece: TracedPiece, layout: Layout) -> Cut:
    """The piece with its exchanges as arithmetic and meetings. A piece without exchanges stays as it is."""
    _check(piece, layout)
    if not exchanges(piece.jaxpr):
        return Cut((piece,), (Compute(piece.name),), {})
    written = _with_arithmetic(piece, layout, late=True)
    if holders(layout) == 1:
        return Cut((written,), (Compute(written.name),), {})
    return _apart(written, layout)


@dataclass(frozen=True, slots=True)
class Opened:
    """A piece that reads ``arena:exchange:...`` and writes its slices of these, to be cut by the caller: equations of a
    level go before the meetings that those of the next level read from. ``levels``: by an equation's identity."""

    piece: TracedPiece
    levels: Mapping[int, int]

    @property
    def depth(self) -> int:
        """How many levels there are."""
        return max(self.levels.values(), default=0) + 1

    def level(self, equation: JaxprEqn) -> int:
        """After how many meetings an equation runs."""
        return self.levels.get(id(equation), 0)


def opened(piece: TracedPiece, layout: Layout) -> Opened:
    """A piece of replicas of several IPUs with arithmetic for its exchanges."""
    _check(piece, layout)
    if not exchanges(piece.jaxpr):
        return Opened(piece, {})
    written = _with_arithmetic(piece, layout, late=False)
    if holders(layout) == 1:
        return Opened(written, {})
    found, _, _ = _opened(written)
    return Opened(found, _levels(found)[0])


def meetings_of(pieces: Iterable[tuple[TracedPiece, int]], layout: Layout) -> dict[str, Arena]:
    """The arenas that pieces cut from an `Opened` one meet in; each piece with its IPU."""
    return {
        arena: Arena(
            arena,
            str(aval.dtype),
            aval.shape[0] * holders(layout),
            (),
            shared=False,
            position=position_of(layout, ipu),
        )
        for piece, ipu in pieces
        for name, aval in zip(piece.outputs, piece.jaxpr.out_avals, strict=True)
        if (arena := met_in(name)) is not None
    }


def met_in(output: str) -> str | None:
    """The arena whose meeting an output of a piece is for; None for any other output."""
    return output.removeprefix(_SLICE) if output.startswith(_SLICE + _ARENA) else None


def _check(piece: TracedPiece, layout: Layout) -> None:
    """Raises for exchanges that cannot be."""
    if any(e.primitive is exchange_p for e in exchanges(piece.jaxpr)):
        raise InternalError(f"{piece.name} has a collective that was not folded")
    for equation in exchanges(piece.jaxpr):
        check_groups(equation.params["groups"], layout.replicas)


def _with_arithmetic(piece: TracedPiece, layout: Layout, *, late: bool) -> TracedPiece:
    """The piece with arithmetic and ``meet`` for its exchanges; on several machines it also reads who it is.

    ``late``: what it both reads and writes is marked, to be written behind all meetings.
    """
    several = holders(layout) > 1
    inputs = (*piece.inputs, *((REPLICA_OFFSET,) if several and REPLICA_OFFSET not in piece.inputs else ()))
    closed = piece.jaxpr
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals]  # type: ignore[no-untyped-call]
    if len(inputs) > len(specs):
        specs.append(jax.ShapeDtypeStruct((), jnp.int32))  # type: ignore[no-untyped-call]

    def run(*arguments: Any) -> tuple[Any, ...]:
        offset = dict(zip(inputs, arguments, strict=True))[REPLICA_OFFSET] if several else 0
        room = _Room(layout, offset)

        def apply(equation: JaxprEqn, operands: Sequence[Any]) -> Any:
            if equation.primitive is folded_p:
                return room.exchanged(operands[0], **equation.params)
            return jax_internals.bind(equation, operands)

        given = arguments[: len(piece.inputs)]
        results = jax_internals.evaluate(closed.jaxpr, closed.consts, given, {}, apply)
        both = {*piece.inputs} if several and late else set()
        named = zip(piece.outputs, results, strict=True)
        return tuple(tap(_LAST, jnp.asarray(v)) if n in both else v for n, v in named)

    return TracedPiece(piece.name, jax_internals.pruned(jax.make_jaxpr(run)(*specs)), inputs, piece.outputs)


@dataclass(frozen=True, slots=True)
class _Room:
    """Arithmetic of exchanges on one machine of a layout; ``offset``: the global index of its first replica."""

    layout: Layout
    offset: Any

    def exchanged(self, x: Any, *, kind: Kind, groups: Groups) -> Any:
        """``x``: ``[micro_batches * replicas, *shape]`` of this machine; what its replicas get, on the same axis."""
        replicas = self.layout.replicas_per_machine
        micro_batches = x.shape[0] // replicas
        if kind is Kind.POSITION:
            places = np.zeros(self.layout.replicas, np.int32)
            for group in groups:
                places[list(group)] = range(len(group))
            return jnp.tile(self._mine(places), micro_batches)
        logical = x.dtype == bool
        whole = self._whole(x.astype(jnp.uint8) if logical else x, micro_batches)
        found = self._summed(whole, groups) if kind is Kind.SUM else self._gathered(whole, groups)
        found = jnp.moveaxis(found, 1, 0)
        return found.reshape(x.shape[0], *found.shape[2:]).astype(x.dtype)

    def _mine(self, table: np.ndarray) -> Any:
        """The rows of a table over all replicas that are those of this machine's."""
        return lax.dynamic_slice_in_dim(jnp.asarray(table), self.offset, self.layout.replicas_per_machine)

    def _whole(self, x: Any, micro_batches: int) -> Any:
        """The operands of all replicas of the program: ``[replicas, micro_batches, *shape]``."""
        machines, replicas, shape = holders(self.layout), self.layout.replicas_per_machine, x.shape[1:]
        if machines > 1:
            size = -(-x.size // ALIGNMENT) * ALIGNMENT
            part = tap("exchange:part", jnp.pad(x.reshape(-1), (0, size - x.size)))
            x = meet_p.bind(part, machines=machines).reshape(machines, size)[:, : x.size]
        parts = x.reshape(machines, micro_batches, replicas, *shape)
        return jnp.moveaxis(parts, 1, 2).reshape(machines * replicas, micro_batches, *shape)

    def _summed(self, whole: Any, groups: Groups) -> Any:
        """``[replicas here, micro_batches, *shape]``: sums over groups, in order of replicas."""
        half = jnp.issubdtype(whole.dtype, jnp.floating) and whole.dtype.itemsize < 4
        wide = whole.astype(jnp.float32) if half else whole
        if len(groups) == 1:
            total = (
                _in_order([wide[r] for r in groups[0]])
                if len(groups[0]) <= LONGEST_CHAIN
                else _looped(wide, jnp.asarray(groups[0], jnp.int32))
            )
            found = jnp.broadcast_to(total, (self.layout.replicas_per_machine, *total.shape))
        else:
            members = self._mine(_members(groups, self.layout.replicas))
            size = len(groups[0])
            found = (
                _in_order([wide[members[:, s]] for s in range(size)])
                if size <= LONGEST_CHAIN
                else _looped(wide, members.T)
            )
        return found.astype(whole.dtype)

    def _gathered(self, whole: Any, groups: Groups) -> Any:
        """``[replicas here, micro_batches, group size, *shape]``."""
        return jnp.moveaxis(whole[self._mine(_members(groups, self.layout.replicas))], 1, 2)


def _members(groups: Groups, replicas: int) -> np.ndarray:
    """For each replica the replicas of its group, in order."""
    table = np.zeros((replicas, len(groups[0])), np.int32)
    for group in groups:
        table[list(group)] = group
    return table


def _in_order(parts: Sequence[Any]) -> Any:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _looped(wide: Any, order: Any) -> Any:
    """`_in_order` of ``wide[order[0]]``, ``wide[order[1]]`` ... as a loop."""
    first = wide[order[0]]
    return lax.fori_loop(1, order.shape[0], lambda i, total: total + wide[order[i]], first)


def _apart(piece: TracedPiece, layout: Layout) -> Cut:
    """A piece with meets as Computations between AllGathers."""
    open_piece, names, arenas = _opened(piece)
    levels, meeting = _levels(open_piece)
    segments = split(open_piece, lambda equation: Spot(levels[id(equation)], levels[id(equation)]))
    pieces = [segment.piece for segment in segments]
    if len(pieces) != max(meeting, default=0) + 1:
        raise InternalError(f"{piece.name} has {len(pieces)} parts around {max(meeting, default=0)} meetings")
    work: list[Instruction] = []
    for k, part in enumerate(pieces):
        work.append(Compute(part.name))
        work += [AllGather(name) for name, level in zip(names, meeting, strict=True) if level == k + 1]
    return Cut(tuple(pieces), tuple(work), arenas)


def _opened(piece: TracedPiece) -> tuple[TracedPiece, list[str], dict[str, Arena]]:
    """A piece without its meets: it reads their wholes and writes its parts; names and arenas of the meetings."""
    closed = piece.jaxpr
    meets = [e for e in closed.jaxpr.eqns if e.primitive is meet_p]
    names = [f"{_ARENA}{piece.name}:{k}" for k in range(len(meets))]
    arenas = {
        name: Arena(name, str(m.outvars[0].aval.dtype), int(m.outvars[0].aval.shape[0]), (), shared=False)
        for name, m in zip(names, meets, strict=True)
    }
    rest = [e for e in closed.jaxpr.eqns if e.primitive is not meet_p]
    wholes, parts = [m.outvars[0] for m in meets], [m.invars[0] for m in meets]
    open_jaxpr = jax_internals.sub_jaxpr(
        closed, [*closed.jaxpr.invars, *wholes], rest, [*closed.jaxpr.outvars, *parts]
    )
    open_piece = TracedPiece(
        piece.name,
        open_jaxpr,
        (*piece.inputs, *(f"arena:{name}" for name in names)),
        (*piece.outputs, *(_SLICE + name for name in names)),
    )
    return open_piece, names, arenas


def _levels(piece: TracedPiece) -> tuple[dict[int, int], list[int]]:
    """After how many meetings each equation (by its identity) can run, and the number of each meeting, from 1."""
    jaxpr, meets = piece.jaxpr.jaxpr, sum(met_in(name) is not None for name in piece.outputs)
    first_whole, first_part = len(jaxpr.invars) - meets, len(jaxpr.outvars) - meets
    source = dict(zip(jaxpr.invars[first_whole:], jaxpr.outvars[first_part:], strict=True))
    reached: dict[Var, int] = {}

    def level(atom: Any) -> int:
        if isinstance(atom, Literal):
            return 0
        if atom in source:
            return level(source[atom]) + 1
        return reached.get(atom, 0)

    found: dict[int, int] = {}
    for equation in jaxpr.eqns:
        here = max((level(v) for v in equation.invars), default=0)
        found[id(equation)] = here
        reached.update(dict.fromkeys(equation.outvars, here))
    meeting = [level(whole) for whole in jaxpr.invars[first_whole:]]
    last = max(meeting, default=0)
    for equation in jaxpr.eqns:
        if equation.params.get("name") == _LAST:
            found[id(equation)] = last
    return found, meeting
