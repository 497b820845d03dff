"""What the state consists of: partitions, agents out of service, queued requests, reservations; leases of machines;
and on whose behalf it is asked.

Plain data. What is kept is stored as rows (`stored_rows`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace

from podrun.core.identity import user_name
from podrun.core.quick_dataclass import dataclass
from podrun.faults import FaultSpec
from podrun.partition.state.placement import MachineSlice
from podrun.partition.state.values import NO_USER, PartitionState, Requirements, SyncType


@dataclass(frozen=True, slots=True)
class Partition:
    """The allocator's record of a partition. ``slices`` are its machines in partition order."""

    name: str
    allocation: str
    size: int
    reconfigurable: bool
    num_gcds: int
    num_ilds: int
    sync_type: SyncType
    auto_reset: bool
    slices: tuple[MachineSlice, ...]
    created: float
    faults: tuple[FaultSpec, ...] = ()
    state: PartitionState = PartitionState.PENDING
    error: str = ""
    generation: int = 0
    operation: int = 0
    owner: int = NO_USER
    """User id of the user who made it."""
    limit_s: float = 0.0
    ends: float = 0.0
    """When the partition is removed, in seconds since 1970: its limit after it first became active. 0: not yet, or no
    limit.
    """
    relocatable: bool = False
    routing: str = ""
    """The IPU-Link routing in the request; empty: the best one for size and POD."""
    holder: str = ""
    """The process with which it ends (`podrun.partition.host.holders`); empty: it stays until it is removed."""
    story: tuple[str, ...] = ()
    """The transitions that led here, oldest first; the last `STORY_LENGTH` of them."""

    def machines(self) -> list[tuple[int, MachineSlice]]:
        """Each machine in partition order, with the index in the partition of its first IPU."""
        result, first = [], 0
        for part in self.slices:
            result.append((first, part))
            first += part.count
        return result

    def epoch(self, service: str) -> str:
        """The id of this life of the partition: no other partition has it, not even one of the same name. ``service``:
        the service's id.
        """
        return f"{service}/{self.created:.6f}"

    def moved(self, state: PartitionState, why: str, *, error: str = "") -> Partition:
        """A copy in another state whose story ends with the transition."""
        line = f"{self.state.name} -> {state.name}: {why}"
        return replace(self, state=state, error=error, story=(*self.story, line)[-STORY_LENGTH:])

    def held_times(self) -> tuple[float, float]:
        """`busy_until` as a time and a time from now, of which the later one holds."""
        if not self.limit_s:
            return math.inf, 0.0
        return (self.ends, OVERDUE_S) if self.ends else (0.0, max(self.limit_s, OVERDUE_S))

    def busy_until(self, now: float) -> float:
        """When its IPUs are free at the latest; infinite without a limit. A partition over its limit is removed
        soon.
        """
        if not self.limit_s:
            return math.inf
        return max(self.ends or now + self.limit_s, now + OVERDUE_S)


@dataclass(frozen=True, slots=True)
class Maintenance:
    """An administrator's request for an agent: ``CORDONED`` (no new partitions) or ``DRAINING`` (and no present ones
    after ``deadline``; 0: they may stay). Times are seconds since 1970.
    """

    agent: str
    draining: bool
    since: float
    deadline: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Queued:
    """A request that waits for IPUs. Higher ``priority`` goes first; of equal priority the lower ``sequence``."""

    needs: Requirements
    priority: int
    sequence: int
    since: float

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key for the order in which requests are served."""
        return (-self.priority, self.sequence)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Agents kept for partitions that name the reservation, from ``start`` to ``end`` (seconds since 1970)."""

    name: str
    agents: tuple[str, ...]
    start: float
    end: float


STORY_LENGTH = 32
OVERDUE_S = 10.0
"""Seconds from now in which a partition over its time limit counts as gone."""


@dataclass(frozen=True, slots=True)
class MachineUse:
    """An IPU-M2000 (its agent) as one partition uses it."""

    agent_id: str
    partition: str


@dataclass(frozen=True, slots=True)
class Lease:
    """A server's right to command the machines of a POD. ``pod``: the id of its state; ``epoch``: grows with each
    server that owns that state, so that machines refuse an earlier one. Epoch 0: machines end with their service."""

    pod: str = ""
    epoch: int = 0


NO_LEASE = Lease()


@dataclass(frozen=True, slots=True)
class Asker:
    """On whose behalf the service works. ``allocations``: those whose things may be named to it; None: all. ``check``:
    raises DeniedError if it may not do what it asks with a partition, given its name and its owner's user id.

    What it does not see is to it as if it were not there. Both are asked under the lock under which the service
    decides, so that a partition is never without its owner.
    """

    allocations: frozenset[str] | None = None
    check: Callable[[str, int], None] = lambda partition, owner: None

    def sees(self, allocation: str) -> bool:
        """Whether things of an allocation may be named."""
        return self.allocations is None or allocation in self.allocations


ITSELF = Asker()
"""The service itself, and callers who see everything."""
NOBODY = -2
"""The user id of one who owns nothing, and of an owner who is not told."""


def owner_name(owner: int) -> str:
    """Name of a partition's owner."""
    if owner == NOBODY:
        return "another user"
    return user_name(os.getuid() if owner == NO_USER else owner)
