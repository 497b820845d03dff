"""How a folded exchange between replicas is computed, on one machine and on several.

On one machine all replicas of a group are on the folded axis, and an exchange is arithmetic on it. On several, each
machine writes its replicas' operands to its slice of an arena, an AllGather gives every machine the whole arena, and
each machine computes its replicas' results from it. So a piece is cut into Computations with AllGathers between them. A
sum that replicas share (`podrun.compiler.model_collectives.total_p`) is added up by an AllReduce instead, together with
all others that are known at the same time. Exchanges that do not depend on each other share a cut. Values that one
Computation makes and a later one reads are temporaries. Buffers that the piece both reads and writes (accumulators, the
seed) are written by the last Computation, so that all Computations read the same values.

Sums go from replica to replica in order of the replicas of the whole program, so results do not depend on how replicas
are spread over machines. Only shared sums first go over a machine's replicas, in one product if products are added
(`podrun.compiler.summed_products`), and then from machine to machine; which replicas lie on one machine follows from
the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from podrun.compiler import jaxprs
from podrun.compiler.arenas import ALIGNMENT, arena_size, members_of
from podrun.compiler.export import TracedPiece
from podrun.compiler.model_collectives import (
    CollectiveGroups,
    ExchangeKind,
    check_replica_groups,
    exchange_p,
    exchanges,
    folded_p,
    gather_p,
    sum_p,
    total_p,
)
from podrun.compiler.program import tap
from podrun.compiler.segments import split_at_places
from podrun.compiler.shared_updates import take_updates
from podrun.compiler.summed_products import SummedProducts
from podrun.core.errors import InternalError
from podrun.core.executable import REPLICA_OFFSET, AllGather, AllReduce, Arena, Compute, Instruction, Variable
from podrun.core.layout import Layout
from podrun.core.names import EXCHANGE, SLICE, WHOLE
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.splitting import Spot
from podrun.private_apis import jax as private_jax

LONGEST_CHAIN = 16
"""Replicas up to which a sum is written out; beyond, it is a loop, with the same order and bits."""

_LAST = f"{EXCHANGE}last"


@dataclass(frozen=True, slots=True)
class CutPiece:
    """A piece that is cut where machines exchange values: the smaller ``pieces`` in order, the instructions that run
    them with the AllGathers between them, and the arenas that these fill.
    ``closing``: instructions that come last in a batch. ``variables``: that changed their place, or are new.
    """

    pieces: tuple[TracedPiece, ...]
    instructions: tuple[Instruction, ...]
    arenas: Mapping[str, Arena]
    closing: tuple[Instruction, ...] = ()
    variables: Mapping[str, Variable] = field(default_factory=dict)


def cut_at_exchanges(
    piece: TracedPiece, layout: Layout, shared: Mapping[str, Variable] | None = None
) -> CutPiece:
    """The piece with its exchanges as arithmetic and AllGathers. A piece without exchanges does not change. ``shared``:
    variables that replicas share, whose updates machines may share too.
    """
    _check(piece, layout)
    if not exchanges(piece.jaxpr):
        return CutPiece((piece,), (Compute(piece.name),), {})
    written = _with_arithmetic(piece, layout, late=True)
    if layout.machines_per_position == 1:
        return CutPiece((written,), (Compute(written.name),), {})
    updates = take_updates(written, shared, layout) if shared else None
    if updates is None:
        return _apart(written, layout)
    cut = _apart(updates.rest, layout)
    return CutPiece(
        (*cut.pieces, *updates.pieces),
        cut.instructions,
        {**cut.arenas, **updates.arenas},
        updates.instructions,
        updates.variables,
    )


@dataclass(frozen=True, slots=True)
class LevelledPiece:
    """A piece that writes slices of ``arena:exchange:...`` and reads the gathered arenas. The caller cuts it.

    Equations of one level run before the AllGathers whose results the next level reads. ``levels``: the level of each
    equation, by the equation's identity.
    """

    piece: TracedPiece
    levels: Mapping[int, int]

    @property
    def depth(self) -> int:
        """How many levels there are."""
        return max(self.levels.values(), default=0) + 1

    def level(self, equation: JaxprEqn) -> int:
        """The number of AllGathers, one after the other, that an equation depends on."""
        return self.levels.get(id(equation), 0)


def opened(piece: TracedPiece, layout: Layout) -> LevelledPiece:
    """The piece of a replica over several IPUs, with arithmetic in the place of its exchanges."""
    _check(piece, layout)
    if not exchanges(piece.jaxpr):
        return LevelledPiece(piece, {})
    written = _with_arithmetic(piece, layout, late=False)
    if layout.machines_per_position == 1:
        return LevelledPiece(written, {})
    unrolled, crossings = _opened(written)
    return LevelledPiece(unrolled, _levels(unrolled, len(crossings))[0])


def gathered_arenas(pieces: Iterable[tuple[TracedPiece, int]], layout: Layout) -> dict[str, Arena]:
    """The arenas that AllGathers fill for pieces cut from a `LevelledPiece`, by name. ``pieces``: each with its IPU."""
    return {
        arena: Arena(
            arena,
            str(aval.dtype),
            aval.shape[0] * layout.machines_per_position,
            (),
            shared=False,
            position=layout.position_of(ipu),
        )
        for piece, ipu in pieces
        for name, aval in zip(piece.outputs, piece.jaxpr.out_avals, strict=True)
        if (arena := gathered_arena(name)) is not None
    }


def gathered_arena(output: str) -> str | None:
    """The arena that an output of a piece is a slice of and that an AllGather fills; None for any other output."""
    return output.removeprefix(SLICE) if output.startswith(SLICE + EXCHANGE) else None


def _check(piece: TracedPiece, layout: Layout) -> None:
    """Raise InternalError for a collective that was not folded, UsageError for groups that do not fit the layout."""
    if any(e.primitive is exchange_p for e in exchanges(piece.jaxpr)):
        raise InternalError(f"{piece.name} has a collective that was not folded")
    for equation in exchanges(piece.jaxpr):
        check_replica_groups(equation.params["groups"], layout.replicas)


def _with_arithmetic(piece: TracedPiece, layout: Layout, *, late: bool) -> TracedPiece:
    """The piece with arithmetic and `gather_p` for its exchanges; on several machines it also reads its replica offset.

    ``late``: outputs that the piece also reads are marked, so that they are written after all AllGathers.
    """
    several = layout.machines_per_position > 1
    inputs = (*piece.inputs, *((REPLICA_OFFSET,) if several and REPLICA_OFFSET not in piece.inputs else ()))
    closed = piece.jaxpr
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals]  # type: ignore[no-untyped-call]
    if len(inputs) > len(specs):
        specs.append(jax.ShapeDtypeStruct((), jnp.int32))  # type: ignore[no-untyped-call]

    def run(*arguments: object) -> tuple[Any, ...]:
        offset = dict(zip(inputs, arguments, strict=True))[REPLICA_OFFSET] if several else 0
        here, products = _MachineExchange(layout, offset), SummedProducts()

        def apply(equation: JaxprEqn, operands: Sequence[Any]) -> Any:
            if equation.primitive is folded_p:
                return here.exchanged(operands[0], **equation.params)
            if equation.primitive is total_p:
                return here.total(operands[0], products.find(equation.invars[0]))
            products.look(equation, operands)
            return private_jax.bind_equation(equation, operands)

        piece_inputs = arguments[: len(piece.inputs)]
        results = jaxprs.evaluate(closed.jaxpr, closed.consts, piece_inputs, {}, apply)
        both = {*piece.inputs} if several and late else set()
        named = zip(piece.outputs, results, strict=True)
        return tuple(tap(_LAST, jnp.asarray(v)) if n in both else v for n, v in named)

    return TracedPiece(piece.name, jaxprs.pruned(jax.make_jaxpr(run)(*specs)), inputs, piece.outputs)


@dataclass(frozen=True, slots=True)
class _MachineExchange:
    """Arithmetic of exchanges on one machine of a layout; ``offset``: the global index of its first replica."""

    layout: Layout
    offset: jax.Array | int

    def exchanged(self, x: jax.Array, *, kind: ExchangeKind, groups: CollectiveGroups) -> Any:
        """Results for this machine's replicas, on the folded axis of ``x`` ``[micro_batches * replicas, *shape]``."""
        replicas = self.layout.replicas_per_machine
        micro_batches = x.shape[0] // replicas
        if kind is ExchangeKind.POSITION:
            places = np.zeros(self.layout.replicas, np.int32)
            for group in groups:
                places[list(group)] = range(len(group))
            return jnp.tile(self._mine(places), micro_batches)
        logical = x.dtype == bool
        whole = self._whole(x.astype(jnp.uint8) if logical else x, micro_batches)
        result = self._summed(whole, groups) if kind is ExchangeKind.SUM else self._gathered(whole, groups)
        result = jnp.moveaxis(result, 1, 0)
        return result.reshape(x.shape[0], *result.shape[2:]).astype(x.dtype)

    def total(self, x: jax.Array, summed: jax.Array | None) -> Any:
        """The sum over all replicas, of operands ``[replicas here, *shape]``. Halves are rounded once. ``summed``: the
        sum over the replicas here, if it is known.
        """
        kind, half = x.dtype, jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        if half:
            x, summed = x.astype(jnp.float32), None
        part = x.sum(0, dtype=x.dtype) if summed is None else summed
        if self.layout.machines_per_position > 1 and part.dtype == jnp.float32:
            part = sum_p.bind(tap(EXCHANGE + "part", part))
        elif self.layout.machines_per_position > 1:
            part = _in_order(list(self._gathered_parts(part)))
        return part.astype(kind)

    def _mine(self, table: np.ndarray) -> Any:
        """The rows of a table over all replicas that belong to this machine's replicas."""
        return lax.dynamic_slice_in_dim(jnp.asarray(table), self.offset, self.layout.replicas_per_machine)

    def _whole(self, x: jax.Array, micro_batches: int) -> Any:
        """The operands of all replicas of the program: ``[replicas, micro_batches, *shape]``."""
        machines, replicas = self.layout.machines_per_position, self.layout.replicas_per_machine
        shape = x.shape[1:]
        if machines > 1:
            x = self._gathered_parts(x)
        parts = x.reshape(machines, micro_batches, replicas, *shape)
        return jnp.moveaxis(parts, 1, 2).reshape(machines * replicas, micro_batches, *shape)

    def _gathered_parts(self, x: jax.Array) -> Any:
        """The arrays ``x`` of all machines: ``[machines, *shape]``."""
        machines, size = self.layout.machines_per_position, -(-x.size // ALIGNMENT) * ALIGNMENT
        part = tap(EXCHANGE + "part", jnp.pad(x.reshape(-1), (0, size - x.size)))
        parts = gather_p.bind(part, machines=machines).reshape(machines, size)[:, : x.size]
        return parts.reshape(machines, *x.shape)

    def _summed(self, whole: jax.Array, groups: CollectiveGroups) -> Any:
        """``[replicas here, micro_batches, *shape]``: sums over groups, in order of replicas."""
        half = jnp.issubdtype(whole.dtype, jnp.floating) and whole.dtype.itemsize < 4
        wide = whole.astype(jnp.float32) if half else whole
        if len(groups) == 1:
            total = (
                _in_order([wide[r] for r in groups[0]])
                if len(groups[0]) <= LONGEST_CHAIN
                else _looped(wide, jnp.asarray(groups[0], jnp.int32))
            )
            result = jnp.broadcast_to(total, (self.layout.replicas_per_machine, *total.shape))
        else:
            members = self._mine(_members(groups, self.layout.replicas))
            size = len(groups[0])
            result = (
                _in_order([wide[members[:, s]] for s in range(size)])
                if size <= LONGEST_CHAIN
                else _looped(wide, members.T)
            )
        return result.astype(whole.dtype)

    def _gathered(self, whole: jax.Array, groups: CollectiveGroups) -> Any:
        """``[replicas here, micro_batches, group size, *shape]``."""
        return jnp.moveaxis(whole[self._mine(_members(groups, self.layout.replicas))], 1, 2)


def _members(groups: CollectiveGroups, replicas: int) -> np.ndarray:
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


def _looped(wide: jax.Array, order: jax.Array) -> Any:
    """`_in_order` of ``wide[order[0]]``, ``wide[order[1]]`` ... as a loop."""
    first = wide[order[0]]
    return lax.fori_loop(1, order.shape[0], lambda i, total: total + wide[order[i]], first)


def _apart(piece: TracedPiece, layout: Layout) -> CutPiece:
    """A piece with `gather_p` and `sum_p` as Computations with AllGathers and AllReduces between them."""
    open_piece, crossings = _opened(piece)
    levels, reached = _levels(open_piece, len(crossings))
    segments = split_at_places(open_piece, lambda equation: Spot(levels[id(equation)], levels[id(equation)]))
    pieces = [segment.piece for segment in segments]
    if len(pieces) != max(reached, default=0) + 1:
        raise InternalError(f"{piece.name} has {len(pieces)} parts around {max(reached, default=0)} cuts")
    work: list[Instruction] = []
    arenas: dict[str, Arena] = {}
    for k, part in enumerate(pieces):
        work.append(Compute(part.name))
        here = [item for item, level in zip(crossings, reached, strict=True) if level == k + 1]
        gathered = [_gathered_whole(item) for item in here if not item.added]
        added = [_added_arena(part.name, [item for item in here if item.added])]
        work += [AllGather(arena.name) for arena in gathered]
        work += [AllReduce(arena.name) for arena in added if arena.members]
        arenas |= {arena.name: arena for arena in (*gathered, *added) if arena.size}
    return CutPiece(tuple(pieces), tuple(work), arenas)


@dataclass(frozen=True, slots=True)
class _Crossing:
    """What machines exchange in one place: the parts of all end to end, or ``added`` up."""

    name: str
    equation: JaxprEqn

    @property
    def added(self) -> bool:
        return self.equation.primitive is sum_p

    @property
    def result(self) -> Any:
        """Shape and dtype."""
        return self.equation.outvars[0].aval


def _gathered_whole(crossing: _Crossing) -> Arena:
    result = crossing.result
    return Arena(crossing.name, str(result.dtype), int(result.shape[0]), (), shared=False)


def _added_arena(piece: str, crossings: Sequence[_Crossing]) -> Arena:
    """One arena for all sums that a piece takes part in."""
    ends = members_of((item.name, tuple(item.result.shape)) for item in crossings)
    size = arena_size(ends)
    return Arena(f"{EXCHANGE}sums:{piece}", "float32", size, ends, shared=False)


def _opened(piece: TracedPiece) -> tuple[TracedPiece, list[_Crossing]]:
    """The piece without `gather_p` and `sum_p`: it reads gathered arenas and writes slices of them, and likewise sums
    and its parts of them.
    """
    closed = piece.jaxpr
    equations = [e for e in closed.jaxpr.eqns if e.primitive in (gather_p, sum_p)]
    crossings = [_Crossing(f"{EXCHANGE}{piece.name}:{k}", e) for k, e in enumerate(equations)]
    rest = [e for e in closed.jaxpr.eqns if e.primitive not in (gather_p, sum_p)]
    wholes, parts = [e.outvars[0] for e in equations], [e.invars[0] for e in equations]
    open_jaxpr = jaxprs.sub_jaxpr(
        closed, [*closed.jaxpr.invars, *wholes], rest, [*closed.jaxpr.outvars, *parts]
    )
    open_piece = TracedPiece(
        piece.name,
        open_jaxpr,
        (*piece.inputs, *(item.name if item.added else WHOLE + item.name for item in crossings)),
        (*piece.outputs, *(item.name if item.added else SLICE + item.name for item in crossings)),
    )
    return open_piece, crossings


def _levels(piece: TracedPiece, count: int) -> tuple[dict[int, int], list[int]]:
    """The level of each equation, by its identity, and of each of ``count`` crossings, from 1. See `LevelledPiece`."""
    jaxpr = piece.jaxpr.jaxpr
    first_whole, first_part = len(jaxpr.invars) - count, len(jaxpr.outvars) - count
    source = dict(zip(jaxpr.invars[first_whole:], jaxpr.outvars[first_part:], strict=True))
    reached: dict[Var, int] = {}

    def level(atom: Var | Literal) -> int:
        if isinstance(atom, Literal):
            return 0
        if atom in source:
            return level(source[atom]) + 1
        return reached.get(atom, 0)

    level_of: dict[int, int] = {}
    for equation in jaxpr.eqns:
        here = max((level(v) for v in equation.invars), default=0)
        level_of[id(equation)] = here
        reached.update(dict.fromkeys(equation.outvars, here))
    gathers = [level(whole) for whole in jaxpr.invars[first_whole:]]
    last = max(gathers, default=0)
    for equation in jaxpr.eqns:
        if equation.params.get("name") == _LAST:
            level_of[id(equation)] = last
    return level_of, gathers
