"""Checks an Executable for consistency before it is loaded, so that a machine may rely on a compiler's promises."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from podrun.core.cluster import IPUS_PER_MACHINE
from podrun.core.errors import ApplicationRuntimeError
from podrun.core.executable import (
    REPLICA_OFFSET,
    AllGather,
    AllReduce,
    Arena,
    Compute,
    Copy,
    Executable,
    Instruction,
    LoadStream,
    Receive,
    ReduceScatter,
    Send,
    StoreStream,
    StreamDirection,
    Sync,
)
from podrun.core.names import SLICE, WHOLE
from podrun.device.program.machine_groups import unpaired
from podrun.device.service.handover import wire_dtype


def check_executable(executable: Executable) -> None:
    """Raise ApplicationRuntimeError for an Executable that cannot run."""
    _check_layout(executable)
    for arena in executable.arenas.values():
        _check_arena(arena, executable)
    for name, variable in executable.variables.items():
        _require(variable.spec.name == name, f"variable {name!r} is filed under another name")
        wire_dtype(variable.spec.dtype)
        if variable.arena is not None:
            members = executable.arenas[variable.arena].members if variable.arena in executable.arenas else ()
            in_an_arena = any(m.name == name and m.shape == variable.spec.shape for m in members)
            _require(
                in_an_arena and not variable.per_replica,
                f"variable {name!r} has no place in arena {variable.arena!r}",
            )
        if variable.rows:
            _require(
                variable.per_replica
                and len(variable.rows) == executable.layout.replicas
                and sorted(set(variable.rows)) == list(range(len(set(variable.rows)))),
                f"the rows of variable {name!r} are not those of {executable.layout.replicas} replicas",
            )
    for stream in executable.streams.values():
        wire_dtype(stream.spec.dtype)
        _require(stream.period >= 1, f"stream {stream.spec.name!r} has period {stream.period}")
    _check_positions(executable)
    for ipu, instructions in enumerate(executable.instructions):
        for index, instruction in enumerate(instructions):
            _check_instruction(instruction, executable, f"instruction {index} of IPU {ipu}")
        _check_reads(instructions, executable, ipu)
    _check_progress(executable)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ApplicationRuntimeError(
            f"the Executable is not consistent: {message}", hint="Compile the program again."
        )


def _check_layout(executable: Executable) -> None:
    layout = executable.layout
    numbers = (
        layout.replicas,
        layout.ipus_per_replica,
        layout.machines,
        layout.machines_per_replica,
        executable.accumulation_factor,
    )
    _require(all(n >= 1 for n in numbers), f"its layout has numbers below 1: {numbers}")
    _require(layout.is_consistent, f"its {layout.replicas} replicas do not lie on {layout.machines} machines")
    _require(
        len(executable.instructions) == layout.ipus_per_replica,
        f"it has {len(executable.instructions)} instruction lists for {layout.ipus_per_replica} IPUs per replica",
    )


def _check_positions(executable: Executable) -> None:
    """Where replicas span machines: positions exist, and every message has a sender and a receiver."""
    machines_per_replica = executable.layout.machines_per_replica
    held = [(a.name, a.position) for a in executable.arenas.values()]
    held += [(n, v.position) for n, v in executable.variables.items() if v.arena is None]
    for name, position in held:
        _require(
            position is None or 0 <= position < machines_per_replica,
            f"{name!r} lies at position {position} of replicas of {machines_per_replica} machine(s)",
        )
    if machines_per_replica == 1:
        return
    lost = unpaired(executable.instructions)
    _require(not lost, f"messages {lost[:5]} (from IPU, to IPU, tag) are not sent once and received once")
    for ipu, instructions in enumerate(executable.instructions):
        for instruction in instructions:
            if isinstance(instruction, ReduceScatter | AllGather | AllReduce):
                arena = executable.arenas.get(instruction.arena)
                _require(
                    arena is None or arena.position in (None, ipu // IPUS_PER_MACHINE),
                    f"IPU {ipu} has a collective on arena {instruction.arena!r}, which lies elsewhere",
                )


def _check_arena(arena: Arena, executable: Executable) -> None:
    wire_dtype(arena.dtype)
    machines = executable.layout.machines // max(executable.layout.machines_per_replica, 1)
    _require(
        arena.size >= 1 and arena.size % machines == 0,
        f"arena {arena.name!r} of {arena.size} elements cannot be shared out to {machines} machines",
    )
    end = 0
    for member in sorted(arena.members, key=lambda m: m.offset):
        _require(member.offset >= end, f"{member.name!r} overlaps its neighbour in arena {arena.name!r}")
        _require(all(n >= 0 for n in member.shape), f"{member.name!r} has a negative size")
        end = member.offset + int(np.prod(member.shape, dtype=np.int64))
    _require(end <= arena.size, f"arena {arena.name!r} is too small for its members")


def _check_instruction(instruction: Instruction, executable: Executable, where: str) -> None:
    match instruction:
        case Compute(name):
            _require(name in executable.computations, f"{where} names no Computation: {name!r}")
        case LoadStream(stream, _, first, count):
            _check_stream(executable, stream, StreamDirection.TO_DEVICE, first, count, where)
        case StoreStream(stream, _, first, count):
            _check_stream(executable, stream, StreamDirection.TO_HOST, first, count, where)
        case ReduceScatter(arena) | AllGather(arena) | AllReduce(arena):
            _require(arena in executable.arenas, f"{where} names no arena: {arena!r}")
        case Send(_, peer, _) | Receive(_, peer, _):
            _require(
                0 <= peer < executable.layout.ipus_per_replica, f"{where} names no IPU of a replica: {peer}"
            )
        case _:
            pass


def _check_stream(
    executable: Executable, name: str, direction: StreamDirection, first: int, count: int, where: str
) -> None:
    stream = executable.streams.get(name)
    _require(stream is not None and stream.direction is direction, f"{where} names no such stream: {name!r}")
    _require(
        first >= 0 and count >= 1 and first + count <= executable.accumulation_factor,
        f"{where} reaches beyond the {executable.accumulation_factor} micro-batches of a batch",
    )
    _require(name != REPLICA_OFFSET, f"{where} uses a reserved name")


def _check_reads(instructions: Sequence[Instruction], executable: Executable, ipu: int) -> None:
    """Every temporary is written before it is read; temporaries are an IPU's own, and last for one pass."""
    lasting = {REPLICA_OFFSET, *executable.variables}
    lasting.update(member.name for arena in executable.arenas.values() for member in arena.members)
    written: set[str] = set()
    for index, instruction in enumerate(instructions):
        match instruction:
            case Compute(name):
                computation = executable.computations[name]
                reads, writes = computation.inputs, computation.outputs
            case StoreStream(_, buffer, _, _) | Send(buffer, _, _):
                reads, writes = (buffer,), ()
            case LoadStream(_, buffer, _, _) | Receive(buffer, _, _):
                reads, writes = (), (buffer,)
            case Copy(source, destination):
                _require(
                    source in written,
                    f"instruction {index} of IPU {ipu} copies {source!r}, which nothing wrote",
                )
                reads, writes = (), (destination,)
            case _:
                continue
        where = f"instruction {index} of IPU {ipu}"
        for buffer in (*reads, *writes):
            if buffer.startswith((WHOLE, SLICE)):
                arena = buffer.removeprefix(WHOLE if buffer.startswith(WHOLE) else SLICE)
                _require(arena in executable.arenas, f"{where} names no arena: {buffer!r}")
        for buffer in reads:
            known = buffer in lasting or buffer in written or buffer.startswith((WHOLE, SLICE))
            _require(known, f"{where} reads {buffer!r}, which nothing wrote before")
        if isinstance(instruction, Compute):
            written.difference_update(computation.donated)
        written.update(writes)


def _check_progress(executable: Executable) -> None:
    """Check that no lists wait for each other: all reach their ends, whatever is computed."""
    lists = executable.instructions
    ipus_per_group = max(len(lists) // executable.layout.machines_per_replica, 1)
    places, syncs, sent = [0] * len(lists), [0] * len(lists), set[tuple[int, int, int]]()

    def here(ipu: int) -> Instruction | None:
        return lists[ipu][places[ipu]] if places[ipu] < len(lists[ipu]) else None

    def waits(instruction: Instruction, ipu: int) -> bool:
        if isinstance(instruction, Receive):
            return (instruction.peer, ipu, instruction.tag) not in sent
        return isinstance(instruction, Sync) and any(
            syncs[k] < syncs[ipu] or (syncs[k] == syncs[ipu] and not isinstance(here(k), Sync))
            for k in range(
                ipu // ipus_per_group * ipus_per_group,
                min(ipu // ipus_per_group * ipus_per_group + ipus_per_group, len(lists)),
            )
        )

    moved = True
    while moved:
        moved = False
        for ipu in range(len(lists)):
            while (instruction := here(ipu)) is not None and not waits(instruction, ipu):
                if isinstance(instruction, Send):
                    sent.add((ipu, instruction.peer, instruction.tag))
                elif isinstance(instruction, Receive):
                    sent.remove((instruction.peer, ipu, instruction.tag))
                syncs[ipu] += isinstance(instruction, Sync)
                places[ipu], moved = places[ipu] + 1, True
    stuck = [str(ipu) for ipu in range(len(lists)) if here(ipu) is not None]
    _require(not stuck, f"IPUs {', '.join(stuck[:5])} of a replica wait for each other")
