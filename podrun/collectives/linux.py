"""What groups need beneath Python: futexes, whether a process is alive, shared memory, the C module and memory fences.

**Futexes.** A futex is a 32-bit word that processes share. ``wait`` sleeps while the word still has the value that the
caller saw; ``wake`` wakes the sleepers after the word was changed. Both release the GIL. Futexes were chosen over
eventfd because a peer can open a memfd through /proc but not an eventfd, and because one wake reaches all sleepers. See
futex(2).

**Processes.** A process is identified by its PID and its start time, so that a PID that is used again is not taken for
the same process.

**The C module.** `c_module` is ``podrun.collectives._collectives``, which does a whole collective in one call when
nothing unusual happens. Everything works without it, only slower (``docs/collectives.md`` has the figures). Where there
was no C compiler at installation, or where the module was built from another version of the protocol, `c_module` is
None.

**Fences.** A fence orders a thread's memory accesses: all before it take effect before all after it. x86 and s390x keep
stores in order by themselves, which is all that the protocols of this room need of stores made by the interpreter.
Other processors (aarch64, riscv64, ppc64le) need a fence: an instruction of the C module or, without the module, the
system call membarrier(2).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import select
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun.collectives.group import HostLimitError, within_limits
from podrun.core.errors import UnsupportedError
from podrun.core.shared_region import RegionName, SharedRegion

if TYPE_CHECKING:
    from types import ModuleType

_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_EVERYONE = 0x7FFFFFFF
_SYSCALL_NUMBER = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


def _number() -> int:
    machine = platform.machine()
    if machine not in _SYSCALL_NUMBER:
        raise UnsupportedError(f"collectives do not know the futex system call of {machine}")
    return _SYSCALL_NUMBER[machine]


class Futex:
    """The futex ``offset`` bytes into a shared mapping, which it keeps alive: it may be rung after all else is gone."""

    def __init__(self, mapping: Any, offset: int) -> None:
        self._number = ctypes.c_long(_number())
        self._word = ctypes.c_uint32.from_buffer(mapping, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))
        self._wake_args = (self._number, self._address, ctypes.c_int(_FUTEX_WAKE), ctypes.c_int(_EVERYONE))

    @property
    def value(self) -> int:
        """The current value of the word."""
        return self._word.value

    @value.setter
    def value(self, new: int) -> None:
        self._word.value = new

    def wake(self) -> None:
        """Wake every sleeper."""
        _syscall(*self._wake_args, None, None, 0)

    def wait(self, seen: int, seconds: float) -> None:
        """Sleep until woken, at most ``seconds``. Returns at once if the word is not ``seen``; may return early."""
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        result = _syscall(
            self._number,
            self._address,
            ctypes.c_int(_FUTEX_WAIT),
            ctypes.c_uint32(seen),
            ctypes.byref(limit),
            None,
            0,
        )
        if result < 0 and (code := ctypes.get_errno()) not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, f"futex: {os.strerror(code)}")


def boot_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot (field 22 of ``/proc/<pid>/stat``); 0 if there is no such
    process. Raises HostLimitError if no file can be opened to read it.
    """
    with within_limits(f"file to look at process {pid} by"):
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1")
        except (FileNotFoundError, ProcessLookupError):
            return 0
    return int(text.rpartition(")")[2].split()[19])


def host_identity() -> str:
    """A text that is equal for two processes iff they are on one host: same boot, PID namespace and network namespace.

    Processes in different PID namespaces cannot share memory through /proc. Tests use network namespaces with addresses
    of their own as several hosts.
    """
    with within_limits("file to know this host by"):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="latin-1").strip()
    return "/".join([boot, os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net")])


class ProcessWatch:
    """Watches one process by a pidfd, which reports the end of the process even before its parent has noticed.

    If this process may not open another file, only the PID is checked; a zombie then counts as alive.
    """

    def __init__(self, pid: int, started: int) -> None:
        self.fd = -1
        self._pid = pid
        self._gone = False
        try:
            with within_limits("pidfd"):
                self.fd = os.pidfd_open(pid)
            self._gone = boot_ticks(pid) != started
        except ProcessLookupError:
            self._gone = True
        except HostLimitError:
            pass

    def alive(self) -> bool:
        """Whether the watched process still runs."""
        if self._gone:
            return False
        if self.fd < 0:
            return Path(f"/proc/{self._pid}").exists()
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close the pidfd. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def whole_pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def create_region(label: str, nbytes: int) -> SharedRegion:
    """A new region of whole pages. Raises HostLimitError if the host has no memory or file for it."""
    with within_limits(f"shared memory of {whole_pages(nbytes)} bytes for {label}"):
        return SharedRegion.create(label, whole_pages(nbytes))


def open_region(pid: int, fd: int, inode: int = 0) -> SharedRegion:
    """The region that process ``pid`` holds open as ``fd``; ``inode``: of its file, 0 where its content tells.

    Raises OSError if it is gone or not ours to open, HostLimitError if the host has no memory or file for it.
    """
    with within_limits(f"room for shared memory of process {pid}"):
        try:
            return SharedRegion.open(RegionName(pid, fd, inode))
        except ValueError as error:
            raise OSError(errno.EBADF, str(error)) from error


PROTOCOL = 2
"""Version of the layout of shared memory and of who writes what when. The C file has the same number."""

UNKNOWN, ALONE, NOT_ALONE = 0, 1, 2
"""Whether a rank is the only one of its process: only then may it spin without releasing the GIL."""


def _load() -> ModuleType | None:
    try:
        from podrun.collectives import _collectives
    except ImportError:
        return None
    return _collectives if _collectives.PROTOCOL == PROTOCOL else None


c_module: Any = _load()
"""The C module, or None."""


class Counts:
    """State of a rank's barriers that Python and C share; this class is used where there is no C module."""

    count: int
    """Barriers that the rank has arrived at."""
    spins: int
    """Whether it may spin: `UNKNOWN`, `ALONE` or `NOT_ALONE`."""
    quick_looks: int
    """Number of times that it reads the words before it yields the core."""
    spin: float
    """Seconds of spinning before it sleeps."""

    def __init__(self) -> None:
        self.count = self.spins = self.quick_looks = 0
        self.spin = 0.0


if c_module is not None:
    Counts = c_module.Counts  # type: ignore[misc]


_ORDERED = frozenset(("x86_64", "i386", "i686", "s390x"))
_MEMBARRIER = {"aarch64": 283, "riscv64": 283, "ppc64le": 365, "x86_64": 324}
_QUERY, _GLOBAL_EXPEDITED = 0, 2

Fence = Callable[[], None]


def fence_for(machine: str) -> Fence | None:
    """The fence for a processor by its name in `platform.machine`; None if it needs none.

    Raises UnsupportedError if neither the C module nor the kernel provides one.
    """
    if machine in _ORDERED:
        return None
    return c_module.fence if c_module is not None else kernel_fence(machine)


def kernel_fence(machine: str) -> Fence:
    """A fence by membarrier(2), whose expedited command begins and ends with one on the calling processor.

    On a host with one processor the call returns at once, and nothing is out of order there. Raises UnsupportedError
    if the kernel does not offer it.
    """
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    number = ctypes.c_long(_MEMBARRIER.get(machine, -1))
    offered = call(number, ctypes.c_int(_QUERY), ctypes.c_uint(0), ctypes.c_int(0))
    if machine not in _MEMBARRIER or offered < 0 or not offered & _GLOBAL_EXPEDITED:
        why = os.strerror(ctypes.get_errno()) if offered < 0 else "unknown processor, or not offered"
        raise UnsupportedError(
            f"ranks that share memory on {machine} need podrun's C module, or membarrier(2) of the kernel ({why})",
            hint="Install a C compiler and podrun again: pip install --force-reinstall --no-deps podrun",
        )
    arguments = (number, ctypes.c_int(_GLOBAL_EXPEDITED), ctypes.c_uint(0), ctypes.c_int(0))

    def fence() -> None:
        if call(*arguments) < 0:
            raise OSError(ctypes.get_errno(), "membarrier failed")

    return fence


def no_fence() -> None:
    """Do nothing: the fence of processors that need none."""


def fence_here() -> Fence | None:
    """The fence for this host's processor; None if it needs none."""
    return fence_for(platform.machine())
