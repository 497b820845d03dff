"""Commands that list devices and their attributes: `gc-info` and `gc-inventory`. They only read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from podrun.core.command_line import HELP_OPTIONS
from podrun.core.errors import UnsupportedError
from podrun.core.machine_output import output_options, print_output
from podrun.monitor.devices import View
from podrun.monitor.monitor_tables import partition_mark
from podrun.partition.commands.shared_options import server_options

NEEDS_EXCLUSIVE_ACCESS = (
    "--tile-overview",
    "--tile-status",
    "--dump-mem",
    "--xb-status",
    "--gsp-status",
    "--pci-status",
    "--nlc-status",
)
"""Options of the real tool that read registers and tile memory. They are refused by name."""


def _refuse(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None and not ctx.resilient_parsing:
        raise UnsupportedError(
            f"gc-info {param.opts[0]} reads registers and tile memory, which are not emulated",
            hint="There are: --list-devices, --device-info, --ipu-arch, --tile-clock-speed, --ipu-count.",
        )


def _refused_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`NEEDS_EXCLUSIVE_ACCESS`, with or without a value."""
    for name in NEEDS_EXCLUSIVE_ACCESS:
        command = click.option(
            name, flag_value="", is_flag=False, default=None, hidden=True, is_eager=True, expose_value=False,
            callback=_refuse,
        )(command)  # fmt: skip
    return command


@click.command(context_settings=HELP_OPTIONS, epilog=f"Not available: {', '.join(NEEDS_EXCLUSIVE_ACCESS)}.")
@click.version_option(package_name="podrun", prog_name="gc-info")
@click.option("-l", "--list-devices", is_flag=True, help="List single and multi-IPU devices.")
@click.option("--all-partitions", is_flag=True, help="With -l: those of the other partitions, too.")
@click.option("-d", "--device-id", "device", type=int, metavar="ID", help="Device to ask about.")
@click.option("-i", "--device-info", is_flag=True, help="Print attributes of the device.")
@click.option("--ipu-arch", is_flag=True, help="Print the IPU architecture, as ipu2.")
@click.option("--tile-clock-speed", is_flag=True, help="Print the tile clock.")
@click.option("--ipu-count", is_flag=True, help="Print the number of IPUs.")
@output_options("-j", "--json")
@_refused_options
@server_options
@click.pass_context
def gc_info_command(ctx: click.Context, /, **options: Any) -> None:
    """Show devices of the active partition.

    Example: gc-info -d 0 -i
    """
    wanted = ("list_devices", "device_info", "ipu_arch", "tile_clock_speed", "ipu_count")
    if not any(options[name] for name in wanted):
        click.echo(ctx.get_help())
        return
    from podrun.monitor.devices import connect_monitor, on_stderr, views

    with connect_monitor(options["api_host"], options["api_port"], say=on_stderr) as client:
        shown = views(client, everything=options["all_partitions"])
    form, device = options["form"], options["device"] or 0
    if options["list_devices"]:
        devices = listed_devices(shown)
        document = {"schema_version": LISTING_VERSION, "devices": devices}
        print_output(form, text=lambda: "\n".join(listing(shown)), document=document, rows=devices)
    if options["ipu_arch"]:
        click.echo(device_attributes(shown[0], device)["ipu architecture"])
    if options["tile_clock_speed"]:
        click.echo(device_attributes(shown[0], device)["clock"])
    if options["ipu_count"]:
        click.echo(len(_members(shown[0], options["device"])))
    if options["device_info"]:
        values = device_attributes(shown[0], device)
        print_output(form, text=lambda: device_text(values), document=values, rows=[values])


LISTING_VERSION = 1
"""Version of gc-info's list of devices in JSON."""


def listed_devices(shown: Sequence[View]) -> list[dict[str, Any]]:
    """The devices of `listing` as plain data; ``ipus``: the members of a device."""
    from podrun.monitor.devices import device_sets

    result = []
    for view in shown:
        first = view.devices[0].id if view.devices else 0
        for index, members in enumerate(device_sets(view.info.size, view.info.reconfigurable)):
            if len(members) == 1 or len(shown) == 1:
                devices = [view.devices[member] for member in members]
                ipus = [{"id": d.id, "host": d.host, "ipu_number": d.number} for d in devices]
                single = len(members) == 1
                result.append(
                    {
                        "id": devices[0].id if single else first + index,
                        "target": "Fabric" if single else "Multi IPU",
                        "partition": view.info.name,
                        "active": view.active,
                        "ipus": ipus,
                    }
                )
    return result


def listing(shown: Sequence[View]) -> Iterator[str]:
    """Lines of --list-devices: single IPUs, then the groups of the active partition.

    With several partitions single IPUs alone, as in published output: their ids count on through the partitions, so a
    group's id would stand for an IPU of another partition, too.
    """
    from podrun.monitor.devices import device_sets

    yield "Graphcore device listing:"
    for view in shown:
        yield ""
        yield f"Partition: {view.info.name}{partition_mark(view)}"
        first = view.devices[0].id if view.devices else 0
        for index, members in enumerate(device_sets(view.info.size, view.info.reconfigurable)):
            if len(members) == 1:
                device = view.devices[members[0]]
                place = f"IPU-M host: [{device.host}], IPU#: [{device.number}]"
                yield f"-+- Id: [{device.id}], target: [Fabric], {place}"
            elif len(shown) == 1:
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
    from podrun.monitor.devices import attributes_of_ipus

    members = [attributes_of_ipus(view)[i] for i in _members(view, device)]
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


@click.command(context_settings=HELP_OPTIONS)
@click.version_option(package_name="podrun", prog_name="gc-inventory")
@output_options("-j", "--json")
@click.option("--all-partitions", is_flag=True, help="Devices of the other partitions, too.")
@server_options
def gc_inventory_command(form: str, all_partitions: bool, api_host: str | None, api_port: int | None) -> None:
    """List the IPUs of the active partition with their attributes. Values are strings, as in the real tool."""
    from podrun.monitor.devices import attributes_of_ipus, connect_monitor, on_stderr, views

    with connect_monitor(api_host, api_port, say=on_stderr) as client:
        shown = views(client, everything=all_partitions)
    devices = [values for view in shown for values in attributes_of_ipus(view)]
    print_output(form, text=lambda: inventory_text(devices), document={"devices": devices}, rows=devices)


def inventory_text(devices: Sequence[Mapping[str, str]]) -> str:
    """A block of attributes for each device."""
    return "\n".join(
        "\n".join(["Device:", *(f"  {k}: {v}" for k, v in values.items())]) for values in devices
    )
