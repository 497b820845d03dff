"""The machine behind a server, and its report (`podrun.core.telemetry`): attached processes, errors, utilisation.

Temperature and power stay unknown: podrun neither measures nor models them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from podrun.core.errors import ApplicationRuntimeError
from podrun.core.telemetry import NO_ERRORS, AttachedProcess, IpuReport, MachineReport
from podrun.device.health import Health
from podrun.device.machine import Machine
from podrun.device.owners import MachinePlace, Owner

CLOCK_MHZ = {"gc200": 1330.0, "bow": 1850.0}
"""Tile clocks: GC200 1.33 GHz (Graphcore, IPU-M2000 datasheet), Bow 1.85 GHz (Graphcore, Bow-2000 datasheet).
"""


MakeMachine = Callable[[MachinePlace], Machine]


class MachineHolder:
    """Holds the machine once it is configured. Safe to use from several threads."""

    def __init__(self, make: MakeMachine, bare: MachineReport, admins: Sequence[int] = ()) -> None:
        self._make = make
        self._bare = bare
        self.admins = tuple(admins)
        self._lock = threading.Lock()
        self._machine: Machine | None = None
        self.target = bare.target
        self.owner = -1
        """Id of the user who may attach besides the user who runs the machine."""

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

    def configure(self, place: MachinePlace, owner: int = -1) -> None:
        """Put the machine into its place in a partition, for user ``owner``."""
        with self._lock:
            self.owner = owner
            if self._machine is None:
                self._machine = self._make(place)
            else:
                self._machine.move(place)

    def report(self) -> MachineReport:
        """The machine's report."""
        return self._bare if self._machine is None else machine_report(self._machine, self._bare)


def machine_report(machine: Machine, bare: MachineReport) -> MachineReport:
    """``bare`` (the report of a machine in no partition) completed from the machine."""
    place = machine.place

    def read(
        health: Health, owners: Mapping[int, Owner], batches: Mapping[int, int], now: float
    ) -> tuple[IpuReport, ...]:
        return tuple(
            _ipu(ipu, ipu - place.first_ipu, health, owners.get(ipu), batches[ipu], now, bare.target)
            for ipu in place.range
        )

    work = machine.work()
    return replace(
        bare,
        batches_done=work.batches,
        samples_done=work.samples,
        modelled_s=work.modelled_s,
        emulation_s=work.emulation_s,
        planned_faults=machine.planned_faults(),
        struck_faults=tuple(map(asdict, machine.struck_faults())),
        partition=place.partition,
        machine_index=place.machine,
        endpoint=place.endpoint,
        ipus=machine.snapshot(read),
    )


def _ipu(
    ipu: int, local: int, health: Health, owner: Owner | None, batches: int, now: float, target: str
) -> IpuReport:
    condition = health.condition(ipu)
    process = None
    if owner is not None:
        request = owner.request
        process = AttachedProcess(request.pid, request.user, request.command, owner.started, owner.host)
    return IpuReport(
        partition_ipu=ipu,
        ipu=local,
        error_state=NO_ERRORS if condition is None else condition.state,
        error_code="NONE" if condition is None else condition.error.code.name,
        recovery_action=None if condition is None or condition.action is None else condition.action.value,
        process=process,
        clock_mhz=CLOCK_MHZ.get(target),
        utilisation_percent=0.0 if owner is None else owner.usage.recent_percent(now),
        utilisation_session_percent=None if owner is None else owner.usage.session_percent(now),
        batches_done=batches,
        links_down=health.links_down(ipu),
    )
