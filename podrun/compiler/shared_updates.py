"""Updates of state that replicas share, by slices: what a program that updates by itself has in common with others.

`podrun.compiler.elementwise_updates` finds the updates. Those that do the same have arenas together, one for each of
their variables (weights, Adam's moments ...) and one for the gradients that machines add up, laid out alike. So a
machine updates its slice after a ReduceScatter, and an AllGather lets all see the whole, as in programs that the
compiler differentiates (`podrun.compiler.update`). Machines of a host hold one copy of the variables.

Numbers that an update reads, such as a rate that follows a schedule, are computed by the piece and kept in scalars of
their own, so the piece may write what they come from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from podrun.compiler import jaxprs
from podrun.compiler.arenas import arena_size, members_of
from podrun.compiler.elementwise_updates import ARITHMETIC, ElementwiseUpdate, UpdateReader
from podrun.compiler.export import PieceFunction, TracedPiece, trace_piece
from podrun.compiler.jaxprs import BufferValues, buffer
from podrun.core.executable import (
    AllGather,
    Arena,
    Compute,
    Instruction,
    ReduceScatter,
    TensorSpec,
    Variable,
    VariableRole,
)
from podrun.core.layout import Layout
from podrun.core.names import SLICE, gradient_buffer
from podrun.core.quick_dataclass import dataclass
from podrun.private_apis.jax import bind_equation


@dataclass(frozen=True, slots=True)
class SharedUpdates:
    """``rest``: the piece without the updates; their own ``pieces`` and ``instructions`` come after it. ``variables``:
    those that lie in ``arenas`` now, and the scalars that updates read.
    """

    rest: TracedPiece
    pieces: tuple[TracedPiece, ...]
    instructions: tuple[Instruction, ...]
    arenas: Mapping[str, Arena]
    variables: Mapping[str, Variable]


def take_updates(
    piece: TracedPiece, variables: Mapping[str, Variable], layout: Layout
) -> SharedUpdates | None:
    """The updates of ``variables``, which replicas share, of a piece with sums over all replicas; None if there are
    none.
    """
    piece = replace(piece, jaxpr=jaxprs.inlined(piece.jaxpr, {*ARITHMETIC, "broadcast_in_dim"}))
    reader = UpdateReader(piece, variables)
    alike: dict[Any, list[ElementwiseUpdate]] = {}
    for update in reader.find_updates():
        alike.setdefault(update.key, []).append(update)
    if not alike:
        return None
    groups = [_Group(index, updates) for index, updates in enumerate(alike.values())]
    numbers = sorted({number for group in groups for number in group.updates[0].numbers})
    scalars = {
        number: TensorSpec(f"update:{place}", str(reader.numbers.first[number].aval.dtype), ())
        for place, number in enumerate(numbers)
    }
    rest = _rest(piece, reader, groups, scalars)
    changed = {spec.name: Variable(spec, VariableRole.COMPUTED, 0.0) for spec in scalars.values()}
    arenas: dict[str, Arena] = {}
    pieces: list[TracedPiece] = []
    instructions: list[Instruction] = []
    for group in groups:
        gradients, own = group.arenas(variables, rest.inputs, layout)
        arenas |= {arena.name: arena for arena in (gradients, *own)}
        pieces.append(trace_piece(group.piece(gradients, own, scalars, layout)))
        instructions += [ReduceScatter(gradients.name), Compute(group.name)]
        instructions += [AllGather(arena.name) for arena in own if not arena.sliced]
        for arena in own:
            changed |= {m.name: replace(variables[m.name], arena=arena.name) for m in arena.members}
    return SharedUpdates(rest, tuple(pieces), tuple(instructions), arenas, changed)


@dataclass(frozen=True, slots=True)
class _Group:
    """Updates with the same steps, whose variables share arenas."""

    index: int
    updates: Sequence[ElementwiseUpdate]

    @property
    def name(self) -> str:
        """The name of the piece that updates a slice."""
        return f"update.{self.index}"

    def arenas(
        self, variables: Mapping[str, Variable], read: Collection[str], layout: Layout
    ) -> tuple[Arena, tuple[Arena, ...]]:
        """The arena of gradients, and one for each variable of an update. ``read``: what the rest of the program reads:
        all machines need the whole of that.
        """

        def arena(name: str, shapes: Mapping[str, tuple[int, ...]], dtype: str, *, lasts: bool) -> Arena:
            members = members_of(shapes.items())
            size = arena_size(members, layout.machines_per_position)
            sliced = lasts and set(read).isdisjoint(shapes)
            return Arena(name, dtype, size, members, shared=lasts, sliced=sliced)

        gradients = {gradient_buffer(u.variables[0]): u.total_shape for u in self.updates}
        own = []
        for place, first in enumerate(self.updates[0].variables):
            specs = [variables[update.variables[place]].spec for update in self.updates]
            shapes = {spec.name: spec.shape for spec in specs}
            own.append(
                arena(f"variables.{self.index}.{place}", shapes, variables[first].spec.dtype, lasts=True)
            )
        return arena(f"gradients.{self.index}", gradients, "float32", lasts=False), tuple(own)

    def piece(
        self, gradients: Arena, own: Sequence[Arena], scalars: Mapping[int, TensorSpec], layout: Layout
    ) -> PieceFunction:
        """The piece that updates this machine's slice."""
        update, count = self.updates[0], gradients.size // layout.machines_per_position
        slices = [SLICE + arena.name for arena in own]
        read = {number: scalars[number].name for number in update.numbers}
        inputs = {SLICE + arena.name: buffer((count,), arena.dtype) for arena in (*own, gradients)}
        inputs |= {name: buffer((), scalars[number].dtype) for number, name in read.items()}

        def run(values: BufferValues) -> dict[str, Any]:
            numbers = {number: values[name] for number, name in read.items()}
            before, total = [values[name] for name in slices], values[SLICE + gradients.name]
            after = update.apply(before, total, numbers, _bind_flat)
            return {
                name: jnp.broadcast_to(new, (count,)).astype(old.dtype)
                for name, old, new in zip(slices, before, after, strict=True)
            }

        return PieceFunction(self.name, run, inputs, tuple(slices))


def _bind_flat(equation: JaxprEqn, operands: Sequence[Any]) -> Any:
    """An equation of arithmetic on slices: numbers among its operands may have been spread before."""
    axes = next((jnp.shape(operand) for operand in operands if jnp.ndim(operand)), ())
    return bind_equation(equation, [jnp.broadcast_to(jnp.asarray(operand), axes) for operand in operands])


def _rest(
    piece: TracedPiece, reader: UpdateReader, groups: Sequence[_Group], scalars: Mapping[int, TensorSpec]
) -> TracedPiece:
    """The piece without updates: it gives their gradients and scalars."""
    updates = [update for group in groups for update in group.updates]
    updated = {name for update in updates for name in update.variables}
    totals = {id(update.total) for update in updates}
    kept = [(name, atom) for name, atom in reader.results.items() if name not in updated]
    outgoing = [(gradient_buffer(update.variables[0]), update.total.invars[0]) for update in updates]
    outgoing += [(spec.name, reader.numbers.first[number]) for number, spec in scalars.items()]
    names, atoms = zip(*kept, *outgoing, strict=True)
    closed = piece.jaxpr
    equations = [e for e in closed.jaxpr.eqns if id(e) not in totals]
    open_jaxpr = jaxprs.sub_jaxpr(closed, closed.jaxpr.invars, equations, atoms)
    read = jaxprs.read_arguments(open_jaxpr.jaxpr)
    pairs = zip(piece.inputs, closed.jaxpr.invars, strict=True)
    narrow = [(name, variable) for name, variable in pairs if variable in read]
    rest = jaxprs.sub_jaxpr(closed, [v for _, v in narrow], open_jaxpr.jaxpr.eqns, atoms)
    return TracedPiece(piece.name, rest, tuple(name for name, _ in narrow), names)
