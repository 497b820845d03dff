"""Arenas: their memory on one machine, and the buffer names of arenas and of their parts.

An arena has one copy for all machines of a host if every Computation that writes it writes only this machine's slice.
It lies in the group's per-rank buffers if it is reduced or gathered, and otherwise in plain memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from podrun.collectives import Group, slice_of
from podrun.core.buffer_names import SLICE, WHOLE
from podrun.core.executable import (
    AllGather,
    AllReduce,
    Arena,
    ArenaMember,
    Executable,
    ReduceScatter,
    numpy_dtype,
)
from podrun.device.program.xla_memory import Array, aligned_zeros

Shape = tuple[int, ...] | None
"""The shape in which a piece takes an arena or a slice of one. None: flat."""


@dataclass(slots=True)
class ArenaBuffer:
    """An arena's memory: ``own`` (this machine's, or the host's one copy), and the results of the last collective."""

    arena: Arena
    own: Array
    mine: slice
    one_copy: bool
    whole_result: Array | None = None
    slice_result: Array | None = None

    def whole(self) -> Array:
        """The current contents of the arena."""
        return self.own if self.whole_result is None else self.whole_result

    def part(self) -> Array:
        """The current contents of this machine's slice."""
        return self.whole()[self.mine] if self.slice_result is None else self.slice_result

    def settle(self) -> None:
        """Copy the result of the last collective into the arena's own memory, before a part of it is overwritten."""
        if self.whole_result is not None:
            self.own[:] = self.whole_result
        if self.slice_result is not None:
            self.own[self.mine] = self.slice_result
        self.forget()

    def forget(self) -> None:
        """Drop the result of the last collective: the whole arena is about to be overwritten."""
        self.whole_result = self.slice_result = None


@dataclass(frozen=True, slots=True)
class Member:
    """A part of an arena, from element ``start``."""

    arena: str
    start: int
    stop: int
    shape: tuple[int, ...]

    def of(self, arena: Array) -> Array:
        """A view of it in the arena's memory."""
        return arena[self.start : self.stop].reshape(self.shape)


def arena_buffers(executable: Executable, group: Group) -> tuple[dict[str, ArenaBuffer], frozenset[str]]:
    """Memory for all arenas of a program, and the names of those whose contents may be a collective's result."""
    reduced, gathered = set(), set()
    if group.size > 1:
        reduced = {i.arena for i in _collectives(executable) if isinstance(i, ReduceScatter | AllReduce)}
        gathered = {i.arena for i in _collectives(executable) if isinstance(i, AllGather)}
    changing = reduced | gathered
    buffers = {}
    for name, arena in executable.arenas.items():
        one_copy = (
            group.size > 1 and name not in reduced and arena.shared and _written_by_slices(executable, arena)
        )
        if one_copy:
            own = group.shared(name, arena.dtype, arena.size)
            changing.discard(name)
        elif name in changing:
            own = group.allocate(name, arena.dtype, arena.size)
        else:
            own = aligned_zeros((arena.size,), numpy_dtype(arena.dtype))
        buffers[name] = ArenaBuffer(arena, own, slice_of(group.rank, group.size, arena.size), one_copy)
    return buffers, frozenset(changing)


def in_shape(flat: Array, shape: Shape) -> Array:
    """A flat arena as a piece takes it."""
    return flat if shape is None else flat.reshape(shape)


def member_of(arena: Arena, member: ArenaMember) -> Member:
    """Where a member lies."""
    size = int(np.prod(member.shape, dtype=np.int64))
    return Member(arena.name, member.offset, member.offset + size, member.shape)


def arena_of(name: str, members: Mapping[str, Member]) -> str | None:
    """The arena behind a buffer name; None if there is none."""
    for prefix in (WHOLE, SLICE):
        if name.startswith(prefix):
            return name[len(prefix) :]
    member = members.get(name)
    return None if member is None else member.arena


def _collectives(executable: Executable) -> Iterable[ReduceScatter | AllReduce | AllGather]:
    for ipu in executable.instructions:
        for instruction in ipu:
            if isinstance(instruction, ReduceScatter | AllReduce | AllGather):
                yield instruction


def _written_by_slices(executable: Executable, arena: Arena) -> bool:
    """True iff no Computation writes the arena other than by this machine's slice."""
    members = {member.name for member in arena.members}
    whole = WHOLE + arena.name
    return not any(
        name == whole or name in members for c in executable.computations.values() for name in c.outputs
    )
