"""`gc-hostsynclatencytest`: the time of a sync between the host and an IPU."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from podrun.vipu.cli_common import HELP_OPTIONS, run, server_options

if TYPE_CHECKING:
    from podrun.core.layout import IpuRange
    from podrun.monitor.tool_partition import ToolPartition

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
@click.option("-j", "--json-output", "as_json", is_flag=True, help="Print one JSON object.")
@server_options
def gc_hostsynclatencytest(as_json: bool, api_host: str | None, api_port: int | None, **options: Any) -> int:
    """Print the modelled time of a number of syncs between host and IPU, and what one costs the emulation.

    On a real IPU the host sets a count of marks and every sync takes one away.
    """
    from podrun.core.errors import UsageError
    from podrun.monitor.tool_partition import find_partition
    from podrun.monitor.tool_times import sync_train_seconds

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
        as_json,
    )
    return 0


def _emulated(
    partition: ToolPartition, ipus: IpuRange, syncs: int, modelled_each: float
) -> tuple[float, float]:
    """Run ``syncs`` syncs; returns the modelled and the emulation seconds of all."""
    from podrun.core.errors import ApplicationRuntimeError
    from podrun.monitor.tool_partition import attach
    from podrun.monitor.tool_programs import host_syncs

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


def _show(found: dict[str, Any], as_json: bool) -> None:
    """Print the values, and which of them are modelled."""
    if as_json:
        from podrun.monitor.tool_partition import strings

        kinds = {
            "modelled": ["time_to_sync_us"],
            "emulated": ["result", "emulated_syncs", "emulated_sync_us"],
        }
        click.echo(json.dumps({**strings(found), **kinds}, indent=2))
    else:
        for key, value in found.items():
            click.echo(f"o {key.replace('_', ' ')}: {value}")
        click.echo("The time to sync is modelled; emulated syncs were timed on this host.")


def main() -> None:
    """Entry point of `gc-hostsynclatencytest`."""
    sys.exit(run(gc_hostsynclatencytest))


if __name__ == "__main__":
    main()
