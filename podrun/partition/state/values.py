"""Values that the V-IPU service, its client and its commands exchange. Imports neither gRPC nor Ray.

Messages on the wire and JSON are derived from these dataclasses (`codec`); a field's metadata says how it is spelled
there, where that is not its name. JSON has the keys in the order of the fields.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from podrun.core.cluster import IPUS_PER_MACHINE
from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.faults import FaultSpec
from podrun.partition.state.codec import spelled, value_to_json

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: str, what: str) -> None:
    """Raises UsageError if ``name`` is not valid for ``what``, such as "a partition"."""
    if not NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f"{name!r} is no name for {what}",
            hint="Use letters, digits, '.', '_' and '-', at most 64, starting with a letter or digit.",
        )


class PartitionState(enum.Enum):
    """Life of a partition: PENDING -> PROVISIONING -> ACTIVE <-> RESETTING; REMOVING -> REMOVED; ERROR from any."""

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


class SyncType(enum.Enum):
    """How the IPUs of a partition synchronise; values are the command line's spelling."""

    C2_COMPATIBLE = "c2-compatible"
    POD_NATIVE_DEFAULT = "pod-native-default"


def parse_sync_type(text: str) -> SyncType:
    """The SyncType of either spelling, in any case. Raises UsageError, which names both."""
    plain = text.lower().replace("_", "-").removeprefix("st-")
    for kind in SyncType:
        if kind.value == plain:
            return kind
    known = ", ".join(kind.value for kind in SyncType)
    raise UsageError(f"unknown sync type {text!r}", hint=f"Known: {known} (PopRun: ST_C2_COMPATIBLE, ...).")


NO_USER = -1
"""Owner of a partition of which no record says whose it is: it belongs to the user who runs the server."""


@dataclass(frozen=True, slots=True)
class Requirements:
    """A request for a partition. ``allocation`` "" and ``num_ilds`` 0: the server chooses. Without ``auto_reset``
    errors of IPUs stay until they are reset. ``faults`` are planned before the partition becomes active. ``owner``: the
    user id of who asks; the server fills it in."""

    name: str = field(metadata=spelled("partition_id"))
    size: int = field(metadata=spelled("requirements.size"))
    allocation: str = field(default="", metadata=spelled("requirements.allocation_id"))
    reconfigurable: bool = field(default=False, metadata=spelled("requirements.reconfigurable"))
    num_gcds: int = field(default=1, metadata=spelled("requirements.num_gcds"))
    num_ilds: int = field(default=0, metadata=spelled("requirements.num_ilds"))
    sync_type: SyncType | None = field(default=None, metadata=spelled("requirements.sync_type"))
    auto_reset: bool = field(default=True, metadata=spelled("disable_auto_reset", negated=True))
    faults: tuple[FaultSpec, ...] = ()
    limit_s: float = field(default=0.0, metadata=spelled("limit_seconds"))
    """Seconds after which the partition is removed; 0: no limit."""
    relocatable: bool = False
    """Whether the server may move the partition to other IPUs when a machine of it fails."""
    reservation: str = ""
    """The reservation whose IPUs it may use."""
    owner: int = field(default=NO_USER, metadata=spelled(on_wire=False))
    routing: str = field(default="", metadata=spelled("requirements.routing"))
    """``DNC``, ``SWNC`` or ``RINGSWNC``; empty: the best one for the size and the POD's links."""
    index: int = field(default=0, metadata=spelled("requirements.index"))
    """Which of the V-IPU cluster's places of this size, from 1; 0: the server chooses."""
    cluster: str = field(default="", metadata=spelled("requirements.cluster_id"))
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
class PartitionStatus:
    """What changes about a partition, and is polled."""

    state: PartitionState
    error: str
    generation: int


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """A partition as the service describes it."""

    name: str = field(metadata=spelled("partition_id"))
    cluster: str = field(metadata=spelled("cluster_id"))
    allocation: str = field(metadata=spelled("allocation_id", "requirements.allocation_id"))
    size: int = field(metadata=spelled("requirements.size"))
    state: PartitionState = field(metadata=spelled("status.state"))
    reconfigurable: bool = field(default=False, metadata=spelled("requirements.reconfigurable"))
    num_gcds: int = field(default=1, metadata=spelled("requirements.num_gcds"))
    sync_type: SyncType = field(
        default=SyncType.POD_NATIVE_DEFAULT, metadata=spelled("requirements.sync_type")
    )
    num_ilds: int = field(default=1, metadata=spelled("num_ilds", "requirements.num_ilds"))
    ild_routing: str = "DNC"
    gw_routing: str = "DEFAULT"
    agents: tuple[str, ...] = field(default=(), metadata=spelled("agent_ids"))
    error: str = field(default="", metadata=spelled("status.error", null_if_empty=True))
    generation: int = field(default=0, metadata=spelled("status.generation"))
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

    partition: str = field(metadata=spelled("partition_id"))
    state: PartitionState
    devices: tuple[IpuofDevice, ...]
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AllocationInfo:
    """Agents that users have access to; partitions do not span allocations."""

    name: str = field(metadata=spelled("id", json="id"))
    cluster: str = field(metadata=spelled("spec.cluster_id"))
    agents: tuple[str, ...] = field(metadata=spelled("spec.agent_ids"))


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """One IPU-M2000. ``host`` and ``port`` are modelled addresses; its processes listen at ``endpoints``."""

    agent_id: str = field(metadata=spelled("agent_id", json="id"))
    host: str
    port: int
    serial: str
    state: AgentState
    health: str = "up"
    """``up``, ``suspect``, ``unreachable``, ``cordoned``, ``draining`` or ``failed``."""
    stale_seconds: float | None = field(default=None, metadata=spelled(none=-1.0))
    """Seconds since its machine answered last; None if it answers, or has none."""
    reason: str = field(default="", metadata=spelled(null_if_empty=True))
    deadline: float = field(default=0.0, metadata=spelled(json="deadline_s", null_if_empty=True))
    cluster: str = field(default="", metadata=spelled("cluster_id", null_if_empty=True))
    """The V-IPU cluster it is in, or empty."""
    ild: int = 0
    attached_ipus: int = 0
    """IPUs that processes hold, as its machines said last."""
    num_ipus: int = IPUS_PER_MACHINE
    partitions: tuple[str, ...] = field(default=(), metadata=spelled("partition_ids"))
    endpoints: tuple[str, ...] = ()


def agent_json(info: AgentInfo) -> dict[str, Any]:
    """An agent for --format json: outside of a cluster it is in no IPU-Link domain."""
    return value_to_json(info) | ({} if info.cluster else {"ild": None})


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A request that waits for IPUs, and what it waits for. Times are seconds since 1970."""

    name: str = field(metadata=spelled("partition_id", json="id"))
    size: int
    priority: int
    owner: str
    since: float = field(metadata=spelled(json="since_s"))
    position: int
    ahead: tuple[str, ...] = ()
    blockers: tuple[str, ...] = ()
    latest: float | None = field(default=None, metadata=spelled(json="starts_by_s"))
    """When it starts at the latest; None: unknown."""


@dataclass(frozen=True, slots=True)
class PlannedInfo:
    """Where and when a request would start, were it made now. ``ipus``: those of the POD that it would get, empty if
    nobody can say. ``request.latest``: when it starts at the latest."""

    request: QueueInfo
    starts: bool
    cluster: str = field(metadata=spelled("cluster_id"))
    allocation: str = field(metadata=spelled("allocation_id"))
    agents: tuple[str, ...] = field(metadata=spelled("agent_ids"))
    ipus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReservationInfo:
    """Agents kept for partitions that name the reservation. Times are seconds since 1970."""

    name: str = field(metadata=spelled("id", json="id"))
    agents: tuple[str, ...] = field(metadata=spelled("agent_ids"))
    start: float = field(metadata=spelled(json="start_s"))
    end: float = field(metadata=spelled(json="end_s"))


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """The POD behind a server, or a V-IPU cluster of it."""

    name: str = field(metadata=spelled("cluster_id", json="id"))
    target: str
    num_ipus: int
    num_ilds: int
    ipu_link_domain_size: int
    ipu_link_topology: str
    gateway_topology: str
    agents: tuple[str, ...] = field(default=(), metadata=spelled("agent_ids"))
    """Of a V-IPU cluster of the POD, in the order of their links."""

    @property
    def num_agents(self) -> int:
        """How many IPU-M2000s it has."""
        return self.num_ipus // IPUS_PER_MACHINE


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

    name: str = field(metadata=spelled("user_id", json="name"))
    role: str
    allocations: tuple[str, ...] = field(default=(), metadata=spelled("allocation_ids"))
    may_inject: bool = False
    created: float = 0.0


@dataclass(frozen=True, slots=True)
class CallInfo:
    """Calls of one name: how many, with an error, seconds in all, and how many within each bound."""

    name: str = field(metadata=spelled("call"))
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
