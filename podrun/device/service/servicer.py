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

from podrun.collectives import ClosedError
from podrun.core.access import why_unreachable
from podrun.core.error_codec import error_to_json
from podrun.core.errors import (
    ApplicationRuntimeError,
    ConflictError,
    ErrorCause,
    ErrorCode,
    PodrunError,
    TakenBy,
    UnrecoverableRuntimeError,
)
from podrun.core.gate import Gate, caller_of
from podrun.core.proven_channel import open_channel
from podrun.device.machine_context import MachinePlace
from podrun.device.program.fabric import LOOK_SECONDS, JobName, Wait
from podrun.device.service import wire
from podrun.device.service.control import MachineHolder
from podrun.device.service.host_session import (
    ATTACH_SECONDS,
    PART_SECONDS,
    SESSIONS,
    HostSession,
    Patience,
    SessionLimits,
)
from podrun.device.service.preload import Preload
from podrun.faults import parse_fault
from podrun.protos import ipuof_pb2 as pb
from podrun.protos.services import add_to_server, stub_of

log = logging.getLogger("podrun.device")

CONTROL = 16
"""Threads for requests of the partition service, which sessions and claims cannot take."""
CLAIMS = 256
"""Machines that may wait here for this machine's group, with a thread each. This machine may be the last to load, and
must still answer the host process that attaches to it."""


class IpuofServicer:
    """See ``ipuof.proto``. ``preload`` begins when a host process attaches, and ends before one loads a program."""

    def __init__(self, holder: MachineHolder, preload: Preload | None = None) -> None:
        self._holder = holder
        self._preload = preload
        self._claims = threading.BoundedSemaphore(CLAIMS)
        self._limits = SessionLimits()

    def Session(
        self, requests: Iterator[pb.HostRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.MachineReply]:
        caller = caller_of(context)
        with self._limits.session(caller) as refusal:
            if refusal:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, refusal)
            patience = Patience(caller, context.cancel)
            try:
                yield from self._serve(HostSession(self._holder, caller), requests, context, patience)
            finally:
                patience.stop()

    def _serve(
        self,
        session: HostSession,
        requests: Iterator[pb.HostRequest],
        context: grpc.ServicerContext,
        patience: Patience,
    ) -> Iterator[pb.MachineReply]:
        caller = caller_of(context)
        patience.until(ATTACH_SECONDS, "request to attach")
        # Called when the stream ends for whatever reason, also while a request is at work in this thread.
        if not context.add_callback(lambda: session.end(died=True)):
            session.end(died=True)
        try:
            joiner = wire.MessageJoiner(pb.HostRequest)
            for part in requests:
                joiner.limit = self._limits.most_bytes(caller, session.attached)
                try:
                    request = joiner.add(part)
                except ApplicationRuntimeError as error:
                    yield pb.MachineReply(error_json=error_to_json(error))
                    return
                if request is None:
                    patience.until(PART_SECONDS, "further part of a message")
                    continue
                patience.stop()
                if self._preload is not None and request.HasField("load"):
                    self._preload.wait()
                yield from wire.in_parts(session.answer(request))
                if not session.attached:
                    patience.until(ATTACH_SECONDS, "request to attach")
                if self._preload is not None and request.HasField("attach"):
                    self._preload.begin()
        except grpc.RpcError:
            log.info("a host process ended its session without detaching")
        finally:
            session.end(died=True)
            session.close()

    def JoinGroup(self, request: pb.JoinGroupRequest, context: grpc.ServicerContext) -> pb.JoinGroupReply:
        _refuse_others(context)
        if not self._claims.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{CLAIMS} machines wait for its group already")
        try:
            token = self._holder.machine.offers.claim(
                JobName(wire.range_from_wire(request.job), request.who),
                request.rank,
                request.digest,
                Wait(max(request.timeout_seconds, 0.1), context.is_active),
            )
        except PodrunError as error:
            return pb.JoinGroupReply(error_json=error_to_json(error))
        finally:
            self._claims.release()
        return pb.JoinGroupReply(token_json=json.dumps(dict(token)))

    def Describe(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.DescribeReply:
        if not self._holder.may_attach(caller_of(context)):
            context.abort(
                grpc.StatusCode.PERMISSION_DENIED, "this machine is in no partition of the caller's"
            )
        partition, epoch = self._holder.work
        return pb.DescribeReply(partition=partition, epoch=epoch)


class CommandingServer:
    """Which server commands a machine, and its last order: the highest epoch of a server that the machine has seen.

    A machine that outlives its server is taken over by the next one, whose epoch is higher. The earlier server, if it
    still runs, is refused from then on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch = 0
        self.partition, self.operation = "", 0

    def obey(self, context: grpc.ServicerContext) -> None:
        """Raise ConflictError for a call of a server that another one has replaced."""
        metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
        text = metadata.get(wire.EPOCH_KEY, "0")
        epoch = int(text) if isinstance(text, str) and text.isdecimal() else 0
        with self._lock:
            if epoch < self._epoch:
                raise ConflictError(
                    f"this machine obeys a newer V-IPU server (epoch {self._epoch}, not {epoch})",
                    hint="Stop the old server; vipu --server-version shows which one answers.",
                )
            self._epoch = epoch


class ControlServicer:
    """See ``ipuof.proto``. ``stop``: ends the server, called in a thread of its own."""

    def __init__(self, holder: MachineHolder, stop: Callable[[], None]) -> None:
        self._holder = holder
        self._stop = stop
        self._command = CommandingServer()

    def Lead(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.LeadReply:
        _refuse_others(context)
        try:
            self._command.obey(context)
        except PodrunError as error:
            return pb.LeadReply(error_json=error_to_json(error))
        return pb.LeadReply(partition=self._command.partition, operation=self._command.operation)

    def Configure(self, request: pb.ConfigureRequest, context: grpc.ServicerContext) -> pb.ControlReply:
        _refuse_others(context)
        place = MachinePlace(
            request.partition, request.machine, request.first_ipu, request.ipus, tuple(request.endpoints)
        )
        owner = int(request.owner) - 1

        def configure() -> None:
            self._holder.configure(place, owner)
            self._holder.work = (request.partition, request.epoch)
            self._command.partition, self._command.operation = request.partition, request.operation

        return self._control(context, configure)

    def ResetIpus(self, request: pb.ResetIpusRequest, context: grpc.ServicerContext) -> pb.ControlReply:
        _refuse_others(context)

        def reset() -> None:
            machine = self._holder.machine
            machine.reset_ipus([machine.place.first_ipu + ipu for ipu in request.ipus])

        return self._control(context, reset)

    def ResetLinks(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.ControlReply:
        _refuse_others(context)
        return self._control(context, lambda: self._holder.machine.reset_links())

    def PowerCycle(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.ControlReply:
        _refuse_others(context)
        machine = self._holder.known
        cause = str(dict(context.invocation_metadata() or ()).get(wire.TAKEN_BY_KEY, ""))
        taken_by = TakenBy[cause] if cause in TakenBy.__members__ else TakenBy.POWER_CYCLE

        def power_cycle() -> None:
            self._command.partition, self._command.operation = "", 0
            if taken_by in (TakenBy.REMOVAL, TakenBy.MOVE):
                self._holder.work = ("", "")
            if machine is not None:
                machine.power_cycle(taken_by)

        return self._control(context, power_cycle)

    def Inject(self, request: pb.InjectRequest, context: grpc.ServicerContext) -> pb.ControlReply:
        _refuse_others(context)

        def plan() -> None:
            if request.cancel:
                self._holder.machine.cancel_faults(tuple(request.faults))
            else:
                self._holder.machine.plan_faults([parse_fault(text) for text in request.faults])

        return self._control(context, plan)

    def Telemetry(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.TelemetryReply:
        _refuse_others(context)
        machine = self._holder.known
        if machine is not None and not machine.answers:
            context.abort(grpc.StatusCode.UNAVAILABLE, "a fault drops what this machine reports")
        try:
            return pb.TelemetryReply(report_json=json.dumps(self._holder.report().to_json_dict()))
        except PodrunError as error:
            return pb.TelemetryReply(error_json=error_to_json(error))

    def Stop(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.ControlReply:
        _refuse_others(context)
        end = threading.Thread(target=self._stop, name="podrun-machine-stop", daemon=True)
        return self._control(context, end.start)

    def _control(self, context: grpc.ServicerContext, action: Callable[[], Any]) -> pb.ControlReply:
        try:
            self._command.obey(context)
            action()
        except PodrunError as error:
            return pb.ControlReply(error_json=error_to_json(error))
        return pb.ControlReply()


class GrpcFabric:
    """Other machines of the partition, at the endpoints of ``place()``."""

    def __init__(self, place: Callable[[], MachinePlace], token: str = "") -> None:
        self._place = place
        self._token = token

    def claim(self, machine: int, job: JobName, rank: int, digest: str, wait: Wait) -> Mapping[str, Any]:
        endpoint = self._place().endpoints[machine]
        request = pb.JoinGroupRequest(
            job=wire.range_to_wire(job.range),
            who=job.who,
            rank=rank,
            digest=digest,
            timeout_seconds=wait.seconds,
        )
        with open_channel(endpoint, wire.CHANNEL_OPTIONS, self._token, own=bool(self._token)) as channel:
            try:
                stub = stub_of(pb, "Ipuof", channel)
                reply = _answer(stub.JoinGroup.future(request, timeout=wait.seconds + 5), wait)
            except grpc.RpcError as error:
                raise UnrecoverableRuntimeError(
                    f"machine {machine} of the partition, at {endpoint}, does not answer: "
                    f"{why_unreachable(endpoint) or wire.status_of(error)[1]}",
                    code=ErrorCode.LINK_DOWN,
                    where=f"machine {machine}",
                    cause=ErrorCause(machine=machine),
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


def _refuse_others(context: grpc.ServicerContext) -> None:
    """End a call that is not from the user who runs this machine: other users may open sessions, and nothing else."""
    if not caller_of(context).own:
        context.abort(
            grpc.StatusCode.PERMISSION_DENIED, "only the partition service may ask that of a machine"
        )


def serve_machine(
    holder: MachineHolder,
    address: tuple[str, int],
    stop: Callable[[], None],
    gate: Gate,
    preload: Preload | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[grpc.Server, int]:
    """Start a server for ``holder`` at an address; returns it and its port. ``gate`` decides who may call. ``environ``:
    names the runtime directory.

    Raises RuntimeError if the port is taken.
    """
    host, port = address
    pool = ThreadPoolExecutor(SESSIONS + CLAIMS + CONTROL, thread_name_prefix="podrun-ipuof")
    options = wire.SERVER_OPTIONS
    server = grpc.server(pool, options=options, interceptors=gate.interceptors())
    add_to_server(pb, "Ipuof", IpuofServicer(holder, preload), server)
    add_to_server(pb, "MachineControl", ControlServicer(holder, stop), server)
    bound = gate.listen(server, host, port, environ)
    server.start()
    return server, bound


def _answer(call: grpc.Future[pb.JoinGroupReply], wait: Wait) -> pb.JoinGroupReply:
    """The answer to a claim. Cancels it, and raises ClosedError, once it is no longer wanted."""
    while True:
        try:
            reply: pb.JoinGroupReply = call.result(LOOK_SECONDS)
            return reply
        except grpc.FutureTimeoutError:
            if not wait.wanted():
                call.cancel()
                raise ClosedError("the job ended before its group of machines was formed") from None
