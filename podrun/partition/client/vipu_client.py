"""`VipuClient`: the V-IPU service as Python calls.

    with VipuClient("127.0.0.1", 8090) as client:
        client.create_partition(Requirements("p16", 16, reconfigurable=True))
        client.wait_for_state("p16", {PartitionState.ACTIVE}, deadline=60)

Every call has a deadline and raises `podrun.core.errors`: UsageError (wrong request), NotFoundError, ConflictError
(name or IPUs taken, wrong state), ServiceError (no answer, or the server failed), DeadlineError. gRPC is
imported on first use.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from types import TracebackType
from typing import Any

from podrun.core.access import account_of, make_token, open_channel, quiet_grpc, with_account
from podrun.core.environment import environment, runtime_directory
from podrun.core.errors import (
    DeadlineError,
    LostAnswerError,
    NotFoundError,
    PodrunError,
    ServiceError,
)
from podrun.core.known_servers import KnownServers
from podrun.core.telemetry import MachineReport
from podrun.faults import FaultSpec
from podrun.partition.host.discovery import DEFAULT_PORT
from podrun.partition.machines.endpoint_watch import NoServerError, call_error
from podrun.partition.state.codec import from_message, to_message, unsigned
from podrun.partition.state.values import (
    AgentInfo,
    AllocationInfo,
    ClusterInfo,
    IpuofConfig,
    PartitionInfo,
    PartitionState,
    PartitionStatus,
    QueueInfo,
    Requirements,
    ReservationInfo,
    ServerVersion,
    ServiceMetrics,
    UserInfo,
    WatchedChange,
)

CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
DEFAULT_HOST = "127.0.0.1"
DEFAULT_TIMEOUT_S = 120.0
"""PopRun's default --vipu-server-timeout."""
QUEUE_POLL_S = 0.5
"""Seconds between two questions about a queued request."""
WATCH_PATIENCE_S = 30.0
"""Seconds for which a broken watch is tried again."""
SERVER_PATIENCE_S = 30.0
"""Seconds for which a client that waits for a partition lets a server start again that does not answer any more."""
WATCH_AGAIN_S = 0.5
MOST_ANSWERS_LOST = 4
"""Answers to one request that may be lost before the client gives up."""


class VipuClient:
    """A connection to a V-IPU service. ``timeout``: seconds each request may take. Not valid in a forked process.

    Every call proves who makes it (`podrun.core.access`). ``own``: the server has to prove that it is the same user's;
    pass it unless the user has named the server, which may then be one that another user of the host shares.
    ``account``: user and access key at a server with users of its own; by default those of the environment.
    """

    def __init__(
        self,
        host: str = DEFAULT_HOST,
        port: int = DEFAULT_PORT,
        timeout: float = DEFAULT_TIMEOUT_S,
        *,
        own: bool = False,
        account: tuple[str, str] = ("", ""),
    ) -> None:
        quiet_grpc()
        from podrun.protos import vipu_pb2, vipu_pb2_grpc

        self.host, self.port, self.timeout, self.own = host, port, timeout, own
        self._pb: Any = vipu_pb2
        channel = open_channel(
            f"{host}:{port}",
            CHANNEL_OPTIONS,
            make_token(environment(), runtime_directory()),
            own=own,
            admit=None if own else KnownServers(runtime_directory()).admit,
        )
        self._channel = with_account(channel, account if any(account) else account_of(environment()))
        self._user: Any = vipu_pb2_grpc.UserServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._admin: Any = vipu_pb2_grpc.AdminServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> VipuClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._channel.close()

    # --- partitions -----------------------------------------------------------------------------------------

    def create_partition(
        self, needs: Requirements, *, wait: bool = False, priority: int = 0
    ) -> PartitionInfo:
        """Request a partition; returns at once, usually in state PENDING (see `wait_for_state`). With ``wait`` it is
        QUEUED if there is no room now; then call `wait_in_queue`.

        Raises UsageError for an invalid request, NotFoundError for an unknown allocation, ExistsError if a partition
        has the name, ExhaustedError if other partitions hold the IPUs.
        """
        request = to_message(needs, self._pb.CreatePartitionRequest)
        request.wait, request.priority = wait, priority
        with contextlib.suppress(LostAnswerError):  # Whether it was carried out is seen at once.
            self._call(self._user.CreatePartition, request)
        return self.get_partition(needs.name)

    def get_partition(self, name: str) -> PartitionInfo:
        """One partition. Raises NotFoundError, which lists the partitions."""
        request = self._pb.GetPartitionRequest(partition_id=name)
        reply = self._call(self._user.GetPartition, request, again=True)
        return from_message(PartitionInfo, reply.partition)

    def list_partitions(self) -> list[PartitionInfo]:
        """All partitions, by name."""
        reply = self._call(self._user.ListPartitions, self._pb.ListPartitionsRequest())
        return [from_message(PartitionInfo, entry) for entry in reply.partitions]

    def partition_state(self, name: str) -> tuple[PartitionState, str]:
        """State of a partition, and its error in state ERROR: cheap, for polling."""
        reply = self._call(
            self._user.GetPartitionStatus, self._pb.GetPartitionStatusRequest(partition_id=name)
        )
        status = from_message(PartitionStatus, reply.status)
        return status.state, status.error

    def reset_partition(self, name: str, generation: int = 0) -> None:
        """Re-initialise IPUs and links; returns at once (then `wait_for_state`).

        ``generation``: the generation to end; a partition that has been reset since is left alone. 0: any.
        """
        request = self._pb.ResetPartitionRequest(partition_id=name, generation=generation)
        self._call(self._user.ResetPartition, request, again=generation > 0)

    def remove_partition(self, name: str, *, force: bool = False) -> None:
        """Give the IPUs back; returns at once (``wait_for_state(name, {REMOVED}, ...)`` waits for that). A queued
        request is given up. Raises ConflictError if a process is attached, unless ``force``."""
        request = self._pb.RemovePartitionRequest(partition_id=name, force=force)
        try:
            self._call(self._user.RemovePartition, request)
        except LostAnswerError:
            with contextlib.suppress(NotFoundError):  # It was carried out.
                self._call(self._user.RemovePartition, request)

    def hold_partition(self, name: str, holder: str, *, keep: bool = False) -> None:
        """Tell the server that a partition's holder (`partition.host.holders`) lives. ``keep``: end that bond."""
        request = self._pb.HoldPartitionRequest(partition_id=name, holder=holder, keep=keep)
        self._call(self._user.HoldPartition, request, again=True)

    def wait_in_queue(
        self, name: str, deadline: float = math.inf, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Wait until a request has left the queue, at most ``deadline`` seconds. Each question is a sign of life: some
        seconds after the last one the server drops the request. The server may start again meanwhile. Raises
        NotFoundError if the request was dropped, DeadlineError.
        """
        end = time.monotonic() + deadline
        while self._state_when_back(name, end, time.monotonic, sleep)[0] is PartitionState.QUEUED:
            if time.monotonic() >= end:
                raise DeadlineError(
                    f"partition {name} is still in the queue after {deadline:g} s",
                    hint=f"What it waits for: vipu explain {name}",
                )
            sleep(QUEUE_POLL_S)

    def list_queue(self) -> list[QueueInfo]:
        """Requests that wait for IPUs, in the order in which they are served."""
        reply = self._call(self._user.ListQueue, self._pb.ListQueueRequest())
        return [from_message(QueueInfo, entry) for entry in reply.requests]

    def list_reservations(self) -> list[ReservationInfo]:
        """Reservations, by their begin."""
        reply = self._call(self._user.ListReservations, self._pb.ListReservationsRequest())
        return [from_message(ReservationInfo, entry) for entry in reply.reservations]

    def wait_for_state(
        self,
        name: str,
        states: Collection[PartitionState],
        deadline: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> PartitionState:
        """Poll until the partition is in one of ``states``; returns the state. ``deadline``: seconds from now.

        A partition that does not exist counts as REMOVED if ``states`` has it. Raises ServiceError with the partition's
        own error as soon as it is in ERROR (unless ``states`` has ERROR or REMOVED), DeadlineError after ``deadline``
        seconds.
        """
        wanted = set(states)
        end = clock() + deadline
        pause = 0.01
        while True:
            try:
                state, error = self._state_when_back(name, end, clock, sleep)
            except NotFoundError:
                if PartitionState.REMOVED in wanted:
                    return PartitionState.REMOVED
                raise
            if state in wanted:
                return state
            if state is PartitionState.ERROR and PartitionState.REMOVED not in wanted:
                raise ServiceError(
                    f"partition {name} is in state ERROR: {error}",
                    hint=f"Look at it: vipu get partition {name}",
                )
            if clock() >= end:
                names = " or ".join(sorted(state.name for state in wanted))
                raise DeadlineError(
                    f"partition {name} is still {state.name} after {deadline:g} s; waited for {names}",
                    hint="Allow more time (--vipu-server-timeout SECONDS), or see `vipu-admin list agents`.",
                )
            sleep(min(pause, max(end - clock(), 0)))
            pause = min(pause * 1.5, 0.2)

    def _state_when_back(
        self, name: str, end: float, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> tuple[PartitionState, str]:
        """`partition_state`; while no server answers, again: until ``end``, and for `SERVER_PATIENCE_S` at most."""
        give_up = None
        while True:
            try:
                return self.partition_state(name)
            except NoServerError:
                give_up = give_up or min(end, clock() + SERVER_PATIENCE_S)
                if clock() >= give_up:
                    raise
            sleep(QUEUE_POLL_S)

    def ipuof_config(self, name: str, gcd: int = 0) -> IpuofConfig:
        """How to reach the IPUs of GCD ``gcd`` of the partition."""
        request = self._pb.GetPartitionIpuofConfigRequest(
            partition_id=name, gcd_id=self._pb.GcdId(id=unsigned(gcd, "gcd"))
        )
        config = self._call(self._user.GetPartitionIpuofConfig, request).ipuof_config
        return from_message(IpuofConfig, config)

    # --- machines -------------------------------------------------------------------------------------------

    def machine_reports(self, partition: str | None = None) -> list[MachineReport]:
        """Reports of machines: those of ``partition`` in partition order, or all agents of the POD."""
        reply = self._call(
            self._user.ListMachineReports, self._pb.ListMachineReportsRequest(partition_id=partition or "")
        )
        return [MachineReport.from_json_dict(json.loads(text)) for text in reply.reports_json]

    def reset_ipus(self, partition: str, ipus: Iterable[int]) -> None:
        """Reset IPUs (recovery action IPU_RESET) by their index in the partition. Links are not touched."""
        request = self._pb.ResetIpusRequest(
            partition_id=partition, partition_ipus=[unsigned(ipu, "ipu") for ipu in ipus]
        )
        self._call(self._user.ResetIpus, request)

    def inject_faults(self, partition: str, specs: Iterable[FaultSpec | str]) -> None:
        """Plan faults, or their texts, on the machines of a partition. Raises UsageError for one that cannot strike."""
        self._call(
            self._admin.InjectFaults,
            self._pb.InjectFaultsRequest(partition_id=partition, faults=[str(fault) for fault in specs]),
        )

    def cancel_faults(self, partition: str, texts: Iterable[str] = ()) -> tuple[str, ...]:
        """Take faults of a partition off the plan: those of these texts, or all. Returns the cancelled ones.

        Raises NotFoundError for a text that is not planned.
        """
        request = self._pb.InjectFaultsRequest(partition_id=partition, faults=list(texts), cancel=True)
        return tuple(self._call(self._admin.InjectFaults, request).cancelled)

    # --- the POD --------------------------------------------------------------------------------------------

    def server_version(self) -> ServerVersion:
        """Version, address and process id of the server."""
        reply = self._call(self._user.GetServerVersion, self._pb.GetServerVersionRequest())
        return from_message(ServerVersion, reply)

    def cluster(self) -> ClusterInfo:
        """The POD behind the server; of one that was divided into several clusters the largest."""
        reply = self._call(self._user.GetCluster, self._pb.GetClusterRequest())
        return ClusterInfo(
            reply.cluster_id,
            reply.target,
            reply.num_ipus,
            reply.num_ipus // reply.ipu_link_domain_size,
            reply.ipu_link_domain_size,
            reply.ipu_link_topology,
            reply.gateway_topology,
        )

    def list_clusters(self) -> list[ClusterInfo]:
        """The V-IPU clusters of the POD: agents that links join."""
        reply = self._call(self._user.ListClusters, self._pb.ListClustersRequest())
        return [from_message(ClusterInfo, entry) for entry in reply.clusters]

    def create_cluster(
        self, name: str, agents: Iterable[str], *, ilds: int = 1, ipu_links: str = "mesh", gateway: str = ""
    ) -> None:
        """Join agents that are in no cluster by links, with an allocation of the same name. ``ilds``: IPU-Link domains;
        ``ipu_links``: ``mesh`` or ``torus``; ``gateway``: ``none`` or ``looped``, empty: as is usual for so many."""
        cluster = self._pb.Cluster(
            cluster_id=name,
            agent_ids=list(agents),
            num_ilds=unsigned(ilds, "num-ipulinkdomains"),
            ipu_link_topology=ipu_links,
            gateway_topology=gateway,
        )
        self._call(self._admin.CreateCluster, self._pb.CreateClusterRequest(cluster=cluster))

    def remove_cluster(self, name: str) -> None:
        """Remove a cluster without partitions. Its agents stay, in no cluster."""
        self._call(self._admin.RemoveCluster, self._pb.RemoveClusterRequest(cluster_id=name))

    def create_agent(self, name: str, host: str, port: int = 8080) -> None:
        """Add an IPU-M2000, in no cluster. ``host`` and ``port``: its modelled address."""
        request = self._pb.CreateAgentRequest(agent_id=name, host=host, port=unsigned(port, "port"))
        self._call(self._admin.CreateAgent, request)

    def remove_agent(self, name: str) -> None:
        """Remove an IPU-M2000 that is in no cluster."""
        self._call(self._admin.RemoveAgent, self._pb.RemoveAgentRequest(agent_id=name))

    def list_allocations(self) -> list[AllocationInfo]:
        """Allocations, by name."""
        reply = self._call(self._user.ListAllocations, self._pb.ListAllocationsRequest())
        return [from_message(AllocationInfo, entry) for entry in reply.allocations]

    def create_allocation(self, name: str, agents: Iterable[str]) -> None:
        """Make an allocation of agents that are in no other one."""
        spec = self._pb.AllocationSpec(agent_ids=list(agents))
        self._call(
            self._admin.CreateAllocation,
            self._pb.CreateAllocationRequest(allocation=self._pb.Allocation(id=name, spec=spec)),
        )

    def remove_allocation(self, name: str) -> None:
        """Remove an allocation that has no partitions."""
        self._call(self._admin.RemoveAllocation, self._pb.RemoveAllocationRequest(allocation_id=name))

    def list_agents(self) -> list[AgentInfo]:
        """Agents of the POD in its order, one for each IPU-M2000."""
        reply = self._call(self._admin.ListAgents, self._pb.ListAgentsRequest())
        return [from_message(AgentInfo, agent) for agent in reply.agents]

    def set_maintenance(
        self, agent: str, *, drain: bool = False, deadline_s: float = 0.0, reason: str = ""
    ) -> None:
        """Make no new partitions on an agent; with ``drain`` remove the present ones after ``deadline_s`` seconds (0:
        they stay until their owners remove them).
        """
        request = self._pb.SetMaintenanceRequest(
            agent_id=agent, drain=drain, deadline_seconds=deadline_s, reason=reason
        )
        self._call(self._admin.SetMaintenance, request)

    def end_maintenance(self, agent: str) -> None:
        """Return an agent to service."""
        self._call(self._admin.EndMaintenance, self._pb.EndMaintenanceRequest(agent_id=agent))

    def create_reservation(
        self, name: str, agents: Iterable[str], *, begin_in_s: float, for_s: float
    ) -> None:
        """Keep agents, from ``begin_in_s`` seconds from now on, for partitions that name the reservation."""
        request = self._pb.CreateReservationRequest(
            reservation_id=name, agent_ids=list(agents), begin_in_seconds=begin_in_s, for_seconds=for_s
        )
        self._call(self._admin.CreateReservation, request)

    def remove_reservation(self, name: str) -> None:
        """End a reservation."""
        self._call(self._admin.RemoveReservation, self._pb.RemoveReservationRequest(reservation_id=name))

    def power_cycle_agent(self, agent: str, generation: int = 0) -> None:
        """Power-cycle an IPU-M2000 (FULL_RESET). Its partitions go to ERROR until they are reset.

        ``generation``: left alone if all its partitions are of later generations.
        """
        request = self._pb.PowerCycleAgentRequest(agent_id=agent, generation=generation)
        self._call(self._admin.PowerCycleAgent, request, again=generation > 0)

    def restart_agent(self, agent: str, generation: int = 0) -> None:
        """Replace a lost machine by a fresh one. Its partitions stay in ERROR until they are reset. ``generation``: as
        in `power_cycle_agent`.
        """
        request = self._pb.RestartAgentRequest(agent_id=agent, generation=generation)
        self._call(self._admin.RestartAgent, request, again=generation > 0)

    # --- users, and the service itself ----------------------------------------------------------------------

    def create_user(
        self, name: str, role: str = "user", allocations: Iterable[str] = (), *, may_inject: bool = False
    ) -> str:
        """Add a user of a server that was started with --secure; returns the access key, which cannot be read again."""
        user = to_message(UserInfo(name, role, tuple(allocations), may_inject), self._pb.User)
        reply = self._call(self._admin.CreateUser, self._pb.CreateUserRequest(user=user))
        return str(reply.access_key)

    def remove_user(self, name: str) -> None:
        """Remove a user; its key is invalid from then on."""
        self._call(self._admin.RemoveUser, self._pb.RemoveUserRequest(user_id=name))

    def list_users(self) -> list[UserInfo]:
        """The users, by name."""
        reply = self._call(self._admin.ListUsers, self._pb.ListUsersRequest())
        return [from_message(UserInfo, user) for user in reply.users]

    def service_metrics(self) -> ServiceMetrics:
        """Figures of the service itself."""
        reply = self._call(self._user.GetServiceMetrics, self._pb.GetServiceMetricsRequest())
        return from_message(ServiceMetrics, reply)

    def watch(self, kinds: Iterable[str] = (), *, token: str = "") -> Iterator[WatchedChange]:
        """The stream of changes, without end: the present state, then a change of kind ``synced``, then each change.

        ``kinds``: ``partition``, ``machine``, ``incident``; empty: all. ``token``: of the last change that the caller
        saw; the stream goes on after it. A connection that breaks is made again and goes on in this way; raises
        ServiceError if no server answers for `WATCH_PATIENCE_S`.
        """
        import grpc

        quiet_since = time.monotonic()
        while True:
            try:
                for event in self._user.Watch(self._pb.WatchRequest(resume_token=token, kinds=list(kinds))):
                    token, quiet_since = event.resume_token, time.monotonic()
                    value = json.loads(event.json) if event.json else None
                    yield WatchedChange(token, event.kind, event.name, value, event.time, event.initial)
            except grpc.RpcError as error:
                gone = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
                if not gone or time.monotonic() - quiet_since > WATCH_PATIENCE_S:
                    raise self._translate(error) from None
            else:
                if time.monotonic() - quiet_since > WATCH_PATIENCE_S:
                    return
            time.sleep(WATCH_AGAIN_S)

    # --- inside ---------------------------------------------------------------------------------------------

    def _call(self, method: Any, request: Any, *, again: bool = False) -> Any:
        """``again``: carried out twice, the request has the effect that it has once, so that it is made again if its
        answer is lost.
        """
        import grpc

        for left in reversed(range(MOST_ANSWERS_LOST if again else 1)):
            try:
                return method(request, timeout=self.timeout)
            except grpc.RpcError as error:
                known = self._translate(error)
                if not left or not isinstance(known, LostAnswerError):
                    raise known from None
        raise AssertionError

    def _translate(self, error: Any) -> PodrunError:
        return call_error(error, f"{self.host}:{self.port}", self.timeout)
