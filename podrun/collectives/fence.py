"""Order in memory, for what is done in Python.

x86 and s390x let every processor see stores in the order in which they were made, and that is all that the protocols
of this room ask of a store by the interpreter. Other processors (aarch64, riscv64, ppc64le) need to be told, by a
*fence*: all that a thread wrote and read before it comes before all that it writes and reads after it. It is an
instruction, which only the C module can give (`podrun.collectives.native`); without the module the kernel gives it, by
membarrier(2).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable

from podrun.collectives import native
from podrun.errors import UnsupportedError

_ORDERED = frozenset(("x86_64", "i386", "i686", "s390x"))
_MEMBARRIER = {"aarch64": 283, "riscv64": 283, "ppc64le": 365, "x86_64": 324}
_QUERY, _GLOBAL_EXPEDITED = 0, 2

Fence = Callable[[], None]


def fence_for(machine: str) -> Fence | None:
    """The fence of a kind of processor as `platform.machine` calls it; None: it needs none.

    Raises UnsupportedError where there is none to be had.
    """
    if machine in _ORDERED:
        return None
    return native.module.fence if native.module is not None else by_kernel(machine)


def by_kernel(machine: str) -> Fence:
    """A fence by the kernel: membarrier's expedited kind begins and ends with one on the calling processor.

    On a host with one processor it returns at once, and there nothing is out of order. Raises UnsupportedError if
    this kernel has none.
    """
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    number = ctypes.c_long(_MEMBARRIER.get(machine, -1))
    offered = call(number, ctypes.c_int(_QUERY), ctypes.c_uint(0), ctypes.c_int(0))
    if machine not in _MEMBARRIER or offered < 0 or not offered & _GLOBAL_EXPEDITED:
        why = os.strerror(ctypes.get_errno()) if offered < 0 else "not known or not offered"
        raise UnsupportedError(
            f"ranks that share memory on {machine} need podrun's C module, or membarrier(2) of the kernel ({why})",
            hint="Install a C compiler and podrun again: pip install --force-reinstall --no-deps podrun",
        )
    arguments = (number, ctypes.c_int(_GLOBAL_EXPEDITED), ctypes.c_uint(0), ctypes.c_int(0))

    def fence() -> None:
        if call(*arguments) < 0:
            raise OSError(ctypes.get_errno(), "membarrier failed")

    return fence


def nothing() -> None:
    """The fence of processors that need none."""


def here() -> Fence | None:
    """The fence of this host's processor; None: it needs none."""
    return fence_for(platform.machine())
