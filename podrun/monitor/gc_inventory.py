"""`gc-inventory`: every device with all its attributes."""

from __future__ import annotations

import json
import sys

import click

from podrun.partition.cli_common import run

NAMES = {"help_option_names": ["-h", "--help"]}


@click.command(context_settings=NAMES)
@click.version_option(package_name="podrun", prog_name="gc-inventory")
@click.option("-j", "--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--all-partitions", is_flag=True, help="Devices of the other partitions, too.")
@click.option("--api-host", "-H", metavar="HOST", help="Server [environment, else a running one].")
@click.option("--api-port", type=click.IntRange(1, 65535), metavar="PORT", help="Port of the server.")
def gc_inventory(as_json: bool, all_partitions: bool, api_host: str | None, api_port: int | None) -> None:
    """List the IPUs of the active partition with their attributes. Values are strings, as of the real tool."""
    from podrun.monitor.source import attributes_of, connect, on_stderr, views

    with connect(api_host, api_port, say=on_stderr) as client:
        found = views(client, everything=all_partitions)
    devices = [values for view in found for values in attributes_of(view)]
    if as_json:
        click.echo(json.dumps({"devices": devices}, indent=2))
    else:
        blocks = ["\n".join(["Device:", *(f"  {key}: {value}" for key, value in d.items())]) for d in devices]
        click.echo("\n".join(blocks))


def main() -> None:
    """Entry point of `gc-inventory`."""
    sys.exit(run(gc_inventory))


if __name__ == "__main__":
    main()
