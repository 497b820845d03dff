"""A one-way pipe of messages between two ranks of a host, over shared memory.

A channel is a ring of bytes in a region of its own. The sender moves the head and the receiver the tail; each is
written by one side only, after that side has copied (with a fence where the processor needs one). A message is a header
(tag, size, dtype) and its bytes. Messages longer than the ring stream through it. A send returns when its bytes are in
the ring, so a sender may run ahead by the size of the ring.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from podrun.collectives.board import GroupBoard, label
from podrun.collectives.linux import Futex, address_of
from podrun.core.shared_region import SharedRegion

RING_BYTES = 8 * 1024 * 1024
"""Size of a ring in bytes. The kernel provides its pages as they are used."""
_HEAD, _TAIL, _DATA_DOORBELL, _SPACE_DOORBELL, _BYTES = 0, 64, 128, 192, 4096
HEADER = struct.Struct("<qQ32s")
"""Tag, size of the payload in bytes, and its dtype, which the receiver checks."""

ByteView = np.ndarray[Any, np.dtype[np.uint8]]


def channel_bytes() -> int:
    """Size of a channel's region in bytes."""
    return _BYTES + RING_BYTES


class MessageChannel:
    """One end of the pipe from rank ``source`` to rank ``dest``."""

    def __init__(self, region: SharedRegion, board: GroupBoard, source: int, dest: int) -> None:
        view = memoryview(region.map)
        self._head = view[_HEAD : _HEAD + 8].cast("Q")
        self._tail = view[_TAIL : _TAIL + 8].cast("Q")
        base = address_of(region.map)
        self._data_doorbell, self._space_doorbell = (
            Futex(base + _DATA_DOORBELL),
            Futex(base + _SPACE_DOORBELL),
        )
        self._ring: ByteView = np.frombuffer(region.map, np.uint8, RING_BYTES, _BYTES)
        self._board, self._source, self._dest = board, source, dest

    def send(self, tag: int, what: str, payload: ByteView, timeout: float) -> None:
        """Send a message. Waits at most ``timeout`` seconds at a time while the ring is full."""
        reason = label(f"send({what}, to rank {self._dest}, tag {tag})")
        header = np.frombuffer(HEADER.pack(tag, payload.size, what.encode()[:32]), np.uint8)
        self._put(header, reason, timeout)
        self._put(payload, reason, timeout)

    def receive_header(self, reason: bytes, timeout: float) -> tuple[int, int, str]:
        """Tag, size in bytes and dtype of the next message; call `receive_into` next for its bytes."""
        raw = np.empty(HEADER.size, np.uint8)
        self._take(raw, reason, timeout)
        tag, nbytes, what = HEADER.unpack(raw.tobytes())
        return tag, nbytes, what.rstrip(b"\0").decode(errors="replace")

    def receive_into(self, out: ByteView, reason: bytes, timeout: float) -> None:
        """Receive the bytes of the message whose header was received."""
        self._take(out, reason, timeout)

    def _put(self, data: ByteView, reason: bytes, timeout: float) -> None:
        done = 0
        while done < data.size:
            room = self._await(self._space, self._dest, self._space_doorbell, reason, timeout)
            head = self._head[0]
            at = head % RING_BYTES
            count = min(data.size - done, room, RING_BYTES - at)
            self._ring[at : at + count] = data[done : done + count]
            self._move(self._head, head + count, self._data_doorbell)
            done += count

    def _take(self, out: ByteView, reason: bytes, timeout: float) -> None:
        done = 0
        while done < out.size:
            waiting = self._await(self._waiting, self._source, self._data_doorbell, reason, timeout)
            tail = self._tail[0]
            at = tail % RING_BYTES
            count = min(out.size - done, waiting, RING_BYTES - at)
            out[done : done + count] = self._ring[at : at + count]
            self._move(self._tail, tail + count, self._space_doorbell)
            done += count

    def _space(self) -> int:
        return RING_BYTES - (self._head[0] - self._tail[0])

    def _waiting(self) -> int:
        return self._head[0] - self._tail[0]

    def _move(self, end: memoryview, to: int, doorbell: Futex) -> None:
        """Move the head or the tail after the copy has taken effect, and ring the other side's doorbell."""
        self._board.order()
        end[0] = to
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
            self._board.wait_until(lambda: ready() > 0, lambda: [peer], doorbell, reason, timeout)
            count = ready()
        self._board.order()  # what is copied now is read and written after the other side moved its end
        return count
