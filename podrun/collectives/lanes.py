"""Who reduces what, in which order, when ranks of a group are on several hosts.

A vector is cut into *lanes*: lane *m* is rank *m*'s slice. On each host one rank handles a lane: its owner
where it lives, elsewhere one of the ranks there, in turn. A lane's values are combined in rank order whatever
the hosts, so a running reduction visits the hosts in the order in which their ranks come: *runs* of
consecutive ranks of one host. It starts at the first run, each handler adds the values of its run, and at the
last run the lane is done. In pieces, so that all handlers and both directions of every connection are busy at
once: between two hosts each moves the vector once each way, which is what a ring would do, and no sum is
taken in another order than on a single host.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Layout:
    """Which rank is on which host: ``host_of[rank]`` counts hosts in order of their first rank."""

    host_of: tuple[int, ...]

    @classmethod
    def from_names(cls, names: Sequence[str]) -> Layout:
        """From each rank's host by name."""
        order = list(dict.fromkeys(names))
        return cls(tuple(order.index(name) for name in names))

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return max(self.host_of) + 1

    @cached_property
    def ranks_on(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each host, in order."""
        return tuple(
            tuple(rank for rank, where in enumerate(self.host_of) if where == host)
            for host in range(self.hosts)
        )

    @cached_property
    def runs(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Host and ranks of every run, in rank order."""
        grouped = itertools.groupby(range(len(self.host_of)), key=lambda rank: self.host_of[rank])
        return tuple((host, tuple(ranks)) for host, ranks in grouped)

    def handler(self, host: int, lane: int) -> int:
        """The rank that handles a lane on a host."""
        if self.host_of[lane] == host:
            return lane
        here = self.ranks_on[host]
        return here[lane % len(here)]

    def lanes_of(self, rank: int) -> list[int]:
        """The lanes that a rank handles."""
        host = self.host_of[rank]
        return [lane for lane in range(len(self.host_of)) if self.handler(host, lane) == rank]

    def next_host(self, host: int, origin: int) -> int | None:
        """Where a finished lane goes from ``host``: round the hosts until all have it. None at the last."""
        following = (host + 1) % self.hosts
        return None if following == origin else following

    def previous_host(self, host: int) -> int:
        """Where a finished lane comes from, on any host but its origin."""
        return (host - 1) % self.hosts
