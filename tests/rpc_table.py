"""Every call of every protocol, and who may make it: the table that tests hold servers against.

Light to import: programs of other users use it too.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import podrun.protos

ANYBODY, OWNER, ADMIN, SELF = "anybody", "owner", "admin", "self"
"""Of a shared server: every user of the host; the partition's owner and administrators; administrators; nobody but the
user who runs it. Of one that is not shared, only the user who runs it may make any call."""

TABLE = {
    "UserService.GetServerVersion": ANYBODY,
    "UserService.GetCluster": ANYBODY,
    "UserService.ListClusters": ANYBODY,
    "UserService.CreatePartition": ANYBODY,
    "UserService.GetPartition": ANYBODY,
    "UserService.ListPartitions": ANYBODY,
    "UserService.GetPartitionStatus": ANYBODY,
    "UserService.ResetPartition": OWNER,
    "UserService.RemovePartition": OWNER,
    "UserService.HoldPartition": OWNER,
    "UserService.GetPartitionIpuofConfig": OWNER,
    "UserService.ListQueue": ANYBODY,
    "UserService.PlanPartition": ANYBODY,
    "UserService.CaptureState": ANYBODY,
    "UserService.ListReservations": ANYBODY,
    "UserService.ListAllocations": ANYBODY,
    "UserService.ListMachineReports": ANYBODY,
    "UserService.ResetIpus": OWNER,
    "UserService.Watch": ANYBODY,
    "UserService.GetServiceMetrics": ANYBODY,
    "AdminService.ListAgents": ANYBODY,
    "AdminService.SetMaintenance": ADMIN,
    "AdminService.EndMaintenance": ADMIN,
    "AdminService.CreateReservation": ADMIN,
    "AdminService.RemoveReservation": ADMIN,
    "AdminService.CreateAllocation": ADMIN,
    "AdminService.RemoveAllocation": ADMIN,
    "AdminService.CreateAgent": ADMIN,
    "AdminService.RemoveAgent": ADMIN,
    "AdminService.CreateCluster": ADMIN,
    "AdminService.RemoveCluster": ADMIN,
    "AdminService.PowerCycleAgent": ADMIN,
    "AdminService.RestartAgent": ADMIN,
    "AdminService.InjectFaults": OWNER,
    "AdminService.CreateUser": ADMIN,
    "AdminService.RemoveUser": ADMIN,
    "AdminService.ListUsers": ADMIN,
    "Ipuof.Session": OWNER,
    "Ipuof.JoinGroup": SELF,
    "Ipuof.Describe": OWNER,
    "MachineControl.Lead": SELF,
    "MachineControl.Configure": SELF,
    "MachineControl.ResetIpus": SELF,
    "MachineControl.ResetLinks": SELF,
    "MachineControl.PowerCycle": SELF,
    "MachineControl.Inject": SELF,
    "MachineControl.Telemetry": SELF,
    "MachineControl.Stop": SELF,
}
LAST = ("RemovePartition", "Stop")
"""Calls that change the subject of the calls after them, so they come last."""
HARMLESS = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION", "UNAVAILABLE"}
"""Answers to a caller who may make the call."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a protocol. ``row``: its name in `TABLE`; ``path``: in the protocol; ``request``: about the partition
    ``alices``, as bytes.
    """

    row: str
    path: str
    request: bytes
    streams: bool
    endless: bool = False
    """Its replies have no end."""

    @property
    def of_machine(self) -> bool:
        """Whether machines answer it, not the partition service."""
        return self.row.startswith(("Ipuof.", "MachineControl."))


def every_call() -> Iterator[Call]:
    """Each call that a protocol of podrun has, those of `LAST` at the end."""
    found = []
    for module in pkgutil.iter_modules(podrun.protos.__path__):
        if module.name.endswith("_pb2"):
            messages: Any = importlib.import_module(f"podrun.protos.{module.name}")
            for service in messages.DESCRIPTOR.services_by_name.values():
                found += [_call(messages, service, method) for method in service.methods]
    yield from sorted(found, key=lambda call: call.row.endswith(LAST))


def _call(messages: Any, service: Any, method: Any) -> Call:
    request = getattr(messages, method.input_type.name)()
    if hasattr(request, "partition_id"):
        request.partition_id = "alices"
    if method.name == "Session":
        request.attach.pid, request.attach.user = 1, "root"
        request.attach.job.count = request.attach.owned.count = 4
    path = f"/{service.full_name}/{method.name}"
    return Call(
        f"{service.name}.{method.name}",
        path,
        request.SerializeToString(),
        bool(method.client_streaming),
        bool(method.server_streaming and not method.client_streaming),
    )


def answer(channel: Any, call: Call, metadata: Any = ()) -> str:
    """The status of a call; DENIED where a session's first reply says that the partition is another user's."""
    import grpc

    try:
        if call.streams:
            for reply in channel.stream_stream(call.path)(
                iter([call.request]), timeout=60, metadata=metadata
            ):
                return "DENIED" if b"another user" in reply else "OK"
            return "OK"
        if call.endless:
            replies = channel.unary_stream(call.path)(call.request, timeout=60, metadata=metadata)
            next(replies)
            replies.cancel()
            return "OK"
        channel.unary_unary(call.path)(call.request, timeout=60, metadata=metadata)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def main() -> None:
    """Make every call, at the service and the machine that the argument names: what a user's program does."""
    from podrun.core.access import make_token
    from podrun.core.environment import environment, runtime_directory
    from podrun.core.proven_channel import open_channel

    vipu, machine, how = json.loads(sys.argv[1])
    token = make_token(environment(), runtime_directory()) if how == "own" else ""
    with open_channel(vipu, (), token) as service, open_channel(machine, (), token) as device:
        codes = {call.row: answer(device if call.of_machine else service, call) for call in every_call()}
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
