"""Test tools of the host link: `gc-hosttraffictest` and `gc-hostsynclatencytest`.

The first moves data between host and IPU through the gateway's buffer, both legs at once; the second times syncs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from podrun.core.command_line import HELP_OPTIONS
from podrun.core.machine_output import output_options, print_output
from podrun.core.quick_dataclass import dataclass
from podrun.partition.commands.shared_options import server_options

if TYPE_CHECKING:
    import numpy as np

    from podrun.core.layout import IpuRange
    from podrun.device.connection import Connection, RunResult
    from podrun.monitor.tool_partition import ToolPartition

ITERATIONS = 100_000
"""Modelled iterations. Published: the configuration of the tool's sample."""
HOST_WORDS = 1 << 20
"""32-bit words that the host moves in one emulated batch."""
BATCHES = 4
"""Batches that each test moves and compares in the emulation."""
SEED = 2_654_435_761


@dataclass(frozen=True, slots=True)
class Leg:
    """One test: the host and the tiles each write ("to") or read ("from") the gateway's buffer, at once."""

    name: str
    description: str
    host: str
    tile: str


LEGS = (
    Leg("host_from_buffer_from_tile", "host <- buffer <- tile", "from", "from"),
    Leg("host_to_buffer_to_tile", "host -> buffer -> tile", "to", "to"),
    Leg("host_to_buffer_from_tile", "host -> buffer <- tile", "to", "from"),
    Leg("host_from_buffer_to_tile", "host <- buffer -> tile", "from", "to"),
)


@dataclass(frozen=True, slots=True)
class HostTraffic:
    """Result of one test. ``wrong``: number of wrong words or checksums."""

    leg: Leg
    seconds: float
    host_bytes: int
    tile_bytes: int
    wrong: int
    emulated_bytes: int
    emulation_s: float

    @property
    def speeds_gbps(self) -> tuple[float, float]:
        """Modelled rates of the host's and the tiles' side, 10^9 bits per second."""
        return self.host_bytes * 8 / self.seconds / 1e9, self.tile_bytes * 8 / self.seconds / 1e9


@click.command(context_settings=HELP_OPTIONS)
@click.version_option(package_name="podrun", prog_name="gc-hosttraffictest")
@click.option(
    "-d", "--device-id", "device", type=click.IntRange(0), default=0, metavar="ID", help="One IPU [0]."
)
@output_options("-j", "--json-output")
@server_options
def gc_hosttraffictest_command(device: int, form: str, api_host: str | None, api_port: int | None) -> int:
    """Move data between the host and an IPU's tiles, in all four combinations of directions.

    Speeds are modelled. The emulation moves bytes over the connection that programs use and compares them; the exit
    code is 1 if any is wrong.
    """
    from podrun.core.errors import UsageError
    from podrun.monitor.tool_partition import attach, find_partition

    partition = find_partition(api_host, api_port)
    ipus = partition.ipus_of(device)
    if ipus.count != 1:
        raise UsageError(
            f"device {device} has {ipus.count} IPUs; host traffic is tested one IPU at a time",
            hint="Name a single IPU: gc-info -l",
        )
    with attach(partition, ipus, name="gc-hosttraffictest") as connection:
        outcomes = [measure_host_traffic(partition, connection, leg) for leg in LEGS]
    document = host_traffic_json(outcomes)
    print_output(
        form,
        text=lambda: "\n".join(host_traffic_lines(outcomes)),
        document=document,
        rows=[{"test": name, **values} for name, values in document["repeat_0"].items()],
    )
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


def measure_host_traffic(partition: ToolPartition, connection: Connection, leg: Leg) -> HostTraffic:
    """Load a test's program, move its data, compare."""
    import numpy as np

    from podrun.monitor import tool_partition as times
    from podrun.monitor.transfer_programs import host_traffic

    seconds = ITERATIONS * times.tile_round_seconds()
    tile_words = times.HOST_TILES * times.TILE_BYTES // 4
    connection.load(
        host_traffic(partition.chip, leg.host, leg.tile, HOST_WORDS, tile_words, seconds / BATCHES)
    )
    buffer = np.arange(tile_words, dtype=np.uint32) * np.uint32(SEED)
    connection.write_variables({"buffer": buffer})
    down = np.random.default_rng(2).integers(0, 2**32, (BATCHES, 1, 1, HOST_WORDS), np.uint32)
    first = np.arange(BATCHES, dtype=np.uint32).reshape(BATCHES, 1, 1, 1) * np.uint32(HOST_WORDS)
    result = connection.run(BATCHES, {"down": down} if leg.host == "to" else {"first": first})
    wrong = _wrong_on_host(result, down, first) + _wrong_on_tiles(connection, result, buffer)
    return HostTraffic(
        leg,
        seconds=result.modelled_seconds,
        host_bytes=round(times.host_rate(leg.tile) * result.modelled_seconds),
        tile_bytes=ITERATIONS * times.HOST_TILES * times.TILE_BYTES,
        wrong=wrong,
        emulated_bytes=BATCHES * 4 * HOST_WORDS,
        emulation_s=result.emulation_seconds,
    )


def _wrong_on_host(result: RunResult, down: np.ndarray, first: np.ndarray) -> int:
    """Wrong words from the IPU, or batches to the IPU with a wrong checksum."""
    import numpy as np

    from podrun.monitor.transfer_programs import checksum

    if "up" in result.anchors:
        expected = first + np.arange(HOST_WORDS, dtype=np.uint32)
        return int(np.count_nonzero(result.anchors["up"] != expected))
    sums = np.array([checksum(batch) for batch in down], np.uint32)
    return int(np.count_nonzero(result.anchors["sum:down"].reshape(-1) != sums))


def _wrong_on_tiles(connection: Connection, result: RunResult, buffer: np.ndarray) -> int:
    """Batches that tiles read with a wrong checksum, or words of the buffer that tiles wrote wrong."""
    import numpy as np

    from podrun.monitor.transfer_programs import checksum

    if "sum:buffer" in result.anchors:
        return int(np.count_nonzero(result.anchors["sum:buffer"] != checksum(buffer)))
    written = connection.read_variables(["buffer"])["buffer"]
    return int(np.count_nonzero(written != buffer + np.uint32(BATCHES)))


def host_traffic_json(outcomes: Sequence[HostTraffic]) -> dict[str, Any]:
    """The documented object, and which of its values are modelled and which emulated."""
    from podrun.monitor import tool_partition as times
    from podrun.monitor.tool_partition import strings

    tests = {}
    for outcome in outcomes:
        host, tile = outcome.speeds_gbps
        tests[outcome.leg.name] = {
            "description": outcome.leg.description,
            "duration_seconds": f"{outcome.seconds:.9f}",
            "host_data_transferred_bytes": outcome.host_bytes,
            "tile_data_transferred_bytes": outcome.tile_bytes,
            "host_transfer_speed_gbps": f"{host:.4f}",
            "tile_transfer_speed_gbps": f"{tile:.4f}",
            "emulated_host_bytes": outcome.emulated_bytes,
            "emulation_seconds": f"{outcome.emulation_s:.6f}",
            "errors": outcome.wrong,
        }
    configuration = {
        "number_of_ipus": 1,
        "tile_transfers_enabled": True,
        "tiles_per_ipu": times.HOST_TILES,
        "transfer_size_64byte_blocks": times.HOST_BLOCKS,
        "iterations": ITERATIONS,
        "host_transfers_enabled": True,
    }
    modelled = [
        *("duration_seconds", "host_data_transferred_bytes", "tile_data_transferred_bytes"),
        *("host_transfer_speed_gbps", "tile_transfer_speed_gbps"),
    ]
    return {
        **strings({"configuration": configuration, "repeat_0": tests}),
        "modelled": modelled,
        "emulated": ["emulated_host_bytes", "emulation_seconds", "errors"],
    }


def host_traffic_lines(outcomes: Sequence[HostTraffic]) -> list[str]:
    """A line for each test."""
    lines = [f"{'test':24}{'seconds':>12}{'host Gb/s':>11}{'tile Gb/s':>11}{'errors':>8}"]
    for outcome in outcomes:
        host, tile = outcome.speeds_gbps
        lines.append(
            f"{outcome.leg.description:24}{outcome.seconds:12.6f}{host:11.4f}{tile:11.4f}{outcome.wrong:8}"
        )
    moved, took = sum(o.emulated_bytes for o in outcomes), sum(o.emulation_s for o in outcomes)
    lines.append(
        f"Seconds and speeds are modelled. Emulation: {moved / 2**20:.0f} MiB moved and compared in {took:.2f} s."
    )
    return lines


MARKS = 4095
"""Syncs of one iteration. Published: mark_count of the tool's sample."""
EMULATED = 500
"""Most syncs of the emulation that are timed in each iteration: each is a run of its own."""


@click.command(context_settings=HELP_OPTIONS)
@click.version_option(package_name="podrun", prog_name="gc-hostsynclatencytest")
@click.option(
    "-d", "--device-id", "device", type=click.IntRange(0), default=0, metavar="ID", help="One IPU [0]."
)
@click.option(
    "--hsp", type=click.Choice(["hsp1", "hsp2", "both"]), default="hsp1", help="Host sync proxy [hsp1]."
)
@click.option("-i", "--iterations", type=click.IntRange(1), default=1, metavar="N", help="Iterations [1].")
@click.option(
    "--sync-mode",
    type=click.Choice(["posted", "polling", "hybrid"]),
    default="polling",
    help="How the host waits [polling].",
)
@click.option(
    "--delay-cycles", type=click.IntRange(0, 20), default=5, metavar="N", help="Cycles, up to 20 [5]."
)
@click.option("--num-delays", type=click.IntRange(0), default=32, metavar="N", help="Delays per sync [32].")
@click.option("--mark-count", type=click.IntRange(1), default=MARKS, metavar="N", help="Syncs [4095].")
@click.option("--split-increments", is_flag=True, help="Accepted: marks are not emulated one by one.")
@output_options("-j", "--json-output")
@server_options
def gc_hostsynclatencytest_command(
    form: str, api_host: str | None, api_port: int | None, **options: Any
) -> int:
    """Print the modelled time of a number of syncs between host and IPU, and what one costs the emulation.

    On a real IPU the host sets a count of marks and every sync takes one away.
    """
    from podrun.core.errors import UsageError
    from podrun.monitor.tool_partition import find_partition, sync_train_seconds

    partition = find_partition(api_host, api_port)
    ipus = partition.ipus_of(options["device"])
    if ipus.count != 1:
        raise UsageError(
            f"device {options['device']} has {ipus.count} IPUs", hint="Name a single IPU: gc-info -l"
        )
    marks = options["mark_count"]
    whole = sync_train_seconds(partition.chip, marks, options["delay_cycles"], options["num_delays"])
    timed = options["iterations"] * min(marks, EMULATED)
    modelled, emulation = _emulated(partition, ipus, timed, whole / marks)
    _show(
        {
            "ipu_id": options["device"],
            "sync_mode": options["sync_mode"].capitalize(),
            "hsp": options["hsp"],
            "delay_cycles": options["delay_cycles"],
            "num_delays": options["num_delays"],
            "iterations": options["iterations"],
            "mark_count": marks,
            "split_increments": options["split_increments"],
            "time_to_sync_us": round(modelled / timed * marks * 1e6),
            "result": "pass",
            "emulated_syncs": timed,
            "emulated_sync_us": f"{emulation / timed * 1e6:.1f}",
        },
        form,
    )
    return 0


def _emulated(
    partition: ToolPartition, ipus: IpuRange, syncs: int, modelled_each: float
) -> tuple[float, float]:
    """Run ``syncs`` syncs; returns the modelled and the emulation seconds of all."""
    from podrun.core.errors import ApplicationRuntimeError
    from podrun.monitor.tool_partition import attach
    from podrun.monitor.transfer_programs import host_syncs

    modelled = emulation = 0.0
    with attach(partition, ipus, name="gc-hostsynclatencytest") as connection:
        connection.load(host_syncs(partition.chip, modelled_each))
        for number in range(syncs):
            result = connection.run(1, {})
            if result.batches_done != number + 1:
                raise ApplicationRuntimeError(f"sync {number + 1} came back as {result.batches_done}")
            modelled += result.modelled_seconds
            emulation += result.emulation_seconds
    return modelled, emulation


def _show(values: dict[str, Any], form: str) -> None:
    """Print the values, and say which of them are modelled."""
    from podrun.monitor.tool_partition import strings

    kinds = {"modelled": ["time_to_sync_us"], "emulated": ["result", "emulated_syncs", "emulated_sync_us"]}
    document = {**strings(values), **kinds}
    lines = [f"o {key.replace('_', ' ')}: {value}" for key, value in values.items()]
    lines.append("The time to sync is modelled; emulated syncs were timed on this host.")
    print_output(form, text=lambda: "\n".join(lines), document=document, rows=[document])
