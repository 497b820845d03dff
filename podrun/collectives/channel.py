"""A one-way pipe of messages between two ranks of a host: send and receive over shared memory.

A ring of bytes in a segment of its own. The sender moves the head, the receiver the tail; each is written by
one side only, after it has copied (`podrun.collectives.fence`, where the processor needs to be told). A message
is a header (tag, size, dtype) and its bytes, which may be more than the ring holds: they stream through. A send
returns when its bytes are in the ring, so a sender may run ahead by the ring's size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from podrun.collectives.board import Board, label
from podrun.collectives.futex import Futex, address_of
from podrun.collectives.memory import Segment

RING_BYTES = 8 * 1024 * 1024
"""Size of a ring; memory appears as it is used."""
_HEAD, _TAIL, _DATA_BELL, _SPACE_BELL, _BYTES = 0, 64, 128, 192, 4096
HEADER = struct.Struct("<qQ32s")
"""Tag, bytes of payload, and what the payload is (dtype, for the receiver to check)."""

ByteView = np.ndarray[Any, np.dtype[np.uint8]]


def segment_bytes() -> int:
    """What a channel's segment takes."""
    return _BYTES + RING_BYTES


class Channel:
    """One end of the pipe from rank ``source`` to rank ``dest``."""

    def __init__(self, segment: Segment, board: Board, source: int, dest: int) -> None:
        view = memoryview(segment.map)
        self._head = view[_HEAD : _HEAD + 8].cast("Q")
        self._tail = view[_TAIL : _TAIL + 8].cast("Q")
        base = address_of(segment.map)
        self._data_bell, self._space_bell = Futex(base + _DATA_BELL), Futex(base + _SPACE_BELL)
        self._ring: ByteView = np.frombuffer(segment.map, np.uint8, RING_BYTES, _BYTES)
        self._board, self._source, self._dest = board, source, dest

    def send(self, tag: int, what: str, payload: ByteView, timeout: float) -> None:
        """Put a message in. Waits, at most ``timeout`` seconds, while the ring is full."""
        reason = label(f"send({what}, to rank {self._dest}, tag {tag})")
        header = np.frombuffer(HEADER.pack(tag, payload.size, what.encode()[:32]), np.uint8)
        self._put(header, reason, timeout)
        self._put(payload, reason, timeout)

    def receive_header(self, reason: bytes, timeout: float) -> tuple[int, int, str]:
        """Tag, bytes and kind of the next message; then call `receive_into` for its bytes."""
        raw = np.empty(HEADER.size, np.uint8)
        self._take(raw, reason, timeout)
        tag, nbytes, what = HEADER.unpack(raw.tobytes())
        return tag, nbytes, what.rstrip(b"\0").decode(errors="replace")

    def receive_into(self, out: ByteView, reason: bytes, timeout: float) -> None:
        """The bytes of the message whose header was received."""
        self._take(out, reason, timeout)

    def _put(self, data: ByteView, reason: bytes, timeout: float) -> None:
        done = 0
        while done < data.size:
            room = self._await(self._space, self._dest, self._space_bell, reason, timeout)
            head = self._head[0]
            at = head % RING_BYTES
            count = min(data.size - done, room, RING_BYTES - at)
            self._ring[at : at + count] = data[done : done + count]
            self._move(self._head, head + count, self._data_bell)
            done += count

    def _take(self, out: ByteView, reason: bytes, timeout: float) -> None:
        done = 0
        while done < out.size:
            waiting = self._await(self._waiting, self._source, self._data_bell, reason, timeout)
            tail = self._tail[0]
            at = tail % RING_BYTES
            count = min(out.size - done, waiting, RING_BYTES - at)
            out[done : done + count] = self._ring[at : at + count]
            self._move(self._tail, tail + count, self._space_bell)
            done += count

    def _space(self) -> int:
        return RING_BYTES - (self._head[0] - self._tail[0])

    def _waiting(self) -> int:
        return self._head[0] - self._tail[0]

    def _move(self, end: memoryview, to: int, bell: Futex) -> None:
        """Move the head or the tail, once what was copied is there, and ring for the other side."""
        self._board.order()
        end[0] = to
        self._board.order()
        bell.value = (bell.value + 1) & 0xFFFFFFFF
        bell.wake()

    def _await(self, ready: Callable[[], int], peer: int, bell: Futex, reason: bytes, timeout: float) -> int:
        """Wait until there is something of what ``ready`` counts; how much."""
        count = ready()
        if not count:
            self._board.check()
            self._board.wait_until(lambda: ready() > 0, lambda: [peer], bell, reason, timeout)
            count = ready()
        self._board.order()  # what is copied now is read and written after the other side moved its end
        return count
