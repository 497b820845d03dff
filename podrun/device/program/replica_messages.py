"""Messages between the machines of a replica: activations and gradients.

Two machines that exchange messages share a `ReplicaChannel`, a group of two over shared memory or TCP. During a run a
thread receives from each channel, so a sender never waits for the receiver's computation and two machines cannot
block each other. A sender may be at most `WINDOW` batches ahead of a receiver, which bounds the memory of waiting
messages. This cannot deadlock, because a receiver needs nothing of a later batch to finish one. A receiver sends an
empty message when it has finished a batch.

Every wait ends: with the message, with the error that ended the program elsewhere, or after the group's timeout with an
error that names the machine.
"""

from __future__ import annotations

import math
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import numpy as np

from podrun.collectives import Group, RankLostError, RankMissingError
from podrun.collectives.shared_memory import SharedMemoryGroup
from podrun.core.aligned_memory import aligned_empty
from podrun.core.errors import InternalError
from podrun.core.executable import Array, numpy_dtype

WINDOW = 2
"""Batches that may be under way between a sender and a receiver."""
MAX_AXES = 12
_HEADER = struct.Struct(f"<qqqq16s{MAX_AXES}q")
"""From IPU, to IPU, tag, number of axes, dtype, shape."""
_BATCH_DONE = -1
"""The tag of the message that says that the receiver has finished a batch."""

_NOTHING = np.empty(0, np.uint8)

Key = tuple[int, int, int]
"""From IPU, to IPU (of the replica), tag."""


@lru_cache(4096)
def _header_of(key: Key, dtype: str, shape: tuple[int, ...]) -> bytes:
    """The header of a message, which is the same in every batch."""
    return _HEADER.pack(*key, len(shape), dtype.encode(), *shape, *(0,) * (MAX_AXES - len(shape)))


@lru_cache(4096)
def _read_header(header: bytes) -> tuple[Key, np.dtype[Any], tuple[int, ...]]:
    """What `_header_of` was given."""
    source, dest, tag, axes, dtype, *shape = _HEADER.unpack(header)
    return (source, dest, tag), numpy_dtype(dtype.rstrip(b"\0").decode() or "uint8"), tuple(shape[:axes])


class MachineLost(RankLostError):
    """A machine of the program was lost. ``rank`` counts the program's machines."""


class MachineMissing(RankMissingError):
    """Machines of the program did not arrive. ``ranks`` count the program's machines."""


def with_program_ranks(error: Exception, ranks: Sequence[int]) -> Exception:
    """The error of a group of machines ``ranks``, with ranks among all machines of the program."""
    if isinstance(error, RankLostError) and not isinstance(error, MachineLost):
        rank = ranks[error.rank] if 0 <= error.rank < len(ranks) else -1
        return MachineLost(error.message, rank=rank, hint=error.hint)
    if isinstance(error, RankMissingError) and not isinstance(error, MachineMissing):
        program_ranks = tuple(ranks[rank] for rank in error.ranks if 0 <= rank < len(ranks))
        return MachineMissing(error.message, ranks=program_ranks, hint=error.hint)
    return error


class ReplicaChannel:
    """One machine's end of the connection to another machine of its replica.

    ``position``: of the other machine. ``ranks``: of the two among the program's machines, in the group's order.
    ``sends`` and ``receives``: messages of a batch.
    """

    def __init__(self, group: Group, position: int, ranks: Sequence[int], sends: int, receives: int) -> None:
        self.group, self.position, self.ranks = group, position, tuple(ranks)
        self.sends, self.receives = sends, receives
        self._other = 1 - group.rank
        self._in_memory = group if isinstance(group, SharedMemoryGroup) else None
        if self._in_memory is not None:
            self._in_memory.patient = True  # A stage computes for longer than it takes to wake a thread.
            for way in ((0, 1), (1, 0)):  # opened before any wait, so that an error wakes who waits
                self._in_memory.message_channel(*way)
        self._threads = ThreadPoolExecutor(1, f"podrun-messages-{position}")

    def send(self, key: Key, array: Array) -> None:
        """Send an array. When this returns the caller may overwrite the array."""
        if array.ndim > MAX_AXES:
            raise InternalError(f"a message between machines has {array.ndim} axes, more than {MAX_AXES}")
        header = _header_of(key, array.dtype.name, array.shape)
        self._post(header, np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def send_batch_done(self) -> None:
        """Tell the other machine that this one has finished a batch."""
        self._post(_header_of((0, 0, _BATCH_DONE), "", ()), _NOTHING)

    def receive(self) -> tuple[Key, Array | None]:
        """The next message; None in place of an array: the other machine has finished a batch."""
        memory = self._in_memory
        try:
            if memory is not None:
                header, left = memory.receive_preface(self._other, _HEADER.size)
            else:
                raw = np.empty(_HEADER.size, np.uint8)
                self.group.receive(raw, self._other)
                header = raw.tobytes()
            key, dtype, shape = _read_header(header)
            nbytes = math.prod(shape) * dtype.itemsize if key[2] != _BATCH_DONE else 0
            if memory is not None and left != nbytes:
                raise InternalError(
                    f"message {key} between machines has {left} bytes, its header says {nbytes}"
                )
            if key[2] == _BATCH_DONE:
                return key, None
            array = aligned_empty(shape, dtype)
            if array.size and memory is not None:
                memory.receive_rest(array, self._other)
            elif array.size:
                self.group.receive(array.reshape(-1).view(np.uint8), self._other)
        except (RankLostError, RankMissingError) as error:
            raise with_program_ranks(error, self.ranks) from error
        return key, array

    def in_background(self, work: Callable[[], None]) -> None:
        """Run a function in the channel's thread."""
        self._threads.submit(work)

    def close(self) -> None:
        """Wait for the channel's thread, then leave the group."""
        self._threads.shutdown(wait=True)
        self.group.close()

    def _post(self, header: bytes, data: Array) -> None:
        try:
            if self._in_memory is not None:
                self._in_memory.send(data, self._other, preface=header)
                return
            self.group.send(np.frombuffer(header, np.uint8), self._other)
            if data.size:
                self.group.send(data, self._other)
        except (RankLostError, RankMissingError) as error:
            raise with_program_ranks(error, self.ranks) from error


class ReplicaMessages:
    """All channels of one machine, and messages that have arrived and were not fetched. Used by the thread of a run."""

    def __init__(self, channels: Iterable[ReplicaChannel], ipus_per_position: int) -> None:
        self._channels = {channel.position: channel for channel in channels}
        self._each = ipus_per_position
        self._changed = threading.Condition()
        self._arrived: dict[Key, deque[Array]] = {}
        self._batches_done: dict[int, int] = {}
        self._receiving = 0
        self._error: BaseException | None = None

    def begin(self, batches: int) -> None:
        """Start to receive for a run of ``batches`` batches."""
        self._batches_done = dict.fromkeys(self._channels, 0)
        self._receiving = len(self._channels)
        for channel in self._channels.values():
            channel.in_background(partial(self._receive_all, channel, batches))

    def await_room(self, batch: int) -> None:
        """Wait until no receiver is `WINDOW` or more batches behind batch ``batch`` of the run."""
        senders = [channel.position for channel in self._channels.values() if channel.sends]
        self._wait(lambda: all(batch - self._batches_done[p] < WINDOW for p in senders))

    def send(self, key: Key, array: Array) -> None:
        """Send an array to an IPU on another machine."""
        self._channels[key[1] // self._each].send(key, array)

    def has(self, key: Key) -> bool:
        """Whether a message has arrived. Raises the error that ended the program, if one did."""
        if self._error is not None:
            raise self._error
        return key in self._arrived

    def await_any(self, keys: Sequence[Key]) -> None:
        """Wait until one of these messages has arrived."""
        self._wait(lambda: any(key in self._arrived for key in keys))

    def fetch(self, key: Key) -> Array:
        """Remove and return a message that has arrived."""
        with self._changed:
            waiting = self._arrived[key]
            array = waiting.popleft()
            if not waiting:
                del self._arrived[key]
        return array

    def end_batch(self) -> None:
        """Note that this machine has received and computed all of a batch."""
        for channel in self._channels.values():
            if channel.receives:
                channel.send_batch_done()

    def end(self) -> None:
        """End a run: wait until all channels have received everything."""
        self._wait(lambda: self._receiving == 0)
        if self._arrived:
            raise InternalError(f"messages arrived that nothing received: {sorted(self._arrived)[:5]}")

    def _receive_all(self, channel: ReplicaChannel, batches: int) -> None:
        """The work of a channel's thread in a run."""
        left = batches * (channel.receives + bool(channel.sends))
        try:
            for _ in range(left):
                key, array = channel.receive()
                with self._changed:
                    if array is None:
                        self._batches_done[channel.position] += 1
                    else:
                        self._arrived.setdefault(key, deque()).append(array)
                    self._changed.notify_all()
        except Exception as error:  # any error is raised in the thread of the run
            with self._changed:
                self._error = self._error or error
        finally:
            with self._changed:
                self._receiving -= 1
                self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready``. A channel's thread ends with an error if nothing arrives in time."""
        with self._changed:
            self._changed.wait_for(lambda: ready() or self._error is not None or not self._receiving)
            if self._error is not None:
                raise self._error
            if not ready():
                raise InternalError("machines of a replica wait for messages that nobody sends")
