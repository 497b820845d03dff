"""The board: one small shared region in which the ranks of a host wait for each other, fail together and find arenas.

The board has one column for each rank. A rank writes in its own column only, and all ranks read everything, so no
atomic instruction is needed, which Python does not have. What several ranks may write (the table of arenas, the error
that ends the group) is written under ``flock`` on the region, which the kernel releases when its holder dies. What is
read without the lock is kept in order by fences (`podrun.collectives.linux`).

`GroupBoard.arrive_and_wait` is the barrier (`podrun.collectives.barrier`). A rank that waits long sleeps on the
*doorbell*, a futex, in slices. Between two slices it checks whether the group has failed and whether the ranks that it
waits for are alive.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import json
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

from podrun.collectives.barrier import DIGEST_BYTES, LABEL_BYTES, Barriers, barrier_bytes, label_text
from podrun.collectives.group import ClosedError, GroupError, RankLostError, RankMissingError
from podrun.collectives.linux import Futex, ProcessWatch, boot_ticks, create_region, open_region
from podrun.core.error_codec import error_from_json, error_to_dict
from podrun.core.errors import ConflictError, InternalError, PodrunError
from podrun.core.shared_region import SharedRegion

MAX_RANKS = 1024
_MAGIC = b"podrunB1"
_HEADER = struct.Struct("<8sI4x16s")  # magic, ranks, secret
_DOORBELL, _TABLE_WORD = 64, 192  # a cache line each
_COLUMNS = 256
_ERROR_BYTES = 64 * 1024
_TABLE_BYTES = 4 * 1024 * 1024  # pages of a memfd exist only once they are written
_PATIENCE = 10.0  # seconds
_ABSENT, _JOINED, _LEFT = 0, 1, 2
_SPIN = 200e-6  # seconds of spinning: longer than a sleeping core takes to wake
_SLICES = (0.002, 0.05)  # seconds of the first slice of sleep and of the longest; slices grow with the wait
_CHECK_AFTER = 0.1  # seconds; where 64 ranks share a core, checking processes costs more than their work


def label(text: str) -> bytes:
    """``text`` as a label of fixed size. Labels are equal iff their texts are (up to a 128-bit digest)."""
    raw, room = text.encode(), LABEL_BYTES - DIGEST_BYTES
    return raw[:room].ljust(room, b"\0") + blake2b(raw, digest_size=DIGEST_BYTES).digest()


def _after_columns(ranks: int) -> int:
    return _COLUMNS + -(-24 * ranks // 64) * 64


class GroupBoard:
    """One rank's view of the board. The first rank calls `create`, the others `open`; then each calls `join`."""

    def __init__(self, region: SharedRegion, ranks: int) -> None:
        self.region = region
        self.ranks = ranks
        self.rank = -1
        self.names: Sequence[int] = range(ranks)
        """The ranks' numbers in error messages: those of the larger group of `total` ranks that this one is part of."""
        self.total = ranks
        self.patience = _PATIENCE
        """Most seconds that a rank waits for another to release the board's lock."""
        self.doorbell = Futex(region.map, _DOORBELL)
        self.more_doorbells: list[Futex] = []
        """Others on which ranks sleep, which are rung too when this rank fails the group or leaves it."""
        view = memoryview(region.map)
        self._table_word = view[_TABLE_WORD : _TABLE_WORD + 8].cast("Q")
        at = _COLUMNS
        self._started = view[at : at + 8 * ranks].cast("Q")
        self._pids = view[at + 8 * ranks : at + 16 * ranks].cast("Q")
        self._states = view[at + 16 * ranks : at + 24 * ranks].cast("Q")
        at = _after_columns(ranks)
        self.barriers = Barriers(self, at)
        self.order = self.barriers.order
        self.failed = self.barriers.failed
        """Length of the error that ended the group; 0 while the group works."""
        self.arrive_and_wait: Callable[[bytes, float], None] = self.barriers.arrive_and_wait
        """`Barriers.arrive_and_wait`: wait until every rank has arrived with the same label."""
        at += barrier_bytes(ranks)
        self._error = view[at : at + _ERROR_BYTES]
        self._table = view[at + _ERROR_BYTES : at + _ERROR_BYTES + 2 * _TABLE_BYTES]
        self._mutex = threading.Lock()  # flock does not exclude the threads of one process from each other
        self._watches: dict[int, ProcessWatch] = {}
        self.closed = False

    @classmethod
    def create(cls, ranks: int) -> GroupBoard:
        """A new board for ``ranks`` ranks."""
        nbytes = _after_columns(ranks) + barrier_bytes(ranks) + _ERROR_BYTES + 2 * _TABLE_BYTES
        region = create_region("board", nbytes)
        _HEADER.pack_into(region.map, 0, _MAGIC, ranks, secrets.token_bytes(16))
        return cls(region, ranks)

    @property
    def secret(self) -> str:
        """What a rank has to know to open the board, so that it opens this region and no other."""
        return bytes(_HEADER.unpack_from(self.region.map)[2]).hex()

    @classmethod
    def open(cls, pid: int, fd: int, ranks: int, secret: str) -> GroupBoard:
        """The board with a secret that process ``pid`` holds as ``fd``. Raises RankLostError if it no longer exists."""
        try:
            region = open_region(pid, fd)
        except OSError as error:
            raise RankLostError(
                f"cannot open the group's shared memory in process {pid}: {error.strerror}",
                rank=0,
                hint="The process that made the group has gone, or runs as another user. Make a new group.",
            ) from error
        head = _HEADER.unpack_from(region.map) if region.nbytes >= _COLUMNS else (b"", 0, b"")
        if head[:2] != (_MAGIC, ranks) or not hmac.compare_digest(head[2].hex(), secret):
            region.close()
            raise RankLostError(
                f"process {pid} no longer holds the group's shared memory", rank=0, hint="Make a new group."
            )
        return cls(region, ranks)

    def join(self, rank: int, timeout: float) -> None:
        """Take a column; ``timeout``: that of the group, in seconds, which no wait for the lock exceeds. Raises
        ConflictError if the column is taken.
        """
        self.patience = min(self.patience, timeout)
        with self._locked():
            if self._states[rank] != _ABSENT:
                raise ConflictError(
                    f"rank {rank} of the group was already taken by process {self._pids[rank]}",
                    hint="Each rank joins once; make a new group to start again.",
                )
            self._pids[rank] = os.getpid()
            self._started[rank] = boot_ticks(os.getpid())
            self.order()
            self._states[rank] = _JOINED
        self.rank = rank

    # --- Waiting --------------------------------------------------------------------------------------------

    def wait_until(
        self,
        ready: Callable[[], bool],
        missing: Callable[[], list[int]],
        doorbell: Futex,
        what: bytes,
        timeout: float,
    ) -> None:
        """Spin until ``ready()``, yielding the core at every turn, then `sleep_until` it."""
        if self.barriers.may_spin():
            limit = time.monotonic() + _SPIN
            while time.monotonic() < limit:
                if ready():
                    return
                os.sched_yield()
        self.sleep_until(ready, missing, doorbell, what, timeout)

    def sleep_until(
        self,
        ready: Callable[[], bool],
        missing: Callable[[], list[int]],
        doorbell: Futex,
        what: bytes,
        timeout: float,
        slices: tuple[float, float] = _SLICES,
    ) -> None:
        """Sleep on ``doorbell`` until ``ready()``. Raises the error that ended the group, if it has failed.

        ``missing()`` gives the ranks that are waited for. If one of them is dead, has left, or is late beyond the
        timeout, the group ends with an error that names it. ``slices``: seconds after which it looks by itself for the
        first time, and the longest; between these it sleeps for as long as it has waited.
        """
        began = now = time.monotonic()
        next_check = began + min(_CHECK_AFTER, timeout)
        while True:
            seen = doorbell.value
            self.order()
            self.check()
            if ready():
                return
            doorbell.wait(seen, min(max(now - began, slices[0]), slices[1]))
            now = time.monotonic()
            if now >= next_check:
                next_check = now + slices[1]
                self._check_missing(ready, missing(), what, now - began, timeout)

    def ring(self, barrier: int) -> None:
        """Wake the ranks that sleep on the doorbell, unless that was done for this barrier or the group has failed."""
        ring = barrier & 0x7FFFFFFF
        if self.doorbell.value != ring and not self.failed[0]:
            self.doorbell.value = ring
            self.doorbell.wake()

    def alone_in_process(self) -> tuple[bool, bool]:
        """Whether no other rank is a thread of this process, and whether all have joined, so that this is final."""
        all_here = _ABSENT not in list(self._states)
        self.order()  # a rank writes its process id before its state
        return list(self._pids).count(os.getpid()) == 1, all_here

    def _check_missing(
        self, ready: Callable[[], bool], missing: list[int], what: bytes, waited: float, timeout: float
    ) -> None:
        """End the group if a missing rank is dead, has left, or is late beyond the deadline."""
        for rank in missing:
            reason = self._why_lost(rank)
            self.order()
            if reason and not ready():  # it may have arrived and left since
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
                    hint="Check what those ranks do (py-spy dump --pid PID), or use a longer timeout.",
                )
            )

    def _name(self, rank: int) -> str:
        if self._states[rank] == _ABSENT:
            return f"{self.names[rank]} (never joined)"
        return f"{self.names[rank]} (process {self._pids[rank]})"

    def _why_lost(self, rank: int) -> str:
        """How a rank was lost; empty if it is still expected."""
        if self._states[rank] == _LEFT:
            return "left the group"
        pid = self._pids[rank]
        if self._states[rank] == _ABSENT or pid == os.getpid():
            return ""
        if rank not in self._watches:
            self._watches[rank] = ProcessWatch(pid, self._started[rank])
        return "" if self._watches[rank].alive() else f"(process {pid}) died"

    # --- Failing --------------------------------------------------------------------------------------------

    def fail(self, error: Mapping[str, Any]) -> None:
        """Record the error that ends the group, unless there is one already, and wake all ranks.

        Does nothing on a rank that has closed the group: it is no longer a member.
        """
        payload = json.dumps(dict(error), default=str).encode()
        if len(payload) > _ERROR_BYTES:
            payload = json.dumps(
                {**error, "message": str(error.get("message", ""))[:8000]}, default=str
            ).encode()
            if len(payload) > _ERROR_BYTES:
                payload = json.dumps({k: str(error.get(k, ""))[:8000] for k in ("type", "message")}).encode()
        with contextlib.suppress(ClosedError):
            with self._locked():
                if not self.failed[0]:
                    self._error[: len(payload)] = payload
                    self.order()
                    self.failed[0] = len(payload)
            self._wake_all()

    def failure(self) -> PodrunError | None:
        """The error that ended the group, or None while it works."""
        length = self.failed[0]
        self.order()
        return error_from_json(bytes(self._error[:length]), unknown=GroupError) if length else None

    def check(self) -> None:
        """Raises the error that ended the group, if it has failed, and ClosedError after `close`."""
        if self.failed[0] or self.closed:
            self._raise_failure()

    def fail_with(self, error: PodrunError) -> NoReturn:
        """End the group with an error and raise the error that ended it: the first that any rank recorded."""
        self.fail(error_to_dict(error))
        self._raise_failure()

    def _raise_failure(self) -> NoReturn:
        error = self.failure()
        if error is not None:
            raise error
        if self.closed:
            raise ClosedError(f"rank {self.rank} has closed this group", hint="Make a new group.")
        raise InternalError("a group failed without an error")

    def _wake_all(self) -> None:
        for doorbell in (self.doorbell, *self.more_doorbells):
            doorbell.value ^= 0x80000000
            doorbell.wake()

    # --- Arenas ---------------------------------------------------------------------------------------------

    def arenas(self) -> dict[str, dict[str, Any]]:
        """Every arena requested so far: its dtype, size, kind, and where its memory is."""
        length, half = divmod(self._table_word[0], 2)
        at = half * _TABLE_BYTES
        table: dict[str, dict[str, Any]] = json.loads(bytes(self._table[at : at + length])) if length else {}
        return table

    @contextlib.contextmanager
    def editing_arenas(self) -> Iterator[dict[str, dict[str, Any]]]:
        """The table of arenas, which one rank at a time may change; it is written back at the end.

        The new table goes into the half of the space that is not in use, and one store then switches halves: a rank
        that is killed in between leaves the table as it was.
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
        """Hold the board's lock. Raises RankMissingError if another rank, such as a stopped one, keeps it too long."""
        deadline = time.monotonic() + self.patience
        while not self._take_lock():
            if time.monotonic() > deadline:
                holders = self._lock_holders()
                named = ", ".join(f"{self.names[rank]} (process {self._pids[rank]})" for rank in holders)
                who = f"rank {named}" if named else "a rank"
                raise RankMissingError(
                    f"{who} has held the lock of the group's board for {self.patience:g} s",
                    ranks=tuple(self.names[rank] for rank in holders),
                    hint="That process is stopped: let it go on (kill -CONT PID) or end it.",
                )
            time.sleep(50e-6)
        try:
            yield
        finally:
            self._release_lock()

    def _take_lock(self) -> bool:
        """Take the board's lock if it is free; `_release_lock` releases it. Raises ClosedError after `close`."""
        if not self._mutex.acquire(blocking=False):
            return False
        try:
            if self.region.fd < 0:
                raise ClosedError(f"rank {self.rank} has closed this group", hint="Make a new group.")
            fcntl.flock(self.region.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            self._mutex.release()
            if isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.EINTR):
                return False
            raise
        return True

    def _lock_holders(self) -> list[int]:
        """The ranks of the process that holds the board's lock, from the kernel's list of locks."""
        end = f":{os.fstat(self.region.fd).st_ino}"
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

    def _release_lock(self) -> None:
        """Release the board's lock."""
        fcntl.flock(self.region.fd, fcntl.LOCK_UN)
        self._mutex.release()

    def _refuse_barrier(self, what: bytes, timeout: float) -> None:
        self._raise_failure()

    def close(self) -> None:
        """Leave the group: ranks that still wait for this one get RankLostError. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.arrive_and_wait = self._refuse_barrier
        if self.rank >= 0:
            self.order()  # its last word takes effect before its state says that it has left
            self._states[self.rank] = _LEFT
            self._wake_all()
        for watch in self._watches.values():
            watch.close()
        with self._mutex:
            self.region.close()
