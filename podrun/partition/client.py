"""`VipuClient`: the partition service as Python calls.

    with VipuClient("127.0.0.1", 8090) as client:
        client.create_partition(Requirements("p16", 16, reconfigurable=True))
        client.wait_for_state("p16", {PartitionState.ACTIVE}, deadline=60)

Every call has a deadline and raises `podrun.errors`: UsageError (wrong request), NotFoundError, ConflictError
(name or IPUs taken, wrong state), ServiceError (no answer, or the server failed), DeadlineError. gRPC is
imported on first use.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from types import TracebackType
from typing import Any

from podrun.access import is_loopback, known_token, open_channel, quiet_grpc
from podrun.errors import (
    ConflictError,
    DeadlineError,
    ExhaustedError,
    ExistsError,
    NotFoundError,
    PodrunError,
    ServiceError,
    UnsupportedError,
    UsageError,
)
from podrun.partition.discovery import DEFAULT_PORT, runtime_directory
from podrun.partition.types import (
    AgentInfo,
    AgentState,
    AllocationInfo,
    ClusterInfo,
    IpuofConfig,
    IpuofDevice,
    PartitionInfo,
    PartitionState,
    Requirements,
    ServerVersion,
    SyncType,
)
from podrun.telemetry import MachineReport

DEFAULT_HOST = "127.0.0.1"
DEFAULT_TIMEOUT_S = 120.0
"""PopRun's default --vipu-server-timeout."""
ERROR_METADATA_KEY = "podrun-error-bin"
"""Trailing metadata with the error as JSON."""

_ERROR_TYPES: dict[str, type[PodrunError]] = {
    kind.__name__: kind
    for kind in (
        *(UsageError, NotFoundError, ConflictError, ExistsError, ExhaustedError),
        *(ServiceError, DeadlineError, UnsupportedError),
    )
}


class VipuClient:
    """A connection to a partition service. ``timeout``: seconds each request may take. Not to be shared
    across forks."""

    def __init__(
        self, host: str = DEFAULT_HOST, port: int = DEFAULT_PORT, timeout: float = DEFAULT_TIMEOUT_S
    ) -> None:
        quiet_grpc()
        from podrun.protos import vipu_pb2, vipu_pb2_grpc

        self.host, self.port, self.timeout = host, port, timeout
        self._pb: Any = vipu_pb2
        self._channel = open_channel(
            f"{host}:{port}",
            (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 64 << 20)),
            "" if is_loopback(host) else known_token(os.environ, runtime_directory()),
        )
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

    def create_partition(self, needs: Requirements) -> PartitionInfo:
        """Ask for a partition; returns at once, usually in state PENDING (see `wait_for_state`).

        Raises UsageError for a request that cannot be right, NotFoundError for an unknown allocation, ExistsError if
        there is one of that name, ExhaustedError if others have the IPUs.
        """
        requirements = self._pb.PartitionRequirements(
            size=_unsigned(needs.size, "size"),
            reconfigurable=needs.reconfigurable,
            num_gcds=_unsigned(needs.num_gcds, "num-gcds"),
            num_ilds=_unsigned(needs.num_ilds, "num-ilds"),
            sync_type=self._pb.SyncType.Value(
                needs.sync_type.wire_name if needs.sync_type else "ST_UNSPECIFIED"
            ),
            allocation_id=needs.allocation,
        )
        self._call(
            self._user.CreatePartition,
            self._pb.CreatePartitionRequest(
                partition_id=needs.name,
                requirements=requirements,
                disable_auto_reset=not needs.auto_reset,
                faults=list(needs.faults),
            ),
        )
        return self.get_partition(needs.name)

    def get_partition(self, name: str) -> PartitionInfo:
        """One partition. Raises NotFoundError, which lists the partitions there are."""
        reply = self._call(self._user.GetPartition, self._pb.GetPartitionRequest(partition_id=name))
        return self._partition(reply.partition)

    def list_partitions(self) -> list[PartitionInfo]:
        """All partitions, by name."""
        reply = self._call(self._user.ListPartitions, self._pb.ListPartitionsRequest())
        return [self._partition(entry) for entry in reply.partitions]

    def partition_state(self, name: str) -> tuple[PartitionState, str]:
        """State of a partition and the error if it is ERROR: cheap, for polling."""
        reply = self._call(
            self._user.GetPartitionStatus, self._pb.GetPartitionStatusRequest(partition_id=name)
        )
        return self._state(reply.status.state), reply.status.error

    def reset_partition(self, name: str) -> None:
        """Re-initialise IPUs and links; returns at once (then `wait_for_state`)."""
        self._call(self._user.ResetPartition, self._pb.ResetPartitionRequest(partition_id=name))

    def remove_partition(self, name: str) -> None:
        """Give the IPUs back; returns at once (``wait_for_state(name, {REMOVED}, ...)`` waits for that)."""
        self._call(self._user.RemovePartition, self._pb.RemovePartitionRequest(partition_id=name))

    def wait_for_state(
        self,
        name: str,
        states: Collection[PartitionState],
        deadline: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> PartitionState:
        """Poll until the partition is in one of ``states``; ``deadline`` is seconds from now. Returns the
        state.

        A partition that is not there counts as REMOVED if that is asked for. Raises ServiceError with the
        partition's own error as soon as it is in ERROR (unless that is asked for), DeadlineError after
        ``deadline`` seconds.
        """
        wanted = set(states)
        end = clock() + deadline
        pause = 0.01
        while True:
            try:
                state, error = self.partition_state(name)
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

    def ipuof_config(self, name: str, gcd: int = 0) -> IpuofConfig:
        """Where the IPUs of GCD ``gcd`` of the partition are to be reached."""
        request = self._pb.GetPartitionIpuofConfigRequest(
            partition_id=name, gcd_id=self._pb.GcdId(id=_unsigned(gcd, "gcd"))
        )
        config = self._call(self._user.GetPartitionIpuofConfig, request).ipuof_config
        devices = tuple(
            IpuofDevice(**{field.name: getattr(device, field.name) for field in fields(IpuofDevice)})
            for device in config.devices
        )
        return IpuofConfig(
            config.partition_id,
            PartitionState[config.state],
            devices,
            dict(sorted(config.attributes.items())),
        )

    # --- machines -------------------------------------------------------------------------------------------

    def machine_reports(self, partition: str | None = None) -> list[MachineReport]:
        """What machines report now: those of ``partition`` in partition order, or all agents of the POD."""
        reply = self._call(
            self._user.ListMachineReports, self._pb.ListMachineReportsRequest(partition_id=partition or "")
        )
        return [MachineReport.from_json_dict(json.loads(text)) for text in reply.reports_json]

    def reset_ipus(self, partition: str, ipus: Iterable[int]) -> None:
        """Reset IPUs (recovery action IPU_RESET) by their index in the partition. Links are not touched."""
        request = self._pb.ResetIpusRequest(
            partition_id=partition, partition_ipus=[_unsigned(ipu, "ipu") for ipu in ipus]
        )
        self._call(self._user.ResetIpus, request)

    def inject_faults(self, partition: str, specs: Iterable[str]) -> None:
        """Plan faults on the machines of a partition, as ``ipu:5@step=17:tile-parity``."""
        self._call(
            self._admin.InjectFaults,
            self._pb.InjectFaultsRequest(partition_id=partition, faults=list(specs)),
        )

    # --- the POD --------------------------------------------------------------------------------------------

    def server_version(self) -> ServerVersion:
        """Version, address and process id of the server."""
        reply = self._call(self._user.GetServerVersion, self._pb.GetServerVersionRequest())
        return ServerVersion(reply.version, reply.host, reply.port, reply.pid)

    def cluster(self) -> ClusterInfo:
        """The POD behind the server."""
        reply = self._call(self._user.GetCluster, self._pb.GetClusterRequest())
        return ClusterInfo(
            name=reply.cluster_id,
            target=reply.target,
            num_agents=reply.num_agents,
            num_ipus=reply.num_ipus,
            ipu_link_domain_size=reply.ipu_link_domain_size,
            ipu_link_topology=reply.ipu_link_topology,
            gateway_topology=reply.gateway_topology,
        )

    def list_allocations(self) -> list[AllocationInfo]:
        """Allocations, by name."""
        reply = self._call(self._user.ListAllocations, self._pb.ListAllocationsRequest())
        return [
            AllocationInfo(entry.id, entry.spec.cluster_id, tuple(entry.spec.agent_ids))
            for entry in reply.allocations
        ]

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
        return [
            AgentInfo(
                agent_id=agent.agent_id,
                host=agent.host,
                port=agent.port,
                serial=agent.serial,
                state=AgentState[self._pb.AgentState.Name(agent.state).removeprefix("AS_")],
                ild=agent.ild,
                num_ipus=agent.num_ipus,
                partitions=tuple(agent.partition_ids),
                endpoints=tuple(agent.endpoints),
            )
            for agent in reply.agents
        ]

    def power_cycle_agent(self, agent: str) -> None:
        """Power-cycle an IPU-M2000 (FULL_RESET). Its partitions go to ERROR until they are reset."""
        self._call(self._admin.PowerCycleAgent, self._pb.PowerCycleAgentRequest(agent_id=agent))

    def restart_agent(self, agent: str) -> None:
        """Replace a lost machine by a fresh one. Its partitions stay in ERROR until they are reset."""
        self._call(self._admin.RestartAgent, self._pb.RestartAgentRequest(agent_id=agent))

    # --- inside ---------------------------------------------------------------------------------------------

    def _state(self, value: int) -> PartitionState:
        return PartitionState[self._pb.PartitionState.Name(value).removeprefix("PS_")]

    def _partition(self, entry: Any) -> PartitionInfo:
        needs = entry.requirements
        return PartitionInfo(
            name=entry.partition_id,
            cluster=entry.cluster_id,
            allocation=entry.allocation_id,
            size=needs.size,
            state=self._state(entry.status.state),
            reconfigurable=needs.reconfigurable,
            num_gcds=needs.num_gcds,
            sync_type=SyncType[self._pb.SyncType.Name(needs.sync_type).removeprefix("ST_")],
            num_ilds=entry.num_ilds,
            ild_routing=entry.ild_routing,
            gw_routing=entry.gw_routing,
            agents=tuple(entry.agent_ids),
            error=entry.status.error,
            generation=entry.status.generation,
            created=entry.created,
        )

    def _call(self, method: Any, request: Any) -> Any:
        import grpc

        try:
            return method(request, timeout=self.timeout)
        except grpc.RpcError as error:
            raise self._translate(error) from None

    def _translate(self, error: Any) -> PodrunError:
        import grpc

        for key, value in error.trailing_metadata() or ():
            if key == ERROR_METADATA_KEY:
                data = json.loads(value)
                kind = _ERROR_TYPES.get(str(data.get("type")), ServiceError)
                return kind(str(data.get("message", "")), hint=data.get("hint"))
        where = f"{self.host}:{self.port}"
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return ServiceError(
                f"no V-IPU server answers at {where}",
                hint="Start one (vipu-server --cluster pod16), or name another host and port: --vipu-server-host and "
                "--vipu-server-port in podrun, --api-host and --api-port in vipu.",
            )
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return ServiceError(
                f"what answers at {where} is no V-IPU server, or one of another release: {error.details()}",
                hint="Check host and port; vipu --server-version shows what is there.",
            )
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(
                f"the V-IPU server at {where} did not answer within {self.timeout:g} s",
                hint="Allow more time (--vipu-server-timeout SECONDS in podrun, --timeout in vipu).",
            )
        return ServiceError(
            f"the V-IPU server at {where} failed: {error.code().name}: {error.details()}",
            hint="vipu-server --verbose logs what happens.",
        )


def _unsigned(value: int, what: str) -> int:
    if not 0 <= value < 1 << 32:
        raise UsageError(f"{what} {value} is out of range", hint="Use 0 to 4294967295.")
    return value
