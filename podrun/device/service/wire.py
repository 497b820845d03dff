"""Converts between the messages of ``ipuof.proto`` and values of this package, and checks everything received."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from podrun.core.error_codec import error_from_json
from podrun.core.errors import ApplicationRuntimeError, ServiceError
from podrun.core.executable import Array
from podrun.core.gate import connection_limits
from podrun.core.layout import IpuRange
from podrun.device.connection import AttachRequest
from podrun.device.service.handover import view, wire_dtype
from podrun.protos import ipuof_pb2 as pb

EPOCH_KEY = "podrun-epoch"
"""Metadata of the partition service's calls: its server's epoch, a number that grows with each server of a POD."""
TAKEN_BY_KEY = "podrun-taken-by"
"""Metadata of a power cycle: the name of the `TakenBy` that attached processes read."""
PART_BYTES = 32 << 20
"""Longer messages of a session are sent in parts: gRPC holds several copies of each, and its windows are small."""
MESSAGE_BYTES = PART_BYTES + (1 << 20)
"""Largest message either side sends or takes at once."""
GROUP_BYTES = 512 << 20
"""Largest total of variables in one request; more take several requests."""
WHOLE_BYTES = (2 << 30) - 1
"""Most bytes that Protocol Buffers can hold in one message, parts put together."""
UNREACHABLE_SECONDS = 8.0
"""Longest time until a process knows that a machine it is attached to cannot be reached."""
_BOTH_SIDES = (
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS = (
    *_BOTH_SIDES,
    # A machine that cannot be reached any more is found out after UNREACHABLE_SECONDS. gRPC's own threads answer, so a
    # machine that computes, or that a fault pauses, answers too.
    ("grpc.keepalive_time_ms", 3_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # else a minute, and the shorter one does not count
    # Of a machine whose process is stopped the kernel takes the connection: gRPC waits 20 s for its first word.
    ("grpc.min_reconnect_backoff_ms", int(UNREACHABLE_SECONDS * 1000)),
    # A machine that ends is found out at once, and one that starts again on its port is another machine.
    ("grpc.use_local_subchannel_pool", 1),
)
SERVER_OPTIONS = (
    *_BOTH_SIDES,
    # A host process may be stopped for a while (Ctrl-Z, a debugger) without losing its IPUs.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),
    # By default a server ends connections whose other side asks "are you there" more than twice without sending
    # anything, which every host process does while a long load or run is under way.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    *connection_limits(),
)


def raise_error(text: str) -> None:
    """Raise the error that `error_to_json` described. No-op for empty text."""
    if text:
        raise error_from_json(text)


def range_to_wire(ipus: IpuRange) -> pb.IpuRange:
    """A range of IPUs as a message."""
    return pb.IpuRange(first=ipus.first, count=ipus.count)


def range_from_wire(message: pb.IpuRange) -> IpuRange:
    """A range of IPUs from a message."""
    return IpuRange(message.first, message.count)


Regions = Callable[[int, int], Array]
"""The bytes of a region that was handed over, by its number and size (`podrun.device.service.handover`)."""


def region_bytes(message: pb.Region, regions: Regions) -> Array:
    """The bytes of a region that a request names. Raises ApplicationRuntimeError."""
    return regions(message.number, message.size)


def attach_from_wire(message: pb.AttachRequest) -> AttachRequest:
    """The attach request in a message: which process attaches to which IPUs."""
    return AttachRequest(
        range_from_wire(message.job),
        range_from_wire(message.owned),
        message.pid,
        message.user,
        message.command,
        message.launch,
    )


def blob_from_wire(message: pb.Blob, regions: Regions) -> bytes:
    """Bytes, from a region or inline."""
    if not message.HasField("region"):
        return message.inline
    data = region_bytes(message.region, regions)
    return view(data, message.offset, "uint8", (message.size,)).tobytes()


def tensor_to_wire(name: str, array: Array, *, offset: int | None = None) -> pb.Tensor:
    """A tensor's description (with ``offset``: where it lies in a region), or the tensor itself."""
    inline = b"" if offset is not None else np.ascontiguousarray(array).tobytes()
    return pb.Tensor(name=name, dtype=str(array.dtype), shape=array.shape, offset=offset or 0, inline=inline)


def tensors_from_wire(messages: Iterable[pb.Tensor], region: Array | None) -> dict[str, Array]:
    """Tensors by name: views of ``region``, or of their inline bytes. Raises ApplicationRuntimeError."""
    tensors = {}
    for message in messages:
        shape = tuple(message.shape)
        if region is not None:
            tensors[message.name] = view(region, message.offset, message.dtype, shape)
        else:
            data = np.frombuffer(message.inline, np.uint8)
            tensor = view(data, 0, message.dtype, shape)
            if tensor.nbytes != data.size:
                raise ApplicationRuntimeError(f"tensor {message.name!r} comes with {data.size} bytes")
            tensors[message.name] = tensor
    return tensors


def groups(
    sizes: Iterable[tuple[str, int]],
) -> list[list[str]]:
    """Names in order, in groups of tensors of at most `GROUP_BYTES` together (one alone may have more)."""
    name_groups: list[list[str]] = [[]]
    total = 0
    for name, size in sizes:
        if name_groups[-1] and total + size > GROUP_BYTES:
            name_groups.append([])
            total = 0
        name_groups[-1].append(name)
        total += size
    return name_groups


InParts = TypeVar("InParts", pb.HostRequest, pb.MachineReply)


def in_parts(message: InParts) -> Iterator[InParts]:
    """The message, or the parts of at most `PART_BYTES` that are sent in its place."""
    size = PART_BYTES
    if message.ByteSize() <= size:
        yield message
        return
    data = memoryview(message.SerializeToString())
    for begin in range(0, len(data), size):
        piece = pb.Part(data=bytes(data[begin : begin + size]), last=begin + size >= len(data))
        yield type(message)(part=piece)


class MessageJoiner(Generic[InParts]):
    """Joins the parts of messages. ``kind``: HostRequest or MachineReply."""

    def __init__(self, kind: type[InParts], limit: int = WHOLE_BYTES) -> None:
        self._kind: type[InParts] = kind
        self.limit = limit
        self._bytes = bytearray()

    def add(self, message: InParts) -> InParts | None:
        """The complete message after its last part, else None. Raises ApplicationRuntimeError for malformed parts."""
        if not message.HasField("part"):
            if self._bytes:
                raise ApplicationRuntimeError("malformed message in parts: another message came between them")
            if message.ByteSize() > self.limit:
                raise ApplicationRuntimeError(f"a message is more than {self.limit} bytes")
            return message
        part = message.part
        if len(self._bytes) + len(part.data) > self.limit:
            raise ApplicationRuntimeError(f"the parts of a message are more than {self.limit} bytes")
        self._bytes += part.data
        if not part.last:
            return None
        data, self._bytes = bytes(self._bytes), bytearray()
        try:
            whole: InParts = self._kind.FromString(data)
        except DecodeError as error:
            raise ApplicationRuntimeError("malformed message in parts") from error
        if whole.HasField("part"):
            raise ApplicationRuntimeError("malformed message in parts: it contains another part")
        return whole


def check_size(message: Message) -> None:
    """Raise ApplicationRuntimeError for a message that cannot be sent even in parts."""
    if message.ByteSize() > WHOLE_BYTES:
        raise ApplicationRuntimeError(
            f"{message.ByteSize()} bytes cannot be sent to a machine on another host at once",
            hint="Use fewer batches per step, or run the program on the machine's host (podrun --host).",
        )


def empty_tensors(messages: Iterable[pb.Tensor]) -> dict[str, Array]:
    """New arrays of the shapes that ``messages`` describe, at most `WHOLE_BYTES` in all."""
    arrays, total = {}, 0
    for message in messages:
        size = wire_dtype(message.dtype).itemsize
        for extent in message.shape:
            size *= extent
        total += size
        if total > WHOLE_BYTES:
            raise ApplicationRuntimeError(
                f"anchors of more than {WHOLE_BYTES} bytes cannot be sent to another host in one run",
                hint="Use fewer batches per step, or return fewer tensors.",
            )
        arrays[message.name] = np.empty(tuple(message.shape), wire_dtype(message.dtype))
    return arrays


def inline_tensors(values: Mapping[str, Array]) -> list[pb.Tensor]:
    """Tensors as messages that hold their bytes."""
    return [tensor_to_wire(name, value) for name, value in values.items()]


def status_of(error: Exception) -> tuple[str, str]:
    """Name of a gRPC error's status code, and its details. The errors that calls raise have both."""
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    name = code().name if callable(code) and code() is not None else type(error).__name__
    return name, (details() if callable(details) else "") or str(error)


def json_or_error(text: str, what: str) -> Any:
    """Parsed JSON; ServiceError for text that is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ServiceError(f"{what} is not JSON") from error
