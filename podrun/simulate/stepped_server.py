"""The clock of a virtual POD over gRPC: the answer to `Advance`, and the client that schedulers in Python use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from podrun.core.errors import PodrunError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.server.calls import abort_with
from podrun.protos.services import add_to_server, stub_of
from podrun.simulate import virtual_pod_pb2 as pb
from podrun.simulate.engine import SECOND, nanoseconds
from podrun.simulate.jobs import TraceJob

if TYPE_CHECKING:
    from podrun.simulate.stepped_pod import SteppedPod

ADDRESS_VARIABLE = "PODRUN_VIRTUAL_POD"
"""Where a scheduler finds the virtual POD: host:port."""


class _ClockServicer:
    """podrun.simulate.v1.VirtualPod."""

    def __init__(self, pod: SteppedPod) -> None:
        self._pod = pod

    def Advance(self, request: pb.AdvanceRequest, context: grpc.ServicerContext) -> pb.AdvanceReply:
        """Let virtual time pass."""
        try:
            if not 0 <= request.at_most_seconds < 1e9:
                raise UsageError(
                    f"time cannot pass for {request.at_most_seconds:g} s", hint="0: until the next event."
                )
            told = self._pod.advance(nanoseconds(request.at_most_seconds))
        except PodrunError as error:
            abort_with(context, error)
            raise
        return pb.AdvanceReply(
            now=told.now / SECOND,
            submitted=[
                pb.SubmittedJob(
                    name=job.name,
                    size=partition_size(job),
                    requested_seconds=job.requested / SECOND,
                    user=job.user,
                    submitted=job.submit / SECOND,
                )
                for job in told.submitted
            ],
            ended=told.ended,
            done=told.done,
            waiting=told.waiting,
        )


def partition_size(job: TraceJob) -> int:
    """IPUs of the smallest partition that holds a job."""
    return 1 << (job.size - 1).bit_length()


def add_clock(pod: SteppedPod, server: grpc.Server) -> None:
    """Answer `Advance` at a gRPC server."""
    add_to_server(pb, "VirtualPod", _ClockServicer(pod), server)


@dataclass(frozen=True, slots=True)
class JobAsked:
    """A job that somebody asks for: IPUs of its partition, seconds."""

    name: str
    size: int
    requested_s: float
    user: str
    submitted: float


@dataclass(frozen=True, slots=True)
class StepTaken:
    """What happened up to ``now`` seconds of virtual time. ``done``: nothing more will."""

    now: float
    submitted: tuple[JobAsked, ...]
    ended: tuple[str, ...]
    done: bool
    waiting: int


class VirtualPodClient(VipuClient):
    """A `VipuClient` of a virtual POD, whose clock it steps."""

    def advance(self, at_most_s: float = 0.0) -> StepTaken:
        """Let virtual time pass until something happens, or for so many seconds."""
        stub = stub_of(pb, "VirtualPod", self._channel)
        reply = self._call(stub.Advance, pb.AdvanceRequest(at_most_seconds=at_most_s))
        jobs = tuple(
            JobAsked(job.name, job.size, job.requested_seconds, job.user, job.submitted)
            for job in reply.submitted
        )
        return StepTaken(reply.now, jobs, tuple(reply.ended), reply.done, reply.waiting)


def virtual_pod_at(address: str) -> VirtualPodClient:
    """A client of the virtual POD at host:port, as `ADDRESS_VARIABLE` has it. Raises UsageError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(
            f"{address!r} is no address of a virtual POD",
            hint=f"podrun simulate --serve says it ({ADDRESS_VARIABLE}).",
        )
    return VirtualPodClient(host, int(port))
