"""Runs a program's instruction lists for one batch.

IPU *k* of every replica has a list of its own. A machine runs its lists by turns, deterministically: one list
until it waits (a Receive without its Send, a Sync that others have not reached), then the next. Machines of a
program run the same lists in the same order, so that they meet in the same collectives.

Where a replica spans machines, each runs the lists of its own IPUs, and messages to and from others go through `Mail`.
There a list's turn ends with every Computation, so that no other machine waits longer than it must.

Between two instructions, and only there, faults enter and an abort is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from podrun.collectives import Group
from podrun.device.program.buffers import Buffers, Frame, Read, Write
from podrun.device.program.closing import closing_here
from podrun.device.program.cores import ANY_TIME, Turn
from podrun.device.program.mail import Key, Mail
from podrun.device.program.operands import Array
from podrun.device.program.streams import Drain, Feed
from podrun.device.xla.pieces import Piece
from podrun.errors import InternalError
from podrun.executable import (
    AllGather,
    AllReduce,
    Compute,
    Copy,
    Instruction,
    LoadStream,
    Receive,
    ReduceScatter,
    Send,
    StoreStream,
    Sync,
    SyncScope,
)

Between = Callable[[int, int, int], None]
"""``between(step, list, instruction)``: called before every instruction; raises to stop."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch under way: its index within the run, host data, and what the machine's own lists have sent each other."""

    index: int
    feed: Feed
    drain: Drain
    mail: dict[Key, Any] = field(default_factory=dict)


Action = Callable[[Frame, Batch], object]
"""What an instruction does to a list's temporaries in a batch."""


class Interpreter:
    """One program's lists on one machine.

    ``first``: the IPU of a replica that the first list belongs to; ``mail``: to IPUs that have no list here, if there
    are any; ``turn``: held while a piece computes.
    """

    def __init__(
        self,
        instructions: Sequence[Sequence[Instruction]],
        pieces: Mapping[str, Piece],
        buffers: Buffers,
        group: Group,
        between: Between,
        *,
        first: int = 0,
        mail: Mail | None = None,
        turn: Turn = ANY_TIME,
    ) -> None:
        self._first, self._mail = first, mail
        self._lists = instructions
        self._buffers = buffers
        # Before anybody looks where arenas lie.
        lent = {name: _lent(piece, buffers) for name, piece in pieces.items()}
        self._computes = {name: _compute(piece, buffers, turn, lent[name]) for name, piece in pieces.items()}
        self._group = group
        self._between = between
        self._unsettled = unsettled_reductions(
            instructions,
            {name: buffers.arenas_written_by(piece.computation) for name, piece in pieces.items()},
        )
        self._last_gathers = closing_gathers(instructions)
        self._host_gathers = False
        self._closing = None if mail is not None else closing_here(instructions, pieces, buffers, group, turn)
        # Only a Receive waits where there is no other list.
        self._never_waits = len(instructions) == 1 and not any(
            isinstance(i, Receive) for i in instructions[0]
        )
        self._steps = [
            [self._action(instruction, ipu, place) for place, instruction in enumerate(work)]
            for ipu, work in enumerate(instructions)
        ]

    def run_batch(
        self, step: int, batch: int, feed: Feed, drain: Drain, *, host_gathers: bool = False
    ) -> None:
        """Interpret all lists once. ``step``: batches done since load; ``batch``: index within this run.

        ``host_gathers``: nothing reads what machines write at the end of this batch before the host has heard from all
        of them, so they need not meet for it.
        """
        self._host_gathers = host_gathers
        now = Batch(batch, feed, drain)
        if self._never_waits:
            self._run_through(step, now)
            return
        frames = [Frame() for _ in self._lists]
        places = [0] * len(self._lists)
        while any(place < len(lst) for place, lst in zip(places, self._lists, strict=True)):
            before = tuple(places)
            for ipu, instructions in enumerate(self._lists):
                while places[ipu] < len(instructions):
                    instruction = instructions[places[ipu]]
                    if self._must_wait(instruction, ipu, places, now.mail):
                        break
                    self._between(step, self._first + ipu, places[ipu])
                    self._steps[ipu][places[ipu]](frames[ipu], now)
                    places[ipu] += 1
                    if self._mail is not None and isinstance(instruction, Compute):
                        break
            if tuple(places) == before:
                self._await_mail(places)

    def _run_through(self, step: int, now: Batch) -> None:
        """The only list there is, from beginning to end."""
        frame, between, first = Frame(), self._between, self._first
        for place, act in enumerate(self._steps[0]):
            between(step, first, place)
            act(frame, now)

    def _await_mail(self, places: Sequence[int]) -> None:
        """No list can go on: wait for a message of another machine."""
        waiting = [
            (instruction.peer, self._first + ipu, instruction.tag)
            for ipu, (place, work) in enumerate(zip(places, self._lists, strict=True))
            if place < len(work)
            and isinstance(instruction := work[place], Receive)
            and not self._is_here(instruction.peer)
        ]
        if self._mail is None or not waiting:
            raise InternalError(f"the program's lists wait for each other at instructions {list(places)}")
        self._mail.await_any(waiting)

    def _is_here(self, ipu: int) -> bool:
        """Whether an IPU of the replica has its list here."""
        return self._mail is None or 0 <= ipu - self._first < len(self._lists)

    def _must_wait(
        self, instruction: Instruction, ipu: int, places: list[int], mail: Mapping[Key, Any]
    ) -> bool:
        if isinstance(instruction, Receive):
            key = (instruction.peer, self._first + ipu, instruction.tag)
            if self._mail is None or self._is_here(instruction.peer):
                return key not in mail
            return not self._mail.has(key)
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
        """What an instruction does, with everything that stays the same from batch to batch looked up."""
        buffers = self._buffers
        if self._closing is not None and place >= self._closing[0]:
            first, close = self._closing
            if not isinstance(instruction, AllGather):
                return lambda frame, now: close() if place == first else None
        match instruction:
            case Compute(name):
                return self._computes[name]
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
                spared = (ipu, place) in self._last_gathers and buffers.is_one_copy(arena)
                return lambda frame, now: None if spared and self._host_gathers else buffers.all_gather(arena)
            case AllReduce(arena, reduction):
                return lambda frame, now: buffers.all_reduce(arena, reduction)
            case Sync(scope):
                # HOST: the run began with it. MACHINE: lists of one machine take turns in one thread.
                meets = scope is SyncScope.ALL and ipu == len(self._lists) - 1
                return lambda frame, now: self._group.barrier() if meets else None
            case Send(buffer, peer, tag):
                return self._sending(buffer, (self._first + ipu, peer, tag))
            case Receive(buffer, peer, tag):
                return self._receiving(buffer, (peer, self._first + ipu, tag))
            case Copy(source, destination):
                return lambda frame, now: frame.values.update({destination: frame.values[source]})

    def _sending(self, buffer: str, key: Key) -> Action:
        buffers, mail = self._buffers, self._mail
        if mail is None or self._is_here(key[1]):
            return lambda frame, now: now.mail.update({key: buffers.value(buffer, frame)})
        return lambda frame, now: mail.send(key, np.asarray(buffers.operand(buffer, frame)))

    def _receiving(self, buffer: str, key: Key) -> Action:
        mail = self._mail
        if mail is None or self._is_here(key[0]):
            return lambda frame, now: frame.values.update({buffer: now.mail.pop(key)})
        return lambda frame, now: frame.values.update({buffer: mail.fetch(key)})


Lent = Sequence[tuple[int, Read, int, Write]]
"""Operands that a piece writes over: its place and what reads it, the result's place and what takes it."""


def _lent(piece: Piece, buffers: Buffers) -> Lent:
    names, shapes = piece.computation.inputs, piece.shapes
    found = []
    for operand, result in piece.in_place.items():
        read, take = buffers.lender(names[operand], shapes[operand], piece.device)
        found.append((operand, read, result, take))
    return found


def _compute(piece: Piece, buffers: Buffers, turn: Turn, lent: Lent) -> Action:
    """How to run a piece on a frame, with everything that stays the same from batch to batch looked up."""
    computation, call = piece.computation, piece.call
    inputs = zip(computation.inputs, piece.shapes, strict=True)
    readers = [buffers.reader(name, shape) for name, shape in inputs]
    writers = [buffers.writer(name) for name in computation.outputs]
    for operand, read, result, take in lent:
        readers[operand], writers[result] = read, take
    lasting = bool(buffers.arenas_written_by(computation))

    def run(frame: Frame, now: Batch) -> None:
        with turn:
            compute(frame)

    def compute(frame: Frame) -> None:
        results = call(*[read(frame) for read in readers])
        for result in results:
            result.block_until_ready()
        for name in computation.donated:
            frame.values.pop(name, None)
        if lasting:
            buffers.prepare_writes(computation)
        for write, result in zip(writers, results, strict=True):
            write(frame, result)

    return run


def unsettled_reductions(
    instructions: Sequence[Sequence[Instruction]], writes: Mapping[str, frozenset[str]]
) -> frozenset[tuple[int, int]]:
    """Places ``(list, index)`` of ReduceScatters after which nobody needs to wait for slower readers.

    That is so if, going on from there and around to the next batch, a meeting of all machines comes before
    anything writes the arena. ``writes``: arenas written by each Computation. Only programs with one list are
    looked at; elsewhere every reduction waits.
    """
    if len(instructions) != 1:
        return frozenset()
    lst = instructions[0]
    found = set()
    for index, instruction in enumerate(lst):
        if isinstance(instruction, ReduceScatter):
            for after in (*lst[index + 1 :], *lst[:index]):
                if isinstance(after, AllGather | AllReduce) or after == Sync(SyncScope.ALL):
                    found.add((0, index))
                    break
                if isinstance(after, Compute) and instruction.arena in writes[after.computation]:
                    break
    return frozenset(found)


def closing_gathers(instructions: Sequence[Sequence[Instruction]]) -> frozenset[tuple[int, int]]:
    """Places ``(list, index)`` of AllGathers that nothing but others follows: who reads their arenas next is the host,
    or the next batch. Only programs with one list are looked at.
    """
    if len(instructions) != 1:
        return frozenset()
    found: set[tuple[int, int]] = set()
    for index in reversed(range(len(instructions[0]))):
        if not isinstance(instructions[0][index], AllGather):
            break
        found.add((0, index))
    return frozenset(found)


def _syncs(instructions: Sequence[Instruction]) -> int:
    return sum(isinstance(i, Sync) for i in instructions)


def _at_sync(instructions: Sequence[Instruction], place: int) -> bool:
    return place < len(instructions) and isinstance(instructions[place], Sync)


def _host_view(value: Any, count: int) -> Array:
    array = np.asarray(value)
    if array.ndim < 2 or array.shape[0] != count:
        raise InternalError(f"an anchor's buffer is {list(array.shape)}, not [{count}, replicas, ...]")
    return array
