"""`gc-iputraffictest`: data from IPU to IPU, both ways at once, compared word by word."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from podrun.vipu.cli_common import HELP_OPTIONS, run, server_options

if TYPE_CHECKING:
    from podrun.core.layout import IpuRange
    from podrun.monitor.link_check import LinkCheck
    from podrun.monitor.tool_partition import ToolPartition
    from podrun.monitor.tool_times import Route

ITERATIONS = 1000
ALL_LINKS_WORDS = 16 * 1024
"""32-bit words over each link each way if all links are tested: one tile's transfer. A POD64 has 96 links."""


@dataclass(frozen=True, slots=True)
class PairTraffic:
    """Traffic between a pair of IPUs: the route, KB of both directions, wrong words, modelled and emulation time."""

    ends: tuple[int, int]
    way: Route
    kbytes: float
    errors: int
    modelled_s: float
    emulation_s: float

    @property
    def gbps(self) -> float:
        """Modelled rate of both directions together, in 10^9 bits per second."""
        return self.kbytes * 1024 * 8 / self.modelled_s / 1e9


@click.command(context_settings=HELP_OPTIONS)
@click.version_option(package_name="podrun", prog_name="gc-iputraffictest")
@click.option("--device0", type=click.IntRange(0), metavar="ID", help="A single IPU [0].")
@click.option("--device1", type=click.IntRange(0), metavar="ID", help="Another single IPU [1].")
@click.option(
    "-i", "--iterations", type=click.IntRange(1), metavar="N", help="64 KB transfers of each tile [1000]."
)
@click.option("--all-links", is_flag=True, help="All IPU-Links of the partition at once.")
@click.option("--forever", is_flag=True, help="Until Ctrl-C; not with -j.")
@click.option("-v", "--verbose", is_flag=True, help="Print the progress.")
@click.option("-j", "--json-output", "as_json", is_flag=True, help="Print one JSON object.")
@server_options
def gc_iputraffictest(**options: Any) -> int:
    """Send data between two IPUs of the active partition, both ways at once, and compare what arrives.

    The bandwidth is modelled, of both directions together. The smallest device that holds both IPUs is attached and
    must be free. The exit code is 1 if a word arrives wrong.
    """
    from podrun.core.errors import UsageError
    from podrun.monitor.tool_partition import find_partition

    if options["forever"] and options["as_json"]:
        raise UsageError("--forever has no end that -j could report", hint="Leave out one of them.")
    partition = find_partition(options["api_host"], options["api_port"])
    if options["all_links"]:
        if options["device0"] is not None or options["device1"] is not None:
            raise UsageError("--all-links takes no devices", hint="Leave out --device0 and --device1.")
        pairs = partition.links()
    else:
        pairs = [_pair(partition, options["device0"] or 0, options["device1"])]
    if not pairs:
        raise UsageError(
            "the partition has one IPU and no links", hint="Use a larger one: vipu create partition"
        )
    outcomes = measure(partition, pairs, options)
    if options["as_json"]:
        click.echo(json.dumps(json_object(partition, outcomes, all_links=options["all_links"]), indent=2))
    else:
        click.echo("\n".join(text(outcomes)))
    return 1 if any(outcome.errors for outcome in outcomes) else 0


def _pair(partition: ToolPartition, first: int, second: int | None) -> tuple[int, int]:
    from podrun.core.errors import NotFoundError, UsageError

    size = partition.view.info.size
    ends = (first, (1 if first == 0 else 0) if second is None else second)
    for end in ends:
        if end >= size:
            raise NotFoundError(
                f"device {end} is no single IPU",
                hint=f"Single IPUs of this partition are 0 to {size - 1}: gc-info -l",
            )
    if ends[0] == ends[1]:
        raise UsageError(
            f"device 0 and device 1 are both IPU {first}; traffic within one IPU is not emulated",
            hint="Name two IPUs: --device0 0 --device1 1",
        )
    return ends


def measure(
    partition: ToolPartition, pairs: Sequence[tuple[int, int]], options: dict[str, Any]
) -> list[PairTraffic]:
    """Attach, send, compare."""
    from podrun.core.layout import IpuRange
    from podrun.monitor.link_check import LinkCheck
    from podrun.monitor.tool_partition import attach
    from podrun.monitor.tool_times import STREAM_BYTES, STREAM_TILES, route, transfer_seconds

    everything = IpuRange(0, partition.view.info.size)
    alone = len(pairs) == 1 and not options["all_links"]
    ipus: IpuRange = partition.smallest_with(pairs[0]) if alone else everything
    words = STREAM_BYTES * STREAM_TILES // 4 if alone else ALL_LINKS_WORDS
    ways = [route(a, b, partition.domain_ipus, partition.topology) for a, b in pairs]
    seconds = max(transfer_seconds(partition.chip, way, 4 * words) for way in ways)
    with attach(partition, ipus, name="gc-iputraffictest") as connection:
        test = LinkCheck(partition, connection, ipus, pairs, words, seconds)

        def outcomes() -> list[PairTraffic]:
            done, kbytes = test.done, 2 * 4 * words * test.done.iterations / 1024
            return [
                PairTraffic(ends, way, kbytes, wrong, done.modelled_s, done.emulation_s)
                for ends, way, wrong in zip(pairs, ways, test.errors(), strict=True)
            ]

        if options["forever"]:
            return _until_interrupt(test, outcomes)
        for progress in test.run(options["iterations"] or ITERATIONS):
            if options["verbose"]:
                click.echo(f"{progress.iterations} iterations", err=True)
        return outcomes()


def _until_interrupt(test: LinkCheck, outcomes: Callable[[], list[PairTraffic]]) -> list[PairTraffic]:
    """Send and compare until Ctrl-C or an error."""
    found: list[PairTraffic] = []
    try:
        for progress in test.run(None):
            found = outcomes()
            click.echo(f"{progress.iterations} iterations", err=True)
            if any(outcome.errors for outcome in found):
                break
    except KeyboardInterrupt:
        pass  # The requested end; the current run is abandoned.
    return found


def json_object(
    partition: ToolPartition, outcomes: Sequence[PairTraffic], *, all_links: bool
) -> dict[str, Any]:
    """The documented object, or for all links ``tile_to_tile`` with one entry for each."""
    from podrun.monitor.tool_partition import strings

    entries = [_entry(partition, outcome) for outcome in outcomes]
    return {
        "tile_to_tile": strings(entries if all_links else entries[0]),
        "modelled": ["duration_sec", "gbps"],
        "emulated": ["kbytes_transferred", "gbytes_transferred", "errors", "emulation_sec"],
    }


def _entry(partition: ToolPartition, outcome: PairTraffic) -> dict[str, Any]:
    from podrun.monitor.devices import attributes_of

    boards: dict[str, dict[str, Any]] = {}
    attributes = attributes_of(partition.view)
    for end in outcome.ends:
        board = boards.setdefault(
            attributes[end]["board serial number"],
            {
                "power_sensors": {"XDPE132G5C:0": None, "XDPE132G5C:1": None},
                "device_ids": [],
                "type": attributes[end]["board type"],
                "board_power": None,
            },
        )
        board["device_ids"].append(end)
    return {
        "boards": boards,
        "device0": outcome.ends[0],
        "device1": outcome.ends[1],
        "link": outcome.way.kind,
        "hops": outcome.way.hops,
        "duration_sec": f"{outcome.modelled_s:.9f}",
        "kbytes_transferred": f"{outcome.kbytes:.0f}",
        "gbytes_transferred": f"{outcome.kbytes / 2**20:.6g}",
        "gbps": f"{outcome.gbps:.3f}",
        "errors": outcome.errors,
        "power": None,
        "emulation_sec": f"{outcome.emulation_s:.3f}",
    }


def text(outcomes: Sequence[PairTraffic]) -> list[str]:
    """A line for each pair."""
    lines = [f"{'IPUs':>9}  {'link':8}  hops  {'GB':>8}  {'seconds':>12}  {'Gb/s':>8}  errors"]
    for outcome in outcomes:
        pair = f"{outcome.ends[0]} <-> {outcome.ends[1]}"
        lines.append(
            f"{pair:>9}  {outcome.way.kind:8}  {outcome.way.hops:>4}  {outcome.kbytes / 2**20:8.3f}  "
            f"{outcome.modelled_s:12.9f}  {outcome.gbps:8.3f}  {outcome.errors}"
        )
    if outcomes:
        lines.append(
            "Bandwidth is of both directions together; it and the seconds are modelled. "
            f"Emulation: {outcomes[0].emulation_s:.2f} s."
        )
    return lines


def main() -> None:
    """Entry point of `gc-iputraffictest`."""
    sys.exit(run(gc_iputraffictest))


if __name__ == "__main__":
    main()
