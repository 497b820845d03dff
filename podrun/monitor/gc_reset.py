"""`gc-reset`: resets IPUs (recovery action IPU_RESET). It retrains no links; `vipu reset partition` does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from podrun.core.environment import environment
from podrun.vipu.cli_common import HELP_OPTIONS, run, server_options

if TYPE_CHECKING:
    from podrun.vipu.types import PartitionInfo


@click.command(context_settings=HELP_OPTIONS)
@click.version_option(package_name="podrun", prog_name="gc-reset")
@click.option(
    "-d", "--device-id", "device", type=int, required=True, metavar="ID", help="Device: one IPU or a group."
)
@server_options
def gc_reset(device: int, api_host: str | None, api_port: int | None) -> None:
    """Reset the IPUs of a device of the active partition; gc-info -l lists devices.

    A process that holds them loses what it had loaded there.
    """
    from podrun.monitor.devices import ipus_of_device
    from podrun.monitor.source import active_partition, connect, no_partition, on_stderr

    with connect(api_host, api_port, say=on_stderr, one=True) as client:
        partitions = client.list_partitions()
        info = active_partition(partitions)
        if info is None:
            raise no_partition()
        if not environment().get("IPUOF_VIPU_API_PARTITION_ID"):
            _refuse_ambiguous(device, info, partitions)
        ipus = ipus_of_device(device, info.size, info.reconfigurable)
        client.reset_ipus(info.name, ipus)
    noun = "IPU" if len(ipus) == 1 else "IPUs"
    click.echo(f"Reset {noun} {', '.join(map(str, ipus))} of partition {info.name}.")


def _refuse_ambiguous(device: int, active: PartitionInfo, partitions: Sequence[PartitionInfo]) -> None:
    """Raises ConflictError for an id that --all-partitions shows as an IPU of another partition than the active one."""
    from podrun.core.errors import ConflictError

    first = active.size
    for info in partitions:
        if info is active:
            continue
        if first <= device < first + info.size:
            raise ConflictError(
                f"device {device} can mean IPU {device - first} of partition {info.name}, or a device of {active.name}",
                hint=f"Name the partition, whose ids then count from 0: export IPUOF_VIPU_API_PARTITION_ID={info.name}",
            )
        first += info.size


def main() -> None:
    """Entry point of `gc-reset`."""
    sys.exit(run(gc_reset))


if __name__ == "__main__":
    main()
