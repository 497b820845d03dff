"""The allocator's input (events), its decisions (changes of state and instructions), and a partition's record.

Plain data. Events are requests of people, reports of the service about operations and machines, and the server's start.
Instructions are work on machines. An *operation* number ties an instruction to the event that reports its end: the
allocator ignores a report about an operation that is not the partition's current one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from podrun.core.cluster import Allocation, Cluster, GatewayTopology, LinkTopology
from podrun.core.quick_dataclass import dataclass
from podrun.partition.state.placement import MachineSlice
from podrun.partition.state.records import Maintenance, Partition, Queued, Reservation
from podrun.partition.state.values import Requirements


@dataclass(frozen=True, slots=True)
class CreatePartition:
    """Request: make a new partition; ``now`` is seconds since 1970."""

    requirements: Requirements
    now: float


@dataclass(frozen=True, slots=True)
class OperationStarted:
    """Report: the service began to carry out an operation on a partition."""

    partition: str
    operation: int


@dataclass(frozen=True, slots=True)
class OperationSucceeded:
    """Report: provisioning, resetting or releasing is done."""

    partition: str
    operation: int


@dataclass(frozen=True, slots=True)
class OperationFailed:
    """Report: provisioning, resetting or releasing failed; ``error`` is a sentence."""

    partition: str
    operation: int
    error: str


@dataclass(frozen=True, slots=True)
class ResetPartition:
    """Request: reset a partition. ``generation``: the generation to end (0: any)."""

    partition: str
    generation: int = 0


@dataclass(frozen=True, slots=True)
class RemovePartition:
    """Request: remove a partition."""

    partition: str


@dataclass(frozen=True, slots=True)
class AgentLost:
    """Report: an agent's machine process is gone; ``reason`` is a phrase."""

    agent: str
    reason: str


@dataclass(frozen=True, slots=True)
class RestartAgent:
    """Request: replace an agent's machine by a fresh one. ``generation``: of the partitions on it that are to get it
    (0: any).
    """

    agent: str
    generation: int = 0


@dataclass(frozen=True, slots=True)
class PowerCycleAgent:
    """Request: power-cycle an agent's machine. ``generation``: as in `RestartAgent`."""

    agent: str
    generation: int = 0


@dataclass(frozen=True, slots=True)
class CreateAllocation:
    """Request: make an allocation of these agents."""

    name: str
    agents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RemoveAllocation:
    """Request: remove an allocation."""

    name: str


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Request: a new partition, which waits in the queue if there is no room now."""

    requirements: Requirements
    priority: int
    now: float


@dataclass(frozen=True, slots=True)
class LeaveQueue:
    """Request, or report that its client has vanished: a queued request is given up."""

    name: str


@dataclass(frozen=True, slots=True)
class HoldersGone:
    """Report: the processes with which queued requests and partitions end are gone; holders by name."""

    requests: Mapping[str, str]
    partitions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class KeepPartition:
    """Request: a partition no longer ends with ``holder``."""

    partition: str
    holder: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Report: time has passed. Partitions over their limit and drains over their deadline end; the queue is served."""

    now: float


@dataclass(frozen=True, slots=True)
class SetMaintenance:
    """Request: cordon or drain an agent. ``deadline_s``: seconds until its partitions are removed; 0: they stay."""

    agent: str
    draining: bool
    now: float
    deadline_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EndMaintenance:
    """Request: return an agent to service."""

    agent: str
    now: float


@dataclass(frozen=True, slots=True)
class CreateReservation:
    """Request: keep agents for some time."""

    reservation: Reservation
    now: float


@dataclass(frozen=True, slots=True)
class RemoveReservation:
    """Request: end a reservation."""

    name: str
    now: float


@dataclass(frozen=True, slots=True)
class CreateAgent:
    """Request: add an IPU-M2000. It belongs to no cluster at first."""

    name: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class RemoveAgent:
    """Request: remove an IPU-M2000 that is in no cluster."""

    name: str


@dataclass(frozen=True, slots=True)
class CreateCluster:
    """Request: join agents that are in no cluster by links. ``ilds``: IPU-Link domains, of equal size; ``gateway``: how
    the domains are joined; None: by the default for their number."""

    name: str
    agents: tuple[str, ...]
    ilds: int
    ipu_links: LinkTopology
    gateway: GatewayTopology | None = None


@dataclass(frozen=True, slots=True)
class RemoveCluster:
    """Request: remove a cluster. Its agents stay, in no cluster."""

    name: str


@dataclass(frozen=True, slots=True)
class ServerStarted:
    """Report: the service starts with the stored state. ``adopted``: partitions whose machines an earlier server left
    in order; the others have no machine process left.
    """

    adopted: frozenset[str] = frozenset()


Event = (
    CreatePartition
    | OperationStarted
    | OperationSucceeded
    | OperationFailed
    | ResetPartition
    | RemovePartition
    | AgentLost
    | RestartAgent
    | PowerCycleAgent
    | CreateAllocation
    | RemoveAllocation
    | Enqueue
    | LeaveQueue
    | HoldersGone
    | KeepPartition
    | Tick
    | SetMaintenance
    | EndMaintenance
    | CreateReservation
    | RemoveReservation
    | CreateAgent
    | RemoveAgent
    | CreateCluster
    | RemoveCluster
    | ServerStarted
)


@dataclass(frozen=True, slots=True)
class ProvisionMachines:
    """Start and configure the machines of a partition; report `OperationStarted`, then how it ended."""

    partition: str
    operation: int


@dataclass(frozen=True, slots=True)
class ResetMachines:
    """Re-initialise IPUs and links of a partition; report `OperationStarted`, then how it ended."""

    partition: str
    operation: int


@dataclass(frozen=True, slots=True)
class ReleaseMachines:
    """Take the machines in ``slices`` back from a partition; report how it ended."""

    partition: str
    operation: int
    slices: tuple[MachineSlice, ...]


@dataclass(frozen=True, slots=True)
class StopAgentMachines:
    """End all processes of an agent: the machine is lost as a whole."""

    agent: str


@dataclass(frozen=True, slots=True)
class ReplaceAgentMachines:
    """Replace the processes of an agent by fresh ones for the partitions that hold its IPUs."""

    agent: str
    partitions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PowerCycleMachines:
    """Power-cycle the processes of an agent."""

    agent: str


MachineOrder = (
    ProvisionMachines
    | ResetMachines
    | ReleaseMachines
    | StopAgentMachines
    | ReplaceAgentMachines
    | PowerCycleMachines
)


@dataclass(frozen=True, slots=True)
class StateChange:
    """The change of state that an event causes; fields without a value mean no change.

    ``partitions``: new contents by name, None for a partition that is gone. ``allocations``: all of them, in order.
    ``lost``: all agents whose machine is lost. The others: new contents by name, None for an entry that is gone.
    """

    partitions: Mapping[str, Partition | None] = field(default_factory=dict)
    allocations: tuple[Allocation, ...] | None = None
    lost: frozenset[str] | None = None
    maintenance: Mapping[str, Maintenance | None] = field(default_factory=dict)
    queue: Mapping[str, Queued | None] = field(default_factory=dict)
    reservations: Mapping[str, Reservation | None] = field(default_factory=dict)
    layout: Cluster | None = None

    def __bool__(self) -> bool:
        named = (self.partitions, self.maintenance, self.queue, self.reservations)
        whole = (self.allocations, self.lost, self.layout)
        return any(named) or any(entry is not None for entry in whole)


@dataclass(frozen=True, slots=True)
class Decision:
    """The allocator's answer to an event: the change to store and then apply, and the instructions to carry out
    afterwards.

    ``operations``: the last operation number after it.
    """

    change: StateChange
    instructions: tuple[MachineOrder, ...]
    operations: int
