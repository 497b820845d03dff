"""A machine's lasting memory for one program: arenas, their members, variables, and gradients that no arena has taken.

Where an arena lies, and how XLA reads and writes it there, decides `podrun.device.program.xla_memory`. A reduction or
gathering writes to a buffer of its own; afterwards the arena's name means that buffer, until something writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from functools import partial
from math import copysign
from typing import Any

import numpy as np

from podrun.collectives import Group
from podrun.collectives.shared_memory import SharedMemoryGroup
from podrun.core.aligned_memory import aligned_zeros
from podrun.core.executable import (
    REPLICA_OFFSET,
    Arena,
    Array,
    Computation,
    Executable,
    Reduction,
    numpy_dtype,
)
from podrun.core.names import SLICE, WHOLE
from podrun.core.quick_dataclass import dataclass
from podrun.device.program.xla_memory import (
    PendingGradients,
    arena_buffers,
    arena_of,
    member_of,
)

REDUCED_WHOLE = 64 * 1024
"""Bytes of arenas up to which one machine of a host reduces them for all machines. One slice for each of 64 machines
would take 64 times as many calls, each for a few hundred bytes."""


@dataclass(slots=True)
class Frame:
    """The temporaries of one IPU of a replica; emptied at the end of every batch."""

    values: dict[str, Any] = field(default_factory=dict)


class ProgramMemory:
    """A machine's lasting memory for one program. Used by one thread at a time. ``changing``: arenas whose contents may
    be a collective's result.
    """

    def __init__(self, executable: Executable, group: Group) -> None:
        self._group = group
        self._executable = executable
        self.arenas, self.changing = arena_buffers(executable, group)
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
        self._blank = {*self.arenas, *executable.variables} - set(self._members)
        """Arenas, and variables outside of them, that hold zeros as they were allocated."""
        self._covers: dict[str, bool] = {}
        self._written: dict[str, frozenset[str]] = {}
        self._fill()

    @property
    def group_size(self) -> int:
        """The machines of the program."""
        return self._group.size

    @property
    def writes_one_copy(self) -> bool:
        """True iff this machine is the one of its host that writes what the host keeps one copy of."""
        return self._group.rank == self._group.host_ranks[0]

    @property
    def unwritten(self) -> frozenset[str]:
        """Variables without an initial value that the host has not written yet."""
        return frozenset(self._unwritten)

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
        """Copy pending gradients into the arenas that the Computation reads, before it runs."""
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

    def arena_behind(self, name: str) -> str | None:
        """The arena that a buffer name lies in."""
        return arena_of(name, self._members)

    def holds_gradients(self, arena: str) -> bool:
        """True iff an arena holds no variable: only pieces and reductions read it."""
        return self._gradients.has_arena(arena)

    def scatter_by(
        self, arena: str, reduction: Reduction, make: Callable[[Sequence[Array]], Callable[[], object]]
    ) -> tuple[Callable[[], None], Callable[[], None]] | None:
        """The halves of a prepared reduction of this machine's slice that is the caller's, as of
        `SharedMemoryGroup.scatter_by`; None if the machines do not all share memory, or one reduces for all."""
        if not isinstance(self._group, SharedMemoryGroup) or self.is_reduced_by_one([arena]):
            return None
        return self._group.scatter_by(arena, reduction, make)

    def is_temporary(self, name: str) -> bool:
        """True iff ``name`` is no arena, member or variable: it lives in a Frame."""
        return arena_of(name, self._members) is None and name not in self._variables

    def _place(self, member: str) -> Array:
        """Where a member lies in its arena's own memory."""
        return self._members[member].of(self.arenas[self._members[member].arena].own)

    def _value_of(self, variable: str) -> Array:
        """A variable's current value, which one copy serves for all replicas."""
        return self._as_it_stands(variable) if variable in self._members else self._variables[variable]

    def _as_it_stands(self, member: str) -> Array:
        """A member's current value, in its arena's own memory or in the result of the last collective."""
        return self._members[member].of(self.arenas[self._members[member].arena].whole())

    def memory_behind(self, name: str) -> Array | None:
        """The memory behind a name; None for temporaries."""
        if name.startswith(WHOLE):
            return self.arenas[name[len(WHOLE) :]].own
        if name.startswith(SLICE):
            buffer = self.arenas[name[len(SLICE) :]]
            return buffer.own[buffer.mine]
        return self._place(name) if name in self._members else self._variables.get(name)

    # --- Collectives ------------------------------------------------------------------------------------------

    def prepare_writes(self, computation: Computation) -> None:
        """Called before outputs are stored: an arena of which only a part is written keeps the rest of its contents."""
        for arena in self.arenas_written_by(computation):
            buffer = self.arenas[arena]
            if buffer.whole_result is not None or buffer.slice_result is not None:
                if self.covers(computation, buffer.arena):
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
                member = self._members.get(name)
                here = member is None or self.writes_one_copy or not self.arenas[member.arena].one_copy
                if here and not _is_as_allocated(variable.initial):
                    self._blank.discard(name if member is None else member.arena)
                    self._value_of(name)[...] = variable.initial
        offset = aligned_zeros((), np.dtype(np.int32))
        offset[...] = self._group.rank * layout.replicas_per_machine
        self._variables[REPLICA_OFFSET] = offset

    def covers(self, computation: Computation, arena: Arena) -> bool:
        """True iff the Computation writes every element of the arena that is ever read."""
        key = f"{computation.name}\0{arena.name}"
        if key not in self._covers:
            outputs = set(computation.outputs)
            self._covers[key] = WHOLE + arena.name in outputs or all(m.name in outputs for m in arena.members)
        return self._covers[key]


def _is_as_allocated(initial: float) -> bool:
    """Whether memory of zeros holds this value already, to the bit."""
    return initial == 0 and copysign(1, initial) > 0
