"""Memory that the ranks of one host share, by name (arenas and further regions), and pipes of messages in it.

The first rank that requests a name creates its memory and enters it into the board's table; the others open it from
there. A rank that requests other memory under the same name ends the group with a MismatchError.

A channel is a one-way pipe between two ranks: a ring of bytes in a region of its own. The sender moves the head and the
receiver the tail; each is written by one side only, after that side has copied (with a fence where the processor needs
one). A message is a header (tag, size, dtype) and its bytes, which may begin with a *preface*: bytes that say what
follows, read together with the header. Messages longer than the ring stream through it. A send returns when its bytes
are in the ring, so a sender may run ahead by the size of the ring.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from podrun.collectives.arithmetic import check_reduction
from podrun.collectives.board import GroupBoard, label
from podrun.collectives.group import (
    ByteArray,
    HostLimitError,
    MismatchError,
    RankLostError,
    check_arena,
    first_elements,
    for_rank,
    unknown_arena,
    wrong_kind,
)
from podrun.collectives.linux import Futex, create_region, open_region, whole_pages
from podrun.core.executable import Array, Reduction, numpy_dtype
from podrun.core.quick_dataclass import dataclass
from podrun.core.shared_region import SharedRegion


@dataclass(frozen=True, slots=True)
class MappedArena:
    """An arena as one rank sees it: the rows of all ranks (none if shared) and the one row that all read.

    ``text``: its kind, dtype and size, for labels and messages.
    """

    rows: tuple[Array, ...]
    whole: Array
    text: str


def reducible(
    operation: str, name: str, arena: MappedArena, reduction: Reduction, count: int | None
) -> tuple[int, str]:
    """The number of elements that a reduction over an arena uses, and its text for labels and messages.

    Raises UsageError if the arena is shared or has fewer than ``count`` elements, UnsupportedError if its dtype cannot
    be reduced.
    """
    if not arena.rows:
        raise wrong_kind(name, operation)
    check_reduction(arena.whole.dtype, reduction)
    used = first_elements(name, arena.whole.size, count)
    part = f"[:{count}]" if count is not None else ""
    return used, f"{operation}({name!r}{part}: {arena.text}, {reduction.value})"


class HostMemory:
    """One rank's view of the memory of its host's ranks, whose table is on the ``board``."""

    def __init__(self, board: GroupBoard) -> None:
        self._board = board
        self._arenas: dict[str, MappedArena] = {}
        self._regions: list[SharedRegion] = []

    def arena(self, name: str, dtype: str, size: int, *, kind: str) -> MappedArena:
        """An arena of ``size`` elements: a row for each rank and one for results if its ``kind`` is "allocated", one
        row if it is "shared".

        Raises UsageError for a name, dtype or size that no arena can have, MismatchError (on all ranks) if the arena
        exists with another kind, dtype or size.
        """
        text = f"{kind} {dtype}[{size}]"
        known = self._arenas.get(name)
        if known is None:
            check_arena(name, dtype, size)
            rows = self._board.ranks + 1 if kind == "allocated" else 1
            region = self.region(name, text, size * numpy_dtype(dtype).itemsize, rows)
            known = self._arenas[name] = _mapped(region, text, dtype, size)
        elif known.text != text:
            self._refuse(name, text, known.text, self._board.rank)
        return known

    def find(self, name: str) -> MappedArena:
        """An arena that this rank has requested. Raises UsageError if it has not, or the error that ended the group."""
        arena = self._arenas.get(name)
        if arena is None:
            self._board.check()
            raise unknown_arena(name, list(self._arenas))
        return arena

    def row_sets(self, name: str, text: str, nbytes: int, *, sets: int, ranks: int) -> list[list[ByteArray]]:
        """``sets`` times ``ranks`` rows of ``nbytes`` (whole pages) each, for ranks of this host or of more."""
        region = self.region(name, text, nbytes, sets * ranks)
        rows = [region.array(np.dtype(np.uint8), nbytes, at) for at in range(0, region.nbytes, nbytes)]
        return [rows[at : at + ranks] for at in range(0, len(rows), ranks)]

    def region(self, name: str, text: str, nbytes: int, rows: int) -> SharedRegion:
        """A region of ``rows`` rows of ``nbytes``, each of whole pages: the first rank creates it, the others open it.

        Raises HostLimitError, on all ranks, if a host has no memory or file for it.
        """
        try:
            with for_rank(self._board.names[self._board.rank]):
                return self._made_or_opened(name, text, whole_pages(nbytes) * rows)
        except HostLimitError as error:
            self._board.fail_with(error)

    def _made_or_opened(self, name: str, text: str, size: int) -> SharedRegion:
        entry: dict[str, Any] | None
        with self._board.editing_arenas() as table:
            entry = table.get(name)
            if entry is None:
                region = create_region(f"arena-{name}", size)
                self._regions.append(region)  # stays open, so that the others can open it
                table[name] = {"text": text, "pid": os.getpid(), "fd": region.fd, "rank": self._board.rank}
                table[name]["inode"] = region.name.inode
                return region
        if entry["text"] != text:
            self._refuse(name, text, entry["text"], entry["rank"])
        try:
            region = open_region(entry["pid"], entry["fd"], entry["inode"])
        except OSError as error:
            holder = self._board.names[entry["rank"]]
            self._board.fail_with(
                RankLostError(
                    f"rank {holder} (process {entry['pid']}), which holds arena {name!r}, is gone: {error.strerror}",
                    rank=holder,
                    hint="Close this group, replace the rank and make a new group.",
                )
            )
        region.close()  # the mapping stays
        if region.nbytes != size:
            self._refuse(name, text, f"{region.nbytes} bytes", entry["rank"])
        return region

    def _refuse(self, name: str, mine: str, theirs: str, rank: int) -> NoReturn:
        names = self._board.names
        self._board.fail_with(
            MismatchError(
                f"rank {names[self._board.rank]} requested arena {name!r} as {mine}, rank {names[rank]} as {theirs}",
                hint="All ranks must request an arena with the same kind, dtype and size.",
            )
        )

    def close(self) -> None:
        """Close all regions; arrays that were returned stay valid. Idempotent."""
        self._arenas.clear()
        while self._regions:
            self._regions.pop().close()


def _mapped(region: SharedRegion, text: str, dtype: str, size: int) -> MappedArena:
    kind = numpy_dtype(dtype)
    step = whole_pages(size * kind.itemsize)
    rows = [region.array(kind, size, at) for at in range(0, region.nbytes, step)]
    return MappedArena(tuple(rows[:-1]), rows[-1], text)


RING_BYTES = 8 * 1024 * 1024
"""Size of a ring in bytes. The kernel provides its pages as they are used."""
_HEAD, _TAIL, _DATA_DOORBELL, _SPACE_DOORBELL, _BYTES = 0, 64, 128, 192, 4096
_PATIENT_SLICE = 0.25
"""Seconds after which a patient end looks whether the other process lives. Nothing else has to be looked for: an error
or an end of the group rings."""
HEADER = struct.Struct("<qQ32s")
"""Tag, size of the payload in bytes, and its dtype, which the receiver checks."""

ByteView = np.ndarray[Any, np.dtype[np.uint8]]


@functools.lru_cache(1024)
def _send_label(what: str, dest: int, tag: int) -> bytes:
    return label(f"send({what}, to rank {dest}, tag {tag})")


def channel_bytes() -> int:
    """Size of a channel's region in bytes."""
    return _BYTES + RING_BYTES


class MessageChannel:
    """One end of the pipe from rank ``source`` to rank ``dest``. ``patient``: it sleeps at once where it waits, for as
    long as `_PATIENT_SLICE` and the group's timeout allow.
    """

    def __init__(self, region: SharedRegion, board: GroupBoard, source: int, dest: int) -> None:
        view = memoryview(region.map)
        self._head = view[_HEAD : _HEAD + 8].cast("Q")
        self._tail = view[_TAIL : _TAIL + 8].cast("Q")
        self._data_doorbell = Futex(region.map, _DATA_DOORBELL)
        self._space_doorbell = Futex(region.map, _SPACE_DOORBELL)
        self._ring: ByteView = np.frombuffer(region.map, np.uint8, RING_BYTES, _BYTES)
        self._board, self._source, self._dest = board, source, dest
        board.more_doorbells += (self._data_doorbell, self._space_doorbell)
        self.patient = False

    @property
    def rings(self) -> int:
        """How often the receiver was woken."""
        return self._data_doorbell.value

    def send(self, tag: int, what: str, payload: ByteView, timeout: float, *, preface: bytes = b"") -> None:
        """Send a message: ``preface``, then ``payload``. Waits at most ``timeout`` seconds at a time while the ring is
        full."""
        reason = _send_label(what, self._dest, tag)
        header = HEADER.pack(tag, len(preface) + payload.size, what.encode()[:32]) + preface
        self._put(np.frombuffer(header, np.uint8), reason, timeout, rings=not payload.size)
        if payload.size:
            self._put(payload, reason, timeout, rings=True)

    def receive_header(self, reason: bytes, timeout: float) -> tuple[int, int, str]:
        """Tag, size in bytes and dtype of the next message; call `receive_into` next for its bytes."""
        raw = np.empty(HEADER.size, np.uint8)
        self._take(raw, reason, timeout)
        tag, nbytes, what = HEADER.unpack(raw.tobytes())
        return tag, nbytes, what.rstrip(b"\0").decode(errors="replace")

    def receive_preface(self, size: int, reason: bytes, timeout: float) -> tuple[bytes, int]:
        """The first ``size`` bytes of the next message, which has as many, and how many are left for `receive_into`."""
        raw = np.empty(HEADER.size + size, np.uint8)
        self._take(raw, reason, timeout, rings=False)
        read = raw.tobytes()
        left = HEADER.unpack_from(read)[1] - size
        if not left:
            self._ring_doorbell(self._space_doorbell)
        return read[HEADER.size :], left

    def receive_into(self, out: ByteView, reason: bytes, timeout: float) -> None:
        """Receive the bytes of the message whose header was received."""
        self._take(out, reason, timeout)

    def _put(self, data: ByteView, reason: bytes, timeout: float, *, rings: bool) -> None:
        """``rings``: wake the receiver at the end. It is woken in any case before this waits for it."""
        done = 0
        while done < data.size:
            if not self._space():
                self._ring_doorbell(self._data_doorbell)
            room = self._await(self._space, self._dest, self._space_doorbell, reason, timeout)
            head = self._head[0]
            at = head % RING_BYTES
            count = min(data.size - done, room, RING_BYTES - at)
            self._ring[at : at + count] = data[done : done + count]
            done += count
            self._move(self._head, head + count)
            if rings and done == data.size:
                self._ring_doorbell(self._data_doorbell)

    def _take(self, out: ByteView, reason: bytes, timeout: float, *, rings: bool = True) -> None:
        """``rings``: wake the sender at the end. It is woken in any case before this takes more."""
        done = 0
        while done < out.size:
            waiting = self._await(self._waiting, self._source, self._data_doorbell, reason, timeout)
            tail = self._tail[0]
            at = tail % RING_BYTES
            count = min(out.size - done, waiting, RING_BYTES - at)
            out[done : done + count] = self._ring[at : at + count]
            self._move(self._tail, tail + count)
            done += count
            if rings or done < out.size:
                self._ring_doorbell(self._space_doorbell)

    def _space(self) -> int:
        return RING_BYTES - (self._head[0] - self._tail[0])

    def _waiting(self) -> int:
        return self._head[0] - self._tail[0]

    def _move(self, end: memoryview, to: int) -> None:
        """Move the head or the tail after the copy has taken effect."""
        self._board.order()
        end[0] = to

    def _ring_doorbell(self, doorbell: Futex) -> None:
        """Wake the other side, which then sees what was moved before."""
        self._board.order()
        doorbell.value = (doorbell.value + 1) & 0xFFFFFFFF
        doorbell.wake()

    def _await(
        self, ready: Callable[[], int], peer: int, doorbell: Futex, reason: bytes, timeout: float
    ) -> int:
        """Wait until ``ready`` counts at least one byte; returns the count."""
        count = ready()
        if not count:
            self._board.check()
            if self.patient:
                slice = min(_PATIENT_SLICE, timeout)  # A group with a shorter timeout ends when it says.
                self._board.sleep_until(
                    lambda: ready() > 0, lambda: [peer], doorbell, reason, timeout, slices=(slice, slice)
                )
            else:
                self._board.wait_until(lambda: ready() > 0, lambda: [peer], doorbell, reason, timeout)
            count = ready()
        self._board.order()  # what is copied now is read and written after the other side moved its end
        return count
