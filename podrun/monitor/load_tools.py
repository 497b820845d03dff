"""Tools that load IPUs with matrix products: `gc-flops` (operations per second), `gc-powertest`."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from podrun.core.command_line import HELP_OPTIONS, seconds_range
from podrun.core.environment import IPUOF_VIPU_API_HOST, IPUOF_VIPU_API_PORT
from podrun.core.machine_output import (
    format_option,
    is_for_people,
    machine_lines,
    output_options,
    print_output,
)
from podrun.core.quick_dataclass import dataclass
from podrun.partition.commands.shared_options import server_options

if TYPE_CHECKING:
    from podrun.core.telemetry import IpuReport
    from podrun.costmodel.power import BoardHeat
    from podrun.monitor.devices import Device
    from podrun.monitor.tool_partition import ToolPartition

TYPES = {"FP16": "float16", "FP32": "float32"}


@click.command(context_settings=HELP_OPTIONS)
@click.option("-p", "--fp", type=click.Choice(["FP16", "FP32", "FP8"]), default="FP16", help="Type [FP16].")
@click.option(
    "-d", "--device-id", "device", type=click.IntRange(0), default=0, metavar="ID", help="Device [0]."
)
@output_options("-j", "--json-output")
@click.option("-l", "--low-clock-rate", is_flag=True, help="Accepted: emulated IPUs run at their full clock.")
@click.version_option(None, "-v", "--version", package_name="podrun", prog_name="gc-flops")
@server_options
def gc_flops_command(
    fp: str,
    device: int,
    form: str,
    low_clock_rate: bool,
    api_host: str | None,
    api_port: int | None,
) -> int:
    """Multiply matrices on every tile of a device and print the modelled FLOPS of an IPU.

    Every result is compared to the bit; the exit code is 1 if a value is wrong.
    """
    from podrun.core.errors import UnsupportedError
    from podrun.monitor.tool_partition import attach, find_partition
    from podrun.monitor.tool_programs import PASSES, ProductsRun

    partition = find_partition(api_host, api_port)
    chip, ipus = partition.chip, partition.ipus_of(device)
    if fp not in TYPES:
        raise UnsupportedError(f"{chip.title} does not compute in {fp}", hint="Types: FP16, FP32.")

    def say(line: str) -> None:
        if is_for_people(form):
            click.echo(line)

    say("Testing may take up to a minute of this host's time.")
    with attach(partition, ipus, name="gc-flops") as connection:
        say("Loading binary")
        test = ProductsRun(connection, chip, ipus.count, TYPES[fp], PASSES)
        say(f"Starting {fp} calculation")
        done = test.run()
    tera, clock_mhz = done.flops / done.modelled_s / 1e12, chip.clock_hz / 1e6
    wrong = {str(ipu): words for ipu, words in zip(ipus, done.wrong, strict=True) if words}
    if not is_for_people(form):
        result = _json(fp, device, ipus.count, done, tera, clock_mhz, wrong)
        print_output(form, text=str, document=result, rows=[result])
    else:
        say(f"Flops per IPU ({fp}): {tera:.4f} teraFLOPS (took: {done.modelled_s:.7f} seconds)")
        say(f"IPU clock speed: {clock_mhz:.0f} MHz")
        for ipu, words in wrong.items():
            say(f"IPU {ipu}: {words} values are wrong")
        say(
            f"FLOPS and seconds are modelled. Emulation: {done.flops * ipus.count / 1e9:.1f} GFLOP in "
            f"{done.emulation_s:.2f} s{'' if wrong else ', every value right'}."
        )
    return 1 if wrong else 0


def _json(
    fp: str, device: int, ipus: int, done: Any, tera: float, clock_mhz: float, wrong: dict[str, int]
) -> dict[str, Any]:
    return {
        "device_id": str(device),
        "number_of_ipus": str(ipus),
        "fp": fp,
        "teraflops_per_ipu": f"{tera:.4f}",
        "duration_sec": f"{done.modelled_s:.9f}",
        "clock_mhz": f"{clock_mhz:.0f}",
        "result": "fail" if wrong else "pass",
        "wrong_values": {ipu: str(words) for ipu, words in wrong.items()},
        "emulation_sec": f"{done.emulation_s:.3f}",
        "modelled": ["teraflops_per_ipu", "duration_sec", "clock_mhz"],
        "emulated": ["result", "wrong_values", "emulation_sec"],
    }


PASSES = 129
"""Products of one launch: few, so that Ctrl-C acts soon."""
SENSORS = ("B_COL0:1", "B_COL1:1", "B_IN:1", "B_MID:1", "B_OUT:1")
DIES = ("PVT0", "PVT1", "PVT2", "PVTE")
NOT_KNOWN = "N/A"


@dataclass(frozen=True, slots=True)
class PowerBoard:
    """A board of an IPU-Machine with its IPUs that are in the partition (at most two), by IPU#."""

    serial: str
    devices: tuple[Device, ...]


@click.command(context_settings=HELP_OPTIONS)
@click.version_option(package_name="podrun", prog_name="gc-powertest")
@click.option(
    "-d", "--device-id", "device", type=click.IntRange(0), default=0, metavar="ID", help="Device [0]."
)
@click.option("--time", "seconds", type=seconds_range(), metavar="SECONDS", help="How long [until Ctrl-C].")
@click.option(
    "--interval", type=seconds_range(), default=1.0, metavar="SECONDS", help="Between two rows [1]."
)
@format_option
@server_options
def gc_powertest_command(
    device: int,
    seconds: float | None,
    interval: float,
    form: str,
    api_host: str | None,
    api_port: int | None,
) -> None:
    """Keep the IPUs of a device busy with matrix products until Ctrl-C and print a row of readings again and again.

    Start it once for each device. Power and temperatures are modelled.
    Results are compared; a wrong value ends it with an error.
    """
    from podrun.monitor.tool_partition import find_partition

    partition = find_partition(api_host, api_port)
    readings: list[dict[str, Any]] = []

    def show(values: dict[str, Any]) -> None:
        lines = list(machine_lines("csv" if form == "csv" else "jsonl", {}, [values]))
        click.echo("\n".join(lines[1:] if readings and form == "csv" else lines))
        readings.append(values)

    with contextlib.suppress(KeyboardInterrupt):  # The documented end.
        if is_for_people(form):
            burn(partition, device, seconds, interval)
        else:
            burn(partition, device, seconds, interval, show=readings.append if form == "json" else show)
    if form == "json":
        click.echo(json.dumps({"readings": readings}, indent=2))


def burn(
    partition: ToolPartition,
    device: int,
    seconds: float | None,
    interval: float,
    clock: Callable[[], float] = time.monotonic,
    show: Callable[[dict[str, Any]], object] | None = None,
) -> None:
    """Compute and print rows, or give their values to ``show``. Raises the IPUs' errors, and ApplicationRuntimeError
    for a wrong value."""
    from podrun.core.errors import ApplicationRuntimeError
    from podrun.monitor.tool_partition import attach
    from podrun.monitor.tool_programs import ProductsRun
    from podrun.partition.client.vipu_client import VipuClient

    ipus = partition.ipus_of(device)
    boards, heat = boards_of(partition, set(ipus)), BoardHeats(partition.chip.name, list(ipus))
    where = partition.environ[IPUOF_VIPU_API_HOST], int(partition.environ[IPUOF_VIPU_API_PORT])
    with VipuClient(*where) as client, attach(partition, ipus, name="gc-powertest") as connection:
        test = ProductsRun(connection, partition.chip, ipus.count, "float16", PASSES)
        if show is None:
            click.echo("\n".join(header(boards, list(ipus))))
        begin, number = clock(), 0
        while True:
            due = clock() + interval
            while True:
                wrong = test.run().wrong
                if any(wrong):
                    bad = ", ".join(str(ipu) for ipu, count in zip(ipus, wrong, strict=True) if count)
                    raise ApplicationRuntimeError(
                        f"wrong values on IPU {bad}", hint="Reset it: gc-reset -d ID"
                    )
                if clock() >= due:
                    break
            number += 1
            reports = {
                ipu.partition_ipu: ipu
                for report in client.machine_reports(partition.view.info.name)
                for ipu in report.ipus
            }
            heat.update(boards, reports, clock())
            if show is None:
                click.echo(readings_row(number, boards, list(ipus), reports, heat))
            else:
                show(readings_values(number, boards, list(ipus), reports, heat))
            if seconds is not None and clock() - begin >= seconds:
                return


def boards_of(partition: ToolPartition, ipus: set[int]) -> list[PowerBoard]:
    """The boards with any of ``ipus``."""
    from podrun.monitor.devices import attributes_of_ipus

    by_serial: dict[str, list[Device]] = {}
    for device, values in zip(partition.view.devices, attributes_of_ipus(partition.view), strict=True):
        by_serial.setdefault(values["board serial number"], []).append(device)
    return [
        PowerBoard(serial, tuple(sorted(devices, key=lambda d: d.number)))
        for serial, devices in by_serial.items()
        if any(d.ipu.partition_ipu in ipus for d in devices)
    ]


def header(boards: list[PowerBoard], ipus: list[int]) -> Iterator[str]:
    """Lines that name the columns."""
    for board in boards:
        names = " ".join(f"IPU{d.number % 2}" for d in board.devices)
        yield f"CARD LEVEL {board.serial}: XDPE132G5C {names} total, {' '.join(SENSORS)}"
    for ipu in ipus:
        yield f"IPU#{ipu}: {' '.join(f'0:{die}' for die in DIES)} CLOCK, utilisation"
    yield "Power and temperatures are modelled: the sensors of a board, and of a die, show one value. N/A: unknown."


def readings_row(
    number: int, boards: list[PowerBoard], ipus: list[int], reports: dict[int, IpuReport], heat: BoardHeats
) -> str:
    """One row of the table of readings, as text."""
    cells = []
    for board in boards:
        watts = heat.watts[board.serial]
        known = [w for w in watts if w is not None]
        total = f"T{sum(known):06.2f}W" if len(known) == len(watts) else f"T{NOT_KNOWN}"
        cells += [_reading(w, "{:06.2f}W") for w in watts] + [total]
        cells += [_reading(heat.board_c(board), "{:03.0f}C")] * len(SENSORS)
    for ipu in ipus:
        report = reports[ipu]
        cells += [_reading(heat.die_c(boards, ipu), "{:05.1f}C")] * len(DIES)
        cells += [_reading(report.clock_mhz, "{:.0f}MHz"), f"{report.utilisation_percent or 0:.1f}%"]
    return f"{number:04d}: {' '.join(cells)}"


def readings_values(
    number: int, boards: list[PowerBoard], ipus: list[int], reports: dict[int, IpuReport], heat: BoardHeats
) -> dict[str, Any]:
    """The readings of `readings_row` as values of JSON. IPUs and boards by name, so that each has columns of its own in
    a table.
    """
    return {
        "number": number,
        "boards": {
            board.serial: {
                "board_temperature_c": heat.board_c(board),
                "power_w": {
                    str(d.number): w for d, w in zip(board.devices, heat.watts[board.serial], strict=True)
                },
            }
            for board in boards
        },
        "ipus": {
            str(ipu): {
                "die_temperature_c": heat.die_c(boards, ipu),
                "clock_mhz": reports[ipu].clock_mhz,
                "utilisation_percent": reports[ipu].utilisation_percent,
            }
            for ipu in ipus
        },
    }


class BoardHeats:
    """Power and temperatures of the boards under test: IPUs of this test compute all the time, others that nobody holds
    idle; what other programs' IPUs draw is not known, nor is their board's temperature."""

    def __init__(self, chip: str, ours: Sequence[int]) -> None:
        self._chip, self._ours = chip, frozenset(ours)
        self.watts: dict[str, list[float | None]] = {}
        self._heat: dict[str, BoardHeat] = {}

    def update(self, boards: list[PowerBoard], reports: Mapping[int, IpuReport], now: float) -> None:
        """Take the reports at ``now`` (seconds). At first boards are as warm as after long idling."""
        from podrun.costmodel.power import BoardHeat, modelled_ipu_watts

        for board in boards:
            watts = []
            for device in board.devices:
                report, ours = reports[device.ipu.partition_ipu], device.ipu.partition_ipu in self._ours
                known = ours or report.process is None
                watts.append(modelled_ipu_watts(self._chip, float(ours), report.clock_mhz) if known else None)
            self.watts[board.serial] = watts
            if None in watts:
                self._heat.pop(board.serial, None)
                continue
            drawn = tuple(w or 0.0 for w in watts)
            idle = tuple(modelled_ipu_watts(self._chip, 0.0, 1.0) or 0.0 for _ in watts)
            before = self._heat.get(board.serial, BoardHeat.settled(idle, now))
            self._heat[board.serial] = before.after(drawn, now)

    def board_c(self, board: PowerBoard) -> float | None:
        """The board's temperature; None if it is not known."""
        heat = self._heat.get(board.serial)
        return None if heat is None else heat.board_c

    def die_c(self, boards: list[PowerBoard], ipu: int) -> float | None:
        """The temperature of an IPU of the partition; None if it is not known."""
        for board in boards:
            places = [device.ipu.partition_ipu for device in board.devices]
            if ipu in places and board.serial in self._heat:
                return self._heat[board.serial].dies_c[places.index(ipu)]
        return None


def _reading(value: float | None, form: str) -> str:
    return NOT_KNOWN if value is None else form.format(value)
