"""`gc-links`: whether the IPU-Links of the active partition are up and carry data."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from podrun.monitor.holding import NAMES, server_options
from podrun.partition.cli_common import run

if TYPE_CHECKING:
    from podrun.monitor.holding import Bench

WARNING = "The links of this partition are trained already: no training was performed."
WORDS = 16 * 1024
"""32-bit words that a link carries each way in one iteration."""


@dataclass(frozen=True, slots=True)
class Link:
    """An IPU-Link with what is wrong with it ("": nothing)."""

    ends: tuple[int, int]
    error: str = ""


@click.command(context_settings=NAMES)
@click.version_option(package_name="podrun", prog_name="gc-links")
@click.option("-j", "--json-output", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "-i", "--iterations", type=click.IntRange(1), default=1, metavar="N", help="Times data is sent [1]."
)
@server_options
def gc_links(as_json: bool, iterations: int, api_host: str | None, api_port: int | None) -> int:
    """Check every IPU-Link of the active partition: that it is up, and that data crosses it unharmed, both ways.

    The partition's creation has trained the links (and vipu reset partition trains them anew). The IPUs must be free.
    Ends with exit code 1 if a link fails.
    """
    from podrun.monitor.holding import find_bench

    links = [check(bench := find_bench(api_host, api_port)) for _ in range(iterations)]
    failures = sum(any(link.error for link in found) for found in links)
    if as_json:
        click.echo(json.dumps(json_object(links, failures), indent=2))
    else:
        click.echo("\n".join(text(bench.view.info.name, links, failures)))
    return 1 if failures else 0


def check(bench: Bench) -> list[Link]:
    """Every IPU-Link with its state: what machines report, and if all are up, what a transfer over each shows."""
    from podrun.device.connection import IpuRange
    from podrun.errors import ErrorCode, PoplarError
    from podrun.monitor.holding import hold
    from podrun.monitor.link_check import LinkCheck
    from podrun.monitor.tool_times import Route, transfer_seconds

    links = bench.links()
    if broken := {ends: error for ends in links if (error := _down(bench, ends))}:
        return [Link(ends, broken.get(ends, "")) for ends in links]
    if not links:
        return []
    everything = IpuRange(0, bench.view.info.size)
    seconds = transfer_seconds(bench.chip, Route("IPU-Link", 1), 4 * WORDS)
    with hold(bench, everything, name="gc-links") as connection:
        try:
            test = LinkCheck(bench, connection, everything, links, WORDS, seconds)
            list(test.run(1))
            wrong = test.errors()
        except PoplarError as error:
            if error.code is not ErrorCode.LINK_DOWN:
                raise
            at = error.where.removeprefix("link ")
            return [Link(ends, error.message if at == f"{ends[0]}-{ends[1]}" else "") for ends in links]
    return [
        Link(ends, f"{words} of {2 * WORDS} words arrived wrong" if words else "")
        for ends, words in zip(links, wrong, strict=True)
    ]


def _down(bench: Bench, ends: tuple[int, int]) -> str:
    """What machines report of a link; "" if it is up."""
    for end, other in (ends, ends[::-1]):
        device = bench.view.devices[end]
        if other in device.ipu.links_down:
            return f"IPU-Link down ({device.ipu.recovery_action or 'PARTITION_RESET'} needed)"
    return ""


def json_object(iterations: list[list[Link]], failures: int) -> dict[str, Any]:
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


def text(partition: str, iterations: list[list[Link]], failures: int) -> list[str]:
    """Every link of the last iteration, and what failed before."""
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
        lines.append(f"To train the links anew: vipu reset partition {partition}")
    return lines


def main() -> None:
    """Entry point of `gc-links`."""
    sys.exit(run(gc_links))


if __name__ == "__main__":
    main()
