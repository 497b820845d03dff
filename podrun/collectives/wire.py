"""Frames between ranks on different hosts: a fixed header, a label, and bytes, over two TCP connections a
pair, one for each direction.

Nothing received is evaluated: a frame is numbers, a text that is only compared and shown, and bytes that go
into an array whose size the receiver knows beforehand. Sending is done by a thread of each link, so that a rank
can send and receive at once and no two ranks can wait for each other's buffers. One connection both ways
is slower than two: the kernel locks it for whoever sends, and what arrives meanwhile has to wait.
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
from dataclasses import dataclass

import numpy as np

from podrun.collectives.errors import RankLostError, RankMissingError
from podrun.collectives.group import ByteArray
from podrun.collectives.meeting import LABEL_BYTES

NEAR = 15e-6
"""Seconds of a round trip below which small buffers cannot hold up a connection: 128 KiB at a time are 9 GB/s. Between
network namespaces or containers of one machine it takes 3 to 4 us, over network cards more than this.
"""
CACHED_BUFFER = 128 * 1024
"""Bytes on their way that stay in the caches of a core, one core's sender and receiver taking turns."""
_AT_ONCE = 256
"""Frames that are sent in one system call: it takes 1,024 buffers, a frame has two."""
_PATIENCE = struct.pack("ll", 0, 100_000)
"""Seconds and microseconds that the kernel waits for bytes before the deadline is looked at."""
_MAGIC = b"pdcf"
_HEADER = struct.Struct(f"<4sB3xIIqQ{LABEL_BYTES}s")


class FrameKind(enum.IntEnum):
    """What a frame is for."""

    PARTIAL = 1
    """A lane's running reduction, for the next run of ranks."""
    ROW = 6
    """Values of a lane as a rank has them."""
    RESULT = 2
    """Finished values of a lane."""
    BLOCK = 3
    """A part of what a rank posted in an exchange."""
    TOKEN = 4
    """A barrier's word that a host is there, or that all are."""
    MESSAGE = 5
    """What `send` sends."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A header. What ``a``, ``b`` and ``tag`` mean depends on the kind; ``label`` names the collective."""

    kind: FrameKind
    a: int
    b: int
    tag: int
    nbytes: int
    label: bytes


class Link:
    """The connections to one rank on another host: ``outgoing`` carries what is sent to it, ``incoming`` what it
    sends. ``near``: a round trip is shorter than `NEAR`.
    """

    def __init__(self, peer: int, outgoing: socket.socket, incoming: socket.socket, *, near: bool) -> None:
        self.peer = peer
        self.outgoing, self.incoming = outgoing, incoming
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
        """Prepare for much data: have little on its way at any time, if that is enough for so near a rank.

        Left to itself the kernel lets megabytes wait to be received, which then come from memory and from another
        core: three times as slow as from the cache of a core on which sender and receiver take turns.
        """
        if self._near:
            self._near = False
            for sock, option in ((self.outgoing, socket.SO_SNDBUF), (self.incoming, socket.SO_RCVBUF)):
                sock.setsockopt(socket.SOL_SOCKET, option, CACHED_BUFFER // 2)  # the kernel doubles it

    # --- Sending --------------------------------------------------------------------------------------------

    def post(self, frame: Frame, payload: ByteArray) -> None:
        """Queue a frame. The payload must not change until `drain`.

        What the connection takes at once goes out here: waking the thread that sends costs more than sending.
        """
        header = _HEADER.pack(_MAGIC, frame.kind, frame.a, frame.b, frame.tag, payload.size, frame.label)
        parts = [memoryview(header), payload.data] if payload.size else [memoryview(header)]
        with self._changed:
            if not self._queue and not self._broken:
                try:
                    parts = _rest(parts, self.outgoing.sendmsg(parts, [], socket.MSG_DONTWAIT))
                except BlockingIOError:
                    pass
                except OSError:
                    self._break()
            if parts and not self._broken:
                self._queue.append(parts)
                self._changed.notify_all()

    def drain(self, deadline: float) -> None:
        """Wait until all that was posted is out of our hands."""
        with self._changed:
            while self._queue and not self._broken:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise RankMissingError(
                        f"rank {self.peer} did not take the data sent to it in time",
                        ranks=(self.peer,),
                        hint="See what that rank does, or use a longer timeout.",
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
                    parts = _rest(parts, self.outgoing.sendmsg(parts))
            except OSError:
                with self._changed:
                    self._break()
                return
            with self._changed:
                for _ in taken[: len(self._queue)]:  # none if broken meanwhile
                    self._queue.popleft()
                self._changed.notify_all()

    def _break(self) -> None:
        """The peer is gone: whoever next waits for it learns so from the receiving side."""
        self._broken = True
        self._queue.clear()
        self._changed.notify_all()

    # --- Receiving ------------------------------------------------------------------------------------------

    def receive_frame(self, deadline: float) -> Frame:
        """The next header; then `receive_into` for its payload."""
        raw = np.empty(_HEADER.size, np.uint8)
        self.receive_into(raw, deadline)
        magic, kind, a, b, tag, nbytes, label = _HEADER.unpack(raw.tobytes())
        if magic != _MAGIC or kind not in FrameKind.__members__.values():
            raise RankLostError(
                f"rank {self.peer} sent bytes that are no frame", rank=self.peer, hint="Make a new group."
            )
        return Frame(FrameKind(kind), a, b, tag, nbytes, label)

    def receive_into(self, out: ByteArray, deadline: float) -> None:
        """Exactly ``out.size`` bytes. Raises RankLostError if the peer closes before that, RankMissingError
        if late.
        """
        view, done = out.data, 0
        while done < out.size:
            try:
                count = self.incoming.recv_into(view[done:], 0, socket.MSG_WAITALL)
            except BlockingIOError:  # nothing came for a while
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
                    hint="See what that rank does, or use a longer timeout.",
                )

    def _lost(self, what: str) -> RankLostError:
        return RankLostError(
            f"rank {self.peer} {what}", rank=self.peer, hint="Replace the rank and make a new group."
        )

    def wake(self) -> None:
        """End all waiting on this link."""
        for sock in (self.outgoing, self.incoming):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        with self._changed:
            self._break()

    def close(self, grace: float) -> None:
        """Send what is queued, at most ``grace`` seconds, and close."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._sender.join(grace)
        self.wake()
        self._sender.join()
        self.outgoing.close()
        self.incoming.close()


def _rest(parts: list[memoryview], sent: int) -> list[memoryview]:
    """What is left of some buffers once so many bytes are sent."""
    left = []
    for part in parts:
        if sent < len(part):
            left.append(part[sent:] if sent else part)
        sent = max(0, sent - len(part))
    return left


def round_trip(sock: socket.socket) -> float:
    """Seconds that the kernel took for the last round trip on a connection."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int.from_bytes(info[68:72], sys.byteorder) / 1e6


def _stream_socket(address: str) -> socket.socket:
    """A socket for an address. Raises OSError for what can be none."""
    try:
        address.encode("idna")
    except UnicodeError as error:
        raise OSError(errno.EINVAL, f"no address: {error}") from error
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


def dial(address: str, port: int, deadline: float, *, comes: bool = False) -> socket.socket:
    """A connection to a listener; one that ``comes`` is tried again until the deadline. Raises OSError."""
    while True:
        sock = _stream_socket(address)
        try:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock.connect((address, port))
            return sock
        except ConnectionRefusedError:
            sock.close()
            if not comes or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        except BaseException:
            sock.close()
            raise
