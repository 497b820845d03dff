"""Links between ranks on different hosts: frames over two TCP connections, one for each direction.

A frame is a fixed header, a label and bytes. Nothing received is evaluated: a frame is numbers, a text that is only
compared and shown, and bytes for an array whose size the receiver knows beforehand. A thread of each link sends, so
that a rank can send and receive at once and no two ranks wait for each other's buffers. One connection for both
directions is slower than two: the kernel locks it for the sender, and arriving data waits meanwhile.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import itertools
import socket
import struct
import sys
import threading
import time
from collections import deque

import numpy as np

from podrun.collectives.barrier import LABEL_BYTES
from podrun.collectives.group import ByteArray, RankLostError, RankMissingError
from podrun.core.quick_dataclass import dataclass

NEAR = 15e-6
"""Round trip in seconds below which small buffers do not slow a connection: 128 KiB per 15 us are 9 GB/s. Between
network namespaces or containers of one computer it takes 3 to 4 us, over network cards more than 15.
"""
CACHED_BUFFER = 128 * 1024
"""Bytes in transit that stay in the caches of a core on which sender and receiver take turns."""
_AT_ONCE = 256
"""Most frames in one system call, which takes 1,024 buffers; a frame has two."""
_PATIENCE = struct.pack("ll", 0, 100_000)
"""Seconds and microseconds that the kernel waits for bytes before the deadline is checked."""
_MAGIC = b"pdcf"
_HEADER = struct.Struct(f"<4sB3xIIqQ{LABEL_BYTES}s")


class FrameKind(enum.IntEnum):
    """What a frame is for."""

    PARTIAL = 1
    """The running reduction of a lane, for the next run of ranks."""
    ROW = 6
    """A rank's own values of a lane."""
    RESULT = 2
    """Finished values of a lane."""
    BLOCK = 3
    """A part of what a rank posted in an exchange."""
    TOKEN = 4
    """Reports in a barrier that a host has arrived, or that all have."""
    MESSAGE = 5
    """A message of `send`."""


@dataclass(frozen=True, slots=True)
class LinkFrame:
    """The header of a frame. The meaning of ``a``, ``b`` and ``tag`` depends on the kind; ``label`` names the
    collective.
    """

    kind: FrameKind
    a: int
    b: int
    tag: int
    nbytes: int
    label: bytes


class RankLink:
    """The connections to one rank on another host: ``outgoing`` carries data to it, ``incoming`` from it.

    ``near``: a round trip is shorter than `NEAR`.
    """

    def __init__(self, peer: int, outgoing: socket.socket, incoming: socket.socket, *, near: bool) -> None:
        self.peer = peer
        self.outgoing, self.incoming = outgoing, incoming
        if outgoing.family != socket.AF_UNIX:  # otherwise `podrun.collectives.connection_security` has
            outgoing.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        incoming.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _PATIENCE)
        outgoing.settimeout(None)
        incoming.settimeout(None)
        self._near = near
        self._queue: deque[list[memoryview]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._broken = False
        self._sender = threading.Thread(target=self._send_all, name=f"to-rank-{peer}", daemon=True)
        self._sender.start()

    def keep_in_caches(self) -> None:
        """Prepare for much data: if the rank is on this host, keep little data in transit at any time.

        By default the kernel lets megabytes wait to be received, which then come from memory and another core: three
        times slower than from the cache of a core on which sender and receiver take turns.
        """
        if self._near:
            self._near = False
            for sock, option in ((self.outgoing, socket.SO_SNDBUF), (self.incoming, socket.SO_RCVBUF)):
                sock.setsockopt(socket.SOL_SOCKET, option, CACHED_BUFFER // 2)  # the kernel doubles it

    # --- Sending --------------------------------------------------------------------------------------------

    def post(self, frame: LinkFrame, payload: ByteArray) -> None:
        """Queue a frame. The payload must not change until `drain`.

        This thread sends what the connection takes at once: waking the sending thread costs more than sending.
        """
        header = _HEADER.pack(_MAGIC, frame.kind, frame.a, frame.b, frame.tag, payload.size, frame.label)
        parts = [memoryview(header), payload.data] if payload.size else [memoryview(header)]
        with self._changed:
            if not self._queue and not self._broken:
                try:
                    parts = _unsent(parts, self.outgoing.sendmsg(parts, [], socket.MSG_DONTWAIT))
                except BlockingIOError:
                    pass
                except OSError:
                    self._break()
            if parts and not self._broken:
                self._queue.append(parts)
                self._changed.notify_all()

    def drain(self, deadline: float) -> None:
        """Wait until the kernel has taken everything that was posted. Raises RankMissingError at the deadline."""
        with self._changed:
            while self._queue and not self._broken:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise RankMissingError(
                        f"rank {self.peer} did not take the data sent to it in time",
                        ranks=(self.peer,),
                        hint="Check what that rank does, or use a longer timeout.",
                    )

    def _send_all(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._closing:
                        return
                    self._changed.wait()
                taken = list(itertools.islice(self._queue, _AT_ONCE))
            parts = list(itertools.chain.from_iterable(taken))
            try:
                while parts:
                    parts = _unsent(parts, self.outgoing.sendmsg(parts))
            except OSError:
                with self._changed:
                    self._break()
                return
            with self._changed:
                for _ in taken[: len(self._queue)]:  # the queue is empty if the link broke meanwhile
                    self._queue.popleft()
                self._changed.notify_all()

    def _break(self) -> None:
        """Drop what is queued: the peer is gone, which the receiving side reports to the next waiting call."""
        self._broken = True
        self._queue.clear()
        self._changed.notify_all()

    # --- Receiving ------------------------------------------------------------------------------------------

    def receive_frame(self, deadline: float) -> LinkFrame:
        """The next header; call `receive_into` next for its payload."""
        raw = np.empty(_HEADER.size, np.uint8)
        self.receive_into(raw, deadline)
        magic, kind, a, b, tag, nbytes, label = _HEADER.unpack(raw.tobytes())
        if magic != _MAGIC or kind not in FrameKind.__members__.values():
            raise RankLostError(
                f"rank {self.peer} sent bytes that are no frame", rank=self.peer, hint="Make a new group."
            )
        return LinkFrame(FrameKind(kind), a, b, tag, nbytes, label)

    def receive_into(self, out: ByteArray, deadline: float) -> None:
        """Fill ``out``. Raises RankLostError if the peer closes before that, RankMissingError at the deadline."""
        view, done = out.data, 0
        while done < out.size:
            try:
                count = self.incoming.recv_into(view[done:], 0, socket.MSG_WAITALL)
            except BlockingIOError:  # nothing arrived for a while
                count = None
            except OSError as error:
                raise self._lost(f"connection lost: {error.strerror or error}") from error
            if count == 0:
                where = f" in the middle of a message, at {done} of {out.size} bytes" if done else ""
                raise self._lost(f"closed its connection{where}")
            done += count or 0
            if done < out.size and time.monotonic() >= deadline:
                raise RankMissingError(
                    f"rank {self.peer} stopped in the middle of a message, at {done} of {out.size} bytes",
                    ranks=(self.peer,),
                    hint="Check what that rank does, or use a longer timeout.",
                )

    def _lost(self, what: str) -> RankLostError:
        return RankLostError(
            f"rank {self.peer} {what}", rank=self.peer, hint="Replace the rank and make a new group."
        )

    def wake(self) -> None:
        """End all waiting on this link. The peer sees nothing of it: a connection that ends means a lost rank to it."""
        with contextlib.suppress(OSError):
            self.incoming.shutdown(socket.SHUT_RD)
        with self._changed:
            self._break()

    def close(self, grace: float) -> None:
        """Send what is queued, at most ``grace`` seconds, and close."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            broken = self._broken
        self._sender.join(0.0 if broken else grace)
        for sock in (self.outgoing, self.incoming):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.wake()
        self._sender.join()
        self.outgoing.close()
        self.incoming.close()


def _unsent(parts: list[memoryview], sent: int) -> list[memoryview]:
    """What remains of buffers after ``sent`` bytes of them are sent."""
    left = []
    for part in parts:
        if sent < len(part):
            left.append(part[sent:] if sent else part)
        sent = max(0, sent - len(part))
    return left


def round_trip(sock: socket.socket) -> float:
    """The kernel's estimate of a connection's round trip, in seconds."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int.from_bytes(info[68:72], sys.byteorder) / 1e6


def _stream_socket(address: str) -> socket.socket:
    """A socket for an address. Raises OSError if the address is invalid."""
    try:
        address.encode("idna")
    except UnicodeError as error:
        raise OSError(errno.EINVAL, f"invalid address: {error}") from error
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)


def listen(address: str, port: int = 0) -> socket.socket:
    """A listening socket on one address. Raises OSError."""
    sock = _stream_socket(address)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(1024)
    except BaseException:
        sock.close()
        raise
    return sock


def dial(address: str, port: int, deadline: float, *, retry: bool = False) -> socket.socket:
    """A connection to a listener. ``retry``: try again until the deadline if nothing listens yet. Raises OSError."""
    while True:
        sock = _stream_socket(address)
        try:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock.connect((address, port))
            return sock
        except ConnectionRefusedError:
            sock.close()
            if not retry or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        except BaseException:
            sock.close()
            raise
