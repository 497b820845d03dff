"""Memory files that a host process shares with machines on its host.

The host process makes a `SharedRegion` (a memfd: no name anywhere, gone with its last user), and tells
machines its process id and file descriptor; they open it through ``/proc/<pid>/fd/<fd>`` with `open_region`.
The kernel lets only processes of the same user (or root) do that. The file is sealed against shrinking, so
that a machine that maps it cannot be made to fault.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from podrun.device.program.operands import ALIGNMENT, Array
from podrun.errors import ApplicationRuntimeError
from podrun.executable import numpy_dtype

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True, slots=True)
class RegionName:
    """How another process finds a region. ``inode`` tells whether ``fd`` still is the file that was meant."""

    pid: int
    fd: int
    inode: int
    size: int


class SharedRegion:
    """A region of this process, ``size`` bytes of zeros. Close it when machines no longer use it."""

    def __init__(self, size: int) -> None:
        self.size = max(size, 1)
        self._fd = os.memfd_create("podrun-ipuof", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, self.size)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        self._map = mmap.mmap(self._fd, self.size)
        self.bytes = np.frombuffer(self._map, np.uint8)

    @property
    def name(self) -> RegionName:
        """What to tell machines."""
        return RegionName(os.getpid(), self._fd, os.fstat(self._fd).st_ino, self.size)

    def close(self) -> None:
        """Give up the file; memory goes when the last view does. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_region(name: RegionName) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of another process's region, writable; unmapped when the last view is gone.

    Raises ApplicationRuntimeError if it is not what ``name`` says or could be shrunk.
    """
    try:
        fd = os.open(f"/proc/{name.pid}/fd/{name.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ApplicationRuntimeError(
            f"the shared memory of process {name.pid} cannot be opened: {error.strerror}"
        ) from error
    try:
        status = os.fstat(fd)
        if status.st_ino != name.inode or status.st_size != name.size:
            raise ApplicationRuntimeError(
                f"file {name.fd} of process {name.pid} is not the shared memory it announced"
            )
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if seals & _SEALS != _SEALS:
            raise ApplicationRuntimeError(f"file {name.fd} of process {name.pid} is not sealed shared memory")
        return np.frombuffer(mmap.mmap(fd, name.size), np.uint8)
    finally:
        os.close(fd)


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
