"""The gRPC side of a machine: sessions of host processes, what the partition service asks, other machines."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from podrun.access import guards, open_channel
from podrun.device.connection import IpuRange
from podrun.device.job import Place
from podrun.device.service import wire
from podrun.device.service.preload import Preload
from podrun.device.service.session import MachineHolder, Session
from podrun.errors import (
    ApplicationRuntimeError,
    ErrorCode,
    PodrunError,
    UnrecoverableRuntimeError,
)
from podrun.faults import parse_fault
from podrun.protos import ipuof_pb2 as pb
from podrun.protos import ipuof_pb2_grpc as stubs

log = logging.getLogger("podrun.device")

SESSIONS = 24
"""Threads for all but claims: a session keeps its thread; each of four IPUs may have an owner, and others may ask and
be refused meanwhile."""
CLAIMS = 256
"""Machines that may wait here for this one's group, a thread each: it may be the last to load, and must still hear the
host process that attaches to it."""


class IpuofServicer(stubs.IpuofServicer):
    """See ``ipuof.proto``. ``preload``: begins when a host process attaches, and is over before one loads."""

    def __init__(self, holder: MachineHolder, preload: Preload | None = None) -> None:
        self._holder = holder
        self._preload = preload
        self._claims = threading.BoundedSemaphore(CLAIMS)

    def Session(
        self, requests: Iterator[pb.HostRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.MachineReply]:
        session = Session(self._holder)
        # Called when the stream ends for whatever reason, also while a request is at work in this thread.
        if not context.add_callback(lambda: session.end(died=True)):
            session.end(died=True)
        try:
            whole = wire.Joiner(pb.HostRequest)
            for piece in requests:
                try:
                    request = whole.add(piece)
                except ApplicationRuntimeError as error:
                    yield pb.MachineReply(error_json=wire.error_to_json(error))
                    return
                if request is None:
                    continue
                if self._preload is not None and request.HasField("load"):
                    self._preload.wait()
                yield from wire.in_parts(session.answer(request))
                if self._preload is not None and request.HasField("attach"):
                    self._preload.begin()
        except grpc.RpcError:
            log.info("a host process ended its session without a word")
        finally:
            session.end(died=True)

    def JoinGroup(self, request: pb.JoinGroupRequest, context: grpc.ServicerContext) -> pb.JoinGroupReply:
        if not self._claims.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{CLAIMS} machines wait for its group already")
        try:
            token = self._holder.machine.offers.claim(
                wire.range_from_wire(request.job),
                request.rank,
                request.digest,
                max(request.timeout_seconds, 0.1),
            )
        except PodrunError as error:
            return pb.JoinGroupReply(error_json=wire.error_to_json(error))
        finally:
            self._claims.release()
        return pb.JoinGroupReply(token_json=json.dumps(dict(token)))


class ControlServicer(stubs.MachineControlServicer):
    """See ``ipuof.proto``. ``stop``: ends the server, called in a thread of its own."""

    def __init__(self, holder: MachineHolder, stop: Callable[[], None]) -> None:
        self._holder = holder
        self._stop = stop

    def Configure(self, request: pb.ConfigureRequest, context: grpc.ServicerContext) -> pb.ControlReply:
        place = Place(
            request.partition, request.machine, request.first_ipu, request.ipus, tuple(request.endpoints)
        )
        return _control(lambda: self._holder.configure(place))

    def ResetIpus(self, request: pb.ResetIpusRequest, context: grpc.ServicerContext) -> pb.ControlReply:
        def reset() -> None:
            machine = self._holder.machine
            machine.reset_ipus([machine.place.first_ipu + ipu for ipu in request.ipus])

        return _control(reset)

    def ResetLinks(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.ControlReply:
        return _control(lambda: self._holder.machine.reset_links())

    def PowerCycle(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.ControlReply:
        machine = self._holder.known
        return _control(lambda: machine.power_cycle() if machine is not None else None)

    def Inject(self, request: pb.InjectRequest, context: grpc.ServicerContext) -> pb.ControlReply:
        return _control(
            lambda: self._holder.machine.plan_faults([parse_fault(text) for text in request.faults])
        )

    def Telemetry(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.TelemetryReply:
        try:
            return pb.TelemetryReply(report_json=json.dumps(self._holder.report().to_json_dict()))
        except PodrunError as error:
            return pb.TelemetryReply(error_json=wire.error_to_json(error))

    def Stop(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.ControlReply:
        threading.Thread(target=self._stop, name="podrun-machine-stop", daemon=True).start()
        return pb.ControlReply()


class GrpcFabric:
    """Other machines of the partition, at the endpoints of ``place()``."""

    def __init__(self, place: Callable[[], Place], token: str = "") -> None:
        self._place = place
        self._token = token

    def claim(self, machine: int, job: IpuRange, rank: int, digest: str, timeout: float) -> Mapping[str, Any]:
        endpoint = self._place().endpoints[machine]
        request = pb.JoinGroupRequest(
            job=wire.range_to_wire(job), rank=rank, digest=digest, timeout_seconds=timeout
        )
        with open_channel(endpoint, wire.CHANNEL_OPTIONS, self._token) as channel:
            try:
                stub = stubs.IpuofStub(channel)  # type: ignore[no-untyped-call]
                reply = stub.JoinGroup(request, timeout=timeout + 5)
            except grpc.RpcError as error:
                raise UnrecoverableRuntimeError(
                    f"machine {machine} of the partition, at {endpoint}, does not answer: "
                    f"{wire.status_of(error)[1]}",
                    code=ErrorCode.LINK_DOWN,
                    where=f"machine {machine}",
                    hint="See vipu-admin list agents; reset the partition: vipu reset partition NAME",
                ) from error
        wire.raise_error(reply.error_json)
        token: dict[str, Any] = wire.json_or_error(reply.token_json, "a group's token")
        return token

    def alive(self, machine: int) -> bool:
        host, _, port = self._place().endpoints[machine].rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=1.0):
                return True
        except OSError:
            return False


def serve(
    holder: MachineHolder,
    host: str,
    port: int,
    stop: Callable[[], None],
    token: str = "",
    preload: Preload | None = None,
) -> tuple[grpc.Server, int]:
    """A started server for ``holder`` and the port it got; calls must show ``token``, if there is one. Raises
    RuntimeError if the port is taken.
    """
    pool = ThreadPoolExecutor(SESSIONS + CLAIMS, thread_name_prefix="podrun-ipuof")
    options = (*wire.CHANNEL_OPTIONS, *wire.SERVER_OPTIONS)
    server = grpc.server(pool, options=options, interceptors=guards(token))
    stubs.add_IpuofServicer_to_server(IpuofServicer(holder, preload), server)  # type: ignore[no-untyped-call]
    control = ControlServicer(holder, stop)
    stubs.add_MachineControlServicer_to_server(control, server)  # type: ignore[no-untyped-call]
    bound = server.add_insecure_port(f"{host}:{port}")
    server.start()
    return server, bound


def _control(action: Callable[[], Any]) -> pb.ControlReply:
    try:
        action()
    except PodrunError as error:
        return pb.ControlReply(error_json=wire.error_to_json(error))
    return pb.ControlReply()
