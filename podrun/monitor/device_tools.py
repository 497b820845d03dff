"""Commands that show and reset devices: `gc-monitor` and `gc-reset`.

`gc-monitor` only reads. `gc-reset` resets IPUs (recovery action IPU_RESET); it retrains no links, which
`vipu reset partition` does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from podrun.core.command_line import HELP_OPTIONS
from podrun.core.environment import IPUOF_VIPU_API_PARTITION_ID, environment
from podrun.core.machine_output import format_option, is_for_people, output_options, print_output
from podrun.core.terminal import terminal_columns
from podrun.monitor.devices import Device, View, diagnose_device
from podrun.monitor.full_screen import FullScreen, fills_a_screen, watch_devices
from podrun.monitor.monitor_tables import all_tables, machines
from podrun.partition.commands.shared_options import server_options

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient
    from podrun.partition.state.values import PartitionInfo


@click.command(context_settings=HELP_OPTIONS)
@click.version_option(package_name="podrun", prog_name="gc-monitor")
@click.option("--all-partitions", is_flag=True, help="Show all partitions.")
@click.option("--no-card-info", is_flag=True, help="Leave out the table of devices.")
@output_options("-j", "--json")
@click.option(
    "--watch",
    is_flag=True,
    help="Show the present until Ctrl-C: on the whole screen; in a pipe again after each change.",
)
@server_options
def gc_monitor_command(
    all_partitions: bool,
    no_card_info: bool,
    form: str,
    watch: bool,
    api_host: str | None,
    api_port: int | None,
) -> None:
    """Show the IPUs of the active partition and the processes attached to them."""
    from podrun.monitor.devices import connect_monitor, on_stderr, views

    def tables(shown: Sequence[View]) -> str:
        return all_tables(shown, cards=not no_card_info, width=terminal_columns(sys.stdout))

    def once(client: VipuClient) -> None:
        shown = views(client, everything=all_partitions)
        document = devices_json(shown)
        print_output(form, text=lambda: tables(shown), document=document, rows=list(ipu_rows(document)))

    with connect_monitor(api_host, api_port, say=on_stderr) as client:
        if not watch:
            once(client)
        elif is_for_people(form) and fills_a_screen(sys.stdout):
            with FullScreen(sys.stdout) as screen:
                watch_devices(
                    client, lambda c: screen.show(tables(views(c, everything=all_partitions))), screen.show
                )
        else:
            watch_devices(client, once, on_stderr)


def devices_json(shown: Sequence[View]) -> dict[str, Any]:
    """One object: ``cards`` has an entry for each IPU-Machine; its ``ipus`` have PID if a process is attached."""
    from podrun.core.telemetry import SCHEMA_VERSION

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
            for view in shown
        ],
        "cards": [_card(view, group) for view in shown for group in machines(view.devices)],
    }


def ipu_rows(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each IPU of `devices_json`, with its machine's partition, agent, host, state and age."""
    for card in document["cards"]:
        machine = {key: card[key] for key in ("partition", "agent", "host", "state", "age_s")}
        for ipu in card["ipus"]:
            yield machine | {key: ipu.get(key) for key in (*ipu, *PROCESS_KEYS)}


PROCESS_KEYS = ("PID", "user", "command", "start_time_s")
"""Keys of an IPU that a process holds; rows have them always."""


def _card(view: View, group: list[Device]) -> dict[str, Any]:
    machine = group[0].machine
    return {
        "partition": view.info.name,
        "agent": machine.agent_id,
        "host": group[0].host,
        "serial": machine.serial,
        "state": machine.state,
        "age_s": machine.stale_seconds,
        "board_temperature_c": machine.board_temperature_c,
        "board_power_w": machine.board_power_w,
        "versions": dict(machine.versions),
        "ipus": [_ipu(view.info.name, device) for device in group],
    }


def _ipu(partition: str, device: Device) -> dict[str, Any]:
    ipu, process = device.ipu, device.ipu.process
    diagnosis = diagnose_device(partition, device)
    plain: dict[str, Any] = {
        "id": device.id,
        "ipu_number": device.number,
        "error_state": diagnosis.state if diagnosis else ipu.error_state.value,
        "recovery_action": diagnosis.action.value if diagnosis and diagnosis.action else None,
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


@click.command(context_settings=HELP_OPTIONS)
@click.version_option(package_name="podrun", prog_name="gc-reset")
@click.option(
    "-d", "--device-id", "device", type=int, required=True, metavar="ID", help="Device: one IPU or a group."
)
@click.option(
    "--force", is_flag=True, help="Also while a process works on them: it loses what it had loaded."
)
@format_option
@server_options
def gc_reset_command(device: int, force: bool, form: str, api_host: str | None, api_port: int | None) -> None:
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
        if not environment().get(IPUOF_VIPU_API_PARTITION_ID):
            _refuse_ambiguous(device, info, partitions)
        ipus = ipus_of_device(device, info.size, info.reconfigurable)
        if not force:
            forced = f"gc-reset -d {device} --force"
            check_not_in_use(info.name, client.machine_reports(info.name), forced, ipus)
        client.reset_ipus(info.name, ipus)
    noun = "IPU" if len(ipus) == 1 else "IPUs"
    said = f"Reset {noun} {', '.join(map(str, ipus))} of partition {info.name}."
    document = {"schema_version": 1, "partition": info.name, "reset_ipus": list(ipus)}
    print_output(form, text=lambda: said, document=document, rows=[document])


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
