"""Sleeping on a word of shared memory: Linux futexes through ctypes.

A futex is a 32-bit word that processes share. ``wait`` sleeps while the word still has the value the caller
saw; ``wake`` wakes the sleepers after it was changed. Both release the GIL. Chosen over eventfd because a
peer can open a memfd through /proc but not an eventfd, and because one wake reaches all sleepers. See
futex(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from typing import Any

from podrun.errors import UnsupportedError

_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_EVERYONE = 0x7FFFFFFF
_SYSCALL_NUMBER = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}


def address_of(buffer: Any) -> int:
    """Where a writable buffer starts in this process; valid while the buffer lives."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


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
    """The futex at an address of a shared mapping; the caller keeps the mapping alive."""

    def __init__(self, address: int) -> None:
        self._number = ctypes.c_long(_number())
        self._address = ctypes.c_void_p(address)
        self._word = ctypes.c_uint32.from_address(address)
        self._wake_args = (self._number, self._address, ctypes.c_int(_FUTEX_WAKE), ctypes.c_int(_EVERYONE))

    @property
    def value(self) -> int:
        """The word as it stands."""
        return self._word.value

    @value.setter
    def value(self, new: int) -> None:
        self._word.value = new

    def wake(self) -> None:
        """Wake every sleeper."""
        _syscall(*self._wake_args, None, None, 0)

    def wait(self, seen: int, seconds: float) -> None:
        """Sleep until woken, at most ``seconds``; not at all if the word is no longer ``seen``. May wake
        early.
        """
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
