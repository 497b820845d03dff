"""Replicas over several machines: which of a replica's machines does and holds what.

Machine *m* of a program is at position ``m % machines_per_replica`` of replica ``m // machines_per_replica``
(`podrun.executable.Layout`). `at_position` cuts an Executable down to one position: the lists of its IPUs, and the
Computations, streams, arenas and variables that these need. What it leaves can be run by a machine as if there were
nothing else, but for messages to and from IPUs of other positions (`podrun.device.program.mail`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from podrun.executable import (
    Compute,
    Executable,
    Instruction,
    LoadStream,
    Receive,
    Send,
    StoreStream,
    Variable,
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages of one batch from one position of a replica to another."""

    source: int
    dest: int
    messages: int


def lists_at(executable: Executable, position: int) -> tuple[tuple[Instruction, ...], ...]:
    """The instruction lists of the IPUs at a position, in order."""
    each = ipus_per_position(executable)
    return tuple(executable.instructions[position * each : (position + 1) * each])


def ipus_per_position(executable: Executable) -> int:
    """IPUs of a replica that lie on one machine."""
    return executable.layout.ipus_per_replica // executable.layout.machines_per_replica


def at_position(executable: Executable, position: int) -> Executable:
    """What a machine at ``position`` of a replica runs; the Executable itself where replicas lie on one machine."""
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
    """The position whose machines the host asks for a variable: the one that holds it, the first if all do. Also the
    first for a name that is no variable: it has to say so."""
    variable = executable.variables.get(name)
    if variable is None:
        return 0
    held = variable.position if variable.arena is None else executable.arenas[variable.arena].position
    return held or 0


def traffic(instructions: Sequence[Sequence[Instruction]], each: int) -> tuple[Traffic, ...]:
    """What goes between positions in one batch; ``each``: lists of a position."""
    counted: Counter[tuple[int, int]] = Counter()
    for ipu, work in enumerate(instructions):
        for instruction in work:
            if isinstance(instruction, Send) and instruction.peer // each != ipu // each:
                counted[ipu // each, instruction.peer // each] += 1
    return tuple(Traffic(source, dest, count) for (source, dest), count in sorted(counted.items()))


def unpaired(instructions: Sequence[Sequence[Instruction]]) -> list[tuple[int, int, int]]:
    """Messages ``(from IPU, to IPU, tag)`` that are not sent once and received once in a batch."""
    sent: Counter[tuple[int, int, int]] = Counter()
    received: Counter[tuple[int, int, int]] = Counter()
    for ipu, work in enumerate(instructions):
        for instruction in work:
            if isinstance(instruction, Send):
                sent[ipu, instruction.peer, instruction.tag] += 1
            elif isinstance(instruction, Receive):
                received[instruction.peer, ipu, instruction.tag] += 1
    return sorted(k for k in sent.keys() | received.keys() if sent[k] != 1 or received[k] != 1)


def parts_of(executable: Executable) -> Mapping[int, Executable]:
    """`at_position` of every position."""
    return {p: at_position(executable, p) for p in range(executable.layout.machines_per_replica)}
