"""Memory that a host process hands to a machine on its host: file descriptors over a Unix socket.

When a process attaches, the machine listens on a socket of the abstract namespace with a random name, which it tells
over the session's stream. The process connects, and for each region it sends the file descriptor itself (SCM_RIGHTS)
with a number that the requests on the stream then use. So a machine never opens anything because somebody named it: it
maps what the process at the other end holds and gave. The kernel says whose process that is.

A machine of the same user hands its crash record over the same way. Where no such socket can be reached (another host,
another network namespace), tensors travel over the stream.

`view` checks everything that a host process states about tensors in regions that it has handed over.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from podrun.core.errors import ApplicationRuntimeError
from podrun.core.executable import numpy_dtype
from podrun.core.shared_region import SharedRegion
from podrun.device.program.xla_memory import ALIGNMENT, Array

NAME_BYTES = 24
_NUMBER = struct.Struct("<QQ")
"""Of a region: its number and its size."""
_CREDENTIALS = struct.Struct("iII")
_RECORD = 0
"""Number of the machine's crash record; regions count from 1."""
PATIENCE_S = 10.0
"""Seconds to wait for a file descriptor that a request announces: it is sent first."""
_MOST_AHEAD = 64
"""File descriptors that may be sent before the requests that name them."""


class MemoryReceiver:
    """A machine's side, for one host process. ``uid``: of the user whose process may connect; None:
    whoever knows the name, which only the session's stream tells. ``record``: the crash record to give."""

    def __init__(self, uid: int | None, record: int | None = None) -> None:
        self.name = b"\0podrun-" + secrets.token_hex(NAME_BYTES // 2).encode()
        self._uid, self._record = uid, record
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.name)
        self._listener.listen(1)
        self._socket: socket.socket | None = None
        self._waiting: dict[int, int] = {}

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
        """The connection of the host process. Raises OSError if there is none, PermissionError for another user's."""
        if self._socket is None:
            if self._listener is None:
                raise ConnectionResetError("the session has ended")
            self._listener.settimeout(PATIENCE_S)
            connection, _ = self._listener.accept()
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if self._uid is not None and _CREDENTIALS.unpack(raw)[1] != self._uid:
                connection.close()
                raise PermissionError("the process at the socket is another user's")
            self._listener.close()
            self._listener, self._socket = None, connection
            if self._record is not None:
                socket.send_fds(connection, [_NUMBER.pack(_RECORD, os.getpid())], [self._record])
        return self._socket

    def close(self) -> None:
        """Forget what was handed over and not used. Idempotent."""
        for end in (self._listener, self._socket):
            if end is not None:
                end.close()
        self._listener = self._socket = None
        waiting, self._waiting = self._waiting, {}
        for fd in waiting.values():
            os.close(fd)


class MemorySender:
    """A host process's side. Raises OSError if the machine's socket cannot be reached."""

    def __init__(self, name: bytes) -> None:
        if len(name) != NAME_BYTES + 8 or not name.startswith(b"\0podrun-"):
            raise OSError("no name of a machine's socket")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sent = 0
        try:
            self._socket.settimeout(PATIENCE_S)
            self._socket.connect(name)
        except BaseException:
            self._socket.close()
            raise

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
        """End it."""
        self._socket.close()


def tensor_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a tensor by its name; ApplicationRuntimeError for none of fixed size, such as Python
    objects.
    """
    try:
        kind = numpy_dtype(name)
    except (TypeError, AttributeError) as error:
        raise ApplicationRuntimeError(f"there is no dtype {name!r}") from error
    if kind.hasobject or kind.itemsize == 0 or kind.names is not None or kind.subdtype is not None:
        raise ApplicationRuntimeError(f"tensors cannot have dtype {name!r}")
    return kind


def view(data: Array, offset: int, dtype: str, shape: tuple[int, ...]) -> Array:
    """The tensor at ``offset`` of ``data`` (bytes). Raises ApplicationRuntimeError if it does not
    lie inside.
    """
    kind = tensor_dtype(dtype)
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
