"""A machine's memory for one program: arenas, variables and temporaries behind buffer names.

The lookup rules are those of `podrun.core.executable`'s docstring. Two things are added here:

* Where an arena lies (`podrun.device.program.xla_memory`), and how XLA reads and writes it there
  (`podrun.device.program.xla_memory`).
* The result of the last collective. A reduction writes to a buffer of its own; afterwards the arena's name means that
  buffer, until the arena is written again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.collectives import Group, slice_of
from podrun.core.errors import ApplicationRuntimeError, InternalError
from podrun.core.executable import (
    REPLICA_OFFSET,
    Arena,
    Computation,
    Executable,
    Reduction,
    numpy_dtype,
)
from podrun.core.names import SLICE, WHOLE
from podrun.device.program.xla_memory import (
    Array,
    DonatedArena,
    Member,
    Operands,
    PendingGradients,
    Shape,
    aligned_zeros,
    arena_buffers,
    arena_of,
    in_shape,
    member_of,
    updated_in_place,
)

if TYPE_CHECKING:
    from podrun.device.xla.pieces import Piece

REDUCED_WHOLE = 64 * 1024
"""Bytes of arenas up to which one machine of a host reduces them for all machines. One slice for each of 64 machines
would take 64 times as many calls, each for a few hundred bytes."""


@dataclass(slots=True)
class Frame:
    """The temporaries of one IPU of a replica; emptied at the end of every batch."""

    values: dict[str, Any] = field(default_factory=dict)


Read = Callable[[Frame], Any]
Write = Callable[[Frame, Any], None]


class Buffers:
    """All lasting buffers of one program on one machine. Used by one thread at a time."""

    def __init__(self, executable: Executable, group: Group) -> None:
        self._group = group
        self._executable = executable
        self.arenas, self._changing = arena_buffers(executable, group)
        self._donated: dict[str, DonatedArena] = {}
        self._members = {m.name: member_of(a, m) for a in executable.arenas.values() for m in a.members}
        self._gradients = PendingGradients(
            {
                name: {m.name: partial(self._place, m.name) for m in arena.members}
                for name, arena in executable.arenas.items()
                if not any(m.name in executable.variables for m in arena.members)
            }
        )
        self._variables: dict[str, Array] = {}
        self._unwritten: set[str] = set()
        self._operands = Operands()
        self._covers: dict[str, bool] = {}
        self._written: dict[str, frozenset[str]] = {}
        self.own_copies = ReplicaCopies(self, executable)
        self._fill()

    @property
    def writes_one_copy(self) -> bool:
        """True iff this machine is the one of its host that writes what the host keeps one copy of."""
        return self._group.rank == self._group.host_ranks[0]

    @property
    def unwritten(self) -> frozenset[str]:
        """Variables without an initial value that the host has not written yet."""
        return frozenset(self._unwritten)

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

    def is_one_copy(self, arena: str) -> bool:
        """True iff the machines of this host share one copy of an arena, and there are no others."""
        return self.arenas[arena].one_copy and len(self._group.host_ranks) == self._group.size

    def is_reduced_by_one(self, arenas: Iterable[str]) -> bool:
        """True iff all machines are on this host and the arenas are together no larger than `REDUCED_WHOLE`."""
        here = len(self._group.host_ranks) == self._group.size > 1
        return here and sum(self.arenas[arena].own.nbytes for arena in arenas) <= REDUCED_WHOLE

    def arenas_written_by(self, computation: Computation) -> frozenset[str]:
        """Names of the arenas that outputs of the Computation lie in."""
        known = self._written.get(computation.name)
        if known is None:
            arenas = (arena_of(name, self._members) for name in computation.outputs)
            known = self._written[computation.name] = frozenset(a for a in arenas if a is not None)
        return known

    def variables_written_by(self, computation: Computation) -> list[tuple[Array, Array]]:
        """The variables outside of arenas that outputs of the Computation are: their memory, and what it holds now."""
        written = [self._variables[name] for name in computation.outputs if name in self._variables]
        return [(memory, memory.copy()) for memory in written]

    def flush_pending(self, computation: Computation) -> None:
        """Let arenas take gradients that the Computation reads."""
        for name in computation.inputs:
            arena = arena_of(name, self._members)
            if arena is not None:
                self._gradients.flush(arena)

    def drop_pending(self, arena: str) -> None:
        """Drop gradients that no arena has taken yet."""
        self._gradients.discard(arena)

    def is_same_everywhere(self, name: str) -> bool:
        """True iff ``name`` is a variable outside of arenas of which all machines hold the same value."""
        variable = self._executable.variables.get(name)
        return name in self._variables and variable is not None and not variable.per_replica

    def is_temporary(self, name: str) -> bool:
        """True iff ``name`` is no arena, member or variable: it lives in a Frame."""
        return arena_of(name, self._members) is None and name not in self._variables

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
        try:
            return frame.values[name]
        except KeyError:
            raise InternalError(f"the program reads buffer {name!r} before anything wrote it") from None

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

    def reader(self, name: str, shape: Shape = None) -> Read:
        """`operand` for one name, resolved beforehand: most buffers are the same array in every batch."""
        arena = arena_of(name, self._members)
        stays = arena is not None and arena not in self._changing and not self._gradients.has_arena(arena)
        if stays or name in self._variables:
            fixed = self.operand(name, Frame(), shape)
            return lambda frame: fixed
        if arena is not None:
            return lambda frame: self.operand(name, frame, shape)

        def temporary(frame: Frame) -> Any:
            try:
                return frame.values[name]
            except KeyError:
                raise InternalError(f"the program reads buffer {name!r} before anything wrote it") from None

        return temporary

    def check(self, piece: Piece) -> None:
        """Raises ApplicationRuntimeError unless what a piece takes from lasting buffers and puts there fits."""
        names = (*piece.computation.inputs, *piece.computation.outputs)
        for name, (size, dtype) in zip(names, piece.kinds, strict=True):
            target = self._target(name)
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
            if writers != [computation] or not buffer.own.size or buffer.one_copy or arena in self._changing:
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
        """Whether ``name`` is a variable outside of arenas that no other Computation writes."""
        variable = self._variables.get(name)
        if variable is None or not variable.size:
            return False
        return [c for c in self._executable.computations.values() if name in c.outputs] == [computation]

    def donor(self, name: str, shape: Shape, device: Any) -> tuple[Read, Write]:
        """Functions that donate buffer ``name`` to a piece on a ``jax.Device``, and that take the result back. Call it
        before any `reader` or `writer`: the arena moves to memory that the device may write."""
        if name in self._gradients:
            return lambda frame: self._gradients.donate(name, self._as_it_stands(name), device), self.writer(
                name
            )
        arena = self._donated_arena(name, shape, device)
        return lambda frame: arena.donate(), lambda frame, result: arena.take_back(result)

    def _donated_arena(self, name: str, shape: Shape, device: Any) -> DonatedArena:
        """The arena or variable ``name`` in memory of a ``jax.Device``; the first call moves it there."""
        if name in self._variables:
            old = self._variables[name]
            moved = DonatedArena(old.shape, old.dtype, device)
            self._variables[name] = moved.memory.reshape(old.shape)
            self._variables[name][...] = old
            return moved
        arena = name.removeprefix(WHOLE).removeprefix(SLICE)
        if arena not in self._donated:
            buffer = self.arenas[arena]
            donated = self._donated[arena] = DonatedArena(
                buffer.own.shape if shape is None else shape, buffer.own.dtype, device
            )
            donated.memory[:] = buffer.own
            buffer.own = donated.memory
        return self._donated[arena]

    def writer(self, name: str) -> Write:
        """A function that stores a Computation's output in buffer ``name``, resolved beforehand."""
        if name in self._gradients:
            return lambda frame, value: self._gradients.store(name, value)
        target = self._target(name)
        if target is None:

            def keep(frame: Frame, value: Any) -> None:
                frame.values[name] = value

            return keep
        shape = target.shape
        whole = name.removeprefix(WHOLE) if name.startswith(WHOLE) else ""

        def copy(frame: Frame, value: Any) -> None:
            self._gradients.discard(whole)
            np.copyto(target, np.asarray(value).reshape(shape))

        return copy

    def _place(self, member: str) -> Array:
        """Where a member lies in its arena's own memory."""
        return self._members[member].of(self.arenas[self._members[member].arena].own)

    def _as_it_stands(self, member: str) -> Array:
        """A member's current value, in its arena's own memory or in the result of the last collective."""
        return self._members[member].of(self.arenas[self._members[member].arena].whole())

    def _target(self, name: str) -> Array | None:
        """The memory behind a name; None for temporaries."""
        if name.startswith(WHOLE):
            return self.arenas[name[len(WHOLE) :]].own
        if name.startswith(SLICE):
            buffer = self.arenas[name[len(SLICE) :]]
            return buffer.own[buffer.mine]
        return self._place(name) if name in self._members else self._variables.get(name)

    def value(self, name: str, frame: Frame) -> Any:
        """The value of buffer ``name`` now, which later writes do not change: a temporary itself, a copy of the
        rest."""
        value = self.operand(name, frame)
        return value if self.is_temporary(name) else np.array(value)

    def prepare_writes(self, computation: Computation) -> None:
        """Called before outputs are stored: an arena of which only a part is written keeps the rest of its contents."""
        for arena in self.arenas_written_by(computation):
            buffer = self.arenas[arena]
            if buffer.whole_result is not None or buffer.slice_result is not None:
                if self._covered(computation, buffer.arena):
                    buffer.forget()
                else:
                    buffer.settle()

    def settle(self, arenas: Iterable[str]) -> None:
        """Copy the current contents of arenas into their own memory, where other machines read them."""
        for arena in arenas:
            self.arenas[arena].settle()
            self._gradients.flush(arena)

    def reduce_scatter(self, arena: str, reduction: Reduction, *, settle: bool) -> None:
        """Reduce-scatter the arena; later reads of this machine's slice see the result. No-op for one machine."""
        if self._group.size == 1:
            return
        buffer = self.arenas[arena]
        self.settle([arena])
        if self.is_reduced_by_one([arena]):
            buffer.slice_result = self._group.all_reduce(arena, reduction)[buffer.mine]
        else:
            buffer.slice_result = self._group.reduce_scatter(arena, reduction, settle=settle)

    def all_reduce(self, arena: str, reduction: Reduction) -> None:
        """All-reduce the arena; later reads see the result. No-op for one machine."""
        if self._group.size == 1:
            return
        buffer = self.arenas[arena]
        self.settle([arena])
        buffer.whole_result = self._group.all_reduce(arena, reduction)

    def all_gather(self, arena: str) -> None:
        """All-gather the arena; later reads see the slices of all machines."""
        buffer = self.arenas[arena]
        if buffer.one_copy:
            self._group.all_gather(arena)
        elif self._group.size > 1:
            self.settle([arena])
            buffer.whole_result = self._group.all_gather(arena)

    # --- Construction ---------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Set initial values. The host must write variables that have none before the first run."""
        executable, layout = self._executable, self._executable.layout
        for name, variable in executable.variables.items():
            if name not in self._members:
                lead = (layout.replicas_per_machine,) if variable.per_replica else ()
                shape = (*lead, *variable.spec.shape)
                self._variables[name] = aligned_zeros(shape, numpy_dtype(variable.spec.dtype))
            if variable.initial is None:
                self._unwritten.add(name)
            else:
                lead_view = self.read(name)
                member = self._members.get(name)
                if member is None or self.writes_one_copy or not self.arenas[member.arena].one_copy:
                    lead_view[...] = variable.initial
        offset = aligned_zeros((), np.dtype(np.int32))
        offset[...] = self._group.rank * layout.replicas_per_machine
        self._variables[REPLICA_OFFSET] = offset

    def _covered(self, computation: Computation, arena: Arena) -> bool:
        """True iff the Computation writes every element of the arena that is ever read."""
        key = f"{computation.name}\0{arena.name}"
        if key not in self._covers:
            outputs = set(computation.outputs)
            self._covers[key] = WHOLE + arena.name in outputs or all(m.name in outputs for m in arena.members)
        return self._covers[key]


class ReplicaCopies:
    """Weights and optimizer state of replicas whose memory differs from that of their machine's other replicas.

    One copy serves all replicas of a machine as long as they hold the same bits. A replica whose memory an error
    changes gets a copy of its own. From then on a piece that writes weights or optimizer state runs once more for each
    such copy; every other piece computes with the copy that was changed last, for all replicas of the machine.
    """

    def __init__(self, buffers: Buffers, executable: Executable) -> None:
        self._buffers = buffers
        self._alone = executable.layout.replicas_per_machine == 1
        self._arenas = frozenset(
            name
            for name, buffer in buffers.arenas.items()
            if not buffer.one_copy
            and not (buffer.arena.sliced and buffers._group.size > 1)
            and name not in buffers._changing
            and any(member.name in executable.variables for member in buffer.arena.members)
        )
        self._copies: dict[int, dict[str, Array]] = {}

    def __bool__(self) -> bool:
        return bool(self._copies)

    @property
    def replicas(self) -> frozenset[int]:
        """The replicas of this machine that have copies of their own."""
        return frozenset(self._copies)

    def find(self, replica: int, member: Member) -> Array | None:
        """A variable in a replica's own copy, if it has one."""
        arenas = self._copies.get(replica, {})
        return member.of(arenas[member.arena]) if member.arena in arenas else None

    def make(self, replica: int, member: Member) -> Array | None:
        """The same; the copy is made if need be. None for a variable of which there is one copy for all machines, and
        where the machine has a single replica.
        """
        if member.arena not in self._arenas or self._alone:
            return None
        arrays = self._copies.pop(replica, None) or {a: self._whole(a).copy() for a in self._arenas}
        self._copies[replica] = arrays  # The last one of the dictionary is the one that was changed last.
        return member.of(arrays[member.arena])

    def write(self, member: Member, value: Array) -> None:
        """The host wrote a variable."""
        for arenas in self._copies.values():
            if member.arena in arenas:
                arenas[member.arena][member.start : member.stop] = value.reshape(-1)

    def compute(self, computation: Computation, frame: Frame, work: Callable[[Frame], None]) -> None:
        """Run a piece with all copies. ``work`` runs it once."""
        if not self._buffers.arenas_written_by(computation) & self._arenas:
            with self._kept(self._arenas):
                self._install(next(reversed(self._copies.values())))
                work(frame)
            return
        self._buffers.flush_pending(computation)
        for own in self._copies.values():
            with self._kept(self._arenas | self._buffers.arenas_written_by(computation), computation):
                self._install(own)
                operands = frame.values.items()
                work(Frame({n: np.array(v) if n in computation.donated else v for n, v in operands}))
                for arena, memory in own.items():
                    memory[:] = self._whole(arena)
        work(frame)

    def _whole(self, arena: str) -> Array:
        return self._buffers.arenas[arena].whole()

    def _install(self, own: Mapping[str, Array]) -> None:
        for arena, memory in own.items():
            self._whole(arena)[:] = memory

    @contextlib.contextmanager
    def _kept(self, arenas: Iterable[str], computation: Computation | None = None) -> Iterator[None]:
        """Undo what happens within to arenas, and to the variables that a Computation writes."""
        arenas_kept = [self._buffers.arenas[name] for name in arenas]
        kept = [(b, b.whole_result, b.slice_result, b.whole().copy()) for b in arenas_kept]
        values = [] if computation is None else self._buffers.variables_written_by(computation)
        try:
            yield
        finally:
            for buffer, whole, part, before in kept:
                buffer.whole_result, buffer.slice_result = whole, part
                self._buffers.drop_pending(buffer.arena.name)
                buffer.whole()[:] = before
            for memory, value in values:
                memory[...] = value


def _no_variable(name: str, variables: Mapping[str, Any]) -> ApplicationRuntimeError:
    listed = ", ".join(sorted(variables)[:20]) or "none"
    return ApplicationRuntimeError(
        f"the program has no variable {name!r}", hint=f"Its variables are: {listed}"
    )
