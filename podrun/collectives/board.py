"""The board: one small shared segment through which the ranks of a host meet, fail together and find arenas.

Think of a notice board with one column per rank. A rank writes in its own column only (a count of the
meetings it has come to, and what it came for); all read everything. So no atomic instruction is needed, which
Python does not have. What more than one rank may write (the table of arenas, the error that ends the group)
is written under ``flock`` on the segment, which the kernel lets go of when its holder dies. What is read without it
is in order by the fences of `podrun.collectives.fence`, where the processor does not keep it.

`Board.meet` is the barrier (`podrun.collectives.meeting`). Who waits long sleeps on the *bell*, a futex, in
slices; between two slices it looks whether the group has failed and whether those it waits for still live.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

from podrun.collectives.errors import (
    ClosedError,
    RankLostError,
    RankMissingError,
    describe,
    restore,
)
from podrun.collectives.futex import Futex, address_of
from podrun.collectives.meeting import DIGEST_BYTES, LABEL_BYTES, Meetings, label_text, meeting_bytes
from podrun.collectives.memory import Segment
from podrun.collectives.process import Watch, start_time
from podrun.errors import ConflictError, InternalError, PodrunError

MAX_RANKS = 1024
_MAGIC = b"podrunB1"
_HEADER = struct.Struct("<8sI")  # magic, ranks
_BELL, _TABLE_WORD = 64, 192  # a cache line each
_COLUMNS = 256
_ERROR_BYTES = 64 * 1024
_TABLE_BYTES = 4 * 1024 * 1024  # never touched, never there: memfd pages appear when written
_PATIENCE = 10.0  # seconds
_ABSENT, _JOINED, _LEFT = 0, 1, 2
_SPIN = 200e-6  # seconds: longer than it takes to wake a sleeping core
_FIRST_SLICE, _LAST_SLICE = 0.002, 0.05  # seconds asleep: the longer, the longer the wait is already
_LOOK_AFTER = 0.1  # seconds; where 64 ranks wait for a core, looking at processes costs more than their work


def label(text: str) -> bytes:
    """``text`` as a fixed-size label: equal labels iff equal texts (up to a 128-bit digest)."""
    raw, room = text.encode(), LABEL_BYTES - DIGEST_BYTES
    return raw[:room].ljust(room, b"\0") + blake2b(raw, digest_size=DIGEST_BYTES).digest()


def _after_columns(ranks: int) -> int:
    return _COLUMNS + -(-24 * ranks // 64) * 64


class Board:
    """One rank's hold on the board. Use `create` on the first rank and `open` on the others, then `join`."""

    def __init__(self, segment: Segment, ranks: int) -> None:
        self.segment = segment
        self.ranks = ranks
        self.rank = -1
        self.names: Sequence[int] = range(ranks)
        """What errors call the ranks: as part of a larger group, of `total`, they have other numbers there."""
        self.total = ranks
        self.patience = _PATIENCE
        """Seconds that a rank waits, at most, for another to give back the board's lock."""
        self.bell = Futex(address_of(segment.map) + _BELL)
        view = memoryview(segment.map)
        self._table_word = view[_TABLE_WORD : _TABLE_WORD + 8].cast("Q")
        at = _COLUMNS
        self._started = view[at : at + 8 * ranks].cast("Q")
        self._pids = view[at + 8 * ranks : at + 16 * ranks].cast("Q")
        self._states = view[at + 16 * ranks : at + 24 * ranks].cast("Q")
        at = _after_columns(ranks)
        self.meetings = Meetings(self, at)
        self.order = self.meetings.order
        self.failed = self.meetings.failed
        """The length of the error that ended the group, 0 while it stands."""
        self.meet: Callable[[bytes, float], None] = self.meetings.meet
        """Wait until every rank has come with the same label, so many seconds at most: see `Meetings.meet`."""
        at += meeting_bytes(ranks)
        self._error = view[at : at + _ERROR_BYTES]
        self._table = view[at + _ERROR_BYTES : at + _ERROR_BYTES + 2 * _TABLE_BYTES]
        self._mutex = threading.Lock()  # flock does not part the threads of one holder
        self._watches: dict[int, Watch] = {}
        self.closed = False

    @classmethod
    def create(cls, ranks: int) -> Board:
        """A new board for so many ranks."""
        nbytes = _after_columns(ranks) + meeting_bytes(ranks) + _ERROR_BYTES + 2 * _TABLE_BYTES
        segment = Segment.create("board", nbytes)
        _HEADER.pack_into(segment.map, 0, _MAGIC, ranks)
        return cls(segment, ranks)

    @classmethod
    def open(cls, pid: int, fd: int, ranks: int) -> Board:
        """The board that process ``pid`` holds as ``fd``. Raises RankLostError if it is there no more."""
        try:
            segment = Segment.open(pid, fd)
        except OSError as error:
            raise RankLostError(
                f"cannot open the group's shared memory in process {pid}: {error.strerror}",
                rank=0,
                hint="The process that made the group has gone, or runs as another user. Make a new group.",
            ) from error
        if segment.nbytes < _HEADER.size or _HEADER.unpack_from(segment.map) != (_MAGIC, ranks):
            segment.close()
            raise RankLostError(
                f"process {pid} no longer holds the group's shared memory", rank=0, hint="Make a new group."
            )
        return cls(segment, ranks)

    def join(self, rank: int) -> None:
        """Take a column. Raises ConflictError if it is taken."""
        with self._locked():
            if self._states[rank] != _ABSENT:
                raise ConflictError(
                    f"rank {rank} of the group was already taken by process {self._pids[rank]}",
                    hint="Each rank joins once; make a new group to start again.",
                )
            self._pids[rank] = os.getpid()
            self._started[rank] = start_time(os.getpid())
            self.order()
            self._states[rank] = _JOINED
        self.rank = rank

    # --- Waiting --------------------------------------------------------------------------------------------

    def wait_until(
        self,
        ready: Callable[[], bool],
        missing: Callable[[], list[int]],
        bell: Futex,
        what: bytes,
        timeout: float,
    ) -> None:
        """Look until ``ready()``, giving up the core at every look, then `sleep_until` it."""
        if self.meetings.may_spin():
            limit = time.monotonic() + _SPIN
            while time.monotonic() < limit:
                if ready():
                    return
                os.sched_yield()
        self.sleep_until(ready, missing, bell, what, timeout)

    def sleep_until(
        self,
        ready: Callable[[], bool],
        missing: Callable[[], list[int]],
        bell: Futex,
        what: bytes,
        timeout: float,
    ) -> None:
        """Sleep on ``bell`` until ``ready()``; raises what ended the group otherwise.

        ``missing()`` tells which ranks are waited for: if one of them is dead, has left, or is late beyond
        the timeout, the group ends with an error that names it.
        """
        began = now = time.monotonic()
        next_look = began + min(_LOOK_AFTER, timeout)
        while True:
            seen = bell.value
            self.order()
            self.check()
            if ready():
                return
            bell.wait(seen, min(max(now - began, _FIRST_SLICE), _LAST_SLICE))
            now = time.monotonic()
            if now >= next_look:
                next_look = now + _LAST_SLICE
                self._look_for_missing(ready, missing(), what, now - began, timeout)

    def ring(self, meeting: int) -> None:
        """Wake those who sleep on the bell, unless that was done for this meeting or the group has failed."""
        ring = meeting & 0x7FFFFFFF
        if self.bell.value != ring and not self.failed[0]:
            self.bell.value = ring
            self.bell.wake()

    def alone_in_process(self) -> tuple[bool, bool]:
        """Whether no other rank is a thread of this process, and whether all have joined, so that it stays so."""
        all_here = _ABSENT not in list(self._states)
        self.order()  # who has joined said before which process it is
        return list(self._pids).count(os.getpid()) == 1, all_here

    def _look_for_missing(
        self, ready: Callable[[], bool], missing: list[int], what: bytes, waited: float, timeout: float
    ) -> None:
        """End the group if a missing rank is dead, has left, or is late beyond the deadline."""
        for rank in missing:
            reason = self._why_lost(rank)
            self.order()
            if reason and not ready():  # it may have come and gone since
                self.fail_with(
                    RankLostError(
                        f"rank {self.names[rank]} of {self.total} {reason} while others waited for it "
                        f"in {label_text(what)} ({waited:.1f} s)",
                        rank=self.names[rank],
                        hint="Close this group, replace the rank and make a new group.",
                    )
                )
        if missing and waited >= timeout:
            names = ", ".join(self._name(rank) for rank in missing)
            self.fail_with(
                RankMissingError(
                    f"{label_text(what)} waited {waited:.1f} s for rank {names}, of {self.total} ranks",
                    ranks=tuple(self.names[rank] for rank in missing),
                    hint="See what those ranks do (py-spy dump --pid PID), or use a longer timeout.",
                )
            )

    def _name(self, rank: int) -> str:
        if self._states[rank] == _ABSENT:
            return f"{self.names[rank]} (never joined)"
        return f"{self.names[rank]} (process {self._pids[rank]})"

    def _why_lost(self, rank: int) -> str:
        """How a rank was lost, or nothing if it is still expected."""
        if self._states[rank] == _LEFT:
            return "left the group"
        pid = self._pids[rank]
        if self._states[rank] == _ABSENT or pid == os.getpid():
            return ""
        if rank not in self._watches:
            self._watches[rank] = Watch(pid, self._started[rank])
        return "" if self._watches[rank].alive() else f"(process {pid}) died"

    # --- Failing --------------------------------------------------------------------------------------------

    def fail(self, error: Mapping[str, Any]) -> None:
        """Write down the error that ends the group, unless one stands already, and wake everyone.

        From a rank that has closed the group: nothing, it is no longer a member.
        """
        payload = json.dumps(dict(error), default=str).encode()
        if len(payload) > _ERROR_BYTES:
            payload = json.dumps(
                {**error, "message": str(error.get("message", ""))[:8000]}, default=str
            ).encode()
            if len(payload) > _ERROR_BYTES:
                payload = json.dumps({k: str(error.get(k, ""))[:8000] for k in ("type", "message")}).encode()
        with contextlib.suppress(ClosedError), self._locked():
            if not self.failed[0]:
                self._error[: len(payload)] = payload
                self.order()
                self.failed[0] = len(payload)
        self._ring_alarm()

    def failure(self) -> PodrunError | None:
        """The error that ended the group, or None while it stands."""
        length = self.failed[0]
        self.order()
        return restore(json.loads(bytes(self._error[:length]))) if length else None

    def check(self) -> None:
        """Raises what ended the group, if anything has."""
        if self.failed[0] or self.closed:
            self._raise_failure()

    def fail_with(self, error: PodrunError) -> NoReturn:
        """End the group with an error found here, and raise what ended it (the first error stands)."""
        self.fail(describe(error))
        self._raise_failure()

    def _raise_failure(self) -> NoReturn:
        error = self.failure()
        if error is not None:
            raise error
        if self.closed:
            raise ClosedError(f"rank {self.rank} has closed this group", hint="Make a new group.")
        raise InternalError("a group failed without an error")

    def _ring_alarm(self) -> None:
        self.bell.value = self.bell.value ^ 0x80000000
        self.bell.wake()

    # --- Arenas ---------------------------------------------------------------------------------------------

    def arenas(self) -> dict[str, dict[str, Any]]:
        """Every arena asked for so far: its dtype, size, kind, and where its memory is."""
        length, half = divmod(self._table_word[0], 2)
        at = half * _TABLE_BYTES
        table: dict[str, dict[str, Any]] = json.loads(bytes(self._table[at : at + length])) if length else {}
        return table

    @contextlib.contextmanager
    def editing_arenas(self) -> Iterator[dict[str, dict[str, Any]]]:
        """The table of arenas, for one rank at a time to change; written back at the end.

        Into the half of its room that is not in use, which one store then makes the one in use: a rank killed
        in between leaves the table as it was.
        """
        with self._locked():
            table = self.arenas()
            before = len(table)
            yield table
            if len(table) != before:
                payload = json.dumps(table).encode()
                if len(payload) > _TABLE_BYTES:
                    raise ConflictError(
                        f"a group cannot hold {len(table)} arenas", hint="Use fewer, larger arenas."
                    )
                half = 1 - self._table_word[0] % 2
                self._table[half * _TABLE_BYTES : half * _TABLE_BYTES + len(payload)] = payload
                self.order()
                self._table_word[0] = len(payload) * 2 + half

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among all ranks. Held for a moment; a holder that is stopped must not hang the others."""
        deadline = time.monotonic() + self.patience
        while not self._take_lock():
            if time.monotonic() > deadline:
                holders = self._lock_holders()
                named = ", ".join(f"{self.names[rank]} (process {self._pids[rank]})" for rank in holders)
                who = f"rank {named}" if named else "a rank"
                raise RankMissingError(
                    f"{who} has kept the group's board locked for {self.patience:g} s",
                    ranks=tuple(self.names[rank] for rank in holders),
                    hint="That process is stopped: let it go on (kill -CONT PID) or end it.",
                )
            time.sleep(50e-6)
        try:
            yield
        finally:
            self._give_back_lock()

    def _take_lock(self) -> bool:
        """Take the board's lock if nobody has it; then `_give_back_lock`. Raises ClosedError after `close`."""
        if not self._mutex.acquire(blocking=False):
            return False
        try:
            if self.segment.fd < 0:
                raise ClosedError(f"rank {self.rank} has closed this group", hint="Make a new group.")
            fcntl.flock(self.segment.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            self._mutex.release()
            if isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.EINTR):
                return False
            raise
        return True

    def _lock_holders(self) -> list[int]:
        """The ranks of the process that has the board's lock, by the kernel's list of locks."""
        end = f":{os.fstat(self.segment.fd).st_ino}"
        try:
            locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        except OSError:
            return []
        holder = [
            int(pid) for _, kind, _, _, pid, file, *_ in locks if kind == "FLOCK" and file.endswith(end)
        ]
        return [
            rank for rank, pid in enumerate(self._pids) if pid in holder and self._states[rank] == _JOINED
        ]

    def _give_back_lock(self) -> None:
        """Let others have the lock."""
        fcntl.flock(self.segment.fd, fcntl.LOCK_UN)
        self._mutex.release()

    def _meet_no_more(self, what: bytes, timeout: float) -> None:
        self._raise_failure()

    def close(self) -> None:
        """Leave: ranks that still wait for this one get RankLostError. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.meet = self._meet_no_more
        if self.rank >= 0:
            self.order()  # it has come to what it came to before it is seen to have left
            self._states[self.rank] = _LEFT
            self._ring_alarm()
        for watch in self._watches.values():
            watch.close()
        with self._mutex:
            self.segment.close()
