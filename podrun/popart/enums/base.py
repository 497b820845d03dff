"""What all of PopART's enumerations are."""

from __future__ import annotations

import enum


class PopartEnum(enum.Enum):
    """An enumeration whose members convert with ``int()`` and print as ``Class.Member``."""

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"
