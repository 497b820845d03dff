"""Memory that processes of one host share and that no death of a process can leave behind.

A region is a `memfd`: a file without a name, sealed against changes of size. It exists as long as a process holds it
open or maps it. Another process gets it handed over (`SharedRegion.adopt`), or, where both trust each other as ranks
of one group do, opens it through ``/proc/<pid>/fd/<fd>``, which the kernel allows to processes of the
same user in the same PID namespace. Because the size is sealed, a process that maps a region cannot be made to fault.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any

import numpy as np

from podrun.core.quick_dataclass import dataclass

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True, slots=True)
class RegionName:
    """How another process finds a region. ``inode`` and ``size`` (in bytes) identify the file behind ``fd``; 0 where
    the opener identifies the region by its content.
    """

    pid: int
    fd: int
    inode: int = 0
    size: int = 0


class SharedRegion:
    """One mapped region. The file ``fd`` stays open for others until `close`; the mapping stays until its last view
    is gone.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.map = mmap.mmap(fd, nbytes)

    @classmethod
    def create(cls, label: str, nbytes: int) -> SharedRegion:
        """A new region of zeros, at least one byte. ``label`` shows in ``/proc/<pid>/maps``. Raises OSError."""
        size = max(nbytes, 1)
        fd = os.memfd_create(f"podrun-{label}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, name: RegionName) -> SharedRegion:
        """The region of another process.

        Raises OSError if the process is gone or its files are not ours to open, ValueError if the file is not the
        region that ``name`` says or its size is not sealed.
        """
        fd = os.open(f"/proc/{name.pid}/fd/{name.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if name.inode not in (0, status.st_ino) or name.size not in (0, status.st_size):
                raise ValueError(
                    f"file {name.fd} of process {name.pid} is not the shared memory it announced"
                )
            if not _is_sealed(fd):
                raise ValueError(f"file {name.fd} of process {name.pid} is not sealed shared memory")
            return cls(fd, status.st_size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def adopt(cls, fd: int) -> SharedRegion:
        """The region behind a file descriptor that another process handed over; the descriptor is closed if it is not a
        region.

        Raises OSError, or ValueError if the file is not memory whose size is sealed.
        """
        try:
            status = os.fstat(fd)
            # Pages of other sizes may run out; reading such memory would then end the process.
            if not _is_sealed(fd) or status.st_blksize > mmap.PAGESIZE or not status.st_size:
                raise ValueError("the file is not sealed shared memory")
            return cls(fd, status.st_size)
        except BaseException:
            os.close(fd)
            raise

    @property
    def name(self) -> RegionName:
        """The name by which other processes find the region."""
        return RegionName(os.getpid(), self.fd, os.fstat(self.fd).st_ino, self.nbytes)

    def array(self, dtype: Any, size: int, offset: int = 0) -> np.ndarray[Any, np.dtype[Any]]:
        """``size`` writable elements from byte ``offset`` on. The array keeps the mapping alive."""
        return np.frombuffer(self.map, dtype, size, offset)

    @property
    def bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """All bytes of the region as an array."""
        return self.array(np.uint8, self.nbytes)

    def close(self) -> None:
        """Close the file; arrays handed out stay valid. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:  # not a memfd
        return False
