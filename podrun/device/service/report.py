"""What a machine reports about itself (`podrun.telemetry`): who is attached, what is broken, how busy it is.

Temperatures and power stay unknown: nothing here measures or models them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from podrun.device.health import Health
from podrun.device.job import Owner
from podrun.device.machine import Machine
from podrun.telemetry import NO_ERRORS, AttachedProcess, IpuReport, MachineReport

CLOCK_MHZ = {"gc200": 1330.0, "bow": 1850.0}
"""Tile clocks: GC200 1.33 GHz (Graphcore, IPU-M2000 datasheet), Bow 1.85 GHz (Graphcore, Bow-2000 datasheet).
"""


def machine_report(machine: Machine, bare: MachineReport) -> MachineReport:
    """``bare`` (what is known without a partition) with everything the machine knows."""
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
