"""Runs a program's instruction lists for one batch.

IPU *k* of every replica has an instruction list. A machine runs its lists in a fixed order: one list until it has to
wait (for the Send of a Receive, or for other lists at a Sync), then the next. All machines of a program run the same
lists in the same order, so they reach the same collectives.

Where a replica spans machines, each machine runs the lists of its own IPUs; messages to and from others go through
`ReplicaMessages`. There the interpreter leaves a list after every Computation, so that other machines get their
messages early.

Faults and aborts take effect between two instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from podrun.collectives import Group
from podrun.core.errors import ApplicationRuntimeError, InternalError
from podrun.core.executable import (
    AllGather,
    AllReduce,
    Array,
    Compute,
    Copy,
    Instruction,
    LoadStream,
    Receive,
    ReduceScatter,
    Reduction,
    Send,
    StoreStream,
    Sync,
    SyncScope,
)
from podrun.core.quick_dataclass import dataclass
from podrun.device.crash_records import ProgressSlot
from podrun.device.program.buffers import Buffers, Read, Write
from podrun.device.program.fused_tail import make_fused_tail
from podrun.device.program.fused_updates import FusedUpdate, make_fused_updates
from podrun.device.program.instruction_lists import trailing_gathers, unsettled_reductions
from podrun.device.program.machine_groups import NO_CORE_LOCK, CoreLock
from podrun.device.program.program_memory import Frame
from podrun.device.program.replica_messages import Key, ReplicaMessages
from podrun.device.program.streams import Drain, Feed
from podrun.device.xla.pieces import Piece

InstructionHook = Callable[[int, int, int], None]
"""``before_instruction(done, list, instruction)``: called before every instruction with the batches done before this
pass. It raises to stop the run."""


@dataclass(frozen=True, slots=True)
class BatchState:
    """A batch under way: its index within the run, host data, and messages between the machine's own lists."""

    index: int
    feed: Feed
    drain: Drain
    messages: dict[Key, Any] = field(default_factory=dict)


class NotFinite(Exception):
    """A piece gave an infinite value (``overflow``) or a NaN (``invalid-operation``), in a program that stops there.
    ``ipu``: of the replica, whose list it was; ``name``: of the result.
    """

    def __init__(self, kind: str, ipu: int, name: str) -> None:
        super().__init__(f"{name}: {kind}")
        self.kind, self.ipu, self.name = kind, ipu, name


Action = Callable[[Frame, BatchState], object]
"""Executes one instruction on a list's temporaries in a batch."""


class Interpreter:
    """One program's instruction lists on one machine.

    ``slot``: records which piece is under way. ``first``: the IPU of a replica that the first list belongs to.
    ``finite``: raise `NotFinite` where a piece gives no finite number. ``messages``: the way to IPUs whose lists other
    machines run, if there are any. ``core_lock``: held while a piece computes. ``strikes_between``: faults are planned
    that strike this machine between two instructions of a batch.
    """

    def __init__(
        self,
        instructions: Sequence[Sequence[Instruction]],
        pieces: Mapping[str, Piece],
        buffers: Buffers,
        group: Group,
        before_instruction: InstructionHook,
        slot: ProgressSlot,
        *,
        first: int = 0,
        finite: bool = False,
        messages: ReplicaMessages | None = None,
        core_lock: CoreLock = NO_CORE_LOCK,
        strikes_between: bool = False,
    ) -> None:
        self._first, self._messages, self._slot = first, messages, slot
        self._lists = instructions
        self._buffers = buffers
        for piece in pieces.values():
            buffers.check(piece)
        # First, because a donated arena moves to memory of XLA's.
        donated = {name: _donated(piece, buffers) for name, piece in pieces.items()}
        mixed = any(piece.is_shared for piece in pieces.values())
        self._computes = {
            name: _compute(piece, buffers, core_lock, donated[name], finite=finite, mixed=mixed)
            for name, piece in pieces.items()
        }
        self._group, self._before_instruction = group, before_instruction
        self._unsettled = unsettled_reductions(
            instructions,
            {name: buffers.arenas_written_by(piece.computation) for name, piece in pieces.items()},
        )
        self._trailing_gathers = trailing_gathers(instructions)
        self._host_gathers = False
        fuses = not finite and messages is None
        self._fused_tail = make_fused_tail(instructions, pieces, buffers, group, core_lock) if fuses else None
        if self._fused_tail is not None and _on_any_machine(group, strikes_between):
            self._fused_tail = None  # Machines would not wait for each other where the faults strike.
        self._fused_updates: dict[int, FusedUpdate] = {}
        if fuses and self._fused_tail is None and len(instructions) == 1:
            places = {place for _, place in self._unsettled}
            self._fused_updates = make_fused_updates(instructions[0], pieces, buffers, places)
        # With one list, only a Receive waits.
        self._never_waits = len(instructions) == 1 and not any(
            isinstance(i, Receive) for i in instructions[0]
        )
        self._actions = [
            [self._action(instruction, ipu, place) for place, instruction in enumerate(work)]
            for ipu, work in enumerate(instructions)
        ]

    def run_batch(
        self, done: int, batch: int, feed: Feed, drain: Drain, *, host_gathers: bool = False
    ) -> None:
        """Interpret all lists once. ``done``: batches done since load. ``batch``: index within this run.

        ``host_gathers``: the host waits for all machines before anything reads what they write at the end of this
        batch, so they need no barrier there.
        """
        self._host_gathers = host_gathers
        self._slot.set_batch(done)
        now = BatchState(batch, feed, drain)
        if self._never_waits:
            self._run_only_list(done, now)
            return
        frames = [Frame() for _ in self._lists]
        places = [0] * len(self._lists)
        while any(place < len(lst) for place, lst in zip(places, self._lists, strict=True)):
            before = tuple(places)
            for ipu, instructions in enumerate(self._lists):
                while places[ipu] < len(instructions):
                    instruction = instructions[places[ipu]]
                    if self._must_wait(instruction, ipu, places, now.messages):
                        break
                    self._before_instruction(done, self._first + ipu, places[ipu])
                    self._actions[ipu][places[ipu]](frames[ipu], now)
                    places[ipu] += 1
                    if self._messages is not None and isinstance(instruction, Compute):
                        break
            if tuple(places) == before:
                self._await_message(places)

    def _run_only_list(self, done: int, now: BatchState) -> None:
        """Run the only list, which never waits."""
        frame, before_instruction, first = Frame(), self._before_instruction, self._first
        for place, act in enumerate(self._actions[0]):
            before_instruction(done, first, place)
            act(frame, now)

    def _await_message(self, places: Sequence[int]) -> None:
        """No list can continue: wait for a message from another machine."""
        waiting = [
            (instruction.peer, self._first + ipu, instruction.tag)
            for ipu, (place, work) in enumerate(zip(places, self._lists, strict=True))
            if place < len(work)
            and isinstance(instruction := work[place], Receive)
            and not self._is_here(instruction.peer)
        ]
        if self._messages is None or not waiting:
            raise InternalError(f"the program's lists wait for each other at instructions {list(places)}")
        self._messages.await_any(waiting)

    def _is_here(self, ipu: int) -> bool:
        """Whether an IPU of the replica has its list here."""
        return self._messages is None or 0 <= ipu - self._first < len(self._lists)

    def _must_wait(
        self, instruction: Instruction, ipu: int, places: list[int], local: Mapping[Key, Any]
    ) -> bool:
        if isinstance(instruction, Receive):
            key = (instruction.peer, self._first + ipu, instruction.tag)
            if self._messages is None or self._is_here(instruction.peer):
                return key not in local
            return not self._messages.has(key)
        if isinstance(instruction, Sync) and len(self._lists) > 1:
            nth = _syncs(self._lists[ipu][: places[ipu]])
            return any(
                _syncs(other[: places[k]]) < nth
                or (_syncs(other[: places[k]]) == nth and not _at_sync(other, places[k]))
                for k, other in enumerate(self._lists)
                if k != ipu
            )
        return False

    def _action(self, instruction: Instruction, ipu: int, place: int) -> Action:
        """The function that executes an instruction. Everything that is the same for every batch is looked up here."""
        buffers = self._buffers
        fused = self._fused_action(instruction, ipu, place)
        if fused is not None:
            return fused
        match instruction:
            case Compute(name):
                return self._recorded(self._computes[name], ipu, name)
            case LoadStream(stream, buffer, first, count):
                return lambda frame, now: frame.values.update(
                    {buffer: now.feed.load(stream, now.index, first, count)}
                )
            case StoreStream(stream, buffer, first, count):
                return lambda frame, now: now.drain.store(
                    stream, now.index, first, _host_view(buffers.operand(buffer, frame), count)
                )
            case ReduceScatter(arena, reduction):
                settle = (ipu, place) not in self._unsettled
                return lambda frame, now: buffers.reduce_scatter(arena, reduction, settle=settle)
            case AllGather(arena):
                skipped_for_host = (ipu, place) in self._trailing_gathers and buffers.is_one_copy(arena)
                return lambda frame, now: (
                    None if skipped_for_host and self._host_gathers else buffers.all_gather(arena)
                )
            case AllReduce(arena, reduction):
                return lambda frame, now: buffers.all_reduce(arena, reduction)
            case Sync(scope):
                # HOST: the run began with it. MACHINE: one thread runs the lists of a machine.
                waits = scope is SyncScope.ALL and ipu == len(self._lists) - 1
                return lambda frame, now: self._group.barrier() if waits else None
            case Send(buffer, peer, tag):
                return self._sending(buffer, (self._first + ipu, peer, tag))
            case Receive(buffer, peer, tag):
                return self._receiving(buffer, (peer, self._first + ipu, tag))
            case Copy(source, destination):
                return lambda frame, now: frame.values.update({destination: frame.values[source]})

    def _fused_action(self, instruction: Instruction, ipu: int, place: int) -> Action | None:
        """The function for an instruction that is part of the fused tail or of a fused update; None for others."""
        if self._fused_tail is not None and place >= self._fused_tail[0]:
            first, meet, finish = self._fused_tail
            if isinstance(instruction, AllGather):
                return None
            if place != first:
                return lambda frame, now: None
            name = next(i.computation for i in self._lists[ipu][first:] if isinstance(i, Compute))
            update = self._recorded(lambda frame, now: finish(), ipu, name)
            return lambda frame, now: update(frame, now) if meet() else None
        if (begun := self._fused_updates.get(place)) is not None:
            return lambda frame, now: begun.reduce()
        if (ended := self._fused_updates.get(place - 1)) is not None:
            return self._recorded(lambda frame, now: ended.finish(), ipu, ended.computation)
        return None

    def _recorded(self, act: Action, ipu: int, name: str) -> Action:
        """``act`` with the piece recorded as under way, for other processes to read if this one dies."""
        begin, place = self._slot.begin, self._slot.place((ipu, name))

        def recorded(frame: Frame, now: BatchState) -> None:
            begin(place)
            try:
                act(frame, now)
            except NotFinite as found:
                raise NotFinite(found.kind, self._first + ipu, found.name) from None
            finally:
                begin(0)

        return recorded

    def _sending(self, buffer: str, key: Key) -> Action:
        buffers, messages = self._buffers, self._messages
        if messages is None or self._is_here(key[1]):
            return lambda frame, now: now.messages.update({key: buffers.value(buffer, frame)})
        return lambda frame, now: messages.send(key, np.asarray(buffers.operand(buffer, frame)))

    def _receiving(self, buffer: str, key: Key) -> Action:
        messages = self._messages
        if messages is None or self._is_here(key[0]):
            return lambda frame, now: frame.values.update({buffer: now.messages.pop(key)})
        return lambda frame, now: frame.values.update({buffer: messages.fetch(key)})


def _on_any_machine(group: Group, here: bool) -> bool:
    """Whether ``here`` is true on any machine of the group. A collective call: every machine makes it."""
    mine = group.allocate("podrun:any machine", "int64", 1)
    mine[0] = here
    return bool(group.all_reduce("podrun:any machine", Reduction.SUM)[0])


DonatedOperands = Sequence[tuple[int, Read, int, Write]]
"""Operands that a piece writes over: position and reader of the operand, position and writer of the result."""


def _donated(piece: Piece, buffers: Buffers) -> DonatedOperands:
    names, shapes = piece.computation.inputs, piece.shapes
    donations = []
    for operand, result in piece.in_place.items():
        read, take = buffers.donor(names[operand], shapes[operand], piece.device)
        donations.append((operand, read, result, take))
    return donations


def _check_finite(names: Sequence[str], results: Sequence[Any]) -> None:
    """Raise NotFinite for the first result with an infinite value or a NaN."""
    for name, result in zip(names, results, strict=True):
        values = np.asarray(result)
        if values.dtype.kind in "biu" or np.isfinite(values).all():
            continue
        raise NotFinite("overflow" if np.isinf(values).any() else "invalid-operation", 0, name)


def _compute(
    piece: Piece, buffers: Buffers, lock: CoreLock, donated: DonatedOperands, *, finite: bool, mixed: bool
) -> Action:
    """The function that runs a piece on a frame. Everything that is the same for every batch is looked up here."""
    computation = piece.computation
    readers = buffers.readers(piece, mixed=mixed)
    writers: list[Write | None] = [buffers.writer(name) for name in computation.outputs]
    for operand, read, result, take in donated:
        readers[operand], writers[result] = read, take
    call = piece.call if finite else buffers.call_of(piece, writers)
    lasting = bool(buffers.arenas_written_by(computation)) and call is piece.call
    stores = [(place, write) for place, write in enumerate(writers) if write is not None]

    constant = not computation.inputs
    clear: Callable[[], None] | None = None

    def run(frame: Frame, now: BatchState) -> None:
        with lock:
            if clear is not None:
                clear()
            elif buffers.own_copies:
                buffers.own_copies.compute(computation, frame, compute)
            else:
                compute(frame)

    def compute(frame: Frame) -> None:
        nonlocal constant, clear
        results = call(*[read(frame) for read in readers])
        if piece.dense is None:
            for result in results:
                result.block_until_ready()
        if finite:
            _check_finite(computation.outputs, results)
        if constant:
            constant, clear = False, buffers.clearing(computation, results)
        for name in computation.donated:
            frame.values.pop(name, None)
        if lasting:
            buffers.prepare_writes(computation)
        for place, write in stores:
            write(frame, results[place])

    return run


def _syncs(instructions: Sequence[Instruction]) -> int:
    return sum(isinstance(i, Sync) for i in instructions)


def _at_sync(instructions: Sequence[Instruction], place: int) -> bool:
    return place < len(instructions) and isinstance(instructions[place], Sync)


def _host_view(value: object, count: int) -> Array:
    array = np.asarray(value)
    if array.ndim < 2 or array.shape[0] != count:
        raise ApplicationRuntimeError(
            f"the Executable is not consistent: an anchor is {list(array.shape)}, not [{count}, replicas, ...]",
            hint="Compile the program again.",
        )
    return array
