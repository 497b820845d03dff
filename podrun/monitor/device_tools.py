"""Commands that show and reset devices: `gc-info`, `gc-inventory`, `gc-monitor` and `gc-reset`.

The first three only read. `gc-reset` resets IPUs (recovery action IPU_RESET); it retrains no links, which
`vipu reset partition` does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from podrun.core.environment import environment
from podrun.vipu.cli_common import HELP_OPTIONS, run, server_options

if TYPE_CHECKING:
    from podrun.monitor.devices import Device, View
    from podrun.vipu.types import PartitionInfo

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
    from podrun.monitor.devices import connect, on_stderr, views

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


def gc_info_main() -> None:
    """Entry point of `gc-info`."""
    from podrun.core.errors import UnsupportedError
    from podrun.core.terminal import show_error

    for argument in sys.argv[1:]:
        if argument.split("=")[0] in NEEDS_EXCLUSIVE_ACCESS:
            error = UnsupportedError(
                f"gc-info {argument.split('=')[0]} reads registers and tile memory, which are not emulated",
                hint="There are: --list-devices, --device-info, --ipu-arch, --tile-clock-speed, --ipu-count.",
            )
            show_error("gc-info", error)
            sys.exit(error.exit_code)
    sys.exit(run(gc_info))


@click.command(context_settings=HELP_OPTIONS)
@click.version_option(package_name="podrun", prog_name="gc-inventory")
@click.option("-j", "--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--all-partitions", is_flag=True, help="Devices of the other partitions, too.")
@server_options
def gc_inventory(as_json: bool, all_partitions: bool, api_host: str | None, api_port: int | None) -> None:
    """List the IPUs of the active partition with their attributes. Values are strings, as in the real tool."""
    from podrun.monitor.devices import attributes_of, connect, on_stderr, views

    with connect(api_host, api_port, say=on_stderr) as client:
        found = views(client, everything=all_partitions)
    devices = [values for view in found for values in attributes_of(view)]
    if as_json:
        click.echo(json.dumps({"devices": devices}, indent=2))
    else:
        blocks = ["\n".join(["Device:", *(f"  {key}: {value}" for key, value in d.items())]) for d in devices]
        click.echo("\n".join(blocks))


def gc_inventory_main() -> None:
    """Entry point of `gc-inventory`."""
    sys.exit(run(gc_inventory))


@click.command(context_settings=HELP_OPTIONS)
@click.version_option(package_name="podrun", prog_name="gc-monitor")
@click.option("--all-partitions", is_flag=True, help="Show all partitions.")
@click.option("--no-card-info", is_flag=True, help="Leave out the table of devices.")
@click.option("-j", "--json", "as_json", is_flag=True, help="Print one JSON object.")
@server_options
def gc_monitor(
    all_partitions: bool, no_card_info: bool, as_json: bool, api_host: str | None, api_port: int | None
) -> None:
    """Show the IPUs of the active partition and the processes attached to them.

    To see it change: watch -n 1 gc-monitor
    """
    from podrun.monitor.devices import connect, on_stderr, views

    with connect(api_host, api_port, say=on_stderr) as client:
        found = views(client, everything=all_partitions)
    if as_json:
        click.echo(json.dumps(json_object(found), indent=2))
    else:
        from podrun.monitor.monitor_tables import whole

        click.echo(whole(found, cards=not no_card_info))


def json_object(found: list[View]) -> dict[str, Any]:
    """One object: ``cards`` has an entry for each IPU-Machine; its ``ipus`` have PID if a process is attached."""
    from podrun.core.telemetry import SCHEMA_VERSION
    from podrun.monitor.monitor_tables import machines

    return {
        "schema_version": SCHEMA_VERSION,
        "partitions": [
            {
                "name": view.info.name,
                "active": view.active,
                "state": view.info.state.name,
                "size": view.info.size,
                "reconfigurable": view.info.reconfigurable,
                "error": view.info.error or None,
            }
            for view in found
        ],
        "cards": [_card(view, group) for view in found for group in machines(view.devices)],
    }


def _card(view: View, group: list[Device]) -> dict[str, Any]:
    machine = group[0].machine
    return {
        "partition": view.info.name,
        "agent": machine.agent_id,
        "host": group[0].host,
        "serial": machine.serial,
        "state": machine.state,
        "board_temperature_c": machine.board_temperature_c,
        "board_power_w": machine.board_power_w,
        "versions": dict(machine.versions),
        "ipus": [_ipu(view.info.name, device) for device in group],
    }


def _ipu(partition: str, device: Device) -> dict[str, Any]:
    from podrun.monitor.devices import diagnose

    ipu, process = device.ipu, device.ipu.process
    diagnosis = diagnose(partition, device)
    plain: dict[str, Any] = {
        "id": device.id,
        "ipu_number": device.number,
        "error_state": diagnosis.state if diagnosis else ipu.error_state,
        "recovery_action": diagnosis.action if diagnosis else None,
        "remedy": diagnosis.remedy if diagnosis else None,
        "links_down": list(ipu.links_down),
        "clock_mhz": ipu.clock_mhz,
        "die_temperature_c": ipu.die_temperature_c,
        "power_w": ipu.power_w,
        "utilisation_percent": ipu.utilisation_percent,
        "batches_done": ipu.batches_done,
    }
    if process is not None:
        plain |= {
            "PID": process.pid,
            "user": process.user,
            "command": process.command,
            "start_time_s": process.start_time_s,
        }
    return plain


def gc_monitor_main() -> None:
    """Entry point of `gc-monitor`."""
    sys.exit(run(gc_monitor))


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
    from podrun.monitor.devices import active_partition, connect, ipus_of_device, no_partition, on_stderr

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


def gc_reset_main() -> None:
    """Entry point of `gc-reset`."""
    sys.exit(run(gc_reset))
