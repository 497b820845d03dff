"""What Python cannot do by itself: the C module, where it was built, and memory fences.

`module` is ``podrun.collectives._collectives``, which does a whole collective in one call when nothing unusual happens.
Everything works without it, only slower (``docs/collectives.md`` has the figures). Where there was no C compiler at
installation, or where the module was built from another version of the protocol, `module` is None.

A *fence* orders a thread's memory accesses: all before it take effect before all after it. x86 and s390x keep stores in
order by themselves, which is all that the protocols of this room need of stores made by the interpreter. Other
processors (aarch64, riscv64, ppc64le) need a fence: an instruction of the C module or, without the module, the system
call membarrier(2).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from podrun.core.errors import UnsupportedError

if TYPE_CHECKING:
    from types import ModuleType

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


module: Any = _load()
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


if module is not None:
    Counts = module.Counts  # type: ignore[misc]


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
    return module.fence if module is not None else kernel_fence(machine)


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
