"""`gc-info`: the devices of a partition and what they are."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from podrun.vipu.cli_common import HELP_OPTIONS, run, server_options

if TYPE_CHECKING:
    from podrun.monitor.devices import View

NEEDS_EXCLUSIVE_ACCESS = (
    "--tile-overview",
    "--tile-status",
    "--dump-mem",
    "--xb-status",
    "--gsp-status",
    "--pci-status",
    "--nlc-status",
)
"""Options of the real tool that read registers and tile memory; refused by name."""


@click.command(context_settings=HELP_OPTIONS, epilog=f"Not available: {', '.join(NEEDS_EXCLUSIVE_ACCESS)}.")
@click.version_option(package_name="podrun", prog_name="gc-info")
@click.option("-l", "--list-devices", is_flag=True, help="List single and multi-IPU devices.")
@click.option("--all-partitions", is_flag=True, help="With -l: those of the other partitions, too.")
@click.option("-d", "--device-id", "device", type=int, metavar="ID", help="Device to ask about.")
@click.option("-i", "--device-info", is_flag=True, help="Print attributes of the device.")
@click.option("--ipu-arch", is_flag=True, help="Print the IPU architecture, as ipu2.")
@click.option("--tile-clock-speed", is_flag=True, help="Print the tile clock.")
@click.option("--ipu-count", is_flag=True, help="Print the number of IPUs.")
@click.option("-j", "--json", "as_json", is_flag=True, help="With -i: print JSON.")
@server_options
@click.pass_context
def gc_info(ctx: click.Context, /, **options: Any) -> None:
    """Show devices of the active partition.

    Example: gc-info -d 0 -i
    """
    wanted = ("list_devices", "device_info", "ipu_arch", "tile_clock_speed", "ipu_count")
    if not any(options[name] for name in wanted):
        click.echo(ctx.get_help())
        return
    from podrun.monitor.source import connect, on_stderr, views

    with connect(options["api_host"], options["api_port"], say=on_stderr) as client:
        found = views(client, everything=options["all_partitions"])
    if options["list_devices"]:
        click.echo("\n".join(listing(found)))
    device = options["device"] or 0
    if options["ipu_arch"]:
        click.echo(device_attributes(found[0], device)["ipu architecture"])
    if options["tile_clock_speed"]:
        click.echo(device_attributes(found[0], device)["clock"])
    if options["ipu_count"]:
        click.echo(len(_members(found[0], options["device"])))
    if options["device_info"]:
        values = device_attributes(found[0], device)
        click.echo(json.dumps(values, indent=2) if options["as_json"] else device_text(values))


def listing(found: Sequence[View]) -> Iterator[str]:
    """Lines of --list-devices: single IPUs, then the groups of the active partition.

    With several partitions single IPUs alone, as in published output: their ids count on through the partitions, so a
    group's id would stand for an IPU of another partition, too.
    """
    from podrun.monitor.devices import device_sets

    yield "Graphcore device listing:"
    for view in found:
        yield ""
        yield f"Partition: {view.info.name}{' [active]' if view.active else ''}"
        first = view.devices[0].id if view.devices else 0
        for index, members in enumerate(device_sets(view.info.size, view.info.reconfigurable)):
            if len(members) == 1:
                device = view.devices[members[0]]
                place = f"IPU-M host: [{device.host}], IPU#: [{device.number}]"
                yield f"-+- Id: [{device.id}], target: [Fabric], {place}"
            elif len(found) == 1:
                yield f"-+- Id: [{first + index}], target: [Multi IPU]"
                for dnc, member in enumerate(members):
                    device = view.devices[member]
                    place = f"IPU-M host: [{device.host}], IPU#: [{device.number}]"
                    yield f" |--- Id: [{device.id}], DNC Id: [{dnc}], {place}"


def _members(view: View, device: int | None) -> tuple[int, ...]:
    from podrun.monitor.devices import ipus_of_device

    if device is None:
        return tuple(range(view.info.size))
    return ipus_of_device(device, view.info.size, view.info.reconfigurable)


def device_attributes(view: View, device: int) -> dict[str, str]:
    """Attributes of a device: those of the IPU, or those that all IPUs of a group share."""
    from podrun.monitor.devices import attributes_of

    members = [attributes_of(view)[i] for i in _members(view, device)]
    if len(members) == 1:
        return members[0]
    common = {key: value for key, value in members[0].items() if all(m.get(key) == value for m in members)}
    return {"id": str(device), "target": "Multi IPU"} | {
        key: value for key, value in common.items() if key not in ("id", "target")
    }


def device_text(values: dict[str, str]) -> str:
    """Attributes as --device-info prints them: id and target first, the rest by name."""
    lines = ["Device Info:"] + [f"  {key}: {value}" for key, value in values.items()]
    return "\n".join(lines)


def main() -> None:
    """Entry point of `gc-info`."""
    from podrun.core.errors import UnsupportedError
    from podrun.vipu.cli_common import show_error

    for argument in sys.argv[1:]:
        if argument.split("=")[0] in NEEDS_EXCLUSIVE_ACCESS:
            error = UnsupportedError(
                f"gc-info {argument.split('=')[0]} reads registers and tile memory, which are not emulated",
                hint="There are: --list-devices, --device-info, --ipu-arch, --tile-clock-speed, --ipu-count.",
            )
            show_error(error)
            sys.exit(error.exit_code)
    sys.exit(run(gc_info))


if __name__ == "__main__":
    main()
