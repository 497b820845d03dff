"""The gRPC interface of the V-IPU service: requests become calls on `Service`, results and errors become messages."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import grpc

from podrun.core.errors import (
    ConflictError,
    DeadlineError,
    DeniedError,
    ExhaustedError,
    ExistsError,
    LostAnswerError,
    NotFoundError,
    PodrunError,
    ServiceError,
    UsageError,
    error_to_dict,
)
from podrun.core.gate import caller_of
from podrun.core.identity import Caller, user_name
from podrun.core.telemetry import MachineReport
from podrun.faults import parse_fault
from podrun.partition.machines.endpoint_watch import ERROR_METADATA_KEY
from podrun.partition.server.access import AccountCaller, FrontDesk
from podrun.partition.server.event_log import BOUNDS_S, SYNCED, Change
from podrun.partition.server.sharing import RIGHTS, Right, Sharing
from podrun.partition.server.views import (
    ViewCache,
    requirements_of,
)
from podrun.partition.state.accounts import Account, Role
from podrun.partition.state.codec import to_message
from podrun.partition.state.records import ITSELF, NOBODY, Asker
from podrun.partition.state.values import AgentInfo, CallInfo, PartitionInfo, PartitionStatus, ServiceMetrics
from podrun.protos import vipu_pb2 as messages

if TYPE_CHECKING:
    from podrun.partition.server.service import Service

log = logging.getLogger("podrun.partition")
pb: Any = messages

_ASK = "Ask an administrator of this server."
MESSAGE_BYTES = 800
"""Longest error message or hint on the wire: gRPC drops an answer whose headers exceed 8 KiB."""


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
"""The gRPC status of an error: that of the first class of which it is an instance."""


def _status(error: PodrunError) -> grpc.StatusCode:
    return next((status for kind, status in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def _shortened(text: str) -> str:
    """A sentence that fits the headers of an answer; a request can cause a quotation of any length."""
    data = text.encode()
    return text if len(data) <= MESSAGE_BYTES else f"{data[:MESSAGE_BYTES].decode(errors='ignore')}..."


def _abort(context: grpc.ServicerContext, error: PodrunError) -> None:
    """End a call with an error."""
    message, hint = _shortened(error.message), _shortened(error.hint or "") or None
    plain = {**error_to_dict(error), "message": message, "hint": hint}
    context.set_trailing_metadata(((ERROR_METADATA_KEY, json.dumps(plain).encode()),))
    context.abort(_status(error), message)


def answers(method: Callable[[Any, Any, Caller], Any]) -> Callable[[Any, Any, grpc.ServicerContext], Any]:
    """Make a gRPC handler from a method. It checks the caller and calls the method with it; errors become a status,
    with podrun's error in the metadata.
    """

    name = method.__name__

    @wraps(method)
    def handler(self: Any, request: Any, context: grpc.ServicerContext) -> Any:
        begin, failed = time.perf_counter(), True
        try:
            caller = self.admit(name, request, context)
            with self.desk.room.call(caller), self.desk.audit.call(name, who(caller), request):
                reply = self.answer(name, request, lambda: method(self, request, caller))
            failed = False
            return reply
        except PodrunError as error:
            _abort(context, error)
        except Exception as error:
            log.exception("%s failed", name)
            context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
        finally:
            self.meter.note(name, time.perf_counter() - begin, failed=failed)

    return handler


class Servicer:
    """The common part of both services: the service behind them, and the check of callers."""

    def __init__(self, service: Service, desk: FrontDesk, admin: bool = True) -> None:
        self._service, self.desk, self._admin = service, desk, admin
        self._sharing, self.meter = desk.sharing, service.meter
        self._partitions: ViewCache[PartitionInfo, Any] = ViewCache()
        self._agents: ViewCache[AgentInfo, Any] = ViewCache()

    def admit(self, method: str, request: Any, context: grpc.ServicerContext) -> Caller:
        """Who makes a call. Raises DeniedError, noted in the audit log, if the caller may not make it."""
        caller = caller_of(context)
        try:
            if not self._admin and RIGHTS.get(method, Right.ADMIN) is Right.ADMIN:
                raise DeniedError(
                    f"{method} is answered at the port for administrators",
                    hint=f"vipu-admin --api-port {self.desk.admin_port}",
                )
            if self.desk.accounts is None:
                self.check(caller, method, request)
                return caller
            metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
            account = self.desk.accounts.authenticate(metadata)
            caller = AccountCaller(caller.uid, caller.own, account)
            self._check_account(account, method, request)
            self._check_there(caller, method, request)
        except PodrunError as error:
            self.desk.audit.refused(method, who(caller), request, error)
            raise
        return caller

    def _check_account(self, account: Account, method: str, request: Any) -> None:
        account.check(method, injects=bool(getattr(request, "faults", ())))
        if method == "CreatePartition":
            wanted = request.requirements.allocation_id
            if wanted:
                account.check_allocation(wanted)
            elif len(account.allocations) == 1:
                request.requirements.allocation_id = account.allocations[0]
            elif account.allocations:
                raise UsageError(
                    f"{account.name} has several allocations: say which",
                    hint=f"--allocation {account.allocations[0]} (or: {', '.join(account.allocations[1:])})",
                )

    def _check_there(self, caller: Caller, method: str, request: Any) -> None:
        """Raise NotFoundError for a partition that the caller does not see, before faults that are planned for it could
        strike the call."""
        name = getattr(request, "partition_id", "")
        if name and method != "CreatePartition" and not self.seen_names(caller, [name]):
            self._service.partition(name, asker=self.asker(caller, method))

    def asker(self, caller: Caller, method: str) -> Asker:
        """The caller of a method as the service needs it: what it sees, and what it may do with which partitions."""
        if isinstance(caller, AccountCaller):
            return ITSELF if self.sees_all(caller) else Asker(frozenset(caller.account.allocations))
        return Asker(check=partial(self._sharing.check, caller, method))

    def is_admin(self, caller: Caller) -> bool:
        """Whether the caller may see and do things that concern the whole POD."""
        if isinstance(caller, AccountCaller):
            return caller.account.role.covers(Role.OPERATOR)
        return self._sharing.is_admin(caller)

    def sees(self, caller: Caller, allocation: str | None) -> bool:
        """Whether the caller may see partitions of an allocation."""
        account = caller.account if isinstance(caller, AccountCaller) else None
        return account is None or account.may_use(allocation or "")

    def sees_agents(self, caller: Caller, agents: Iterable[str]) -> bool:
        """Whether the caller may use one of these agents."""
        wanted = set(agents)
        return self.sees_all(caller) or any(
            wanted & set(info.agents) for info in self._service.allocations() if self.sees(caller, info.name)
        )

    def seen_names(self, caller: Caller, names: Iterable[str]) -> list[str]:
        """Of partitions and queued requests those that the caller is told of."""
        if self.sees_all(caller):
            return list(names)
        return [name for name in names if self.sees(caller, self._service.allocation_of(name))]

    def is_current(self, caller: Caller) -> bool:
        """Whether the caller is a user still."""
        accounts = self.desk.accounts
        return accounts is None or (isinstance(caller, AccountCaller) and accounts.has(caller.account))

    def sees_all(self, caller: Caller) -> bool:
        """Whether the caller may see all partitions."""
        return not isinstance(caller, AccountCaller) or not caller.account.allocations

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
        concerned = list(self._service.partitions_on(agent)) if agent and not name else [name]
        log = self._service.control_log

        def work_and_note() -> Any:
            done = work()
            log.note_request(method, concerned, request)
            return done

        if method != "CreatePartition":
            return faults.answer(method, next(iter(concerned), ""), work_and_note)
        own = [spec for spec in map(parse_fault, request.faults) if spec.during == method]
        faults.plan(name, own)  # Those of the creation itself strike while there is no partition yet.
        try:
            return faults.answer(method, name, work_and_note)
        except LostAnswerError:
            raise
        except Exception:
            faults.cancel(name, [spec.text for spec in own])
            raise


class UserServicer(Servicer):
    """podrun.vipu.v1.UserService."""

    @answers
    def GetServerVersion(self, request: Any, caller: Caller) -> Any:
        return to_message(self._service.version(), pb.GetServerVersionResponse)

    @answers
    def GetCluster(self, request: Any, caller: Caller) -> Any:
        pod = self._service.cluster
        cluster = max(pod.clusters, key=lambda one: one.ipu_count, default=pod)
        return pb.GetClusterResponse(
            cluster_id=pod.name,
            target=cluster.target,
            num_agents=len(cluster.agents),
            num_ipus=cluster.ipu_count,
            ipu_link_domain_size=cluster.topology.ild_ipus,
            ipu_link_topology=cluster.topology.ipu_links.value,
            gateway_topology=cluster.topology.gateway.value,
        )

    @answers
    def ListClusters(self, request: Any, caller: Caller) -> Any:
        return pb.ListClustersResponse(
            clusters=[to_message(info, pb.Cluster) for info in self._service.clusters()]
        )

    @answers
    def CreatePartition(self, request: Any, caller: Caller) -> Any:
        if request.priority > 0 and not self.is_admin(caller):
            raise DeniedError(
                f"priority {request.priority} is for administrators of this server", hint="Use 0 or less."
            )
        self._service.create(
            requirements_of(request, caller.uid),
            wait=request.wait,
            priority=request.priority,
            asker=self.asker(caller, "CreatePartition"),
        )
        return pb.CreatePartitionResponse(partition_id=request.partition_id)

    @answers
    def GetPartition(self, request: Any, caller: Caller) -> Any:
        info = self._service.partition(request.partition_id, asker=self.asker(caller, "GetPartition"))
        return pb.GetPartitionResponse(partition=to_message(info, pb.Partition))

    @answers
    def ListPartitions(self, request: Any, caller: Caller) -> Any:
        messages = self._partitions.all(
            (info.name, info, partial(to_message, info, pb.Partition)) for info in self._service.partitions()
        )
        seen = (
            messages if self.sees_all(caller) else [m for m in messages if self.sees(caller, m.allocation_id)]
        )
        return pb.ListPartitionsResponse(partitions=seen)

    @answers
    def GetPartitionStatus(self, request: Any, caller: Caller) -> Any:
        asker = self.asker(caller, "GetPartitionStatus")
        info = self._service.partition(request.partition_id, asks_for_itself=True, asker=asker)
        status = PartitionStatus(info.state, info.error, info.generation)
        return pb.GetPartitionStatusResponse(status=to_message(status, pb.PartitionStatus))

    @answers
    def ListQueue(self, request: Any, caller: Caller) -> Any:
        queue = self._service.queue()
        seen = set(self.seen_names(caller, [info.name for info in queue]))
        return pb.ListQueueResponse(
            requests=[
                to_message(
                    replace(
                        info,
                        position=1 + len(self.seen_names(caller, info.ahead)),
                        ahead=tuple(self.seen_names(caller, info.ahead)),
                        blockers=tuple(self.seen_names(caller, info.blockers)),
                    ),
                    pb.QueuedRequest,
                )
                for info in queue
                if info.name in seen
            ]
        )

    @answers
    def ListReservations(self, request: Any, caller: Caller) -> Any:
        return pb.ListReservationsResponse(
            reservations=[
                to_message(info, pb.Reservation)
                for info in self._service.reservations()
                if self.sees_agents(caller, info.agents)
            ]
        )

    @answers
    def ResetPartition(self, request: Any, caller: Caller) -> Any:
        asker = self.asker(caller, "ResetPartition")
        self._service.reset(request.partition_id, request.generation, asker=asker)
        return pb.ResetPartitionResponse()

    @answers
    def RemovePartition(self, request: Any, caller: Caller) -> Any:
        asker = self.asker(caller, "RemovePartition")
        self._service.remove(request.partition_id, force=request.force, asker=asker)
        return pb.RemovePartitionResponse()

    @answers
    def HoldPartition(self, request: Any, caller: Caller) -> Any:
        asker = self.asker(caller, "HoldPartition")
        self._service.hold(request.partition_id, request.holder, keep=request.keep, asker=asker)
        return pb.HoldPartitionResponse()

    @answers
    def GetPartitionIpuofConfig(self, request: Any, caller: Caller) -> Any:
        asker = self.asker(caller, "GetPartitionIpuofConfig")
        config = self._service.ipuof_config(request.partition_id, request.gcd_id.id, asker=asker)
        return pb.GetPartitionIpuofConfigResponse(ipuof_config=to_message(config, pb.PartitionConfig))

    @answers
    def ListAllocations(self, request: Any, caller: Caller) -> Any:
        return pb.ListAllocationsResponse(
            allocations=[
                to_message(info, pb.Allocation)
                for info in self._service.allocations()
                if self.sees(caller, info.name)
            ]
        )

    @answers
    def ListMachineReports(self, request: Any, caller: Caller) -> Any:
        asker = self.asker(caller, "ListMachineReports")
        before = self._holders()
        told = self._service.machine_reports(request.partition_id, asker=asker)
        # A partition that was made, or made anew, while machines answered is nobody's, so that nothing of it is told.
        holders = dict(before.items() & self._holders().items())
        reports = [self._visible(caller, r, holders.get(r.partition, (NOBODY, ""))) for r in told]
        return pb.ListMachineReportsResponse(
            reports_json=[json.dumps(report.to_json_dict()) for report in reports]
        )

    def _holders(self) -> dict[str, tuple[int, str]]:
        """The owner's user id and the allocation of each partition."""
        owners = self._service.owners()
        return {name: (owner, self._service.allocation_of(name) or "") for name, owner in owners.items()}

    def _visible(self, caller: Caller, report: MachineReport, holder: tuple[int, str]) -> MachineReport:
        """A machine's report as the caller may see it. ``holder``: owner and allocation of its partition."""
        owner, allocation = holder
        if not report.partition:
            return report
        if self.sees_all(caller):
            return self._sharing.visible(caller, report, owner)
        if self.sees(caller, allocation):
            return report
        hidden = Sharing(shared=True).visible(Caller(NOBODY, own=False), report, NOBODY)
        return replace(hidden, partition="")

    def Watch(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """The stream of changes."""
        try:
            caller = self.admit("Watch", request, context)
            log_ = self._service.events
            for change in log_.watch(request.resume_token, request.kinds, context.is_active):
                if not self.is_current(caller):
                    raise DeniedError(f"{who(caller)} is no user of this server any more", hint=_ASK)
                text = self._told(caller, change)
                if text is None:
                    continue
                yield pb.WatchEvent(
                    resume_token=log_.token(change),
                    kind=change.kind,
                    name=change.name,
                    removed=change.kind != SYNCED and not text,
                    json=text,
                    time=change.time,
                    initial=change.initial,
                )
        except PodrunError as error:
            _abort(context, error)

    def _told(self, caller: Caller, change: Change) -> str | None:
        """The JSON of a change as the caller may see it; None: it is not told."""
        match change.kind:
            case "user":
                account = caller.account if isinstance(caller, AccountCaller) else None
                return change.text if account is None or account.role is Role.ADMIN else None
            case "partition" | "incident":
                return change.text if self.sees(caller, change.allocation) else None
            case "allocation":
                return change.text if self.sees(caller, change.name) else None
            case "reservation" if change.text and not self.sees_all(caller):
                agents = json.loads(change.text)["agents"]
                return change.text if self.sees_agents(caller, agents) else None
            case "machine" if change.text and not (self.is_admin(caller) and self.sees_all(caller)):
                told = json.loads(change.text)
                endpoints = told["endpoints"] if self.is_admin(caller) else []
                seen = self.seen_names(caller, told["partitions"])
                return json.dumps({**told, "partitions": seen, "endpoints": endpoints})
        return change.text

    @answers
    def GetServiceMetrics(self, request: Any, caller: Caller) -> Any:
        queued, free, largest = self._service.room()
        calls = tuple(
            CallInfo(name, f.count, f.errors, f.seconds, tuple(f.within)) for name, f in self.meter.all()
        )
        watchers = self._service.events.watchers
        metrics = ServiceMetrics(tuple(BOUNDS_S), calls, queued, free, largest, watchers)
        return to_message(metrics, pb.GetServiceMetricsResponse)

    @answers
    def ResetIpus(self, request: Any, caller: Caller) -> Any:
        asker = self.asker(caller, "ResetIpus")
        self._service.reset_ipus(request.partition_id, list(request.partition_ipus), asker=asker)
        return pb.ResetIpusResponse()


def who(caller: Caller) -> str:
    """A caller's name in the audit log."""
    return caller.account.name if isinstance(caller, AccountCaller) else user_name(caller.uid)
