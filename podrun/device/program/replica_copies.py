"""Weights and optimizer state of replicas whose memory differs from that of their machine's other replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from podrun.core.executable import Array, Computation, Executable
from podrun.device.program.program_memory import Frame, ProgramMemory
from podrun.device.program.xla_memory import Member


class ReplicaCopies:
    """Weights and optimizer state of replicas whose memory differs from that of their machine's other replicas.

    One copy serves all replicas of a machine as long as they hold the same bits. A replica whose memory an error
    changes gets a copy of its own. From then on a piece that writes weights or optimizer state runs once more for each
    such copy; every other piece computes with the copy that was changed last, for all replicas of the machine.
    """

    def __init__(self, memory: ProgramMemory, executable: Executable) -> None:
        self._memory = memory
        self._alone = executable.layout.replicas_per_machine == 1
        self._arenas = frozenset(
            name
            for name, buffer in memory.arenas.items()
            if not buffer.one_copy
            and not (buffer.arena.sliced and memory.group_size > 1)
            and name not in memory.changing
            and any(member.name in executable.variables for member in buffer.arena.members)
        )
        self._copies: dict[int, dict[str, Array]] = {}

    def __bool__(self) -> bool:
        return bool(self._copies)

    @property
    def replicas(self) -> frozenset[int]:
        """The replicas of this machine that have copies of their own."""
        return frozenset(self._copies)

    def may_hold(self, arena: str) -> bool:
        """Whether replicas may have copies of their own of an arena."""
        return arena in self._arenas

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
        if not self._memory.arenas_written_by(computation) & self._arenas:
            with self._kept(self._arenas):
                self._install(next(reversed(self._copies.values())))
                work(frame)
            return
        self._memory.flush_pending(computation)
        for own in self._copies.values():
            with self._kept(self._arenas | self._memory.arenas_written_by(computation), computation):
                self._install(own)
                operands = frame.values.items()
                work(Frame({n: np.array(v) if n in computation.donated else v for n, v in operands}))
                for arena, memory in own.items():
                    memory[:] = self._whole(arena)
        work(frame)

    def _whole(self, arena: str) -> Array:
        return self._memory.arenas[arena].whole()

    def _install(self, own: Mapping[str, Array]) -> None:
        for arena, memory in own.items():
            self._whole(arena)[:] = memory

    @contextlib.contextmanager
    def _kept(self, arenas: Iterable[str], computation: Computation | None = None) -> Iterator[None]:
        """Undo what happens within to arenas, and to the variables that a Computation writes."""
        arenas_kept = [self._memory.arenas[name] for name in arenas]
        kept = [(b, b.whole_result, b.slice_result, b.whole().copy()) for b in arenas_kept]
        values = [] if computation is None else self._memory.variables_written_by(computation)
        try:
            yield
        finally:
            for buffer, whole, part, before in kept:
                buffer.whole_result, buffer.slice_result = whole, part
                self._memory.drop_pending(buffer.arena.name)
                buffer.whole()[:] = before
            for memory, value in values:
                memory[...] = value
