from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ControlReply(_message.Message):
    __slots__ = ("error_json",)
    ERROR_JSON_FIELD_NUMBER: _ClassVar[int]
    error_json: str
    def __init__(self, error_json: _Optional[str] = ...) -> None: ...

class IpuRange(_message.Message):
    __slots__ = ("first", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("size", "number")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    size: int
    number: int
    def __init__(self, size: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Blob(_message.Message):
    __slots__ = ("region", "offset", "size", "inline")
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    region: Region
    offset: int
    size: int
    inline: bytes
    def __init__(self, region: _Optional[_Union[Region, _Mapping]] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ..., inline: _Optional[bytes] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "dtype", "shape", "offset", "inline")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    inline: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., inline: _Optional[bytes] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("job", "owned", "pid", "user", "command", "host", "started", "hands_memory_over", "launch")
    JOB_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    HANDS_MEMORY_OVER_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    job: IpuRange
    owned: IpuRange
    pid: int
    user: str
    command: str
    host: str
    started: float
    hands_memory_over: bool
    launch: str
    def __init__(self, job: _Optional[_Union[IpuRange, _Mapping]] = ..., owned: _Optional[_Union[IpuRange, _Mapping]] = ..., pid: _Optional[int] = ..., user: _Optional[str] = ..., command: _Optional[str] = ..., host: _Optional[str] = ..., started: _Optional[float] = ..., hands_memory_over: _Optional[bool] = ..., launch: _Optional[str] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("refusal", "broken_json", "memory_socket")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    BROKEN_JSON_FIELD_NUMBER: _ClassVar[int]
    MEMORY_SOCKET_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    broken_json: str
    memory_socket: bytes
    def __init__(self, refusal: _Optional[str] = ..., broken_json: _Optional[str] = ..., memory_socket: _Optional[bytes] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("digest", "executable", "timeout_seconds", "own_pieces")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    EXECUTABLE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OWN_PIECES_FIELD_NUMBER: _ClassVar[int]
    digest: str
    executable: Blob
    timeout_seconds: float
    own_pieces: bool
    def __init__(self, digest: _Optional[str] = ..., executable: _Optional[_Union[Blob, _Mapping]] = ..., timeout_seconds: _Optional[float] = ..., own_pieces: _Optional[bool] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("region", "tensors")
    REGION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    region: Region
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    def __init__(self, region: _Optional[_Union[Region, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("names", "region", "tensors")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    region: Region
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    def __init__(self, names: _Optional[_Iterable[str]] = ..., region: _Optional[_Union[Region, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ("tensors",)
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    def __init__(self, tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...

class BindRequest(_message.Message):
    __slots__ = ("batches", "region", "inputs", "outputs", "doorbell", "slots", "slot_bytes")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    DOORBELL_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    batches: int
    region: Region
    inputs: _containers.RepeatedCompositeFieldContainer[Tensor]
    outputs: _containers.RepeatedCompositeFieldContainer[Tensor]
    doorbell: bool
    slots: int
    slot_bytes: int
    def __init__(self, batches: _Optional[int] = ..., region: _Optional[_Union[Region, _Mapping]] = ..., inputs: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., doorbell: _Optional[bool] = ..., slots: _Optional[int] = ..., slot_bytes: _Optional[int] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("batches", "inline", "inputs", "outputs")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    batches: int
    inline: bool
    inputs: _containers.RepeatedCompositeFieldContainer[Tensor]
    outputs: _containers.RepeatedCompositeFieldContainer[Tensor]
    def __init__(self, batches: _Optional[int] = ..., inline: _Optional[bool] = ..., inputs: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...

class RunReply(_message.Message):
    __slots__ = ("batches_done", "modelled_seconds", "seconds", "outputs")
    BATCHES_DONE_FIELD_NUMBER: _ClassVar[int]
    MODELLED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    batches_done: int
    modelled_seconds: float
    seconds: float
    outputs: _containers.RepeatedCompositeFieldContainer[Tensor]
    def __init__(self, batches_done: _Optional[int] = ..., modelled_seconds: _Optional[float] = ..., seconds: _Optional[float] = ..., outputs: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("data", "last")
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    last: bool
    def __init__(self, data: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...

class HostRequest(_message.Message):
    __slots__ = ("attach", "load", "write", "read", "bind", "run", "detach", "part")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    BIND_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    attach: AttachRequest
    load: LoadRequest
    write: WriteRequest
    read: ReadRequest
    bind: BindRequest
    run: RunRequest
    detach: Empty
    part: Part
    def __init__(self, attach: _Optional[_Union[AttachRequest, _Mapping]] = ..., load: _Optional[_Union[LoadRequest, _Mapping]] = ..., write: _Optional[_Union[WriteRequest, _Mapping]] = ..., read: _Optional[_Union[ReadRequest, _Mapping]] = ..., bind: _Optional[_Union[BindRequest, _Mapping]] = ..., run: _Optional[_Union[RunRequest, _Mapping]] = ..., detach: _Optional[_Union[Empty, _Mapping]] = ..., part: _Optional[_Union[Part, _Mapping]] = ...) -> None: ...

class MachineReply(_message.Message):
    __slots__ = ("error_json", "attach", "read", "run", "done", "part")
    ERROR_JSON_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    error_json: str
    attach: AttachReply
    read: ReadReply
    run: RunReply
    done: Empty
    part: Part
    def __init__(self, error_json: _Optional[str] = ..., attach: _Optional[_Union[AttachReply, _Mapping]] = ..., read: _Optional[_Union[ReadReply, _Mapping]] = ..., run: _Optional[_Union[RunReply, _Mapping]] = ..., done: _Optional[_Union[Empty, _Mapping]] = ..., part: _Optional[_Union[Part, _Mapping]] = ...) -> None: ...

class JoinGroupRequest(_message.Message):
    __slots__ = ("job", "rank", "digest", "timeout_seconds", "who")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    job: IpuRange
    rank: int
    digest: str
    timeout_seconds: float
    who: str
    def __init__(self, job: _Optional[_Union[IpuRange, _Mapping]] = ..., rank: _Optional[int] = ..., digest: _Optional[str] = ..., timeout_seconds: _Optional[float] = ..., who: _Optional[str] = ...) -> None: ...

class JoinGroupReply(_message.Message):
    __slots__ = ("error_json", "token_json")
    ERROR_JSON_FIELD_NUMBER: _ClassVar[int]
    TOKEN_JSON_FIELD_NUMBER: _ClassVar[int]
    error_json: str
    token_json: str
    def __init__(self, error_json: _Optional[str] = ..., token_json: _Optional[str] = ...) -> None: ...

class ConfigureRequest(_message.Message):
    __slots__ = ("partition", "first_ipu", "machine", "ipus", "endpoints", "agent_id", "serial", "target", "operation", "epoch", "owner")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    FIRST_IPU_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    IPUS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    partition: str
    first_ipu: int
    machine: int
    ipus: int
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    agent_id: str
    serial: str
    target: str
    operation: int
    epoch: str
    owner: int
    def __init__(self, partition: _Optional[str] = ..., first_ipu: _Optional[int] = ..., machine: _Optional[int] = ..., ipus: _Optional[int] = ..., endpoints: _Optional[_Iterable[str]] = ..., agent_id: _Optional[str] = ..., serial: _Optional[str] = ..., target: _Optional[str] = ..., operation: _Optional[int] = ..., epoch: _Optional[str] = ..., owner: _Optional[int] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("partition", "epoch")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    partition: str
    epoch: str
    def __init__(self, partition: _Optional[str] = ..., epoch: _Optional[str] = ...) -> None: ...

class LeadReply(_message.Message):
    __slots__ = ("error_json", "partition", "operation")
    ERROR_JSON_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    error_json: str
    partition: str
    operation: int
    def __init__(self, error_json: _Optional[str] = ..., partition: _Optional[str] = ..., operation: _Optional[int] = ...) -> None: ...

class ResetIpusRequest(_message.Message):
    __slots__ = ("ipus",)
    IPUS_FIELD_NUMBER: _ClassVar[int]
    ipus: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ipus: _Optional[_Iterable[int]] = ...) -> None: ...

class InjectRequest(_message.Message):
    __slots__ = ("faults", "cancel")
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    faults: _containers.RepeatedScalarFieldContainer[str]
    cancel: bool
    def __init__(self, faults: _Optional[_Iterable[str]] = ..., cancel: _Optional[bool] = ...) -> None: ...

class TelemetryReply(_message.Message):
    __slots__ = ("error_json", "report_json")
    ERROR_JSON_FIELD_NUMBER: _ClassVar[int]
    REPORT_JSON_FIELD_NUMBER: _ClassVar[int]
    error_json: str
    report_json: str
    def __init__(self, error_json: _Optional[str] = ..., report_json: _Optional[str] = ...) -> None: ...
