"""MachineControl: the partition service's hold on one machine, over gRPC.

`MachineHolder` keeps the machine behind a server; `podrun.device.service.reporting` makes its report.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from podrun.core.access import why_unreachable
from podrun.core.errors import ApplicationRuntimeError, ServiceError, SilentMachineError, TakenBy
from podrun.core.identity import Caller
from podrun.core.proven_channel import open_channel
from podrun.core.telemetry import MachineReport
from podrun.device.service import wire
from podrun.device.service.reporting import MachineHeat, report_and_heat
from podrun.faults import FaultSpec
from podrun.protos import ipuof_pb2 as pb
from podrun.protos.services import stub_of

if TYPE_CHECKING:
    from podrun.device.machine import Machine
    from podrun.device.machine_context import MachinePlace

    MakeMachine = Callable[[MachinePlace], Machine]


class MachineControl:
    """Asks the machine at ``endpoint`` (host:port). ``timeout``: seconds for each answer; ``token``: see
    `podrun.core.access`; ``epoch``: the server's, 0 if machines end with it.

    Calls raise ServiceError if it does not answer, and what the machine raises otherwise.
    """

    def __init__(self, endpoint: str, *, timeout: float = 10.0, token: str = "", epoch: int = 0) -> None:
        self.endpoint = endpoint
        self._metadata = ((wire.EPOCH_KEY, str(epoch)),)
        self._timeout = timeout
        self._channel = open_channel(endpoint, wire.CHANNEL_OPTIONS, token, own=bool(token))
        self._stub = stub_of(pb, "MachineControl", self._channel)

    def configure(
        self,
        *,
        partition: str,
        first_ipu: int,
        machine_index: int,
        endpoints: Sequence[str],
        ipus: int = 4,
        owner: int = -1,
        operation: int = 0,
        epoch: str = "",
    ) -> None:
        """Put the machine into a partition: its first IPU and its own index there, where all its machines listen.

        ``ipus``: how many IPUs this and every other machine of the partition has. ``owner``: the user id of who may
        attach; -1: only the user who runs the machine. ``operation``: the partition service's number for this, which
        `lead` gives back. ``epoch``: the life of the partition, for those who ask whether a file describes it.
        Attached processes lose their IPUs.
        """
        self._ask(
            self._stub.Configure,
            pb.ConfigureRequest(
                partition=partition,
                first_ipu=first_ipu,
                machine=machine_index,
                ipus=ipus,
                endpoints=endpoints,
                owner=owner + 1,
                operation=operation,
                epoch=epoch,
            ),
        )

    def lead(self, timeout: float | None = None) -> tuple[str, int]:
        """Take command of a machine that an earlier server left: the partition it is configured for (or empty), and the
        number of the operation that did so. Raises ConflictError if it obeys a newer server."""
        reply = self._call(self._stub.Lead, pb.Empty(), timeout)
        wire.raise_error(reply.error_json)
        return reply.partition, reply.operation

    def reset_ipus(self, ipus: Iterable[int]) -> None:
        """IPU_RESET of IPUs by their index at the machine."""
        self._ask(self._stub.ResetIpus, pb.ResetIpusRequest(ipus=list(ipus)))

    def reset_links(self) -> None:
        """PARTITION_RESET: retrain links, reset all IPUs; attached processes lose theirs."""
        self._ask(self._stub.ResetLinks, pb.Empty())

    def power_cycle(self, taken_by: TakenBy = TakenBy.POWER_CYCLE) -> None:
        """FULL_RESET; attached processes lose their IPUs, and read by what."""
        self._ask(self._stub.PowerCycle, pb.Empty(), ((wire.TAKEN_BY_KEY, taken_by.name),))

    def inject(self, faults: Iterable[FaultSpec | str]) -> None:
        """Plan faults, or their texts; those of other machines are ignored."""
        self._ask(self._stub.Inject, pb.InjectRequest(faults=[str(fault) for fault in faults]))

    def cancel_faults(self, texts: Iterable[str] = ()) -> None:
        """Take faults off the plan: those of these texts, or all."""
        self._ask(self._stub.Inject, pb.InjectRequest(faults=list(texts), cancel=True))

    def telemetry(self, timeout: float | None = None) -> MachineReport:
        """What the machine reports now; ``timeout``: seconds for this answer."""
        reply = self._call(self._stub.Telemetry, pb.Empty(), timeout)
        wire.raise_error(reply.error_json)
        return MachineReport.from_json_dict(wire.json_or_error(reply.report_json, "a machine report"))

    def stop(self) -> None:
        """End the machine's server."""
        with contextlib.suppress(
            ServiceError
        ):  # It may end before it has answered, which is what was asked for.
            self._ask(self._stub.Stop, pb.Empty())

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def _ask(
        self, method: Callable[..., Any], request: object, more: tuple[tuple[str, str], ...] = ()
    ) -> None:
        wire.raise_error(self._call(method, request, more=more).error_json)

    def _call(
        self,
        method: Callable[..., Any],
        request: object,
        timeout: float | None = None,
        more: tuple[tuple[str, str], ...] = (),
    ) -> Any:
        try:
            return method(request, timeout=timeout or self._timeout, metadata=(*self._metadata, *more))
        except grpc.RpcError as error:
            code, _ = wire.status_of(error)
            why = why_unreachable(self.endpoint) if code == "UNAVAILABLE" else ""
            raise SilentMachineError(
                f"the machine at {self.endpoint} does not answer ({why or code})",
                hint=(
                    "See vipu-admin list agents; a lost machine comes back with vipu-admin restart agent ID."
                ),
            ) from error


class MachineHolder:
    """Holds the machine once it is configured. Safe to use from several threads."""

    def __init__(self, make: MakeMachine, bare: MachineReport, admins: Sequence[int] = ()) -> None:
        self._make = make
        self._bare = bare
        self.admins = tuple(admins)
        self._lock, self._reporting = threading.Lock(), threading.Lock()
        self._heat: MachineHeat = ()
        self._machine: Machine | None = None
        self.target = bare.target
        self.owner = -1
        """Id of the user who may attach besides the user who runs the machine."""
        self.work = ("", "")
        """The partition that the machine works for, and which life of it; empty: none."""

    @property
    def machine(self) -> Machine:
        """Raises ApplicationRuntimeError if it is in no partition yet."""
        if self._machine is None:
            raise ApplicationRuntimeError(
                "this machine is in no partition", hint="Create one: vipu create partition NAME --size N"
            )
        return self._machine

    @property
    def known(self) -> Machine | None:
        """The machine; None before it is configured."""
        return self._machine

    def may_attach(self, caller: Caller) -> bool:
        """Whether a caller may attach to the machine's IPUs."""
        return caller.own or caller.uid in (self.owner, 0, os.getuid(), *self.admins)

    def configure(self, place: MachinePlace, owner: int = -1) -> None:
        """Put the machine into its place in a partition, for user ``owner``."""
        with self._lock:
            self.owner = owner
            if self._machine is None:
                self._machine = self._make(place)
            else:
                self._machine.move(place)

    def report(self) -> MachineReport:
        """The machine's own report of itself."""
        if self._machine is None:
            return self._bare
        with self._reporting:
            report, self._heat = report_and_heat(self._machine, self._bare, self._heat)
        return report
