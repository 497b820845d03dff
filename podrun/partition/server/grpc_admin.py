"""The gRPC interface of the V-IPU service for administrators; that for users is `grpc_service`."""

from __future__ import annotations

from functools import partial
from typing import Any

from podrun.core.cluster import GatewayTopology, LinkTopology, named_topology
from podrun.core.errors import ConflictError
from podrun.faults import parse_fault
from podrun.partition.server.calls import ServiceCall, Servicer, answers
from podrun.partition.server.views import user_info
from podrun.partition.state import events as ev
from podrun.partition.state.accounts import Account, Accounts, role_of
from podrun.partition.state.codec import to_message
from podrun.protos import vipu_pb2 as pb


class AdminServicer(Servicer):
    """The service ``podrun.vipu.v1.AdminService``: each method answers the call of that name."""

    @answers
    def ListAgents(self, request: pb.ListAgentsRequest, call: ServiceCall) -> Any:
        messages = self._agents.all(
            (info.agent_id, info, partial(to_message, info, pb.Agent)) for info in self._service.agents()
        )
        reply = pb.ListAgentsResponse(agents=messages)
        if not self.is_admin(call.caller):
            for agent in reply.agents:
                agent.ClearField("endpoints")
        if not self.sees_all(call.caller):
            for agent in reply.agents:
                agent.partition_ids[:] = self.seen_names(call.caller, agent.partition_ids)
        return reply

    @answers
    def SetMaintenance(self, request: pb.SetMaintenanceRequest, call: ServiceCall) -> None:
        self._service.set_maintenance(
            request.agent_id, drain=request.drain, deadline_s=request.deadline_seconds, reason=request.reason
        )

    @answers
    def EndMaintenance(self, request: pb.EndMaintenanceRequest, call: ServiceCall) -> None:
        self._service.end_maintenance(request.agent_id)

    @answers
    def CreateReservation(self, request: pb.CreateReservationRequest, call: ServiceCall) -> None:
        self._service.create_reservation(
            request.reservation_id,
            tuple(request.agent_ids),
            begin_in_s=request.begin_in_seconds,
            for_s=request.for_seconds,
            asker=call.asker,
        )

    @answers
    def RemoveReservation(self, request: pb.RemoveReservationRequest, call: ServiceCall) -> None:
        self._service.remove_reservation(request.reservation_id, asker=call.asker)

    @answers
    def CreateAllocation(self, request: pb.CreateAllocationRequest, call: ServiceCall) -> None:
        allocation = request.allocation
        self._service.handle(ev.CreateAllocation(allocation.id, tuple(allocation.spec.agent_ids)))

    @answers
    def RemoveAllocation(self, request: pb.RemoveAllocationRequest, call: ServiceCall) -> None:
        self._service.handle(ev.RemoveAllocation(request.allocation_id))

    @answers
    def CreateAgent(self, request: pb.CreateAgentRequest, call: ServiceCall) -> None:
        self._service.handle(ev.CreateAgent(request.agent_id, request.host, request.port))

    @answers
    def RemoveAgent(self, request: pb.RemoveAgentRequest, call: ServiceCall) -> None:
        self._service.handle(ev.RemoveAgent(request.agent_id))

    @answers
    def CreateCluster(self, request: pb.CreateClusterRequest, call: ServiceCall) -> None:
        asked = request.cluster
        links = named_topology(LinkTopology, asked.ipu_link_topology or LinkTopology.MESH.value)
        gateway = named_topology(GatewayTopology, asked.gateway_topology) if asked.gateway_topology else None
        self._service.handle(
            ev.CreateCluster(asked.cluster_id, tuple(asked.agent_ids), asked.num_ilds or 1, links, gateway)
        )

    @answers
    def RemoveCluster(self, request: pb.RemoveClusterRequest, call: ServiceCall) -> None:
        self._service.handle(ev.RemoveCluster(request.cluster_id))

    @answers
    def PowerCycleAgent(self, request: pb.PowerCycleAgentRequest, call: ServiceCall) -> None:
        self._service.handle(ev.PowerCycleAgent(request.agent_id, request.generation))

    @answers
    def RestartAgent(self, request: pb.RestartAgentRequest, call: ServiceCall) -> None:
        self._service.handle(ev.RestartAgent(request.agent_id, request.generation))

    @answers
    def InjectFaults(self, request: pb.InjectFaultsRequest, call: ServiceCall) -> Any:
        if request.cancel:
            gone = self._service.cancel_faults(request.partition_id, list(request.faults), asker=call.asker)
            return pb.InjectFaultsResponse(cancelled=gone)
        faults = [parse_fault(text) for text in request.faults]
        self._service.inject_faults(request.partition_id, faults, asker=call.asker)
        return None

    @answers
    def CreateUser(self, request: pb.CreateUserRequest, call: ServiceCall) -> Any:
        user = request.user
        for allocation in user.allocation_ids:
            self._service.check_allocation(allocation)
        account = Account(user.user_id, role_of(user.role), tuple(user.allocation_ids), user.may_inject)
        return pb.CreateUserResponse(access_key=self._accounts().create(account))

    @answers
    def RemoveUser(self, request: pb.RemoveUserRequest, call: ServiceCall) -> None:
        self._accounts().remove(request.user_id)

    @answers
    def ListUsers(self, request: pb.ListUsersRequest, call: ServiceCall) -> Any:
        return pb.ListUsersResponse(
            users=[to_message(user_info(account), pb.User) for account in self._accounts().all()]
        )

    def _accounts(self) -> Accounts:
        if self.desk.accounts is None:
            raise ConflictError(
                "this server has no users: it was started without --secure",
                hint="Allocations divide the agents without users: vipu-admin create allocation NAME",
            )
        return self.desk.accounts
