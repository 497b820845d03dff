"""`gc-inventory`: every device with all its attributes."""

from __future__ import annotations

import json
import sys

import click

from podrun.vipu.cli_common import HELP_OPTIONS, run, server_options


@click.command(context_settings=HELP_OPTIONS)
@click.version_option(package_name="podrun", prog_name="gc-inventory")
@click.option("-j", "--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--all-partitions", is_flag=True, help="Devices of the other partitions, too.")
@server_options
def gc_inventory(as_json: bool, all_partitions: bool, api_host: str | None, api_port: int | None) -> None:
    """List the IPUs of the active partition with their attributes. Values are strings, as in the real tool."""
    from podrun.monitor.devices import attributes_of
    from podrun.monitor.source import connect, on_stderr, views

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
