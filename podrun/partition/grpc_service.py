"""The partition service's gRPC face: requests into calls on `Service`, results and errors into messages."""

from __future__ import annotations

import errno
import json
import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import wraps
from typing import TYPE_CHECKING, Any

import grpc

from podrun.access import guards
from podrun.errors import (
    ConflictError,
    DeadlineError,
    ExhaustedError,
    ExistsError,
    NotFoundError,
    PodrunError,
    ServiceError,
    UsageError,
)
from podrun.partition import events as ev
from podrun.partition.client import ERROR_METADATA_KEY
from podrun.partition.types import PartitionInfo, PartitionState, Requirements, SyncType
from podrun.protos import vipu_pb2 as messages
from podrun.protos import vipu_pb2_grpc

if TYPE_CHECKING:
    from podrun.partition.service import Service

log = logging.getLogger("podrun.partition")
pb: Any = messages

HANDLER_THREADS = 16
MESSAGE_BYTES = 800
"""Most of a message or hint that crosses the wire: gRPC drops an answer whose headers exceed 8 KiB."""


def serve(service: Service, host: str, port: int, token: str = "") -> tuple[grpc.Server, int]:
    """Listen for ``service``; returns the server and its port. ``token``: what callers have to show (none: nothing).
    Raises ConflictError if the port is taken."""
    _refuse_taken(host, port)
    server = grpc.server(
        ThreadPoolExecutor(HANDLER_THREADS, thread_name_prefix="podrun-vipu"),
        options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 16 << 20)),
        interceptors=guards(token),
    )
    vipu_pb2_grpc.add_UserServiceServicer_to_server(UserServicer(service), server)  # type: ignore[no-untyped-call]
    vipu_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(service), server)  # type: ignore[no-untyped-call]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise _taken(host, port) from error
    if not bound:
        raise _taken(host, port)
    server.start()
    return server, bound


def _refuse_taken(host: str, port: int) -> None:
    """Find out before gRPC does, which would print a trace of its own to the terminal."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _taken(host, port) from error
            raise UsageError(
                f"cannot listen on {host}:{port}: {error.strerror or error}",
                hint="Name another: --host, --port.",
            ) from error
        except OverflowError as error:
            raise UsageError(f"there is no port {port}", hint="Use --port 1 to 65535.") from error


def _taken(host: str, port: int) -> ConflictError:
    return ConflictError(
        f"port {port} on {host} is taken by another program",
        hint=f"Perhaps a server runs already: vipu -H {host} --api-port {port} --server-version. "
        f"Or use another port: vipu-server --port {port + 1 if port < 65535 else port - 1}",
    )


_STATUS: tuple[tuple[type[PodrunError], grpc.StatusCode], ...] = (
    (NotFoundError, grpc.StatusCode.NOT_FOUND),
    (ExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (ExhaustedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ConflictError, grpc.StatusCode.FAILED_PRECONDITION),
    (UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    (DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (ServiceError, grpc.StatusCode.UNAVAILABLE),
)
"""The first that an error is one of counts."""


def _status(error: PodrunError) -> grpc.StatusCode:
    return next((status for kind, status in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def _shortened(text: str) -> str:
    """A sentence that fits the headers of an answer, whatever the caller made us quote."""
    data = text.encode()
    return text if len(data) <= MESSAGE_BYTES else f"{data[:MESSAGE_BYTES].decode(errors='ignore')}..."


def _answers(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any, grpc.ServicerContext], Any]:
    """A handler from a method that takes a request: its errors become statuses with podrun's own error beside
    them.
    """

    @wraps(method)
    def handler(self: Any, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return method(self, request)
        except PodrunError as error:
            message, hint = _shortened(error.message), _shortened(error.hint or "") or None
            plain = {"type": type(error).__name__, "message": message, "hint": hint}
            context.set_trailing_metadata(((ERROR_METADATA_KEY, json.dumps(plain).encode()),))
            context.abort(_status(error), message)
        except Exception as error:
            log.exception("%s failed", method.__name__)
            context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")

    return handler


class UserServicer:
    """podrun.vipu.UserService."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @_answers
    def GetServerVersion(self, request: Any) -> Any:
        version = self._service.version()
        return pb.GetServerVersionResponse(
            version=version.version, host=version.host, port=version.port, pid=version.pid
        )

    @_answers
    def GetCluster(self, request: Any) -> Any:
        cluster = self._service.cluster
        return pb.GetClusterResponse(
            cluster_id=cluster.name,
            target=cluster.target,
            num_agents=len(cluster.agents),
            num_ipus=cluster.ipu_count,
            ipu_link_domain_size=cluster.topology.ild_ipus,
            ipu_link_topology=cluster.topology.ipu_links.value,
            gateway_topology=cluster.topology.gateway.value,
        )

    @_answers
    def CreatePartition(self, request: Any) -> Any:
        needs = request.requirements
        try:
            sync = pb.SyncType.Name(needs.sync_type)
        except ValueError as error:
            raise UsageError(
                f"there is no sync type {needs.sync_type}",
                hint=f"There are: {', '.join(pb.SyncType.keys())}.",
            ) from error
        self._service.create(
            Requirements(
                name=request.partition_id,
                size=needs.size,
                allocation=needs.allocation_id,
                reconfigurable=needs.reconfigurable,
                num_gcds=needs.num_gcds or 1,
                num_ilds=needs.num_ilds,
                sync_type=None if sync == "ST_UNSPECIFIED" else SyncType[sync.removeprefix("ST_")],
                auto_reset=not request.disable_auto_reset,
                faults=tuple(request.faults),
            )
        )
        return pb.CreatePartitionResponse(partition_id=request.partition_id)

    @_answers
    def GetPartition(self, request: Any) -> Any:
        return pb.GetPartitionResponse(partition=_partition(self._service.partition(request.partition_id)))

    @_answers
    def ListPartitions(self, request: Any) -> Any:
        return pb.ListPartitionsResponse(partitions=[_partition(info) for info in self._service.partitions()])

    @_answers
    def GetPartitionStatus(self, request: Any) -> Any:
        return pb.GetPartitionStatusResponse(
            status=_partition_status(self._service.partition(request.partition_id))
        )

    @_answers
    def ResetPartition(self, request: Any) -> Any:
        self._service.reset(request.partition_id)
        return pb.ResetPartitionResponse()

    @_answers
    def RemovePartition(self, request: Any) -> Any:
        self._service.remove(request.partition_id)
        return pb.RemovePartitionResponse()

    @_answers
    def GetPartitionIpuofConfig(self, request: Any) -> Any:
        config = self._service.ipuof_config(request.partition_id, request.gcd_id.id)
        devices = [pb.IpuofDevice(**asdict(device)) for device in config.devices]
        return pb.GetPartitionIpuofConfigResponse(
            ipuof_config=pb.PartitionConfig(
                partition_id=config.partition,
                state=config.state.name,
                devices=devices,
                attributes=dict(config.attributes),
            )
        )

    @_answers
    def ListAllocations(self, request: Any) -> Any:
        return pb.ListAllocationsResponse(
            allocations=[
                pb.Allocation(
                    id=info.name, spec=pb.AllocationSpec(cluster_id=info.cluster, agent_ids=list(info.agents))
                )
                for info in self._service.allocations()
            ]
        )

    @_answers
    def ListMachineReports(self, request: Any) -> Any:
        reports = self._service.machine_reports(request.partition_id)
        return pb.ListMachineReportsResponse(
            reports_json=[json.dumps(report.to_json_dict()) for report in reports]
        )

    @_answers
    def ResetIpus(self, request: Any) -> Any:
        self._service.reset_ipus(request.partition_id, list(request.partition_ipus))
        return pb.ResetIpusResponse()


class AdminServicer:
    """podrun.vipu.AdminService."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @_answers
    def ListAgents(self, request: Any) -> Any:
        return pb.ListAgentsResponse(
            agents=[
                pb.Agent(
                    agent_id=info.agent_id,
                    host=info.host,
                    port=info.port,
                    serial=info.serial,
                    state=pb.AgentState.Value(f"AS_{info.state.name}"),
                    partition_ids=list(info.partitions),
                    endpoints=list(info.endpoints),
                    ild=info.ild,
                    num_ipus=info.num_ipus,
                )
                for info in self._service.agents()
            ]
        )

    @_answers
    def CreateAllocation(self, request: Any) -> Any:
        allocation = request.allocation
        self._service.handle(ev.CreateAllocation(allocation.id, tuple(allocation.spec.agent_ids)))
        return pb.CreateAllocationResponse()

    @_answers
    def RemoveAllocation(self, request: Any) -> Any:
        self._service.handle(ev.RemoveAllocation(request.allocation_id))
        return pb.RemoveAllocationResponse()

    @_answers
    def PowerCycleAgent(self, request: Any) -> Any:
        self._service.handle(ev.RequestPowerCycle(request.agent_id))
        return pb.PowerCycleAgentResponse()

    @_answers
    def RestartAgent(self, request: Any) -> Any:
        self._service.handle(ev.RequestRestart(request.agent_id))
        return pb.RestartAgentResponse()

    @_answers
    def InjectFaults(self, request: Any) -> Any:
        self._service.inject_faults(request.partition_id, list(request.faults))
        return pb.InjectFaultsResponse()


def _partition_status(info: PartitionInfo) -> Any:
    state = pb.PartitionState.Value(info.state.wire_name)
    return pb.PartitionStatus(state=state, error=info.error, generation=info.generation)


def _partition(info: PartitionInfo) -> Any:
    assert info.state is not PartitionState.REMOVED, "a removed partition is not described"
    return pb.Partition(
        partition_id=info.name,
        cluster_id=info.cluster,
        allocation_id=info.allocation,
        requirements=pb.PartitionRequirements(
            size=info.size,
            reconfigurable=info.reconfigurable,
            num_gcds=info.num_gcds,
            sync_type=pb.SyncType.Value(info.sync_type.wire_name),
            allocation_id=info.allocation,
            num_ilds=info.num_ilds,
        ),
        status=_partition_status(info),
        num_ilds=info.num_ilds,
        ild_routing=info.ild_routing,
        gw_routing=info.gw_routing,
        agent_ids=list(info.agents),
        created=info.created,
    )
