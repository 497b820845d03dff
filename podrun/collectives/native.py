"""The C module `podrun.collectives._meeting`, where it was built: collectives whose every step goes well as one call.

Everything works without it, only slower (``docs/collectives.md`` has the figures): a machine without a C compiler
installs podrun without it, and a module built from another version of the protocol is not used. What is here decides
that in one place; `podrun.collectives.plans` and `meeting` ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

PROTOCOL = 2
"""Of what lies in shared memory and who writes what when; the same number stands in the C file."""

UNKNOWN, ALONE, NOT_ALONE = 0, 1, 2
"""Whether a rank is the only one of its process: only then may it look for a while without giving up the GIL."""


def _load() -> ModuleType | None:
    try:
        from podrun.collectives import _meeting
    except ImportError:
        return None
    return _meeting if _meeting.PROTOCOL == PROTOCOL else None


module: Any = _load()
"""The C module, or None."""


class Counts:
    """What a rank counts by itself, where there is no C module to share it with."""

    count: int
    """Meetings that it has come to."""
    spins: int
    """Whether it may look for a while: `UNKNOWN` and so on."""
    quick_looks: int
    """Looks before it gives up the core."""
    spin: float
    """Seconds of looking before it sleeps."""

    def __init__(self) -> None:
        self.count = self.spins = self.quick_looks = 0
        self.spin = 0.0


if module is not None:
    Counts = module.Counts  # type: ignore[misc]
