"""Memory that a host process hands to a machine on its host: file descriptors over a Unix socket.

When a process attaches, the machine listens on a socket with a random name, which it tells over the session's stream.
The process connects, and for each region it sends the file descriptor itself (SCM_RIGHTS) with a number that the
requests on the stream then use. So a machine never opens anything because somebody named it: it maps what the process
at the other end holds and gave.

The socket lies in a folder that only its user enters (`podrun.core.own_sockets`); for a process of another user it is
in the abstract namespace, the only place that both reach. Names of either kind stand in ``/proc/net/unix``, so a name
proves nothing: each side asks the kernel whose process is at the other end before it sends anything. A wrong one is
let go, with a line in the log, and the machine goes on waiting for the right one.

A machine of the same user hands its crash record over the same way. Where no such socket can be reached (another host,
another network namespace), tensors travel over the stream.

`view` checks everything that a host process states about tensors in regions that it has handed over.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from podrun.core.aligned_memory import ALIGNMENT
from podrun.core.errors import ApplicationRuntimeError
from podrun.core.executable import Array, numpy_dtype
from podrun.core.identity import user_name
from podrun.core.own_sockets import peer_uid, reached_by, socket_folder
from podrun.core.shared_region import SharedRegion

log = logging.getLogger("podrun.device")

_ABSTRACT = b"\0podrun-"
"""How the names of sockets for other users begin."""
_OWN = "memory-"
"""How the file names of sockets for the same user begin."""
_WAITING = 16
"""Connections that may wait: other users' too, until they are looked at."""
_NUMBER = struct.Struct("<QQ")
"""Of a region: its number and its size."""
_RECORD = 0
"""Number of the machine's crash record; regions count from 1."""
PATIENCE_S = 10.0
"""Seconds to wait for a file descriptor that a request announces: it is sent first."""
_MOST_AHEAD = 64
"""File descriptors that may be sent before the requests that name them."""


class MemoryReceiver:
    """A machine's side, for one host process of user ``uid``. ``record``: the crash record to give; only to a process
    of the same user. Raises OSError or UsageError if there is no folder for its socket."""

    def __init__(self, uid: int, record: int | None = None) -> None:
        self._uid, self._record = uid, record
        self._path: Path | None = None
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.name = self._bind(self._listener)
            self._listener.listen(_WAITING)
        except BaseException:
            self._listener.close()
            raise
        self._socket: socket.socket | None = None
        self._waiting: dict[int, int] = {}

    def _bind(self, listener: socket.socket) -> bytes:
        """Give the socket a name; returns it as it is told to the process."""
        if self._uid != os.getuid():
            name = _ABSTRACT + secrets.token_hex(12).encode()
            listener.bind(name)
            return name
        path = socket_folder() / f"{_OWN}{secrets.token_hex(12)}"
        with reached_by(path) as short:
            listener.bind(short)
        self._path = path
        return os.fsencode(path)

    def take(self, number: int, size: int) -> Array:
        """The bytes of a region that was handed over, writable; unmapped when the last view is gone.

        Raises ApplicationRuntimeError if it was not handed over, or is not shared memory of that size.
        """
        try:
            fd = self._received(number)
        except OSError as error:
            raise ApplicationRuntimeError(
                f"shared memory {number} was not handed over: {error.strerror or error}"
            ) from error
        try:
            region = SharedRegion.adopt(fd)
        except (OSError, ValueError) as error:
            raise ApplicationRuntimeError(f"the file handed over is not shared memory: {error}") from error
        region.close()  # the mapping stays as long as the array
        if region.nbytes != size:
            raise ApplicationRuntimeError(
                f"the shared memory that was handed over has {region.nbytes} bytes, not the {size} announced"
            )
        return region.bytes

    def _received(self, number: int) -> int:
        """The file descriptor with a number. Raises OSError."""
        end = time.monotonic() + PATIENCE_S
        connection = self._connected()
        while number not in self._waiting:
            connection.settimeout(max(end - time.monotonic(), 0.001))
            data, fds, _, _ = socket.recv_fds(connection, _NUMBER.size, 4)
            if len(data) != _NUMBER.size or len(fds) != 1 or len(self._waiting) >= _MOST_AHEAD:
                for fd in fds:
                    os.close(fd)
                raise ConnectionResetError(
                    "the other side closed the socket" if not data else "no file descriptor"
                )
            replaced = self._waiting.pop(_NUMBER.unpack(data)[0], None)
            if replaced is not None:
                os.close(replaced)
            self._waiting[_NUMBER.unpack(data)[0]] = fds[0]
        return self._waiting.pop(number)

    def _connected(self) -> socket.socket:
        """The connection of the host process. Raises OSError if there is none in time."""
        end = time.monotonic() + PATIENCE_S
        while self._socket is None:
            if self._listener is None:
                raise ConnectionResetError("the session has ended")
            self._listener.settimeout(max(end - time.monotonic(), 0.001))
            connection, _ = self._listener.accept()
            uid = peer_uid(connection)
            if uid != self._uid:
                connection.close()
                log.warning(
                    "a process of %s was refused the shared memory of a process of %s",
                    *(user_name(uid), user_name(self._uid)),
                )
                continue
            self._stop_listening()
            self._socket = connection
            if self._record is not None and uid == os.getuid():
                socket.send_fds(connection, [_NUMBER.pack(_RECORD, os.getpid())], [self._record])
        return self._socket

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        path, self._path = self._path, None
        if listener is not None:
            listener.close()
        if path is not None:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Forget what was handed over and not used. Idempotent."""
        self._stop_listening()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        waiting, self._waiting = self._waiting, {}
        for fd in waiting.values():
            os.close(fd)


class MemorySender:
    """A host process's side. ``name``: of the socket, as the machine tells it; ``uid``: the user who runs the machine.

    Raises OSError if the machine's socket cannot be reached, PermissionError if it is another user's.
    """

    def __init__(self, name: bytes, uid: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sent = 0
        try:
            self._socket.settimeout(PATIENCE_S)
            self._connect(name, uid)
            there = peer_uid(self._socket)
            if there != uid:
                log.warning(
                    "a process of %s listens for the shared memory that is for %s: nothing was handed over",
                    *(user_name(there), user_name(uid)),
                )
                raise PermissionError(errno.EACCES, "the process at the socket is another user's")
        except BaseException:
            self._socket.close()
            raise

    def _connect(self, name: bytes, uid: int) -> None:
        if uid != os.getuid():
            if not name.startswith(_ABSTRACT):
                raise OSError("no name of a socket of another user's machine")
            self._socket.connect(name)
            return
        path = Path(os.fsdecode(name))
        if not path.is_absolute() or not path.name.startswith(_OWN) or b"\0" in name:
            raise OSError("no name of a machine's socket")
        with reached_by(path) as short:
            self._socket.connect(short)

    def give(self, region: SharedRegion) -> int:
        """Hand a region over; returns its number for the request that uses it, whose answer tells if the machine is
        gone."""
        self._sent += 1
        with contextlib.suppress(OSError):
            socket.send_fds(self._socket, [_NUMBER.pack(self._sent, region.nbytes)], [region.fd])
        return self._sent

    def record(self) -> tuple[int, int] | None:
        """File descriptor of the machine's crash record, and the machine's process; None if it gave none."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(0)
            data, fds, _, _ = socket.recv_fds(self._socket, _NUMBER.size, 1)
            if len(data) == _NUMBER.size and len(fds) == 1:
                return fds[0], _NUMBER.unpack(data)[1]
        return None

    def close(self) -> None:
        """Close the connection over which memory is handed."""
        self._socket.close()


def wire_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a tensor by its name; ApplicationRuntimeError for none of fixed size, such as Python objects."""
    try:
        kind = numpy_dtype(name)
    except (TypeError, AttributeError) as error:
        raise ApplicationRuntimeError(f"there is no dtype {name!r}") from error
    if kind.hasobject or kind.itemsize == 0 or kind.names is not None or kind.subdtype is not None:
        raise ApplicationRuntimeError(f"tensors cannot have dtype {name!r}")
    return kind


def view(data: Array, offset: int, dtype: str, shape: tuple[int, ...]) -> Array:
    """The tensor at ``offset`` of ``data`` (bytes). Raises ApplicationRuntimeError if it does not lie inside."""
    kind = wire_dtype(dtype)
    if any(size < 0 for size in shape):
        raise ApplicationRuntimeError(f"a tensor cannot have shape {list(shape)}")
    size = kind.itemsize
    for extent in shape:  # Python integers: a hostile shape cannot overflow.
        size *= extent
    if offset < 0 or offset % kind.itemsize or offset + size > data.size:
        raise ApplicationRuntimeError(
            f"a tensor {dtype}{list(shape)} at byte {offset} does not lie in its {data.size} bytes of memory"
        )
    return data[offset : offset + size].view(kind).reshape(shape)


def lay_out(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Aligned offsets for pieces of ``sizes`` bytes, one after the other, and the bytes of all."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end
