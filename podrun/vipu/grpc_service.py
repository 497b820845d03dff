"""The gRPC interface of the V-IPU service: requests become calls on `Service`, results and errors become messages."""

from __future__ import annotations

import errno
import json
import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import grpc

from podrun.core.access import Gate, add_port, caller_of
from podrun.core.errors import (
    ConflictError,
    DeadlineError,
    DeniedError,
    ExhaustedError,
    ExistsError,
    NotFoundError,
    PodrunError,
    ServiceError,
    UsageError,
    error_to_dict,
)
from podrun.core.identity import Caller
from podrun.faults import parse_fault
from podrun.protos import vipu_pb2 as messages
from podrun.protos import vipu_pb2_grpc
from podrun.vipu import events as ev
from podrun.vipu.client import ERROR_METADATA_KEY
from podrun.vipu.rights import CallRoom, Sharing
from podrun.vipu.types import AgentInfo, PartitionInfo, PartitionState, Requirements, SyncType
from podrun.vipu.views import ViewCache

if TYPE_CHECKING:
    from podrun.vipu.service import Service

log = logging.getLogger("podrun.vipu")
pb: Any = messages

HANDLER_THREADS = 16
REQUEST_BYTES = 4 << 20
"""Longest request: an allocation of all agents of the largest POD has a hundredth of it."""
MESSAGE_BYTES = 800
"""Longest error message or hint on the wire: gRPC drops an answer whose headers exceed 8 KiB."""


def serve(
    service: Service, host: str, port: int, token: str, sharing: Sharing | None = None
) -> tuple[grpc.Server, int]:
    """Listen for ``service``; returns the server and its port. ``token``: the secret that callers must prove to know
    (`podrun.core.access`); ``sharing``: who else may call. Raises ConflictError if the port is taken."""
    sharing = sharing or Sharing()
    gate, room = Gate(token, shared=sharing.shared), CallRoom()
    _refuse_taken(host, port)
    server = grpc.server(
        ThreadPoolExecutor(HANDLER_THREADS, thread_name_prefix="podrun-vipu"),
        options=(
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", REQUEST_BYTES),
            ("grpc.server_handshake_timeout_ms", 30_000),
        ),
        interceptors=gate.interceptors(),
    )
    vipu_pb2_grpc.add_UserServiceServicer_to_server(UserServicer(service, sharing, room), server)  # type: ignore[no-untyped-call]
    vipu_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(service, sharing, room), server)  # type: ignore[no-untyped-call]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = add_port(server, address)
    except RuntimeError as error:
        raise _taken(host, port) from error
    if not bound:
        raise _taken(host, port)
    gate.listens(host, bound)
    server.start()
    return server, bound


def _refuse_taken(host: str, port: int) -> None:
    """Check the port before gRPC does, which prints a trace of its own to the terminal."""
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
        f"A server of another POD: vipu-server --cluster NAME --port {port + 1 if port < 65535 else port - 1}",
    )


_STATUS: tuple[tuple[type[PodrunError], grpc.StatusCode], ...] = (
    (NotFoundError, grpc.StatusCode.NOT_FOUND),
    (DeniedError, grpc.StatusCode.PERMISSION_DENIED),
    (ExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (ExhaustedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ConflictError, grpc.StatusCode.FAILED_PRECONDITION),
    (UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    (DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (ServiceError, grpc.StatusCode.UNAVAILABLE),
)
"""The first class that an error is an instance of decides."""


def _status(error: PodrunError) -> grpc.StatusCode:
    return next((status for kind, status in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def _shortened(text: str) -> str:
    """A sentence that fits the headers of an answer; requests can make a quotation of any length."""
    data = text.encode()
    return text if len(data) <= MESSAGE_BYTES else f"{data[:MESSAGE_BYTES].decode(errors='ignore')}..."


def _answers(method: Callable[[Any, Any, Caller], Any]) -> Callable[[Any, Any, grpc.ServicerContext], Any]:
    """Make a gRPC handler from a method: it is called for those who may, with who calls; its errors become a status,
    with podrun's error in the metadata."""

    @wraps(method)
    def handler(self: Any, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            caller = caller_of(context)
            self.check(caller, method.__name__, request)
            with self.room.call(caller):
                return self.answer(method.__name__, request, lambda: method(self, request, caller))
        except PodrunError as error:
            message, hint = _shortened(error.message), _shortened(error.hint or "") or None
            plain = {**error_to_dict(error), "message": message, "hint": hint}
            context.set_trailing_metadata(((ERROR_METADATA_KEY, json.dumps(plain).encode()),))
            context.abort(_status(error), message)
        except Exception as error:
            log.exception("%s failed", method.__name__)
            context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")

    return handler


class _Servicer:
    """What both services share: the service behind them, and who may ask it for what."""

    def __init__(self, service: Service, sharing: Sharing, room: CallRoom | None = None) -> None:
        self._service, self._sharing = service, sharing
        self._partitions: ViewCache[PartitionInfo, Any] = ViewCache()
        self._agents: ViewCache[AgentInfo, Any] = ViewCache()
        self.room = room or CallRoom()

    def check(self, caller: Caller, method: str, request: Any) -> None:
        """Raise DeniedError if the caller may not make this call."""
        name = getattr(request, "partition_id", "")
        owner = self._service.owners().get(name) if name and not caller.own else None
        self._sharing.check(caller, method, name, owner)
        if any(text.startswith("service:") for text in getattr(request, "faults", ())):
            self._sharing.check(caller, "faults of the service", name, owner)

    def answer(self, method: str, request: Any, work: Callable[[], Any]) -> Any:
        """The answer to a call, unless a fault that is planned for it prevents it."""
        faults, name = self._service.request_faults, getattr(request, "partition_id", "")
        agent = getattr(request, "agent_id", "")
        if agent and not name:
            name = next(iter(self._service.partitions_on(agent)), "")
        return faults.answer(method, name, work)


class UserServicer(_Servicer):
    """podrun.vipu.UserService."""

    @_answers
    def GetServerVersion(self, request: Any, caller: Caller) -> Any:
        version = self._service.version()
        return pb.GetServerVersionResponse(
            version=version.version, host=version.host, port=version.port, pid=version.pid
        )

    @_answers
    def GetCluster(self, request: Any, caller: Caller) -> Any:
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
    def CreatePartition(self, request: Any, caller: Caller) -> Any:
        needs = request.requirements
        try:
            sync = pb.SyncType.Name(needs.sync_type)
        except ValueError as error:
            raise UsageError(
                f"there is no sync type {needs.sync_type}",
                hint=f"There are: {', '.join(pb.SyncType.keys())}.",
            ) from error
        if request.priority > 0 and not self._sharing.is_admin(caller):
            raise DeniedError(
                f"priority {request.priority} is for administrators of this server", hint="Use 0 or less."
            )
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
                faults=tuple(map(parse_fault, request.faults)),
                owner=caller.uid,
                limit_s=request.limit_seconds,
                relocatable=request.relocatable,
                reservation=request.reservation,
            ),
            wait=request.wait,
            priority=request.priority,
        )
        return pb.CreatePartitionResponse(partition_id=request.partition_id)

    @_answers
    def GetPartition(self, request: Any, caller: Caller) -> Any:
        return pb.GetPartitionResponse(partition=_partition(self._service.partition(request.partition_id)))

    @_answers
    def ListPartitions(self, request: Any, caller: Caller) -> Any:
        messages = self._partitions.all(
            (info.name, info, partial(_partition, info)) for info in self._service.partitions()
        )
        return pb.ListPartitionsResponse(partitions=messages)

    @_answers
    def GetPartitionStatus(self, request: Any, caller: Caller) -> Any:
        info = self._service.partition(request.partition_id, asks_for_itself=True)
        return pb.GetPartitionStatusResponse(status=_partition_status(info))

    @_answers
    def ListQueue(self, request: Any, caller: Caller) -> Any:
        return pb.ListQueueResponse(
            requests=[
                pb.QueuedRequest(
                    partition_id=info.name,
                    size=info.size,
                    priority=info.priority,
                    since=info.since,
                    position=info.position,
                    ahead=list(info.ahead),
                    blockers=list(info.blockers),
                    latest=info.latest or 0.0,
                    owner=info.owner,
                )
                for info in self._service.queue()
            ]
        )

    @_answers
    def ListReservations(self, request: Any, caller: Caller) -> Any:
        return pb.ListReservationsResponse(
            reservations=[
                pb.Reservation(id=info.name, agent_ids=list(info.agents), start=info.start, end=info.end)
                for info in self._service.reservations()
            ]
        )

    @_answers
    def ResetPartition(self, request: Any, caller: Caller) -> Any:
        self._service.reset(request.partition_id, request.generation)
        return pb.ResetPartitionResponse()

    @_answers
    def RemovePartition(self, request: Any, caller: Caller) -> Any:
        self._service.remove(request.partition_id, force=request.force)
        return pb.RemovePartitionResponse()

    @_answers
    def GetPartitionIpuofConfig(self, request: Any, caller: Caller) -> Any:
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
    def ListAllocations(self, request: Any, caller: Caller) -> Any:
        return pb.ListAllocationsResponse(
            allocations=[
                pb.Allocation(
                    id=info.name, spec=pb.AllocationSpec(cluster_id=info.cluster, agent_ids=list(info.agents))
                )
                for info in self._service.allocations()
            ]
        )

    @_answers
    def ListMachineReports(self, request: Any, caller: Caller) -> Any:
        owners = self._service.owners()
        reports = [
            self._sharing.visible(caller, report, owners.get(report.partition))
            for report in self._service.machine_reports(request.partition_id)
        ]
        return pb.ListMachineReportsResponse(
            reports_json=[json.dumps(report.to_json_dict()) for report in reports]
        )

    @_answers
    def ResetIpus(self, request: Any, caller: Caller) -> Any:
        self._service.reset_ipus(request.partition_id, list(request.partition_ipus))
        return pb.ResetIpusResponse()


class AdminServicer(_Servicer):
    """podrun.vipu.AdminService."""

    @_answers
    def ListAgents(self, request: Any, caller: Caller) -> Any:
        messages = self._agents.all(
            (info.agent_id, info, partial(_agent, info)) for info in self._service.agents()
        )
        reply = pb.ListAgentsResponse(agents=messages)
        if not self._sharing.is_admin(caller):
            for agent in reply.agents:
                agent.ClearField("endpoints")
        return reply

    @_answers
    def SetMaintenance(self, request: Any, caller: Caller) -> Any:
        self._service.set_maintenance(
            request.agent_id, drain=request.drain, deadline_s=request.deadline_seconds, reason=request.reason
        )
        return pb.SetMaintenanceResponse()

    @_answers
    def EndMaintenance(self, request: Any, caller: Caller) -> Any:
        self._service.end_maintenance(request.agent_id)
        return pb.EndMaintenanceResponse()

    @_answers
    def CreateReservation(self, request: Any, caller: Caller) -> Any:
        self._service.create_reservation(
            request.reservation_id,
            tuple(request.agent_ids),
            begin_in_s=request.begin_in_seconds,
            for_s=request.for_seconds,
        )
        return pb.CreateReservationResponse()

    @_answers
    def RemoveReservation(self, request: Any, caller: Caller) -> Any:
        self._service.remove_reservation(request.reservation_id)
        return pb.RemoveReservationResponse()

    @_answers
    def CreateAllocation(self, request: Any, caller: Caller) -> Any:
        allocation = request.allocation
        self._service.handle(ev.CreateAllocation(allocation.id, tuple(allocation.spec.agent_ids)))
        return pb.CreateAllocationResponse()

    @_answers
    def RemoveAllocation(self, request: Any, caller: Caller) -> Any:
        self._service.handle(ev.RemoveAllocation(request.allocation_id))
        return pb.RemoveAllocationResponse()

    @_answers
    def PowerCycleAgent(self, request: Any, caller: Caller) -> Any:
        self._service.handle(ev.PowerCycleAgent(request.agent_id, request.generation))
        return pb.PowerCycleAgentResponse()

    @_answers
    def RestartAgent(self, request: Any, caller: Caller) -> Any:
        self._service.handle(ev.RestartAgent(request.agent_id, request.generation))
        return pb.RestartAgentResponse()

    @_answers
    def InjectFaults(self, request: Any, caller: Caller) -> Any:
        if request.cancel:
            gone = self._service.cancel_faults(request.partition_id, list(request.faults))
            return pb.InjectFaultsResponse(cancelled=gone)
        self._service.inject_faults(request.partition_id, [parse_fault(text) for text in request.faults])
        return pb.InjectFaultsResponse()


def _agent(info: AgentInfo) -> Any:
    return pb.Agent(
        agent_id=info.agent_id,
        host=info.host,
        port=info.port,
        serial=info.serial,
        state=pb.AgentState.Value(f"AS_{info.state.name}"),
        partition_ids=list(info.partitions),
        endpoints=list(info.endpoints),
        ild=info.ild,
        num_ipus=info.num_ipus,
        health=info.health,
        stale_seconds=-1.0 if info.stale_seconds is None else info.stale_seconds,
        reason=info.reason,
        deadline=info.deadline,
    )


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
        owner=info.owner,
        ends=info.ends or 0.0,
        relocatable=info.relocatable,
    )
