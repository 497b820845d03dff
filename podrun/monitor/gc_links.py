"""`gc-links`: whether the IPU-Links of the active partition are up and carry data."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from podrun.vipu.cli_common import HELP_OPTIONS, run, server_options

if TYPE_CHECKING:
    from podrun.monitor.tool_partition import ToolPartition

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
@click.option("-j", "--json-output", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "-i", "--iterations", type=click.IntRange(1), default=1, metavar="N", help="Times data is sent [1]."
)
@server_options
def gc_links(as_json: bool, iterations: int, api_host: str | None, api_port: int | None) -> int:
    """Check every IPU-Link of the active partition: that it is up, and that data crosses it unharmed, both ways.

    Links are trained when a partition is created or reset. The IPUs must be free. The exit code is 1 if a link fails.
    """
    from podrun.monitor.tool_partition import find_partition

    links = [check(partition := find_partition(api_host, api_port)) for _ in range(iterations)]
    failures = sum(any(link.error for link in found) for found in links)
    if as_json:
        click.echo(json.dumps(json_object(links, failures), indent=2))
    else:
        click.echo("\n".join(text(partition.view.info.name, links, failures)))
    return 1 if failures else 0


def check(partition: ToolPartition) -> list[LinkResult]:
    """The state of every IPU-Link: as machines report it, and if all are up, as a transfer over each shows it."""
    from podrun.core.errors import ErrorCode, PoplarError
    from podrun.core.layout import IpuRange
    from podrun.monitor.link_check import LinkCheck
    from podrun.monitor.tool_partition import attach
    from podrun.monitor.tool_times import Route, transfer_seconds

    links = partition.links()
    if broken := {ends: error for ends in links if (error := _down(partition, ends))}:
        return [LinkResult(ends, broken.get(ends, "")) for ends in links]
    if not links:
        return []
    everything = IpuRange(0, partition.view.info.size)
    seconds = transfer_seconds(partition.chip, Route("IPU-Link", 1), 4 * WORDS)
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
            return f"IPU-Link down ({device.ipu.recovery_action or 'PARTITION_RESET'} needed)"
    return ""


def json_object(iterations: list[list[LinkResult]], failures: int) -> dict[str, Any]:
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


def text(partition: str, iterations: list[list[LinkResult]], failures: int) -> list[str]:
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


def main() -> None:
    """Entry point of `gc-links`."""
    sys.exit(run(gc_links))


if __name__ == "__main__":
    main()
