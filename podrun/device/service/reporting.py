"""The report of a machine: what it knows of its IPUs, with modelled power, temperatures and counters.

Nothing here runs unless somebody asks for a report. Temperatures follow the power since the report before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from podrun.core.errors import ErrorCode
from podrun.core.ipu_states import IpuErrorState
from podrun.core.telemetry import AttachedProcess, IpuReport, MachineReport
from podrun.costmodel.power import BoardHeat, modelled_ipu_watts
from podrun.device.activity import ACTIVITIES, WINDOW_S, TrafficCounters
from podrun.device.owners import MachineMoment
from podrun.faults import FaultTarget, Struck

if TYPE_CHECKING:
    from podrun.device.machine import Machine

CLOCK_MHZ = {"gc200": 1330.0, "bow": 1850.0}
"""Tile clocks: GC200 1.33 GHz (Graphcore, IPU-M2000 datasheet), Bow 1.85 GHz (Graphcore, Bow-2000 datasheet)."""
IPUS_PER_BOARD = 2
PARITY_KINDS = ("tile-parity", "corrected-parity")

MachineHeat = tuple[BoardHeat, ...]
"""The temperatures of a machine's boards; empty before the first report."""


def report_and_heat(
    machine: Machine, bare: MachineReport, heat: MachineHeat
) -> tuple[MachineReport, MachineHeat]:
    """The report, and the machine's temperatures now. ``heat``: those at the report before."""
    place, work, struck = machine.place, machine.work(), machine.struck_faults()
    parity = parity_errors(struck)
    usual = CLOCK_MHZ.get(bare.target)

    def clock(ipu: int) -> float | None:
        throttled = machine.throttled_mhz(ipu)
        return usual if usual is None or throttled is None else min(usual, throttled)

    def read(moment: MachineMoment) -> tuple[tuple[IpuReport, ...], float]:
        ipus = (_ipu(moment, ipu, ipu - place.first_ipu, clock(ipu), parity[ipu]) for ipu in place.range)
        return tuple(_with_power(ipu, bare.target) for ipu in ipus), moment.now

    ipus, now = machine.snapshot(read)
    watts = [ipu.power_w for ipu in ipus if ipu.power_w is not None]
    known = bool(watts) and len(watts) == len(ipus)
    if known:
        heat = warmed(heat, _watts_by_board(ipus, bare.target), now)
        dies = [die for board in heat for die in board.dies_c]
        ipus = tuple(replace(ipu, die_temperature_c=die) for ipu, die in zip(ipus, dies, strict=False))
    report = replace(
        bare,
        board_power_w=sum(watts) if known else None,
        board_temperature_c=sum(board.board_c for board in heat) / len(heat) if heat else None,
        batches_done=work.batches,
        samples_done=work.samples,
        modelled_s=work.modelled_s,
        emulation_s=work.emulation_s,
        planned_faults=machine.planned_faults(),
        struck_faults=struck,
        partition=place.partition,
        machine_index=place.machine,
        endpoint=place.endpoint,
        ipus=ipus,
    )
    return report, heat


def _watts_by_board(
    ipus: Sequence[IpuReport], target: str
) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """For each board the power of its IPUs in the last second, and since their processes attached."""
    boards = []
    for first in range(0, len(ipus), IPUS_PER_BOARD):
        board = ipus[first : first + IPUS_PER_BOARD]
        recent = tuple(ipu.power_w or 0.0 for ipu in board)
        boards.append((recent, tuple(_mean_watts(ipu, target) for ipu in board)))
    return boards


def _mean_watts(ipu: IpuReport, target: str) -> float:
    """Power since the process attached: the share of computing in the last second is taken for its whole work."""
    busy, compute = ipu.utilisation_percent or 0.0, ipu.compute_percent
    session = (ipu.utilisation_session_percent or 0.0) / 100
    share = session * (compute / busy if compute is not None and busy else 1.0)
    return modelled_ipu_watts(target, share, ipu.clock_mhz) or 0.0


def warmed(
    heat: MachineHeat, watts: Iterable[tuple[tuple[float, ...], tuple[float, ...]]], now: float
) -> MachineHeat:
    """Temperatures at ``now`` (seconds). ``watts``: for each board those of the last second, and those before it. A
    board that is new, or has other IPUs, begins as if it had been like that for long."""
    boards = []
    for k, (recent, before) in enumerate(watts):
        old = (
            heat[k]
            if k < len(heat) and len(heat[k].dies_c) == len(recent)
            else BoardHeat.settled(before, now)
        )
        if now - old.time_s > WINDOW_S:
            old = old.after(before, now - WINDOW_S)
        boards.append(old.after(recent, now))
    return tuple(boards)


def _with_power(ipu: IpuReport, target: str) -> IpuReport:
    """A program without a model is taken to compute whenever it runs."""
    percent = ipu.utilisation_percent if ipu.compute_percent is None else ipu.compute_percent
    return replace(ipu, power_w=modelled_ipu_watts(target, (percent or 0.0) / 100, ipu.clock_mhz))


def parity_errors(struck: Iterable[Struck]) -> Counter[int]:
    """How many parity errors faults have made so far, by IPU of the partition."""
    count: Counter[int] = Counter()
    for strike in struck:
        if strike.fault.target is FaultTarget.IPU and strike.fault.kind in PARITY_KINDS:
            count[strike.fault.indices[0]] += 1
    return count


def _ipu(moment: MachineMoment, ipu: int, local: int, clock_mhz: float | None, parity: int) -> IpuReport:
    health, owner, now = moment.health, moment.owners.get(ipu), moment.now
    condition = health.condition(ipu)
    traffic, loaded = moment.traffic.get(ipu, TrafficCounters()), moment.activity.get(ipu)
    process = None
    shares: tuple[float | None, ...] = (0.0,) * len(ACTIVITIES)
    if owner is not None:
        request = owner.request
        process = AttachedProcess(request.pid, request.user, request.command, owner.started, owner.host)
        shares = owner.usage.shares(now, ipu - request.job.first)
    percents = {
        f"{name}_percent": None if share is None else 100 * share
        for name, share in zip(ACTIVITIES, shares, strict=True)
    }
    return IpuReport(
        partition_ipu=ipu,
        ipu=local,
        error_state=IpuErrorState.NO_ERRORS if condition is None else condition.state,
        error_code=ErrorCode.NONE if condition is None else condition.error.code,
        recovery_action=None if condition is None else condition.action,
        process=process,
        clock_mhz=clock_mhz,
        utilisation_percent=0.0 if owner is None else owner.usage.recent_percent(now),
        utilisation_session_percent=None if owner is None else owner.usage.session_percent(now),
        batches_done=moment.batches[ipu],
        links_down=health.links_down(ipu),
        link_correctable_errors=round(traffic.link_errors),
        link_bytes=traffic.link_bytes,
        host_bytes=traffic.host_bytes,
        parity_errors=parity,
        tile_bytes=None if loaded is None else loaded.tile_bytes,
        tile_capacity_bytes=None if loaded is None else loaded.tile_capacity_bytes,
        **percents,
    )
