"""Test tools of the IPU-Links: `gc-iputraffictest` and `gc-links`.

The first moves data from IPU to IPU, both ways at once, and compares every word; the second says whether the links of
the active partition are up and carry data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from podrun.core.command_line import HELP_OPTIONS
from podrun.core.machine_output import is_for_people, output_options, print_output
from podrun.core.quick_dataclass import dataclass
from podrun.partition.commands.shared_options import server_options

if TYPE_CHECKING:
    from podrun.core.layout import IpuRange
    from podrun.monitor.tool_partition import Route, ToolPartition
    from podrun.monitor.tool_programs import LinkCheck

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
@output_options("-j", "--json-output")
@server_options
def gc_iputraffictest_command(**options: Any) -> int:
    """Send data between two IPUs of the active partition, both ways at once, and compare what arrives.

    The bandwidth is modelled, of both directions together. The smallest device that holds both IPUs is attached and
    must be free. The exit code is 1 if a word arrives wrong.
    """
    from podrun.core.errors import UsageError
    from podrun.monitor.tool_partition import find_partition

    if options["forever"] and not is_for_people(options["form"]):
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
    outcomes = measure_pairs(partition, pairs, options)
    document = link_traffic_json(partition, outcomes, all_links=options["all_links"])
    traffic = document["tile_to_tile"]
    print_output(
        options["form"],
        text=lambda: "\n".join(link_traffic_lines(outcomes)),
        document=document,
        rows=traffic if options["all_links"] else [traffic],
    )
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


def measure_pairs(
    partition: ToolPartition, pairs: Sequence[tuple[int, int]], options: dict[str, Any]
) -> list[PairTraffic]:
    """Send data between each pair of IPUs and compare what arrives: traffic, time and errors of each."""
    from podrun.core.layout import IpuRange
    from podrun.monitor.tool_partition import STREAM_BYTES, STREAM_TILES, attach, route, route_seconds
    from podrun.monitor.tool_programs import LinkCheck

    everything = IpuRange(0, partition.view.info.size)
    alone = len(pairs) == 1 and not options["all_links"]
    ipus: IpuRange = partition.smallest_with(pairs[0]) if alone else everything
    words = STREAM_BYTES * STREAM_TILES // 4 if alone else ALL_LINKS_WORDS
    ways = [route(a, b, partition.domain_ipus, partition.topology) for a, b in pairs]
    seconds = max(route_seconds(partition.chip, way, 4 * words) for way in ways)
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
    latest: list[PairTraffic] = []
    try:
        for progress in test.run(None):
            latest = outcomes()
            click.echo(f"{progress.iterations} iterations", err=True)
            if any(outcome.errors for outcome in latest):
                break
    except KeyboardInterrupt:
        pass  # This is the requested end; the current run is abandoned.
    return latest


def link_traffic_json(
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
    from podrun.monitor.devices import attributes_of_ipus

    boards: dict[str, dict[str, Any]] = {}
    attributes = attributes_of_ipus(partition.view)
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


def link_traffic_lines(outcomes: Sequence[PairTraffic]) -> list[str]:
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


WARNING = "The links of this partition are trained already: no training was performed."
WORDS = 16 * 1024
"""32-bit words that a link carries each way in one iteration."""


@dataclass(frozen=True, slots=True)
class LinkResult:
    """The state of an IPU-Link; ``error`` is empty if it works."""

    ends: tuple[int, int]
    error: str = ""


@click.command(context_settings=HELP_OPTIONS)
@click.version_option(package_name="podrun", prog_name="gc-links")
@output_options("-j", "--json-output")
@click.option(
    "-i", "--iterations", type=click.IntRange(1), default=1, metavar="N", help="Times data is sent [1]."
)
@server_options
def gc_links_command(form: str, iterations: int, api_host: str | None, api_port: int | None) -> int:
    """Check every IPU-Link of the active partition: that it is up, and that data crosses it unharmed, both ways.

    Links are trained when a partition is created or reset. The IPUs must be free. The exit code is 1 if a link fails.
    """
    from podrun.monitor.tool_partition import find_partition

    links = [check_links(partition := find_partition(api_host, api_port)) for _ in range(iterations)]
    failures = sum(any(link.error for link in checked) for checked in links)
    print_output(
        form,
        text=lambda: "\n".join(links_text(partition.view.info.name, links, failures)),
        document=links_json(links, failures),
        rows=[
            {"iteration": k, "from": link.ends[0], "to": link.ends[1], "error": link.error or None}
            for k, checked in enumerate(links)
            for link in checked
        ],
    )
    return 1 if failures else 0


def check_links(partition: ToolPartition) -> list[LinkResult]:
    """The state of every IPU-Link: as machines report it, and if all are up, as a transfer over each shows it."""
    from podrun.core.errors import ErrorCode, PoplarError
    from podrun.core.layout import IpuRange
    from podrun.monitor.tool_partition import Route, attach, route_seconds
    from podrun.monitor.tool_programs import LinkCheck

    links = partition.links()
    if broken := {ends: error for ends in links if (error := _down(partition, ends))}:
        return [LinkResult(ends, broken.get(ends, "")) for ends in links]
    if not links:
        return []
    everything = IpuRange(0, partition.view.info.size)
    seconds = route_seconds(partition.chip, Route("IPU-Link", 1), 4 * WORDS)
    with attach(partition, everything, name="gc-links") as connection:
        try:
            test = LinkCheck(partition, connection, everything, links, WORDS, seconds)
            list(test.run(1))
            wrong = test.errors()
        except PoplarError as error:
            if error.code is not ErrorCode.LINK_DOWN:
                raise
            at = error.where.removeprefix("link ")
            return [LinkResult(ends, error.message if at == f"{ends[0]}-{ends[1]}" else "") for ends in links]
    return [
        LinkResult(ends, f"{words} of {2 * WORDS} words arrived wrong" if words else "")
        for ends, words in zip(links, wrong, strict=True)
    ]


def _down(partition: ToolPartition, ends: tuple[int, int]) -> str:
    """The error that machines report for a link; empty if it is up."""
    for end, other in (ends, ends[::-1]):
        device = partition.view.devices[end]
        if other in device.ipu.links_down:
            from podrun.core.errors import RecoveryAction

            action = device.ipu.recovery_action or RecoveryAction.PARTITION_RESET
            return f"IPU-Link down ({action.value} needed)"
    return ""


def links_json(iterations: list[list[LinkResult]], failures: int) -> dict[str, Any]:
    """The documented object of a Pod; a failed iteration also lists the links that failed."""
    result: dict[str, Any] = {}
    for number, links in enumerate(iterations):
        bad = [
            {"from": str(link.ends[0]), "to": str(link.ends[1]), "status": "failed", "error": link.error}
            for link in links
            if link.error
        ]
        entry: dict[str, Any] = {
            "warning": WARNING,
            "overall_result": "failed" if bad else "passed",
            "discovery_method": "VIRM",
        }
        result[f"iteration_{number}"] = entry | ({"ipu to ipu": bad} if bad else {})
    return result | {
        "requested_iterations": str(len(iterations)),
        "iterations_with_failures": str(failures),
        "overall_result": "failed" if failures else "passed",
    }


def links_text(partition: str, iterations: list[list[LinkResult]], failures: int) -> list[str]:
    """A line for every link of the last iteration, and the number of iterations that failed."""
    lines = [WARNING, f"IPU-Links of partition {partition}:"]
    lines += [
        f"  {link.ends[0]:>3} <-> {link.ends[1]:<3}  {f'failed: {link.error}' if link.error else 'passed'}"
        for link in iterations[-1]
    ]
    if not iterations[-1]:
        lines.append("  none: it has one IPU")
    lines.append(f"Iterations: {len(iterations)}, with failures: {failures}")
    lines.append(f"Overall result: {'failed' if failures else 'passed'}")
    if failures:
        lines.append(f"To train the links again: vipu reset partition {partition}")
    return lines
