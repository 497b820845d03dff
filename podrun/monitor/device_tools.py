"""Commands that show and reset devices: `gc-info`, `gc-inventory`, `gc-monitor` and `gc-reset`.

The first three only read. `gc-reset` resets IPUs (recovery action IPU_RESET); it retrains no links, which
`vipu reset partition` does.

gc-monitor's tables show devices, the processes attached to them, and errors. The device and process tables have the
widths of published output. The error table is podrun's own and comes last, so that the published tables keep their
shape. Tables are drawn with ``+ - |``, and cells are centred.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from podrun import __version__
from podrun.core.command_line import HELP_OPTIONS, run_command
from podrun.core.environment import environment
from podrun.core.errors import UnsupportedError
from podrun.core.terminal import in_lines, narrowed, terminal_columns
from podrun.monitor.devices import Device, View, diagnose_device
from podrun.partition.client.device_attributes import board_serial, reading
from podrun.partition.commands.shared_options import server_options

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient
    from podrun.partition.state.values import PartitionInfo


DEVICE_COLUMNS = (
    ("IPU-M", 13),
    ("Serial", 20),
    ("IPU-M SW", 8),
    ("Server version", 14),
    ("ICU FW", 10),
    ("Type", 7),
    ("ID", 4),
    ("IPU#", 6),
    ("Routing", 7),
)
TITLE_WIDTH = 15
PROCESS_COLUMNS = (
    ("PID", 8),
    ("Command", 41),
    ("Time", 8),
    ("User", 12),
    ("ID", 4),
    ("Clock", 10),
    ("Temp", 8),
    ("Temp", 8),
    ("Power", 8),
)
IDLE_WIDTH = 98
LEAST_COMMAND = 12
"""Characters of a command that the process table shows on the narrowest terminal."""


def device_table(view: View) -> str:
    """IPUs of a partition by device id; a rule after each IPU-Machine."""
    widths = [width for _, width in DEVICE_COLUMNS]
    title = (TITLE_WIDTH, span(widths) - TITLE_WIDTH - 1)
    lines = [rule(title), centred_row(("gc-monitor", partition_headline(view)), title), rule(widths)]
    lines += [centred_row([name for name, _ in DEVICE_COLUMNS], widths), rule(widths)]
    for group in machines(view.devices):
        lines += [centred_row(_device_cells(view, device), widths) for device in group]
        lines.append(rule(widths))
    return "\n".join(lines)


def partition_headline(view: View) -> str:
    """The partition's name and its number of IPUs."""
    info = view.info
    gcd = f" (gcd:{view.config.attributes.get('GCD Id', '0')})" if info.num_gcds > 1 else ""
    kind = "reconfigurable IPUs" if info.reconfigurable else "IPUs"
    return f"Partition: {info.name}{gcd}{_mark(view)} has {info.size} {kind}"


def _mark(view: View) -> str:
    """``[active]``, as in published output, at the partition that tools use; its state if it cannot be used."""
    from podrun.partition.state.values import PartitionState

    if view.info.state is not PartitionState.ACTIVE:
        return f" [{view.info.state.name.lower()}]"
    return " [active]" if view.active else ""


def machines(devices: Iterable[Device]) -> list[list[Device]]:
    """Devices by IPU-Machine."""
    groups: dict[str, list[Device]] = {}
    for device in devices:
        groups.setdefault(device.machine.agent_id, []).append(device)
    return list(groups.values())


def _device_cells(view: View, device: Device) -> list[str]:
    versions = device.machine.versions
    return [
        device.host,
        board_serial(device.machine.serial, device.number),
        versions.get("IPU-M software", ""),
        versions.get("IPUoF server", __version__),
        versions.get("ICU firmware", ""),
        "M2000",
        str(device.id),
        str(device.number),
        view.info.ild_routing,
    ]


def process_table(view: View, now: float | None = None, width: int | None = None) -> str:
    """A row for each IPU that a process holds, grouped by process and machine; a box that says so if there is none.

    ``width``: of the terminal. On a narrow one columns are as wide as what they hold, and commands show their ends.
    """
    busy = [device for device in view.devices if device.ipu.process is not None]
    if not busy:
        return _box(f"No attached processes in partition {view.info.name}", width)
    moment = time.time() if now is None else now
    cells = [_process_cells(device, moment) for device in busy]
    command = max([PROCESS_COLUMNS[1][1], *(len(line[1]) + 2 for line in cells)])
    widths = [command if name == "Command" else width for name, width in PROCESS_COLUMNS]
    if width is not None and span(widths) + 2 > width:
        whole_rows = [[*line, *_board_cells(device)] for device, line in zip(busy, cells, strict=True)]
        widths = _narrow_processes(whole_rows, width)
    top = [span(widths[:4]), span(widths[4:7]), span(widths[7:])]
    lines = [
        rule(top),
        centred_row([f"Attached processes in partition {view.info.name}", "IPU", "Board"], top),
    ]
    lines += [rule(widths), centred_row([name for name, _ in PROCESS_COLUMNS], widths), rule(widths)]
    previous = None
    for device, line in zip(busy, cells, strict=True):
        group = (line[0], device.machine.agent_id)
        if previous not in (None, group):
            lines.append(rule(widths))
        board = ["", ""] if group == previous else _board_cells(device)
        lines.append(centred_row([*line, *board], widths))
        previous = group
    lines.append(rule(widths))
    return "\n".join(lines)


def _narrow_processes(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Widths of the process table on a terminal of ``width``: what cells hold, and for commands what is left."""
    widths = [
        max(len(name), *(len(cells[column]) for cells in rows))
        for column, (name, _) in enumerate(PROCESS_COLUMNS)
    ]
    widths[1] = 0
    widths[1] = max(width - span(widths) - 2, LEAST_COMMAND)
    return widths


def _box(text: str, width: int | None = None) -> str:
    inner = IDLE_WIDTH if width is None else min(IDLE_WIDTH, max(width - 2, len(text)))
    return "\n".join([rule([inner]), centred_row([text], [inner]), rule([inner])])


def _process_cells(device: Device, now: float) -> list[str]:
    process = device.ipu.process
    assert process is not None, "only devices that a process holds"
    running = "" if process.start_time_s is None else duration(now - process.start_time_s)
    return [
        str(process.pid),
        process.command,
        running,
        process.user,
        str(device.id),
        reading(device.ipu.clock_mhz, "{:.0f}MHz"),
        reading(device.ipu.die_temperature_c, "{:.1f} C"),
    ]


def _board_cells(device: Device) -> list[str]:
    return [
        reading(device.machine.board_temperature_c, "{:.1f} C"),
        reading(device.machine.board_power_w, "{:.1f} W"),
    ]


def duration(seconds: float) -> str:
    """Time as gc-monitor shows it: ``10s``, ``1m3s``, ``2h0m5s``."""
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, last = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes}m{last}s"
    return f"{minutes}m{last}s" if minutes else f"{last}s"


def error_table(view: View, width: int | None = None) -> str | None:
    """The IPUs that cannot be used, why, and the remedy; None if all are usable.

    A partition that is being brought up or taken back gets one line, since it needs no help. ``width``: of the
    terminal; on a narrow one cells go on in further lines.
    """
    if not view.info.state.is_terminal():
        return _box(
            f"Partition {view.info.name} is {view.info.state.name}: its IPUs cannot be used now", width
        )
    found = [(device.id, diagnose_device(view.info.name, device)) for device in view.devices]
    lines = [[str(number), diagnosis.state, diagnosis.remedy] for number, diagnosis in found if diagnosis]
    if view.info.error:
        lines.insert(0, ["-", f"partition {view.info.state.name}", view.info.error])
    if not lines:
        return None
    widths = [
        4,
        max(24, *(len(line[1]) + 2 for line in lines)),
        max(60, *(len(line[2]) + 2 for line in lines)),
    ]
    if width is not None:
        widths = narrowed(widths, width - len(widths) - 1)
    text = f"Errors in partition {view.info.name}"
    result = [rule([span(widths)]), centred_row([text], [span(widths)]), rule(widths)]
    result += [centred_row(["ID", "State", "What makes it usable again"], widths), rule(widths)]
    result += [centred_row(cells, widths) for line in lines for cells in in_lines(line, widths)]
    return "\n".join([*result, rule(widths)])


def all_tables(
    views: Sequence[View], *, cards: bool = True, now: float | None = None, width: int | None = None
) -> str:
    """All tables of gc-monitor for some partitions. ``width``: of the terminal, which the first table disregards: it
    stays as the real tool prints it.
    """
    parts = []
    for view in views:
        parts += [device_table(view)] if cards else []
        parts.append(process_table(view, now, width))
        errors = error_table(view, width)
        parts += [errors] if errors else []
    return "\n".join(parts)


# --- drawing ----------------------------------------------------------------------------------------------------


def fit(text: str, width: int) -> str:
    """Text centred in a cell; text that does not fit keeps its end after three dots."""
    if len(text) > width:
        return "..." + text[len(text) - (width - 3) :] if width > 3 else text[-width:]
    left = (width - len(text)) // 2
    return " " * left + text + " " * (width - len(text) - left)


def rule(widths: Sequence[int]) -> str:
    """A horizontal line with a plus where columns meet."""
    return "+" + "+".join("-" * width for width in widths) + "+"


def centred_row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """A row of centred cells."""
    return "|" + "|".join(fit(cell, width) for cell, width in zip(cells, widths, strict=True)) + "|"


def span(widths: Sequence[int]) -> int:
    """Width of one cell over several columns: their widths and the bars between them."""
    return sum(widths) + len(widths) - 1


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
@click.option("-j", "--json", "as_json", is_flag=True, help="With -i: print JSON.")
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
        yield f"Partition: {view.info.name}{_mark(view)}"
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


def gc_info_main() -> None:
    """Entry point of `gc-info`."""
    sys.exit(run_command(gc_info_command))


@click.command(context_settings=HELP_OPTIONS)
@click.version_option(package_name="podrun", prog_name="gc-inventory")
@click.option("-j", "--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--all-partitions", is_flag=True, help="Devices of the other partitions, too.")
@server_options
def gc_inventory_command(
    as_json: bool, all_partitions: bool, api_host: str | None, api_port: int | None
) -> None:
    """List the IPUs of the active partition with their attributes. Values are strings, as in the real tool."""
    from podrun.monitor.devices import attributes_of_ipus, connect_monitor, on_stderr, views

    with connect_monitor(api_host, api_port, say=on_stderr) as client:
        found = views(client, everything=all_partitions)
    devices = [values for view in found for values in attributes_of_ipus(view)]
    if as_json:
        click.echo(json.dumps({"devices": devices}, indent=2))
    else:
        blocks = ["\n".join(["Device:", *(f"  {key}: {value}" for key, value in d.items())]) for d in devices]
        click.echo("\n".join(blocks))


def gc_inventory_main() -> None:
    """Entry point of `gc-inventory`."""
    sys.exit(run_command(gc_inventory_command))


@click.command(context_settings=HELP_OPTIONS)
@click.version_option(package_name="podrun", prog_name="gc-monitor")
@click.option("--all-partitions", is_flag=True, help="Show all partitions.")
@click.option("--no-card-info", is_flag=True, help="Leave out the table of devices.")
@click.option("-j", "--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--watch", is_flag=True, help="Print again whenever something changes, until Ctrl-C.")
@server_options
def gc_monitor_command(
    all_partitions: bool,
    no_card_info: bool,
    as_json: bool,
    watch: bool,
    api_host: str | None,
    api_port: int | None,
) -> None:
    """Show the IPUs of the active partition and the processes attached to them."""
    from podrun.core.errors import NotFoundError
    from podrun.monitor.devices import connect_monitor, on_stderr, views
    from podrun.partition.commands.context import follow

    def once(client: VipuClient) -> None:
        found = views(client, everything=all_partitions)
        if as_json:
            click.echo(json.dumps(devices_json(found), indent=2))
        else:
            click.echo(all_tables(found, cards=not no_card_info, width=terminal_columns(sys.stdout)))

    def once_more(client: VipuClient) -> None:
        try:
            once(client)
        except NotFoundError as error:  # There may be one later.
            on_stderr(error.message)

    with connect_monitor(api_host, api_port, say=on_stderr) as client:
        if watch:
            follow(client, ("partition", "machine", "incident"), once_more)
        else:
            once(client)


def devices_json(found: list[View]) -> dict[str, Any]:
    """One object: ``cards`` has an entry for each IPU-Machine; its ``ipus`` have PID if a process is attached."""
    from podrun.core.telemetry import SCHEMA_VERSION
    from podrun.monitor.device_tools import machines

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
    from podrun.monitor.devices import diagnose_device

    ipu, process = device.ipu, device.ipu.process
    diagnosis = diagnose_device(partition, device)
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
        "activity_percent": ipu.shares,
        "tile_bytes": ipu.tile_bytes,
        "tile_capacity_bytes": ipu.tile_capacity_bytes,
        "parity_errors": ipu.parity_errors,
        "link_correctable_errors": ipu.link_correctable_errors,
        "link_bytes": ipu.link_bytes,
        "host_bytes": ipu.host_bytes,
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
    sys.exit(run_command(gc_monitor_command))


@click.command(context_settings=HELP_OPTIONS)
@click.version_option(package_name="podrun", prog_name="gc-reset")
@click.option(
    "-d", "--device-id", "device", type=int, required=True, metavar="ID", help="Device: one IPU or a group."
)
@click.option(
    "--force", is_flag=True, help="Also while a process works on them: it loses what it had loaded."
)
@server_options
def gc_reset_command(device: int, force: bool, api_host: str | None, api_port: int | None) -> None:
    """Reset the IPUs of one device of the active partition. gc-info -l lists the devices."""
    from podrun.monitor.devices import (
        active_partition,
        connect_monitor,
        ipus_of_device,
        no_partition,
        on_stderr,
    )
    from podrun.partition.commands.reset import check_not_in_use

    with connect_monitor(api_host, api_port, say=on_stderr, one=True) as client:
        partitions = client.list_partitions()
        info = active_partition(partitions)
        if info is None:
            raise no_partition()
        if not environment().get("IPUOF_VIPU_API_PARTITION_ID"):
            _refuse_ambiguous(device, info, partitions)
        ipus = ipus_of_device(device, info.size, info.reconfigurable)
        if not force:
            forced = f"gc-reset -d {device} --force"
            check_not_in_use(info.name, client.machine_reports(info.name), forced, ipus)
        client.reset_ipus(info.name, ipus)
    noun = "IPU" if len(ipus) == 1 else "IPUs"
    click.echo(f"Reset {noun} {', '.join(map(str, ipus))} of partition {info.name}.")


def _refuse_ambiguous(device: int, active: PartitionInfo, partitions: Sequence[PartitionInfo]) -> None:
    """Raise ConflictError for an id that --all-partitions shows as an IPU of a partition other than the active one."""
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
    sys.exit(run_command(gc_reset_command))
