"""The machines of a program: which of them does what for a replica, and the groups they form.

Machine *m* of a program is at *position* ``m % machines_per_replica`` of replica ``m // machines_per_replica``
(`podrun.core.layout.Layout`). `at_position` reduces an Executable to one position: the instruction lists of its IPUs,
and the Computations, streams, arenas and variables that these lists need. A machine runs the result like any
Executable; `podrun.device.program.replica_messages` carries messages to and from IPUs at other positions.

`MachineGroups` holds the groups of a loaded program: all machines, the machines at one position (which reduce and
gather with each other), and one group of two for each pair of positions that exchange messages. An error that ends
one group of a machine ends all of them, so it reaches every machine of the program.

Cores: if a program has at least as many machines on a host as there are cores, each machine computes on one core:
machines with a process of their own take cores in turn, and neighbours that share a process take the same core. A
busy host's scheduler may otherwise put three machines on one core while another core is idle; on a quiet host it
makes no measurable difference. On a host with more cores than machines nothing is pinned.

Machines that share a process and a core compute one piece, or one slice of a reduction, at a time, under a `CoreLock`.
Without it all of them would be active at once, each with a working set to bring back into the cache and with Python's
interpreter lock to wait for. A machine never holds the lock while it waits for other machines.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from podrun.collectives import Group, RankLostError, RankMissingError
from podrun.core.errors import present
from podrun.core.executable import (
    Compute,
    Executable,
    Instruction,
    LoadStream,
    Receive,
    Send,
    StoreStream,
    Variable,
)
from podrun.core.quick_dataclass import dataclass
from podrun.device.program.replica_messages import ReplicaChannel, ReplicaMessages, with_program_ranks

CoreLock = AbstractContextManager[object]
"""Held while a machine computes."""
NO_CORE_LOCK: CoreLock = nullcontext()
"""For a machine that shares its core with no other machine of its process."""
_SAME_RANKS: AbstractContextManager[None] = nullcontext()
_thread = threading.local()
_locks: dict[int, threading.Lock] = {}
_adding = threading.Lock()


def choose_core(place: int, machines: int, cores: Sequence[int], *, shared: bool = False) -> int | None:
    """The core for machine number ``place`` of ``machines`` on this host; None: do not pin it. ``shared``: neighbours
    share processes."""
    if not 1 < len(cores) <= machines:
        return None
    return cores[place * len(cores) // machines] if shared else cores[place % len(cores)]


def core_lock_of(core: int | None) -> CoreLock:
    """The lock of this process's machines on a core; `NO_CORE_LOCK` for machines that are not pinned."""
    if core is None:
        return NO_CORE_LOCK
    with _adding:
        return _locks.setdefault(core, threading.Lock())


def has_core_for_each_process(machines: int, processes: int) -> bool:
    """Whether there is a core for each machine of a job and each host process that runs it."""
    return machines + processes <= len(os.sched_getaffinity(os.getpid()))


def pin_thread_to(core: int | None) -> None:
    """Keep the calling thread on a core. Does nothing for None, or if the core has gone."""
    if core is not None and getattr(_thread, "core", None) != core:
        _thread.core = core
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {core})


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages of one batch from one position of a replica to another."""

    source: int
    dest: int
    messages: int


def lists_at(executable: Executable, position: int) -> tuple[tuple[Instruction, ...], ...]:
    """The instruction lists of the IPUs at a position, in order."""
    per_position = ipus_per_position(executable)
    return tuple(executable.instructions[position * per_position : (position + 1) * per_position])


def ipus_per_position(executable: Executable) -> int:
    """IPUs of a replica that lie on one machine."""
    return executable.layout.ipus_per_position


def at_position(executable: Executable, position: int) -> Executable:
    """The part of an Executable that machines at ``position`` run; all of it if a replica lies on one machine."""
    if executable.layout.machines_per_replica == 1:
        return executable
    lists = lists_at(executable, position)
    here = [instruction for work in lists for instruction in work]
    computed = {i.computation for i in here if isinstance(i, Compute)}
    streamed = {i.stream for i in here if isinstance(i, LoadStream | StoreStream)}
    return replace(
        executable,
        streams={n: s for n, s in executable.streams.items() if n in streamed},
        variables={n: v for n, v in executable.variables.items() if holds(executable, v, position)},
        arenas={n: a for n, a in executable.arenas.items() if a.position in (None, position)},
        computations={n: c for n, c in executable.computations.items() if n in computed},
        instructions=lists,
    )


def holds(executable: Executable, variable: Variable, position: int) -> bool:
    """Whether machines at ``position`` hold a variable."""
    held = variable.position if variable.arena is None else executable.arenas[variable.arena].position
    return held in (None, position)


def home_of(executable: Executable, name: str) -> int:
    """The position whose machines the host asks for a variable: the one that holds it, or 0 if all hold it. A name
    that is no variable gives 0, whose machine then reports the error."""
    variable = executable.variables.get(name)
    if variable is None:
        return 0
    held = variable.position if variable.arena is None else executable.arenas[variable.arena].position
    return held or 0


def batch_traffic(
    instructions: Sequence[Sequence[Instruction]], ipus_per_position: int
) -> tuple[Traffic, ...]:
    """Messages between positions in one batch. ``each``: instruction lists of a position."""
    counted: Counter[tuple[int, int]] = Counter()
    for ipu, work in enumerate(instructions):
        for instruction in work:
            if (
                isinstance(instruction, Send)
                and instruction.peer // ipus_per_position != ipu // ipus_per_position
            ):
                counted[ipu // ipus_per_position, instruction.peer // ipus_per_position] += 1
    return tuple(Traffic(source, dest, count) for (source, dest), count in sorted(counted.items()))


def unpaired(instructions: Sequence[Sequence[Instruction]]) -> list[tuple[int, int, int]]:
    """Messages ``(from IPU, to IPU, tag)`` that are not sent exactly once and received exactly once in a batch."""
    sent: Counter[tuple[int, int, int]] = Counter()
    received: Counter[tuple[int, int, int]] = Counter()
    for ipu, work in enumerate(instructions):
        for instruction in work:
            if isinstance(instruction, Send):
                sent[ipu, instruction.peer, instruction.tag] += 1
            elif isinstance(instruction, Receive):
                received[instruction.peer, ipu, instruction.tag] += 1
    return sorted(k for k in sent.keys() | received.keys() if sent[k] != 1 or received[k] != 1)


def parts_by_position(executable: Executable) -> Mapping[int, Executable]:
    """The parts of an executable for each position of a machine: `at_position` of all."""
    return {p: at_position(executable, p) for p in range(executable.layout.machines_per_replica)}


class MachineGroups:
    """The groups that the machines of a program form, and which machine does what for a replica. ``program``: the group
    of all machines, by rank. ``core_lock``: held while gradients are summed.

    All machines of the program construct it at the same time. `abort` may be called from any thread.
    """

    def __init__(self, program: Group, executable: Executable, core_lock: CoreLock = NO_CORE_LOCK) -> None:
        self.program = program
        self.machines_per_replica = executable.layout.machines_per_replica
        self.position = program.rank % self.machines_per_replica
        self.peers: Group = program
        self.messages: ReplicaMessages | None = None
        self._channels: list[ReplicaChannel] = []
        if self.machines_per_replica > 1:
            try:
                self._split(executable)
            except BaseException:
                self._close_parts()
                raise
        from podrun.collectives.shared_memory import SharedMemoryGroup

        if isinstance(self.peers, SharedMemoryGroup):
            self.peers.turn = core_lock

    @property
    def peer_ranks(self) -> tuple[int, ...]:
        """The ranks of the peers among all machines."""
        return tuple(range(self.position, self.program.size, self.machines_per_replica))

    def abort(self, error: Mapping[str, Any]) -> None:
        """End the program on all machines, with an error as `PoplarError.to_dict` gives it."""
        self.program.abort(error)
        if self.peers is not self.program:
            self.peers.abort(error)
        for channel in self._channels:
            channel.group.abort(error)

    def close(self) -> None:
        """Leave all groups. No run is under way."""
        self._close_parts()
        self.program.close()

    def _close_parts(self) -> None:
        for channel in self._channels:
            channel.close()
        if self.peers is not self.program:
            self.peers.close()

    def errors_with_program_ranks(self) -> AbstractContextManager[None]:
        """Errors of the peers' group count ranks among the peers; raise them with ranks among all machines."""
        return _SAME_RANKS if self.machines_per_replica == 1 else self._with_program_ranks()

    @contextlib.contextmanager
    def _with_program_ranks(self) -> Iterator[None]:
        try:
            yield
        except (RankLostError, RankMissingError) as error:
            named = with_program_ranks(error, self.peer_ranks)
            if named is error:
                raise
            raise named from error

    def _split(self, executable: Executable) -> None:
        """Make the group of peers, and a channel to each machine of the replica that messages go to or come from."""
        from podrun.collectives import Communicator

        everybody, count = Communicator(self.program), self.machines_per_replica
        firsts = range(0, self.program.size, count)
        groups = everybody.split([[first + p for first in firsts] for p in range(count)])
        mine = present(groups, "every machine is in the group of its position")
        self.peers = mine.group
        counts = {
            (t.source, t.dest): t.messages
            for t in batch_traffic(executable.instructions, ipus_per_position(executable))
        }
        for low, high in sorted({(min(pair), max(pair)) for pair in counts}):
            both = everybody.split([[first + low, first + high] for first in firsts])
            if both is not None:
                other = high if self.position == low else low
                first = self.program.rank - self.position
                sends, receives = (counts.get(p, 0) for p in ((self.position, other), (other, self.position)))
                ranks = (first + low, first + high)
                self._channels.append(ReplicaChannel(both.group, other, ranks, sends, receives))
        self.messages = ReplicaMessages(self._channels, ipus_per_position(executable))
        # Members on different hosts connect at a group's first call. All machines make these calls in the same order.
        for group in (self.peers, *(channel.group for channel in self._channels)):
            group.barrier()
