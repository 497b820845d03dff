"""Memory that processes of one host share and that nobody can leave behind.

A `memfd` is a file without a name: it lives as long as a process holds it open or maps it. Peers open it
through ``/proc/<pid>/fd/<n>``, which needs the same user and the same PID namespace. When the last process is
gone, by whatever death, so is the memory.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from podrun.collectives.errors import within_limits
from podrun.collectives.group import Array

PAGE = mmap.PAGESIZE


def pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Segment:
    """One mapped memfd. ``fd`` stays open, for peers to open, until `close`; the mapping until its last view
    is gone.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.map = mmap.mmap(fd, nbytes)

    @classmethod
    def create(cls, label: str, nbytes: int) -> Segment:
        """A new zeroed segment of whole pages. ``label`` shows in ``/proc/<pid>/maps``. Raises HostLimitError."""
        with within_limits(f"shared memory of {pages(nbytes)} bytes for {label}"):
            fd = os.memfd_create(f"podrun-{label}"[:200], os.MFD_CLOEXEC)
            try:
                os.ftruncate(fd, pages(nbytes))
                return cls(fd, pages(nbytes))
            except BaseException:
                os.close(fd)
                raise

    @classmethod
    def open(cls, pid: int, fd: int) -> Segment:
        """The segment that process ``pid`` holds open as ``fd``. Raises OSError if it is gone or not ours to
        open, HostLimitError if there is no room for it.
        """
        with within_limits(f"room for shared memory of process {pid}"):
            mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                return cls(mine, os.fstat(mine).st_size)
            except BaseException:
                os.close(mine)
                raise

    def array(self, dtype: np.dtype[np.generic], size: int, offset: int = 0) -> Array:
        """``size`` elements from byte ``offset`` on; keeps the mapping alive."""
        return np.frombuffer(self.map, dtype, size, offset)

    def close(self) -> None:
        """Close the file; arrays handed out stay valid. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
