"""Buffer names of one program on one machine: what the host writes and reads, what pieces take and give.

The lookup rules are those of `podrun.core.executable`'s docstring; the memory behind them is
`podrun.device.program.program_memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.collectives import Group, slice_of
from podrun.core.errors import ApplicationRuntimeError, InternalError
from podrun.core.executable import REPLICA_OFFSET, Array, Computation, Executable, numpy_dtype
from podrun.core.names import SLICE, WHOLE
from podrun.device.program.program_memory import Frame, ProgramMemory
from podrun.device.program.replica_copies import ReplicaCopies
from podrun.device.program.xla_memory import (
    DonatedArena,
    Operands,
    Shape,
    arena_of,
    in_shape,
    updated_in_place,
)
from podrun.device.xla.clients import on_one_thread
from podrun.device.xla.matrix_products import ResultPlaces

if TYPE_CHECKING:
    import jax

    from podrun.device.xla.pieces import Piece

WORTH_DONATING = 4096
"""Bytes of a variable from which on a piece writes over it; copying a smaller one costs less than the bookkeeping."""

Read = Callable[[Frame], Any]
Write = Callable[[Frame, Any], None]


class Buffers(ProgramMemory):
    """All lasting buffers of one program on one machine. Used by one thread at a time."""

    def __init__(self, executable: Executable, group: Group) -> None:
        super().__init__(executable, group)
        self._donated: dict[str, DonatedArena] = {}
        self._operands = Operands()
        self.own_copies = ReplicaCopies(self, executable)

    # --- The host's side ------------------------------------------------------------------------------------

    def check_write(self, name: str, value: Array) -> None:
        """Raises ApplicationRuntimeError unless ``value`` can be written to variable ``name``."""
        variable = self._executable.variables.get(name)
        if variable is None:
            raise _no_variable(name, self._executable.variables)
        spec = variable.host_spec
        if value.shape != spec.shape or value.dtype != numpy_dtype(spec.dtype):
            raise ApplicationRuntimeError(
                f"variable {name!r} is {spec.dtype}{list(spec.shape)}, but "
                f"{value.dtype}{list(value.shape)} was written to it",
                hint="Its first axis is of replicas, or groups of them, that have their own value."
                if variable.rows
                else None,
            )

    def write(self, values: Mapping[str, Array]) -> None:
        """Host writes, checked before; where a host keeps one copy only one of its machines writes it."""
        for name, value in values.items():
            member = self._members.get(name)
            self._blank.discard(name if member is None else member.arena)
            if member is None:
                self._variables[name][...] = value[self._rows(name)]
            elif self.writes_one_copy or not self.arenas[member.arena].one_copy:
                self.arenas[member.arena].settle()
                self.arenas[member.arena].own[member.start : member.stop] = value.reshape(-1)
                self.own_copies.write(member, value)
            self._unwritten.discard(name)

    def _rows(self, name: str) -> Any:
        """The rows of a host value that are for this machine's replicas; all of it if the variable has no rows."""
        rows = self._executable.variables[name].rows
        first = int(self._variables[REPLICA_OFFSET])
        return list(rows[first : first + len(self._variables[name])]) if rows else ...

    def read(self, name: str, replica: int = 0) -> Array:
        """A view of a variable's current value, as a replica of this machine has it; of a per-replica variable
        ``[replicas_per_machine, *shape]``.
        """
        if name not in self._executable.variables:
            raise _no_variable(name, self._executable.variables)
        if name not in self._members:
            return self._variables[name]
        own = self.own_copies.find(replica, self._members[name])
        return self._as_it_stands(name) if own is None else own

    def change(self, name: str, replica: int, work: Callable[[Array], None]) -> None:
        """Apply ``work`` in place to one replica's copy of a variable, as a memory error would change it. Where
        machines share one copy of it, or update a slice each, all of them have the change.
        """
        if name not in self._executable.variables:
            raise _no_variable(name, self._executable.variables)
        if name in self._members:
            member = self._members[name]
            self.arenas[member.arena].settle()
            own = self.own_copies.make(replica, member)
            work(self._place(name) if own is None else own)
        else:
            variable = self._variables[name]
            work(variable[replica] if self._executable.variables[name].per_replica else variable)

    # --- The interpreter's side -----------------------------------------------------------------------------

    def operand(self, name: str, frame: Frame, shape: Shape = None) -> Any:
        """What a Computation gets for buffer ``name``: a ``jax.Array`` without a copy where
        alignment allows. ``shape``: the one in which it takes an arena or a slice of one, if not flat.
        """
        if name.startswith(WHOLE):
            self._gradients.flush(name[len(WHOLE) :])
            return self._operands.over(in_shape(self.arenas[name[len(WHOLE) :]].whole(), shape))
        if name.startswith(SLICE):
            self._gradients.flush(name[len(SLICE) :])
            return self._operands.over(in_shape(self.arenas[name[len(SLICE) :]].part(), shape))
        if name in self._members:
            if (pending := self._gradients.operand(name)) is not None:
                return pending
            return self._operands.over(self._as_it_stands(name))
        variable = self._variables.get(name)
        if variable is not None:
            return self._operands.over(variable)
        return _temporary(name, frame)

    def slice_at(self, arena: str, machine: int) -> Array:
        """A machine's slice of an arena of which the host has one copy."""
        return self.arenas[arena].own[slice_of(machine, self._group.size, self.arenas[arena].own.size)]

    def operand_at(self, name: str, machine: int, reduced: Mapping[str, Array], shape: Shape) -> Any:
        """`operand` as another machine of this host would get it. ``reduced``: complete results of reductions, by
        arena. The result can be used for every batch."""
        arena = name[len(SLICE) :]
        if not name.startswith(SLICE):
            return self.operand(name, Frame(), shape)
        if arena in reduced:
            part = reduced[arena][slice_of(machine, self._group.size, reduced[arena].size)]
            return self._operands.over(in_shape(part, shape))
        return self._operands.over(in_shape(self.slice_at(arena, machine), shape))

    def readers(self, piece: Piece, *, mixed: bool) -> list[Read]:
        """A `reader` for each operand of a piece. ``mixed``: the program has pieces of two threads, whose
        results are temporaries of another client's.
        """
        converts, plain = mixed and not piece.is_shared, piece.dense is not None
        names = zip(piece.computation.inputs, piece.shapes, strict=True)
        return [self.reader(name, shape, converts=converts, plain=plain) for name, shape in names]

    def reader(self, name: str, shape: Shape = None, *, converts: bool = False, plain: bool = False) -> Read:
        """`operand` for one name, resolved beforehand: most buffers are the same array in every batch. ``converts``:
        a temporary to an array of the one-thread client. ``plain``: such a buffer as an array of NumPy's."""
        arena = arena_of(name, self._members)
        stays = arena is not None and arena not in self.changing and not self._gradients.has_arena(arena)
        if stays or name in self._variables:
            fixed = self.operand(name, Frame(), shape)
            fixed = np.asarray(fixed) if plain else fixed
            return lambda frame: fixed
        if name in self._members:
            return self._member_reader(name)
        if arena is not None:
            return lambda frame: self.operand(name, frame, shape)
        if converts:
            return lambda frame: on_one_thread(_temporary(name, frame))
        return partial(_temporary, name)

    def _member_reader(self, name: str) -> Read:
        """`operand` for a member of an arena that lies in other memory after a collective: looked up again only where
        it moved."""
        buffer, known, operand = self.arenas[self._members[name].arena], None, None

        def read(frame: Frame) -> Any:
            nonlocal known, operand
            pending = self._gradients.operand(name)
            if pending is not None:
                return pending
            if buffer.whole() is not known:
                known, operand = buffer.whole(), self._operands.over(self._as_it_stands(name))
            return operand

        return read

    def check(self, piece: Piece) -> None:
        """Raises ApplicationRuntimeError unless what a piece takes from lasting buffers and puts there fits."""
        names = (*piece.computation.inputs, *piece.computation.outputs)
        for name, (size, dtype) in zip(names, piece.kinds, strict=True):
            target = self.memory_behind(name)
            if target is not None and (target.size, target.dtype) != (size, dtype):
                raise ApplicationRuntimeError(
                    f"the Executable is not consistent: Computation {piece.computation.name!r} has {size} elements of "
                    f"{dtype} for {name!r}, which has {target.size} of {target.dtype}",
                    hint="Compile the program again.",
                )

    def updated_in_place(self, computation: Computation) -> dict[int, int]:
        """`podrun.device.program.xla_memory.updated_in_place` for the arenas and variables that only this Computation
        writes.
        """
        own = set()
        for arena, buffer in self.arenas.items():
            writers = [
                c for c in self._executable.computations.values() if arena in self.arenas_written_by(c)
            ]
            if writers != [computation] or not buffer.own.size or buffer.one_copy or arena in self.changing:
                continue
            own.add(WHOLE + arena)
            if buffer.own[buffer.mine].size == buffer.own.size:
                own.add(SLICE + arena)
        names = (*computation.inputs, *computation.outputs)
        behind = {n: in_ for n in names if (in_ := arena_of(n, self._members)) is not None}
        for name in names:
            if name in self._gradients and not {WHOLE + behind[name], SLICE + behind[name]} & set(names):
                own.add(name)
        alone = {n for n in computation.outputs if self._writes_alone(computation, n)}
        own |= alone
        named = {n: n for n in own if n in self._gradients or n in alone}
        return updated_in_place(computation, behind | named, own)

    def _writes_alone(self, computation: Computation, name: str) -> bool:
        """Whether ``name`` is a large variable outside of arenas that no other Computation writes."""
        variable = self._variables.get(name)
        if variable is None or variable.nbytes < WORTH_DONATING:
            return False
        return [c for c in self._executable.computations.values() if name in c.outputs] == [computation]

    def donor(self, name: str, shape: Shape, device: jax.Device) -> tuple[Read, Write]:
        """Functions that donate buffer ``name`` to a piece on a ``jax.Device``, and that take the result back. Call it
        before any `reader` or `writer`: the arena moves to memory that the device may write."""
        if name in self._gradients:
            return lambda frame: self._gradients.donate(
                name, self._as_it_stands(name), device
            ), lambda frame, result: self._gradients.store(name, result, in_place=True)
        arena = self._donated_arena(name, shape, device)
        return lambda frame: arena.donate(), lambda frame, result: arena.take_back(result)

    def _donated_arena(self, name: str, shape: Shape, device: jax.Device) -> DonatedArena:
        """The arena or variable ``name`` in memory of a ``jax.Device``; the first call moves it there."""
        if name in self._variables:
            old = self._variables[name]
            moved = DonatedArena(old.shape, old.dtype, device)
            self._variables[name] = moved.memory.reshape(old.shape)
            if name not in self._blank:
                self._variables[name][...] = old
            return moved
        arena = name.removeprefix(WHOLE).removeprefix(SLICE)
        if arena not in self._donated:
            buffer = self.arenas[arena]
            donated = self._donated[arena] = DonatedArena(
                buffer.own.shape if shape is None else shape, buffer.own.dtype, device
            )
            if arena not in self._blank:
                donated.memory[:] = buffer.own
            buffer.own = donated.memory
        return self._donated[arena]

    def clearing(self, computation: Computation, results: Sequence[Any]) -> Callable[[], None] | None:
        """A function in place of a piece without operands, whose results these are, if it only writes zeros to whole
        arenas of gradients; else None."""
        arenas = [name.removeprefix(WHOLE) for name in computation.outputs if name.startswith(WHOLE)]
        alone = len(arenas) == len(computation.outputs) > 0 and all(map(self._gradients.has_arena, arenas))
        if not alone or any(map(_has_bits, results)):
            return None
        gaps = [gap for arena in arenas for gap in self._gaps(arena)]

        def clear() -> None:
            self.prepare_writes(computation)
            for arena in arenas:
                self._gradients.clear(arena)
            for arena, gap in gaps:
                self.arenas[arena].own[gap] = 0

        return clear

    def _gaps(self, arena: str) -> list[tuple[str, slice]]:
        """Parts of an arena that belong to none of its members."""
        members = sorted((m.start, m.stop) for m in self._members.values() if m.arena == arena)
        starts = [0, *(stop for _, stop in members)]
        stops = [*(start for start, _ in members), self.arenas[arena].own.size]
        pairs = zip(starts, stops, strict=True)
        return [(arena, slice(start, stop)) for start, stop in pairs if start < stop]

    def places(self, piece: Piece) -> dict[int, Array]:
        """Where a piece may write its gradients at once, by position: this machine's rows of arenas that machines
        reduce, or arenas that pieces read as a whole, of which the piece writes all and reads nothing. Not where a
        result that is written over an operand has its place."""
        computation, chosen = piece.computation, {}
        read = {arena_of(name, self._members) for name in computation.inputs}
        for position in piece.placed - set(piece.in_place.values()):
            name = computation.outputs[position]
            arena = arena_of(name, self._members)
            if name not in self._gradients or arena is None or arena in read:
                continue
            if arena not in self.changing and self._has_read_members(arena):
                continue
            memory = self._place(name)
            if memory.dtype == np.float32 and self.covers(computation, self.arenas[arena].arena):
                chosen[position] = memory
        return chosen

    def _has_read_members(self, arena: str) -> bool:
        """Whether a Computation reads a part of an arena, such as a gradient to which it adds another one."""
        members = {member.name for member in self.arenas[arena].arena.members}
        return any(not members.isdisjoint(c.inputs) for c in self._executable.computations.values())

    def call_of(self, piece: Piece, writers: list[Write | None]) -> Callable[..., Sequence[Any]]:
        """A call of a piece, which writes results to `places` if it has any, and prepares for that. In ``writers``
        their writers are replaced by such that store only what was not written there; None: nothing is left to
        store."""
        places = self.places(piece)
        if not places:
            return piece.call
        computation, filled, into = piece.computation, 0, ResultPlaces(places)
        arenas = {self._members[computation.outputs[position]].arena for position in places}

        def call(*operands: object) -> Sequence[Any]:
            nonlocal filled
            for arena in arenas:
                self._gradients.discard(arena)
            self.prepare_writes(computation)
            results, filled = into.call(piece.call, operands)
            return results

        def dense_call(*operands: object) -> Sequence[Any]:
            for arena in arenas:
                self._gradients.discard(arena)
            self.prepare_writes(computation)
            return placed(*operands)

        if piece.dense is not None:
            placed = piece.dense.placing(places)
            for position in places:
                writers[position] = None
            return dense_call

        def unless_filled(position: int, write: Write) -> Write:
            bit = into.bit(position)
            return lambda frame, value: None if filled & bit else write(frame, value)

        for position in places:
            if (write := writers[position]) is not None:
                writers[position] = unless_filled(position, write)
        return call

    def writer(self, name: str) -> Write:
        """A function that stores a Computation's output in buffer ``name``, resolved beforehand."""
        if name in self._gradients:
            return lambda frame, value: self._gradients.store(name, value)
        target = self.memory_behind(name)
        if target is None:

            def keep(frame: Frame, value: object) -> None:
                frame.values[name] = value

            return keep
        shape = target.shape
        whole = name.removeprefix(WHOLE) if name.startswith(WHOLE) else ""
        sliced = name.removeprefix(SLICE) if name.startswith(SLICE) else ""

        def copy(frame: Frame, value: object) -> None:
            self._gradients.discard(whole)
            self._gradients.flush(sliced)
            np.copyto(target, np.asarray(value).reshape(shape))

        return copy

    def value(self, name: str, frame: Frame) -> Any:
        """The value of buffer ``name`` now, which later writes do not change: a temporary itself, a copy of the
        rest."""
        value = self.operand(name, frame)
        return value if self.is_temporary(name) else np.array(value)


def _has_bits(result: object) -> bool:
    """Whether any bit of an array is set. An array of zeros has none set, but for -0.0."""
    return bool(np.ascontiguousarray(result).reshape(-1).view(np.uint8).any())


def _temporary(name: str, frame: Frame) -> Any:
    try:
        return frame.values[name]
    except KeyError:
        raise InternalError(f"the program reads buffer {name!r} before anything wrote it") from None


def _no_variable(name: str, variables: Mapping[str, Any]) -> ApplicationRuntimeError:
    listed = ", ".join(sorted(variables)[:20]) or "none"
    return ApplicationRuntimeError(
        f"the program has no variable {name!r}", hint=f"Its variables are: {listed}"
    )
