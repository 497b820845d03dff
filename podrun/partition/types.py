"""Values that the partition service, its client and its commands pass around. Imports neither gRPC nor
Ray."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from podrun.cluster import IPUS_PER_MACHINE
from podrun.errors import UsageError


class PartitionState(enum.Enum):
    """Life of a partition: PENDING -> PROVISIONING -> ACTIVE <-> RESETTING; REMOVING -> REMOVED; ERROR from
    any."""

    PENDING = 1
    """IPUs are reserved; machines have not been asked yet."""
    PROVISIONING = 2
    """Machines are being started and configured."""
    ACTIVE = 3
    """Ready for use."""
    RESETTING = 4
    """IPUs and links are being re-initialised."""
    REMOVING = 5
    """IPUs are being given back."""
    ERROR = 6
    """Not usable; the partition's error says why and what to do."""
    REMOVED = 7
    """Gone."""

    def is_terminal(self) -> bool:
        """True iff the partition stays in this state until somebody asks or something breaks: polling may
        stop.
        """
        return self in (PartitionState.ACTIVE, PartitionState.ERROR, PartitionState.REMOVED)

    @property
    def wire_name(self) -> str:
        """The name on the wire and in PopRun's log: ``PS_ACTIVE``."""
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
    """The SyncType of either spelling, in any case. Raises UsageError naming both."""
    plain = text.lower().replace("_", "-").removeprefix("st-")
    for kind in SyncType:
        if kind.value == plain:
            return kind
    known = ", ".join(kind.value for kind in SyncType)
    raise UsageError(f"unknown sync type {text!r}", hint=f"Known: {known} (PopRun: ST_C2_COMPATIBLE, ...).")


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a partition is asked to be. ``allocation`` "" and ``num_ilds`` 0: the server chooses. Without ``auto_reset``
    errors of IPUs stay until they are reset. ``faults`` are planned before it becomes active."""

    name: str
    size: int
    allocation: str = ""
    reconfigurable: bool = False
    num_gcds: int = 1
    num_ilds: int = 0
    sync_type: SyncType | None = None
    auto_reset: bool = True
    faults: tuple[str, ...] = ()


class AgentState(enum.Enum):
    """What is known of an IPU-M2000's machine process."""

    STANDBY = 1
    """None runs; it is started when a partition needs it."""
    UP = 2
    """It answers."""
    LOST = 3
    """It is gone: `vipu-admin restart agent ID`."""


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


@dataclass(frozen=True, slots=True)
class IpuofDevice:
    """One IPU as its client reaches it (``podrun/protos/vipu.proto`` says what each field means)."""

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
    """Where the IPUs of one GCD of a partition are to be reached."""

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
    """One IPU-M2000. ``host`` and ``port`` are modelled addresses; ``endpoints`` where its processes really
    listen."""

    agent_id: str
    host: str
    port: int
    serial: str
    state: AgentState
    ild: int
    num_ipus: int = IPUS_PER_MACHINE
    partitions: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """The POD behind a server."""

    name: str
    target: str
    num_agents: int
    num_ipus: int
    ipu_link_domain_size: int
    ipu_link_topology: str
    gateway_topology: str


@dataclass(frozen=True, slots=True)
class ServerVersion:
    """What `vipu --server-version` prints, and the server's process id."""

    version: str
    host: str
    port: int
    pid: int
