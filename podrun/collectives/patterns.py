"""Who needs which bytes of whom: collectives that only move data, as one small function each.

Every rank *posts* a block of bytes. `Pattern.part` says which bytes of the block of ``source`` rank ``dest``
needs. Each kind of group has one way to carry out any pattern (`podrun.collectives.group.Group.exchange`), so
that broadcast, gather, scatter, all-gather and all-to-all are the same code over shared memory and over TCP.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """The collectives that only move data."""

    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    GATHER = "gather"
    SCATTER = "scatter"


@dataclass(frozen=True, slots=True)
class Pattern:
    """One collective: ``nbytes`` is the size of the piece that one rank needs of one other.

    ``root`` is the rank that gives or takes in broadcast, gather and scatter. ``detail`` further names the
    call (dtype, shape), for messages and so that ranks that disagree find out.
    """

    kind: Kind
    nbytes: int
    root: int = 0
    detail: str = ""

    def part(self, source: int, dest: int) -> tuple[int, int]:
        """Offset and size, in bytes, of what ``dest`` needs of what ``source`` posts; size 0 for nothing."""
        if self.kind is Kind.ALL_GATHER or (self.kind is Kind.BROADCAST and source == self.root):
            return 0, self.nbytes
        if self.kind is Kind.GATHER and dest == self.root:
            return 0, self.nbytes
        if self.kind is Kind.ALL_TO_ALL or (self.kind is Kind.SCATTER and source == self.root):
            return dest * self.nbytes, self.nbytes
        return 0, 0

    def pieces_of(self, ranks: int) -> int:
        """Pieces that one rank posts at most."""
        return ranks if self.kind in (Kind.ALL_TO_ALL, Kind.SCATTER) else 1

    @property
    def text(self) -> str:
        """The call, for messages."""
        root = f", root {self.root}" if self.kind in (Kind.BROADCAST, Kind.GATHER, Kind.SCATTER) else ""
        return f"{self.kind.value}({self.detail or f'{self.nbytes} bytes'}{root})"
