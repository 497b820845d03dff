"""Messages between the machines of a replica: activations and gradients on their way.

Two machines that exchange messages have a `Line`: a group of the two, on shared memory or TCP. A thread takes in what
comes over it all through a run, whatever the machine computes meanwhile, so a sender is never held up by a receiver's
work and machines cannot wait for each other's room. A sender may be at most `WINDOW` batches ahead of a receiver:
that bounds what lies about, and cannot lock up, because a receiver needs nothing of a later batch to end one. By an
empty message a receiver says that it is done with a batch.

Every wait ends: with the message, with what ended the program elsewhere, or after the group's timeout with an error
that names the machine.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from podrun.collectives import Group, RankLostError, RankMissingError
from podrun.device.program.operands import Array, aligned_empty
from podrun.errors import InternalError
from podrun.executable import numpy_dtype

WINDOW = 2
"""Batches that may be under way between a sender and a receiver."""
MAX_AXES = 12
_HEADER = struct.Struct(f"<qqqq16s{MAX_AXES}q")
"""From IPU, to IPU, tag, number of axes, dtype, shape."""
_DONE = -1
"""The tag of the message that says that a batch is done with."""

Key = tuple[int, int, int]
"""From IPU, to IPU (of the replica), tag."""


class MachineLost(RankLostError):
    """A machine of the program was lost; ``rank`` counts the program's machines."""


class MachineMissing(RankMissingError):
    """Machines of the program did not come; ``ranks`` count the program's machines."""


def of_the_program(error: Exception, ranks: Sequence[int]) -> Exception:
    """An error of a part of the program's machines, ``ranks``, with their places among all of them."""
    if isinstance(error, RankLostError) and not isinstance(error, MachineLost):
        rank = ranks[error.rank] if 0 <= error.rank < len(ranks) else -1
        return MachineLost(error.message, rank=rank, hint=error.hint)
    if isinstance(error, RankMissingError) and not isinstance(error, MachineMissing):
        found = tuple(ranks[rank] for rank in error.ranks if 0 <= rank < len(ranks))
        return MachineMissing(error.message, ranks=found, hint=error.hint)
    return error


class Line:
    """One machine's end of the way to another of its replica.

    ``position``: of the other; ``ranks``: of the two among the program's machines, in the group's order; ``sends`` and
    ``receives``: messages of a batch.
    """

    def __init__(self, group: Group, position: int, ranks: Sequence[int], sends: int, receives: int) -> None:
        self.group, self.position, self.ranks = group, position, tuple(ranks)
        self.sends, self.receives = sends, receives
        self._other = 1 - group.rank
        self._threads = ThreadPoolExecutor(1, f"podrun-mail-{position}")

    def send(self, key: Key, array: Array) -> None:
        """Send an array. Returns when it may be rewritten."""
        if array.ndim > MAX_AXES:
            raise InternalError(f"a message between machines has {array.ndim} axes, more than {MAX_AXES}")
        shape = (*array.shape, *(0,) * (MAX_AXES - array.ndim))
        header = _HEADER.pack(*key, array.ndim, array.dtype.name.encode(), *shape)
        self._post(np.frombuffer(header, np.uint8))
        if array.size:
            self._post(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def say_done(self) -> None:
        """Tell the other that this machine is done with a batch."""
        self._post(np.frombuffer(_HEADER.pack(0, 0, _DONE, 0, b"", *(0,) * MAX_AXES), np.uint8))

    def take(self) -> tuple[Key, Array | None]:
        """The next message; None: the other is done with a batch."""
        try:
            raw = np.empty(_HEADER.size, np.uint8)
            self.group.receive(raw, self._other)
            source, dest, tag, axes, dtype, *shape = _HEADER.unpack(raw.tobytes())
            if tag == _DONE:
                return (source, dest, tag), None
            array = aligned_empty(tuple(shape[:axes]), numpy_dtype(dtype.rstrip(b"\0").decode()))
            if array.size:
                self.group.receive(array.reshape(-1).view(np.uint8), self._other)
        except (RankLostError, RankMissingError) as error:
            raise of_the_program(error, self.ranks) from error
        return (source, dest, tag), array

    def in_background(self, work: Callable[[], None]) -> None:
        """Do something in the thread of this line."""
        self._threads.submit(work)

    def close(self) -> None:
        """Leave the group, once the thread has ended."""
        self._threads.shutdown(wait=True)
        self.group.close()

    def _post(self, data: Array) -> None:
        try:
            self.group.send(data, self._other)
        except (RankLostError, RankMissingError) as error:
            raise of_the_program(error, self.ranks) from error


class Mail:
    """All lines of one machine, and what came over them and was not fetched yet. Used by the thread of a run."""

    def __init__(self, lines: Iterable[Line], ipus_per_position: int) -> None:
        self._lines = {line.position: line for line in lines}
        self._each = ipus_per_position
        self._changed = threading.Condition()
        self._arrived: dict[Key, deque[Array]] = {}
        self._done: dict[int, int] = {}
        self._taking = 0
        self._error: BaseException | None = None

    def begin(self, batches: int) -> None:
        """A run of so many batches starts: take in what comes."""
        self._done = dict.fromkeys(self._lines, 0)
        self._taking = len(self._lines)
        for line in self._lines.values():
            line.in_background(partial(self._take_in, line, batches))

    def await_room(self, batch: int) -> None:
        """Wait until no receiver is more than `WINDOW` batches behind batch ``batch`` of the run."""
        senders = [line.position for line in self._lines.values() if line.sends]
        self._wait(lambda: all(batch - self._done[p] < WINDOW for p in senders))

    def send(self, key: Key, array: Array) -> None:
        """Send an array to an IPU on another machine."""
        self._lines[key[1] // self._each].send(key, array)

    def has(self, key: Key) -> bool:
        """Whether a message is there. Raises what ended the program."""
        if self._error is not None:
            raise self._error
        return key in self._arrived

    def await_any(self, keys: Sequence[Key]) -> None:
        """Wait until one of these messages is there."""
        self._wait(lambda: any(key in self._arrived for key in keys))

    def fetch(self, key: Key) -> Array:
        """A message that is there."""
        with self._changed:
            waiting = self._arrived[key]
            array = waiting.popleft()
            if not waiting:
                del self._arrived[key]
        return array

    def end_batch(self) -> None:
        """All of a batch was received and computed."""
        for line in self._lines.values():
            if line.receives:
                line.say_done()

    def end(self) -> None:
        """The run is over: wait until the others have had all."""
        self._wait(lambda: self._taking == 0)
        if self._arrived:
            raise InternalError(f"messages came that nobody received: {sorted(self._arrived)[:5]}")

    def _take_in(self, line: Line, batches: int) -> None:
        """What the thread of a line does in a run."""
        left = batches * (line.receives + bool(line.sends))
        try:
            for _ in range(left):
                key, array = line.take()
                with self._changed:
                    if array is None:
                        self._done[line.position] += 1
                    else:
                        self._arrived.setdefault(key, deque()).append(array)
                    self._changed.notify_all()
        except Exception as error:  # whatever it is ends the run in the thread that runs it
            with self._changed:
                self._error = self._error or error
        finally:
            with self._changed:
                self._taking -= 1
                self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Until ``ready``; a line's thread ends with an error if nothing comes in time."""
        with self._changed:
            self._changed.wait_for(lambda: ready() or self._error is not None or not self._taking)
            if self._error is not None:
                raise self._error
            if not ready():
                raise InternalError("machines of a replica wait for messages that nobody sends")
