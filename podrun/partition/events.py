"""What the allocator is told (events) and what it wants done (instructions). Plain data.

An *operation* number ties an instruction to the event that reports its end: a report about an operation that
is no longer the partition's current one is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from podrun.partition.placement import MachineSlice
from podrun.partition.types import PartitionState, Requirements, SyncType

# --- state --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition as the allocator holds it. ``slices`` are its machines in partition order."""

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
    faults: tuple[str, ...] = ()
    state: PartitionState = PartitionState.PENDING
    error: str = ""
    generation: int = 0
    operation: int = 0
    story: tuple[str, ...] = ()
    """The transitions that led here, oldest first; the last `STORY_LENGTH` of them."""

    def machines(self) -> list[tuple[int, MachineSlice]]:
        """Its machines in partition order, each with the partition index of its first IPU."""
        result, first = [], 0
        for part in self.slices:
            result.append((first, part))
            first += part.count
        return result

    def moved(self, state: PartitionState, why: str, *, error: str = "") -> Partition:
        """The partition in another state, with the transition in its story."""
        line = f"{self.state.name} -> {state.name}: {why}"
        return replace(self, state=state, error=error, story=(*self.story, line)[-STORY_LENGTH:])


STORY_LENGTH = 32


# --- events -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Create:
    """Somebody asks for a partition; ``now`` is seconds since 1970."""

    requirements: Requirements
    now: float


@dataclass(frozen=True, slots=True)
class Started:
    """The service began to bring up the machines of a partition."""

    partition: str
    operation: int


@dataclass(frozen=True, slots=True)
class Succeeded:
    """Provisioning, resetting or releasing came to its end."""

    partition: str
    operation: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Provisioning, resetting or releasing failed; ``error`` is a sentence."""

    partition: str
    operation: int
    error: str


@dataclass(frozen=True, slots=True)
class RequestReset:
    """Somebody asks to reset a partition."""

    partition: str


@dataclass(frozen=True, slots=True)
class RequestRemove:
    """Somebody asks to remove a partition."""

    partition: str


@dataclass(frozen=True, slots=True)
class MachineLost:
    """A machine process is gone; ``reason`` is a phrase."""

    agent: str
    reason: str


@dataclass(frozen=True, slots=True)
class RequestRestart:
    """Somebody asks to replace an agent's machine by a fresh one."""

    agent: str


@dataclass(frozen=True, slots=True)
class RequestPowerCycle:
    """Somebody asks to power-cycle an agent's machine."""

    agent: str


@dataclass(frozen=True, slots=True)
class CreateAllocation:
    """Somebody asks for an allocation."""

    name: str
    agents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RemoveAllocation:
    """Somebody asks to remove an allocation."""

    name: str


@dataclass(frozen=True, slots=True)
class Recover:
    """The service starts with what the store held: no machine process is left from before."""


Event = (
    Create
    | Started
    | Succeeded
    | Failed
    | RequestReset
    | RequestRemove
    | MachineLost
    | RequestRestart
    | RequestPowerCycle
    | CreateAllocation
    | RemoveAllocation
    | Recover
)

# --- instructions -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Provision:
    """Start and configure the machines of a partition; report `Started`, then `Succeeded` or `Failed`."""

    partition: str
    operation: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Re-initialise IPUs and links of a partition; report `Succeeded` or `Failed`."""

    partition: str
    operation: int


@dataclass(frozen=True, slots=True)
class Release:
    """Take the machines of a partition back; report `Succeeded` or `Failed`. ``slices`` say which."""

    partition: str
    operation: int
    slices: tuple[MachineSlice, ...]


@dataclass(frozen=True, slots=True)
class StopMachines:
    """End whatever processes an agent still has: the machine is lost as a whole."""

    agent: str


@dataclass(frozen=True, slots=True)
class RestartMachines:
    """Replace the processes of an agent by fresh ones for the partitions that hold its IPUs."""

    agent: str
    partitions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PowerCycle:
    """Power-cycle the processes of an agent."""

    agent: str


@dataclass(frozen=True, slots=True)
class SavePartition:
    """Write a partition to the store."""

    partition: str


@dataclass(frozen=True, slots=True)
class ForgetPartition:
    """Delete a partition from the store."""

    partition: str


@dataclass(frozen=True, slots=True)
class SaveAllocations:
    """Write all allocations to the store."""


@dataclass(frozen=True, slots=True)
class SaveLost:
    """Write which agents are lost to the store."""


Instruction = (
    Provision
    | Reset
    | Release
    | StopMachines
    | RestartMachines
    | PowerCycle
    | SavePartition
    | ForgetPartition
    | SaveAllocations
    | SaveLost
)
