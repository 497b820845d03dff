from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PartitionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PS_UNKNOWN: _ClassVar[PartitionState]
    PS_PENDING: _ClassVar[PartitionState]
    PS_PROVISIONING: _ClassVar[PartitionState]
    PS_ACTIVE: _ClassVar[PartitionState]
    PS_RESETTING: _ClassVar[PartitionState]
    PS_REMOVING: _ClassVar[PartitionState]
    PS_ERROR: _ClassVar[PartitionState]
    PS_REMOVED: _ClassVar[PartitionState]
    PS_QUEUED: _ClassVar[PartitionState]

class SyncType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ST_UNSPECIFIED: _ClassVar[SyncType]
    ST_C2_COMPATIBLE: _ClassVar[SyncType]
    ST_POD_NATIVE_DEFAULT: _ClassVar[SyncType]

class AgentState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AS_UNKNOWN: _ClassVar[AgentState]
    AS_STANDBY: _ClassVar[AgentState]
    AS_UP: _ClassVar[AgentState]
    AS_LOST: _ClassVar[AgentState]
PS_UNKNOWN: PartitionState
PS_PENDING: PartitionState
PS_PROVISIONING: PartitionState
PS_ACTIVE: PartitionState
PS_RESETTING: PartitionState
PS_REMOVING: PartitionState
PS_ERROR: PartitionState
PS_REMOVED: PartitionState
PS_QUEUED: PartitionState
ST_UNSPECIFIED: SyncType
ST_C2_COMPATIBLE: SyncType
ST_POD_NATIVE_DEFAULT: SyncType
AS_UNKNOWN: AgentState
AS_STANDBY: AgentState
AS_UP: AgentState
AS_LOST: AgentState

class GetServerVersionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerVersionResponse(_message.Message):
    __slots__ = ("version", "host", "port", "pid")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    version: str
    host: str
    port: int
    pid: int
    def __init__(self, version: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class GetClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetClusterResponse(_message.Message):
    __slots__ = ("cluster_id", "target", "num_agents", "num_ipus", "ipu_link_domain_size", "ipu_link_topology", "gateway_topology")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    NUM_AGENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_IPUS_FIELD_NUMBER: _ClassVar[int]
    IPU_LINK_DOMAIN_SIZE_FIELD_NUMBER: _ClassVar[int]
    IPU_LINK_TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    target: str
    num_agents: int
    num_ipus: int
    ipu_link_domain_size: int
    ipu_link_topology: str
    gateway_topology: str
    def __init__(self, cluster_id: _Optional[str] = ..., target: _Optional[str] = ..., num_agents: _Optional[int] = ..., num_ipus: _Optional[int] = ..., ipu_link_domain_size: _Optional[int] = ..., ipu_link_topology: _Optional[str] = ..., gateway_topology: _Optional[str] = ...) -> None: ...

class Cluster(_message.Message):
    __slots__ = ("cluster_id", "agent_ids", "num_ilds", "ipu_link_topology", "gateway_topology", "num_ipus", "ipu_link_domain_size", "target")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ILDS_FIELD_NUMBER: _ClassVar[int]
    IPU_LINK_TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    NUM_IPUS_FIELD_NUMBER: _ClassVar[int]
    IPU_LINK_DOMAIN_SIZE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    agent_ids: _containers.RepeatedScalarFieldContainer[str]
    num_ilds: int
    ipu_link_topology: str
    gateway_topology: str
    num_ipus: int
    ipu_link_domain_size: int
    target: str
    def __init__(self, cluster_id: _Optional[str] = ..., agent_ids: _Optional[_Iterable[str]] = ..., num_ilds: _Optional[int] = ..., ipu_link_topology: _Optional[str] = ..., gateway_topology: _Optional[str] = ..., num_ipus: _Optional[int] = ..., ipu_link_domain_size: _Optional[int] = ..., target: _Optional[str] = ...) -> None: ...

class ListClustersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListClustersResponse(_message.Message):
    __slots__ = ("clusters",)
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    clusters: _containers.RepeatedCompositeFieldContainer[Cluster]
    def __init__(self, clusters: _Optional[_Iterable[_Union[Cluster, _Mapping]]] = ...) -> None: ...

class PartitionRequirements(_message.Message):
    __slots__ = ("size", "reconfigurable", "num_gcds", "sync_type", "allocation_id", "num_ilds", "routing", "index", "cluster_id")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    RECONFIGURABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_GCDS_FIELD_NUMBER: _ClassVar[int]
    SYNC_TYPE_FIELD_NUMBER: _ClassVar[int]
    ALLOCATION_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_ILDS_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    size: int
    reconfigurable: bool
    num_gcds: int
    sync_type: SyncType
    allocation_id: str
    num_ilds: int
    routing: str
    index: int
    cluster_id: str
    def __init__(self, size: _Optional[int] = ..., reconfigurable: _Optional[bool] = ..., num_gcds: _Optional[int] = ..., sync_type: _Optional[_Union[SyncType, str]] = ..., allocation_id: _Optional[str] = ..., num_ilds: _Optional[int] = ..., routing: _Optional[str] = ..., index: _Optional[int] = ..., cluster_id: _Optional[str] = ...) -> None: ...

class CreatePartitionRequest(_message.Message):
    __slots__ = ("partition_id", "requirements", "disable_auto_reset", "relocatable", "faults", "wait", "priority", "limit_seconds", "reservation", "holder")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUIREMENTS_FIELD_NUMBER: _ClassVar[int]
    DISABLE_AUTO_RESET_FIELD_NUMBER: _ClassVar[int]
    RELOCATABLE_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    LIMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    requirements: PartitionRequirements
    disable_auto_reset: bool
    relocatable: bool
    faults: _containers.RepeatedScalarFieldContainer[str]
    wait: bool
    priority: int
    limit_seconds: float
    reservation: str
    holder: str
    def __init__(self, partition_id: _Optional[str] = ..., requirements: _Optional[_Union[PartitionRequirements, _Mapping]] = ..., disable_auto_reset: _Optional[bool] = ..., relocatable: _Optional[bool] = ..., faults: _Optional[_Iterable[str]] = ..., wait: _Optional[bool] = ..., priority: _Optional[int] = ..., limit_seconds: _Optional[float] = ..., reservation: _Optional[str] = ..., holder: _Optional[str] = ...) -> None: ...

class CreatePartitionResponse(_message.Message):
    __slots__ = ("partition_id",)
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    def __init__(self, partition_id: _Optional[str] = ...) -> None: ...

class PartitionStatus(_message.Message):
    __slots__ = ("state", "error", "generation")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    state: PartitionState
    error: str
    generation: int
    def __init__(self, state: _Optional[_Union[PartitionState, str]] = ..., error: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class Partition(_message.Message):
    __slots__ = ("partition_id", "cluster_id", "allocation_id", "requirements", "status", "num_ilds", "ild_routing", "gw_routing", "agent_ids", "created", "owner", "ends", "relocatable", "holder")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    ALLOCATION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUIREMENTS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NUM_ILDS_FIELD_NUMBER: _ClassVar[int]
    ILD_ROUTING_FIELD_NUMBER: _ClassVar[int]
    GW_ROUTING_FIELD_NUMBER: _ClassVar[int]
    AGENT_IDS_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    RELOCATABLE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    cluster_id: str
    allocation_id: str
    requirements: PartitionRequirements
    status: PartitionStatus
    num_ilds: int
    ild_routing: str
    gw_routing: str
    agent_ids: _containers.RepeatedScalarFieldContainer[str]
    created: float
    owner: str
    ends: float
    relocatable: bool
    holder: str
    def __init__(self, partition_id: _Optional[str] = ..., cluster_id: _Optional[str] = ..., allocation_id: _Optional[str] = ..., requirements: _Optional[_Union[PartitionRequirements, _Mapping]] = ..., status: _Optional[_Union[PartitionStatus, _Mapping]] = ..., num_ilds: _Optional[int] = ..., ild_routing: _Optional[str] = ..., gw_routing: _Optional[str] = ..., agent_ids: _Optional[_Iterable[str]] = ..., created: _Optional[float] = ..., owner: _Optional[str] = ..., ends: _Optional[float] = ..., relocatable: _Optional[bool] = ..., holder: _Optional[str] = ...) -> None: ...

class GetPartitionRequest(_message.Message):
    __slots__ = ("partition_id",)
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    def __init__(self, partition_id: _Optional[str] = ...) -> None: ...

class GetPartitionResponse(_message.Message):
    __slots__ = ("partition",)
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    partition: Partition
    def __init__(self, partition: _Optional[_Union[Partition, _Mapping]] = ...) -> None: ...

class ListPartitionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPartitionsResponse(_message.Message):
    __slots__ = ("partitions",)
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[Partition]
    def __init__(self, partitions: _Optional[_Iterable[_Union[Partition, _Mapping]]] = ...) -> None: ...

class GetPartitionStatusRequest(_message.Message):
    __slots__ = ("partition_id",)
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    def __init__(self, partition_id: _Optional[str] = ...) -> None: ...

class GetPartitionStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: PartitionStatus
    def __init__(self, status: _Optional[_Union[PartitionStatus, _Mapping]] = ...) -> None: ...

class ResetPartitionRequest(_message.Message):
    __slots__ = ("partition_id", "generation")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    generation: int
    def __init__(self, partition_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class ResetPartitionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemovePartitionRequest(_message.Message):
    __slots__ = ("partition_id", "force")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    force: bool
    def __init__(self, partition_id: _Optional[str] = ..., force: _Optional[bool] = ...) -> None: ...

class RemovePartitionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HoldPartitionRequest(_message.Message):
    __slots__ = ("partition_id", "holder", "keep")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    holder: str
    keep: bool
    def __init__(self, partition_id: _Optional[str] = ..., holder: _Optional[str] = ..., keep: _Optional[bool] = ...) -> None: ...

class HoldPartitionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GcdId(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class GetPartitionIpuofConfigRequest(_message.Message):
    __slots__ = ("partition_id", "gcd_id")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    GCD_ID_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    gcd_id: GcdId
    def __init__(self, partition_id: _Optional[str] = ..., gcd_id: _Optional[_Union[GcdId, _Mapping]] = ...) -> None: ...

class GetPartitionIpuofConfigResponse(_message.Message):
    __slots__ = ("ipuof_config",)
    IPUOF_CONFIG_FIELD_NUMBER: _ClassVar[int]
    ipuof_config: PartitionConfig
    def __init__(self, ipuof_config: _Optional[_Union[PartitionConfig, _Mapping]] = ...) -> None: ...

class IpuofDevice(_message.Message):
    __slots__ = ("ip", "server_port", "rdma_port", "partition_ipu", "machine", "ipu", "agent_id", "ipu_number")
    IP_FIELD_NUMBER: _ClassVar[int]
    SERVER_PORT_FIELD_NUMBER: _ClassVar[int]
    RDMA_PORT_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IPU_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    IPU_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    IPU_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ip: str
    server_port: int
    rdma_port: int
    partition_ipu: int
    machine: int
    ipu: int
    agent_id: str
    ipu_number: int
    def __init__(self, ip: _Optional[str] = ..., server_port: _Optional[int] = ..., rdma_port: _Optional[int] = ..., partition_ipu: _Optional[int] = ..., machine: _Optional[int] = ..., ipu: _Optional[int] = ..., agent_id: _Optional[str] = ..., ipu_number: _Optional[int] = ...) -> None: ...

class PartitionConfig(_message.Message):
    __slots__ = ("partition_id", "state", "devices", "attributes")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    state: str
    devices: _containers.RepeatedCompositeFieldContainer[IpuofDevice]
    attributes: _containers.ScalarMap[str, str]
    def __init__(self, partition_id: _Optional[str] = ..., state: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[IpuofDevice, _Mapping]]] = ..., attributes: _Optional[_Mapping[str, str]] = ...) -> None: ...

class AllocationSpec(_message.Message):
    __slots__ = ("cluster_id", "agent_ids")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_IDS_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    agent_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, cluster_id: _Optional[str] = ..., agent_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Allocation(_message.Message):
    __slots__ = ("id", "spec")
    ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    id: str
    spec: AllocationSpec
    def __init__(self, id: _Optional[str] = ..., spec: _Optional[_Union[AllocationSpec, _Mapping]] = ...) -> None: ...

class ListAllocationsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAllocationsResponse(_message.Message):
    __slots__ = ("allocations",)
    ALLOCATIONS_FIELD_NUMBER: _ClassVar[int]
    allocations: _containers.RepeatedCompositeFieldContainer[Allocation]
    def __init__(self, allocations: _Optional[_Iterable[_Union[Allocation, _Mapping]]] = ...) -> None: ...

class ListMachineReportsRequest(_message.Message):
    __slots__ = ("partition_id",)
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    def __init__(self, partition_id: _Optional[str] = ...) -> None: ...

class ListMachineReportsResponse(_message.Message):
    __slots__ = ("reports_json",)
    REPORTS_JSON_FIELD_NUMBER: _ClassVar[int]
    reports_json: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reports_json: _Optional[_Iterable[str]] = ...) -> None: ...

class ResetIpusRequest(_message.Message):
    __slots__ = ("partition_id", "partition_ipus")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IPUS_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    partition_ipus: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, partition_id: _Optional[str] = ..., partition_ipus: _Optional[_Iterable[int]] = ...) -> None: ...

class ResetIpusResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Agent(_message.Message):
    __slots__ = ("agent_id", "host", "port", "serial", "state", "partition_ids", "endpoints", "ild", "num_ipus", "health", "stale_seconds", "reason", "deadline", "cluster_id", "attached_ipus")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PARTITION_IDS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    ILD_FIELD_NUMBER: _ClassVar[int]
    NUM_IPUS_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    STALE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_IPUS_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    host: str
    port: int
    serial: str
    state: AgentState
    partition_ids: _containers.RepeatedScalarFieldContainer[str]
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    ild: int
    num_ipus: int
    health: str
    stale_seconds: float
    reason: str
    deadline: float
    cluster_id: str
    attached_ipus: int
    def __init__(self, agent_id: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., serial: _Optional[str] = ..., state: _Optional[_Union[AgentState, str]] = ..., partition_ids: _Optional[_Iterable[str]] = ..., endpoints: _Optional[_Iterable[str]] = ..., ild: _Optional[int] = ..., num_ipus: _Optional[int] = ..., health: _Optional[str] = ..., stale_seconds: _Optional[float] = ..., reason: _Optional[str] = ..., deadline: _Optional[float] = ..., cluster_id: _Optional[str] = ..., attached_ipus: _Optional[int] = ...) -> None: ...

class QueuedRequest(_message.Message):
    __slots__ = ("partition_id", "size", "priority", "since", "position", "ahead", "blockers", "latest", "owner")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    BLOCKERS_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    size: int
    priority: int
    since: float
    position: int
    ahead: _containers.RepeatedScalarFieldContainer[str]
    blockers: _containers.RepeatedScalarFieldContainer[str]
    latest: float
    owner: str
    def __init__(self, partition_id: _Optional[str] = ..., size: _Optional[int] = ..., priority: _Optional[int] = ..., since: _Optional[float] = ..., position: _Optional[int] = ..., ahead: _Optional[_Iterable[str]] = ..., blockers: _Optional[_Iterable[str]] = ..., latest: _Optional[float] = ..., owner: _Optional[str] = ...) -> None: ...

class PlannedPartition(_message.Message):
    __slots__ = ("request", "starts", "cluster_id", "allocation_id", "agent_ids", "ipus")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    ALLOCATION_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_IDS_FIELD_NUMBER: _ClassVar[int]
    IPUS_FIELD_NUMBER: _ClassVar[int]
    request: QueuedRequest
    starts: bool
    cluster_id: str
    allocation_id: str
    agent_ids: _containers.RepeatedScalarFieldContainer[str]
    ipus: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request: _Optional[_Union[QueuedRequest, _Mapping]] = ..., starts: _Optional[bool] = ..., cluster_id: _Optional[str] = ..., allocation_id: _Optional[str] = ..., agent_ids: _Optional[_Iterable[str]] = ..., ipus: _Optional[_Iterable[int]] = ...) -> None: ...

class PlanPartitionRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: CreatePartitionRequest
    def __init__(self, request: _Optional[_Union[CreatePartitionRequest, _Mapping]] = ...) -> None: ...

class PlanPartitionResponse(_message.Message):
    __slots__ = ("planned",)
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    planned: PlannedPartition
    def __init__(self, planned: _Optional[_Union[PlannedPartition, _Mapping]] = ...) -> None: ...

class CaptureStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CaptureStateResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class ListQueueRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListQueueResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[QueuedRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[QueuedRequest, _Mapping]]] = ...) -> None: ...

class SetMaintenanceRequest(_message.Message):
    __slots__ = ("agent_id", "drain", "deadline_seconds", "reason")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    drain: bool
    deadline_seconds: float
    reason: str
    def __init__(self, agent_id: _Optional[str] = ..., drain: _Optional[bool] = ..., deadline_seconds: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class SetMaintenanceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndMaintenanceRequest(_message.Message):
    __slots__ = ("agent_id",)
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    def __init__(self, agent_id: _Optional[str] = ...) -> None: ...

class EndMaintenanceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("id", "agent_ids", "start", "end")
    ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_IDS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    id: str
    agent_ids: _containers.RepeatedScalarFieldContainer[str]
    start: float
    end: float
    def __init__(self, id: _Optional[str] = ..., agent_ids: _Optional[_Iterable[str]] = ..., start: _Optional[float] = ..., end: _Optional[float] = ...) -> None: ...

class CreateReservationRequest(_message.Message):
    __slots__ = ("reservation_id", "agent_ids", "begin_in_seconds", "for_seconds")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_IDS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_IN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FOR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    agent_ids: _containers.RepeatedScalarFieldContainer[str]
    begin_in_seconds: float
    for_seconds: float
    def __init__(self, reservation_id: _Optional[str] = ..., agent_ids: _Optional[_Iterable[str]] = ..., begin_in_seconds: _Optional[float] = ..., for_seconds: _Optional[float] = ...) -> None: ...

class CreateReservationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveReservationRequest(_message.Message):
    __slots__ = ("reservation_id",)
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    def __init__(self, reservation_id: _Optional[str] = ...) -> None: ...

class RemoveReservationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReservationsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReservationsResponse(_message.Message):
    __slots__ = ("reservations",)
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    reservations: _containers.RepeatedCompositeFieldContainer[Reservation]
    def __init__(self, reservations: _Optional[_Iterable[_Union[Reservation, _Mapping]]] = ...) -> None: ...

class ListAgentsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAgentsResponse(_message.Message):
    __slots__ = ("agents",)
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    agents: _containers.RepeatedCompositeFieldContainer[Agent]
    def __init__(self, agents: _Optional[_Iterable[_Union[Agent, _Mapping]]] = ...) -> None: ...

class CreateAllocationRequest(_message.Message):
    __slots__ = ("allocation",)
    ALLOCATION_FIELD_NUMBER: _ClassVar[int]
    allocation: Allocation
    def __init__(self, allocation: _Optional[_Union[Allocation, _Mapping]] = ...) -> None: ...

class CreateAllocationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveAllocationRequest(_message.Message):
    __slots__ = ("allocation_id",)
    ALLOCATION_ID_FIELD_NUMBER: _ClassVar[int]
    allocation_id: str
    def __init__(self, allocation_id: _Optional[str] = ...) -> None: ...

class RemoveAllocationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CreateAgentRequest(_message.Message):
    __slots__ = ("agent_id", "host", "port")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    host: str
    port: int
    def __init__(self, agent_id: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class CreateAgentResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveAgentRequest(_message.Message):
    __slots__ = ("agent_id",)
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    def __init__(self, agent_id: _Optional[str] = ...) -> None: ...

class RemoveAgentResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CreateClusterRequest(_message.Message):
    __slots__ = ("cluster",)
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    cluster: Cluster
    def __init__(self, cluster: _Optional[_Union[Cluster, _Mapping]] = ...) -> None: ...

class CreateClusterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveClusterRequest(_message.Message):
    __slots__ = ("cluster_id",)
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    def __init__(self, cluster_id: _Optional[str] = ...) -> None: ...

class RemoveClusterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PowerCycleAgentRequest(_message.Message):
    __slots__ = ("agent_id", "generation")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    generation: int
    def __init__(self, agent_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class PowerCycleAgentResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RestartAgentRequest(_message.Message):
    __slots__ = ("agent_id", "generation")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    generation: int
    def __init__(self, agent_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class RestartAgentResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InjectFaultsRequest(_message.Message):
    __slots__ = ("partition_id", "faults", "cancel")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    faults: _containers.RepeatedScalarFieldContainer[str]
    cancel: bool
    def __init__(self, partition_id: _Optional[str] = ..., faults: _Optional[_Iterable[str]] = ..., cancel: _Optional[bool] = ...) -> None: ...

class InjectFaultsResponse(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, cancelled: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("resume_token", "kinds")
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    resume_token: str
    kinds: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, resume_token: _Optional[str] = ..., kinds: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("resume_token", "kind", "name", "removed", "json", "time", "initial")
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    INITIAL_FIELD_NUMBER: _ClassVar[int]
    resume_token: str
    kind: str
    name: str
    removed: bool
    json: str
    time: float
    initial: bool
    def __init__(self, resume_token: _Optional[str] = ..., kind: _Optional[str] = ..., name: _Optional[str] = ..., removed: _Optional[bool] = ..., json: _Optional[str] = ..., time: _Optional[float] = ..., initial: _Optional[bool] = ...) -> None: ...

class GetServiceMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CallMetrics(_message.Message):
    __slots__ = ("call", "count", "errors", "seconds", "within")
    CALL_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WITHIN_FIELD_NUMBER: _ClassVar[int]
    call: str
    count: int
    errors: int
    seconds: float
    within: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, call: _Optional[str] = ..., count: _Optional[int] = ..., errors: _Optional[int] = ..., seconds: _Optional[float] = ..., within: _Optional[_Iterable[int]] = ...) -> None: ...

class GetServiceMetricsResponse(_message.Message):
    __slots__ = ("bounds", "calls", "queued", "free_ipus", "largest_free", "watchers")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    FREE_IPUS_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FREE_FIELD_NUMBER: _ClassVar[int]
    WATCHERS_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    calls: _containers.RepeatedCompositeFieldContainer[CallMetrics]
    queued: int
    free_ipus: int
    largest_free: int
    watchers: int
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., calls: _Optional[_Iterable[_Union[CallMetrics, _Mapping]]] = ..., queued: _Optional[int] = ..., free_ipus: _Optional[int] = ..., largest_free: _Optional[int] = ..., watchers: _Optional[int] = ...) -> None: ...

class User(_message.Message):
    __slots__ = ("user_id", "role", "allocation_ids", "may_inject", "created")
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ALLOCATION_IDS_FIELD_NUMBER: _ClassVar[int]
    MAY_INJECT_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    user_id: str
    role: str
    allocation_ids: _containers.RepeatedScalarFieldContainer[str]
    may_inject: bool
    created: float
    def __init__(self, user_id: _Optional[str] = ..., role: _Optional[str] = ..., allocation_ids: _Optional[_Iterable[str]] = ..., may_inject: _Optional[bool] = ..., created: _Optional[float] = ...) -> None: ...

class CreateUserRequest(_message.Message):
    __slots__ = ("user",)
    USER_FIELD_NUMBER: _ClassVar[int]
    user: User
    def __init__(self, user: _Optional[_Union[User, _Mapping]] = ...) -> None: ...

class CreateUserResponse(_message.Message):
    __slots__ = ("access_key",)
    ACCESS_KEY_FIELD_NUMBER: _ClassVar[int]
    access_key: str
    def __init__(self, access_key: _Optional[str] = ...) -> None: ...

class RemoveUserRequest(_message.Message):
    __slots__ = ("user_id",)
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    user_id: str
    def __init__(self, user_id: _Optional[str] = ...) -> None: ...

class RemoveUserResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListUsersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListUsersResponse(_message.Message):
    __slots__ = ("users",)
    USERS_FIELD_NUMBER: _ClassVar[int]
    users: _containers.RepeatedCompositeFieldContainer[User]
    def __init__(self, users: _Optional[_Iterable[_Union[User, _Mapping]]] = ...) -> None: ...
