"""`gc-reset`: resets IPUs (recovery action IPU_RESET). Links are not retrained: that is `vipu reset
partition`.
"""

from __future__ import annotations

import sys

import click

from podrun.partition.cli_common import run

NAMES = {"help_option_names": ["-h", "--help"]}


@click.command(context_settings=NAMES)
@click.version_option(package_name="podrun", prog_name="gc-reset")
@click.option(
    "-d", "--device-id", "device", type=int, required=True, metavar="ID", help="Device: one IPU or a group."
)
@click.option("--api-host", "-H", metavar="HOST", help="Server [environment, else a running one].")
@click.option("--api-port", type=click.IntRange(1, 65535), metavar="PORT", help="Port of the server.")
def gc_reset(device: int, api_host: str | None, api_port: int | None) -> None:
    """Reset the IPUs of a device of the active partition; gc-info -l lists devices.

    A process that holds them loses what it had loaded there.
    """
    from podrun.monitor.device_ids import ipus_of_device
    from podrun.monitor.source import active_partition, connect, no_partition, on_stderr

    with connect(api_host, api_port, say=on_stderr, one=True) as client:
        info = active_partition(client.list_partitions())
        if info is None:
            raise no_partition()
        ipus = ipus_of_device(device, info.size, info.reconfigurable)
        client.reset_ipus(info.name, ipus)
    noun = "IPU" if len(ipus) == 1 else "IPUs"
    click.echo(f"Reset {noun} {', '.join(map(str, ipus))} of partition {info.name}.")


def main() -> None:
    """Entry point of `gc-reset`."""
    sys.exit(run(gc_reset))


if __name__ == "__main__":
    main()
