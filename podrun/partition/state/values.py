"""Values that the V-IPU service, its client and its commands exchange. Imports neither gRPC nor Ray."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from podrun.core.cluster import IPUS_PER_MACHINE
from podrun.core.errors import UsageError

if TYPE_CHECKING:
    from podrun.faults import FaultSpec


class PartitionState(enum.Enum):
    """Life of a partition: PENDING -> PROVISIONING -> ACTIVE <-> RESETTING; REMOVING -> REMOVED; ERROR from
    any."""

    PENDING = 1
    """IPUs are reserved; no machine has been started yet."""
    PROVISIONING = 2
    """Machines are being started and configured."""
    ACTIVE = 3
    """Ready for use."""
    RESETTING = 4
    """IPUs and links are being re-initialised."""
    REMOVING = 5
    """Machines are being taken back; then the IPUs are free."""
    ERROR = 6
    """Not usable; the partition's error says why and what to do."""
    REMOVED = 7
    """Gone."""
    QUEUED = 8
    """The request waits for IPUs; there is no partition yet."""

    def is_terminal(self) -> bool:
        """True iff only a request or a failure ends this state, so that polling may stop."""
        return self in (PartitionState.ACTIVE, PartitionState.ERROR, PartitionState.REMOVED)

    @property
    def wire_name(self) -> str:
        """The name on the wire: ``PS_ACTIVE``. People read ``name``."""
        return f"PS_{self.name}"


class SyncType(enum.Enum):
    """How the IPUs of a partition synchronise; values are the command line's spelling."""

    C2_COMPATIBLE = "c2-compatible"
    POD_NATIVE_DEFAULT = "pod-native-default"

    @property
    def wire_name(self) -> str:
        """The spelling on the wire, which PopRun's --sync-type uses: ``ST_POD_NATIVE_DEFAULT``."""
        return f"ST_{self.name}"


def parse_sync_type(text: str) -> SyncType:
    """The SyncType of either spelling, in any case. Raises UsageError, which names both."""
    plain = text.lower().replace("_", "-").removeprefix("st-")
    for kind in SyncType:
        if kind.value == plain:
            return kind
    known = ", ".join(kind.value for kind in SyncType)
    raise UsageError(f"unknown sync type {text!r}", hint=f"Known: {known} (PopRun: ST_C2_COMPATIBLE, ...).")


NO_USER = -1
"""Owner of a partition that an earlier podrun stored: it belongs to the user who runs the server."""


@dataclass(frozen=True, slots=True)
class Requirements:
    """A request for a partition. ``allocation`` "" and ``num_ilds`` 0: the server chooses. Without ``auto_reset``
    errors of IPUs stay until they are reset. ``faults`` are planned before the partition becomes active. ``owner``: the
    user id of who asks; the server fills it in."""

    name: str
    size: int
    allocation: str = ""
    reconfigurable: bool = False
    num_gcds: int = 1
    num_ilds: int = 0
    sync_type: SyncType | None = None
    auto_reset: bool = True
    faults: tuple[FaultSpec, ...] = ()
    limit_s: float = 0.0
    """Seconds after which the partition is removed; 0: no limit."""
    relocatable: bool = False
    """Whether the server may move the partition to other IPUs when a machine of it fails."""
    reservation: str = ""
    """The reservation whose IPUs it may use."""
    owner: int = NO_USER
    routing: str = ""
    """``DNC``, ``SWNC`` or ``RINGSWNC``; empty: the best one for the size and the POD's links."""
    index: int = 0
    """Which of the V-IPU cluster's places of this size, from 1; 0: the server chooses."""
    cluster: str = ""
    """The V-IPU cluster it is to lie in; empty: the server chooses."""
    holder: str = ""
    """The process with which the request and the partition end (`podrun.partition.host.holders`); empty: none."""


class AgentState(enum.Enum):
    """State of an IPU-M2000's machine process."""

    STANDBY = 1
    """No process runs; one starts when a partition needs it."""
    UP = 2
    """The process runs."""
    LOST = 3
    """The process ended by itself: `vipu-admin restart agent ID`."""


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """A partition as the service describes it."""

    name: str
    cluster: str
    allocation: str
    size: int
    state: PartitionState
    reconfigurable: bool = False
    num_gcds: int = 1
    sync_type: SyncType = SyncType.POD_NATIVE_DEFAULT
    num_ilds: int = 1
    ild_routing: str = "DNC"
    gw_routing: str = "DEFAULT"
    agents: tuple[str, ...] = ()
    error: str = ""
    generation: int = 0
    """Goes up by one whenever the partition becomes active."""
    created: float = 0.0
    ends: float | None = None
    """When it is removed, in seconds since 1970; None: it has no time limit."""
    relocatable: bool = False
    owner: str = ""
    """Name of the user who made it."""
    holder: str = ""
    """The process with which it ends (`podrun.partition.host.holders`); empty: it stays until it is removed."""


@dataclass(frozen=True, slots=True)
class IpuofDevice:
    """How a client reaches one IPU; ``podrun/protos/vipu.proto`` explains the fields."""

    ip: str
    server_port: int
    partition_ipu: int
    machine: int
    ipu: int
    agent_id: str
    ipu_number: int
    rdma_port: int = 0


@dataclass(frozen=True, slots=True)
class IpuofConfig:
    """How clients reach the IPUs of one GCD of a partition."""

    partition: str
    state: PartitionState
    devices: tuple[IpuofDevice, ...]
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AllocationInfo:
    """Agents that users have access to; partitions do not span allocations."""

    name: str
    cluster: str
    agents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """One IPU-M2000. ``host`` and ``port`` are modelled addresses; its processes listen at ``endpoints``."""

    agent_id: str
    host: str
    port: int
    serial: str
    state: AgentState
    ild: int
    num_ipus: int = IPUS_PER_MACHINE
    partitions: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    health: str = "up"
    """``up``, ``suspect``, ``unreachable``, ``cordoned``, ``draining`` or ``failed``."""
    stale_seconds: float | None = None
    """Seconds since its machine answered last; None if it answers, or has none."""
    reason: str = ""
    deadline: float = 0.0
    cluster: str = ""
    """The V-IPU cluster it is in, or empty."""
    attached_ipus: int = 0
    """IPUs that processes hold, as its machines said last."""


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A request that waits for IPUs, and what it waits for. Times are seconds since 1970."""

    name: str
    size: int
    priority: int
    since: float
    position: int
    ahead: tuple[str, ...] = ()
    blockers: tuple[str, ...] = ()
    latest: float | None = None
    """When it starts at the latest; None: unknown."""
    owner: str = ""


@dataclass(frozen=True, slots=True)
class ReservationInfo:
    """Agents kept for partitions that name the reservation. Times are seconds since 1970."""

    name: str
    agents: tuple[str, ...]
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """The POD behind a server, or a V-IPU cluster of it."""

    name: str
    target: str
    num_agents: int
    num_ipus: int
    ipu_link_domain_size: int
    ipu_link_topology: str
    gateway_topology: str
    agents: tuple[str, ...] = ()
    """Of a V-IPU cluster of the POD, in the order of their links."""


@dataclass(frozen=True, slots=True)
class ServerVersion:
    """What `vipu --server-version` prints, and the server's process id."""

    version: str
    host: str
    port: int
    pid: int


@dataclass(frozen=True, slots=True)
class UserInfo:
    """A user of a server that was started with --secure. ``allocations``: whose partitions it may use; empty: all."""

    name: str
    role: str
    allocations: tuple[str, ...] = ()
    may_inject: bool = False
    created: float = 0.0


@dataclass(frozen=True, slots=True)
class CallInfo:
    """Calls of one name: how many, with an error, seconds in all, and how many within each bound."""

    name: str
    count: int
    errors: int
    seconds: float
    within: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServiceMetrics:
    """How the service is doing. ``bounds`` in seconds; ``largest_free``: IPUs of the largest partition possible now."""

    bounds: tuple[float, ...]
    calls: tuple[CallInfo, ...]
    queued: int
    free_ipus: int
    largest_free: int
    watchers: int


@dataclass(frozen=True, slots=True)
class WatchedChange:
    """The present form of a partition, machine or incident. ``value``: as in --format json; None: it is gone, or the
    kind is ``synced``. ``token``: continues a watch after this change.
    """

    token: str
    kind: str
    name: str
    value: dict[str, Any] | None
    time: float
    initial: bool = False
    """It tells what is there already, before ``synced``; what was known before no longer counts."""


# --- as JSON, for --format json and for those who watch ---------------------------------------------------------


def partition_json(info: PartitionInfo) -> dict[str, Any]:
    """A partition for --format json."""
    plain = asdict(info)
    return {
        **plain,
        "state": info.state.name,
        "sync_type": info.sync_type.value,
        "agents": list(info.agents),
        "error": info.error or None,
    }


def agent_json(info: AgentInfo) -> dict[str, Any]:
    """An agent for --format json."""
    return {
        "id": info.agent_id,
        "host": info.host,
        "port": info.port,
        "serial": info.serial,
        "state": info.state.name,
        "health": info.health,
        "stale_seconds": info.stale_seconds,
        "reason": info.reason or None,
        "deadline_s": info.deadline or None,
        "cluster": info.cluster or None,
        "ild": info.ild if info.cluster else None,
        "attached_ipus": info.attached_ipus,
        "num_ipus": info.num_ipus,
        "partitions": list(info.partitions),
        "endpoints": list(info.endpoints),
    }


def cluster_json(info: ClusterInfo) -> dict[str, Any]:
    """A cluster for --format json."""
    return {
        "id": info.name,
        "target": info.target,
        "num_ipus": info.num_ipus,
        "num_ilds": info.num_ipus // info.ipu_link_domain_size,
        "ipu_link_domain_size": info.ipu_link_domain_size,
        "ipu_link_topology": info.ipu_link_topology,
        "gateway_topology": info.gateway_topology,
        "agents": list(info.agents),
    }


def allocation_json(info: AllocationInfo) -> dict[str, Any]:
    """An allocation for --format json."""
    return {"id": info.name, "cluster": info.cluster, "agents": list(info.agents)}


def reservation_json(info: ReservationInfo) -> dict[str, Any]:
    """A reservation for --format json."""
    return {"id": info.name, "agents": list(info.agents), "start_s": info.start, "end_s": info.end}


def user_json(info: UserInfo) -> dict[str, Any]:
    """A user for --format json."""
    return {**asdict(info), "allocations": list(info.allocations)}
