"""`gc-gwlinkstraffictest`: data between the IPU-Link domains of a partition, over GW-Links."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podrun.core.command_line import HELP_OPTIONS, seconds_range
from podrun.core.environment import IPUOF_CONFIG_PATH, IPUOF_VIPU_API_GCD_ID
from podrun.core.machine_output import output_options, print_output
from podrun.core.quick_dataclass import dataclass
from podrun.partition.commands.shared_options import server_options

if TYPE_CHECKING:
    from podrun.core.layout import IpuRange
    from podrun.monitor.tool_partition import ToolPartition

WORDS = 256 * 1024
"""32-bit words that every machine sends in an iteration: 1 MiB."""


@dataclass(frozen=True, slots=True)
class GatewayTraffic:
    """Bytes over each GW-Link each way, wrong checksums by machine, modelled and emulation time."""

    iterations: int
    bytes_per_link: int
    wrong: dict[int, int]
    modelled_s: float
    emulation_s: float

    @property
    def gbps(self) -> float:
        """Modelled rate of a GW-Link in one direction, in 10^9 bits per second."""
        return self.bytes_per_link * 8 / self.modelled_s / 1e9


@click.command(context_settings=HELP_OPTIONS)
@click.version_option(package_name="podrun", prog_name="gc-gwlinkstraffictest")
@click.option(
    "-i", "--iterations", type=click.IntRange(1), default=10, metavar="N", help="Times data is sent [10]."
)
@click.option(
    "--timeout",
    type=seconds_range(1),
    default=60.0,
    metavar="SECONDS",
    help="Wait for other GCDs' instances [60].",
)
@output_options("-j", "--json-output")
@server_options
def gc_gwlinkstraffictest_command(
    iterations: int, timeout: float, form: str, api_host: str | None, api_port: int | None
) -> int:
    """Send data between the IPU-Link domains of the active partition and compare it.

    Start one instance for each GCD, with IPUOF_VIPU_API_GCD_ID (or IPUOF_CONFIG_PATH, a file of that GCD): they send
    together. An instance without either holds the whole partition. The exit code is 1 if data arrive wrong.
    """
    from podrun.core.errors import UsageError
    from podrun.monitor.tool_partition import find_partition

    partition = find_partition(api_host, api_port)
    info = partition.view.info
    if info.reconfigurable or info.num_ilds < 2:
        kind = "is reconfigurable" if info.reconfigurable else "lies in one IPU-Link domain"
        raise UsageError(
            f"partition {info.name} {kind}: it uses no GW-Links",
            hint="Create one over two domains: vipu create partition NAME --size 8 --num-gcds 2 --num-ilds 2",
        )
    outcome = measure_gateways(partition, iterations, timeout)
    document = gateway_traffic_json(partition, outcome)
    print_output(form, text=lambda: "\n".join(_lines(partition, outcome)), document=document, rows=[document])
    return 1 if outcome.wrong else 0


def measure_gateways(partition: ToolPartition, iterations: int, timeout: float) -> GatewayTraffic:
    """Attach this instance's IPUs, send together with the other instances, compare."""
    import numpy as np

    from podrun.core.errors import ErrorCode, PoplarError
    from podrun.core.layout import IpuRange
    from podrun.monitor.tool_partition import Route, attach, route_seconds
    from podrun.monitor.transfer_programs import checksum, gather_over_gateways, pattern

    info, chip = partition.view.info, partition.chip
    machines = 1 + max(device.machine.machine_index for device in partition.view.devices)
    # All slices go round the ring of domains; every GW-Link carries one at a time.
    transfers = info.num_ilds - 1
    seconds = transfers * route_seconds(chip, Route("GW-Link", 1), 4 * WORDS)
    owned = own_ipus(partition)
    with attach(partition, owned, job=IpuRange(0, info.size), name="gc-gwlinkstraffictest") as connection:
        if owned.count < info.size:
            click.echo(f"Waiting for the instances of the other GCDs, at most {timeout:g} s.", err=True)
        connection.host_sync_timeout = timeout  # type: ignore[attr-defined]
        program = gather_over_gateways(chip, info.size, machines, WORDS, seconds)
        try:
            connection.load(program)
            result = connection.run(iterations, {"batch": np.arange(iterations, dtype=np.uint32)[:, None]})
        except PoplarError as error:
            if error.code is ErrorCode.HOST_SYNC_TIMEOUT:
                error.hint = (
                    f"Start an instance for each of the {info.num_gcds} GCDs "
                    "(IPUOF_VIPU_API_GCD_ID=0 gc-gwlinkstraffictest &), or wait longer: --timeout SECONDS"
                )
            raise
    expected = np.array(
        [[checksum(pattern(m, batch, WORDS)) for m in range(machines)] for batch in range(iterations)],
        np.uint32,
    )
    differ = np.count_nonzero(result.anchors["sums"] != expected[:, None, None, :], axis=(0, 1, 2))
    return GatewayTraffic(
        iterations,
        bytes_per_link=iterations * transfers * 4 * WORDS,
        wrong={machine: int(count) for machine, count in enumerate(differ) if count},
        modelled_s=result.modelled_seconds,
        emulation_s=result.emulation_seconds,
    )


def own_ipus(partition: ToolPartition) -> IpuRange:
    """The IPUs of the GCD that the environment names; the whole partition if it names none.

    Raises ConfigError for a file that names no GCD, UsageError for a GCD that the partition does not have.
    """
    from podrun.core.documents import read_text
    from podrun.core.errors import ConfigError, NotFoundError, UsageError
    from podrun.core.layout import IpuRange

    info, name = partition.view.info, IPUOF_VIPU_API_GCD_ID
    text = partition.environ.get(name, "")
    if path := partition.environ.get(IPUOF_CONFIG_PATH):
        name = path
        try:
            content = read_text(Path(path))
            # `vipu get partition --ipuof-configs` prints a heading before the object.
            text = str(json.loads(content[content.index("{") :])["attributes"]["GCD Id"])
        except (ConfigError, NotFoundError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{path}, which IPUOF_CONFIG_PATH names, says no GCD: {error}",
                hint=f"Write it: vipu get partition {info.name} --gcd 0 --ipuof-configs > FILE",
            ) from error
    if not text:
        return IpuRange(0, info.size)
    if not text.isdecimal() or int(text) >= info.num_gcds:
        raise UsageError(
            f"{name} says GCD {text!r}; partition {info.name} has GCDs 0 to {info.num_gcds - 1}",
            hint=f"vipu get partition {info.name}",
        )
    share = info.size // info.num_gcds
    return IpuRange(int(text) * share, share)


def _lines(partition: ToolPartition, outcome: GatewayTraffic) -> Iterator[str]:
    info = partition.view.info
    yield f"GW-Links of partition {info.name}: {info.num_ilds} IPU-Link domains, {info.num_gcds} GCDs"
    yield (
        f"{outcome.bytes_per_link / 2**20:.0f} MiB each way over every GW-Link in {outcome.modelled_s:.9f} s: "
        f"{outcome.gbps:.3f} Gb/s each way"
    )
    for machine, count in outcome.wrong.items():
        yield f"machine {machine}: {count} of its blocks arrived wrong"
    yield f"Overall result: {'failed' if outcome.wrong else 'passed'}"
    yield f"Seconds and bandwidth are modelled. Emulation: {outcome.emulation_s:.2f} s."


def gateway_traffic_json(partition: ToolPartition, outcome: GatewayTraffic) -> dict[str, Any]:
    """What was measured, as values of JSON. The shape is podrun's own, because no output of the SDK's tool is
    published.
    """
    from podrun.monitor.tool_partition import strings

    info = partition.view.info
    values = {
        "partition": info.name,
        "num_ilds": info.num_ilds,
        "num_gcds": info.num_gcds,
        "iterations": outcome.iterations,
        "bytes_per_link": outcome.bytes_per_link,
        "duration_sec": f"{outcome.modelled_s:.9f}",
        "gbps_each_way": f"{outcome.gbps:.3f}",
        "errors": {str(machine): count for machine, count in outcome.wrong.items()},
        "overall_result": "failed" if outcome.wrong else "passed",
        "emulation_sec": f"{outcome.emulation_s:.3f}",
    }
    return {
        **strings(values),
        "modelled": ["duration_sec", "gbps_each_way"],
        "emulated": ["bytes_per_link", "errors", "overall_result", "emulation_sec"],
    }
