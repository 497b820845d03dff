"""What users ask over gRPC: requests become calls on `Service`, results become messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from podrun.core.errors import (
    DeniedError,
    PodrunError,
)
from podrun.core.identity import Caller
from podrun.core.telemetry import MachineReport
from podrun.partition.server.access import AccountCaller
from podrun.partition.server.calls import ASK_ADMINISTRATOR, ServiceCall, Servicer, abort_with, answers, who
from podrun.partition.server.event_log import BOUNDS_S, SYNCED, Change
from podrun.partition.server.sharing import Sharing
from podrun.partition.server.views import (
    requirements_of,
)
from podrun.partition.state.accounts import Role
from podrun.partition.state.codec import to_message
from podrun.partition.state.records import NOBODY
from podrun.partition.state.values import CallInfo, PartitionStatus, QueueInfo, ServiceMetrics
from podrun.protos import vipu_pb2 as pb


class UserServicer(Servicer):
    """The service ``podrun.vipu.v1.UserService``: each method answers the call of that name."""

    @answers
    def GetServerVersion(self, request: pb.GetServerVersionRequest, call: ServiceCall) -> Any:
        return to_message(self._service.version(), pb.GetServerVersionResponse)

    @answers
    def GetCluster(self, request: pb.GetClusterRequest, call: ServiceCall) -> Any:
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
    def ListClusters(self, request: pb.ListClustersRequest, call: ServiceCall) -> Any:
        return pb.ListClustersResponse(
            clusters=[to_message(info, pb.Cluster) for info in self._service.clusters()]
        )

    @answers
    def CreatePartition(self, request: pb.CreatePartitionRequest, call: ServiceCall) -> Any:
        if request.priority > 0 and not self.is_admin(call.caller):
            raise DeniedError(
                f"priority {request.priority} is for administrators of this server", hint="Use 0 or less."
            )
        self._service.create(
            requirements_of(request, call.caller.uid),
            wait=request.wait,
            priority=request.priority,
            asker=call.asker,
        )
        return pb.CreatePartitionResponse(partition_id=request.partition_id)

    @answers
    def GetPartition(self, request: pb.GetPartitionRequest, call: ServiceCall) -> Any:
        info = self._service.partition(request.partition_id, asker=call.asker)
        return pb.GetPartitionResponse(partition=to_message(info, pb.Partition))

    @answers
    def ListPartitions(self, request: pb.ListPartitionsRequest, call: ServiceCall) -> Any:
        messages = self._partitions.all(
            (info.name, info, partial(to_message, info, pb.Partition)) for info in self._service.partitions()
        )
        seen = (
            messages
            if self.sees_all(call.caller)
            else [m for m in messages if self.sees(call.caller, m.allocation_id)]
        )
        return pb.ListPartitionsResponse(partitions=seen)

    @answers
    def GetPartitionStatus(self, request: pb.GetPartitionStatusRequest, call: ServiceCall) -> Any:
        info = self._service.partition(request.partition_id, asks_for_itself=True, asker=call.asker)
        status = PartitionStatus(info.state, info.error, info.generation)
        return pb.GetPartitionStatusResponse(status=to_message(status, pb.PartitionStatus))

    @answers
    def ListQueue(self, request: pb.ListQueueRequest, call: ServiceCall) -> Any:
        queue = self._service.queue()
        seen = set(self.seen_names(call.caller, [info.name for info in queue]))
        return pb.ListQueueResponse(
            requests=[
                to_message(self._seen_request(call.caller, info), pb.QueuedRequest)
                for info in queue
                if info.name in seen
            ]
        )

    @answers
    def PlanPartition(self, request: pb.PlanPartitionRequest, call: ServiceCall) -> Any:
        planned = self._service.planned(
            requirements_of(request.request, call.caller.uid),
            priority=request.request.priority,
            asker=call.asker,
        )
        told = replace(planned, request=self._seen_request(call.caller, planned.request))
        return pb.PlanPartitionResponse(planned=to_message(told, pb.PlannedPartition))

    @answers
    def CaptureState(self, request: pb.CaptureStateRequest, call: ServiceCall) -> Any:
        if not self.sees_all(call.caller):
            raise DeniedError(
                f"{who(call.caller)} does not see the whole POD, which a capture shows",
                hint=ASK_ADMINISTRATOR,
            )
        return pb.CaptureStateResponse(json=self._service.captured())

    def _seen_request(self, caller: Caller, info: QueueInfo) -> QueueInfo:
        """A queued request as the caller may see it: its place among those that the caller is told of."""
        ahead = tuple(self.seen_names(caller, info.ahead))
        blockers = tuple(self.seen_names(caller, info.blockers))
        return replace(info, position=1 + len(ahead), ahead=ahead, blockers=blockers)

    @answers
    def ListReservations(self, request: pb.ListReservationsRequest, call: ServiceCall) -> Any:
        return pb.ListReservationsResponse(
            reservations=[
                to_message(info, pb.Reservation)
                for info in self._service.reservations()
                if self.sees_agents(call.caller, info.agents)
            ]
        )

    @answers
    def ResetPartition(self, request: pb.ResetPartitionRequest, call: ServiceCall) -> None:
        self._service.reset(request.partition_id, request.generation, asker=call.asker)

    @answers
    def RemovePartition(self, request: pb.RemovePartitionRequest, call: ServiceCall) -> None:
        self._service.remove(request.partition_id, force=request.force, asker=call.asker)

    @answers
    def HoldPartition(self, request: pb.HoldPartitionRequest, call: ServiceCall) -> None:
        self._service.hold(request.partition_id, request.holder, keep=request.keep, asker=call.asker)

    @answers
    def GetPartitionIpuofConfig(self, request: pb.GetPartitionIpuofConfigRequest, call: ServiceCall) -> Any:
        config = self._service.ipuof_config(request.partition_id, request.gcd_id.id, asker=call.asker)
        return pb.GetPartitionIpuofConfigResponse(ipuof_config=to_message(config, pb.PartitionConfig))

    @answers
    def ListAllocations(self, request: pb.ListAllocationsRequest, call: ServiceCall) -> Any:
        return pb.ListAllocationsResponse(
            allocations=[
                to_message(info, pb.Allocation)
                for info in self._service.allocations()
                if self.sees(call.caller, info.name)
            ]
        )

    @answers
    def ListMachineReports(self, request: pb.ListMachineReportsRequest, call: ServiceCall) -> Any:
        before = self._holders()
        told = self._service.machine_reports(request.partition_id, asker=call.asker)
        # A partition that was made, or made anew, while machines answered is nobody's, so that nothing of it is told.
        holders = dict(before.items() & self._holders().items())
        reports = [self._visible(call.caller, r, holders.get(r.partition, (NOBODY, ""))) for r in told]
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

    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        """The stream of changes."""
        try:
            caller = self.admit("Watch", request, context)
            log_ = self._service.events
            for change in log_.watch(request.resume_token, request.kinds, context.is_active):
                if not self.is_current(caller):
                    raise DeniedError(
                        f"{who(caller)} is no user of this server any more", hint=ASK_ADMINISTRATOR
                    )
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
            abort_with(context, error)

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
    def GetServiceMetrics(self, request: pb.GetServiceMetricsRequest, call: ServiceCall) -> Any:
        queued, free, largest = self._service.room()
        calls = tuple(
            CallInfo(name, f.count, f.errors, f.seconds, tuple(f.within)) for name, f in self.meter.all()
        )
        watchers = self._service.events.watchers
        metrics = ServiceMetrics(tuple(BOUNDS_S), calls, queued, free, largest, watchers)
        return to_message(metrics, pb.GetServiceMetricsResponse)

    @answers
    def ResetIpus(self, request: pb.ResetIpusRequest, call: ServiceCall) -> None:
        self._service.reset_ipus(request.partition_id, list(request.partition_ipus), asker=call.asker)
