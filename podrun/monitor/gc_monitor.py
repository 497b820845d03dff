"""`gc-monitor`: the IPUs of the active partition and who uses them. Reads only; disturbs nobody."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from podrun.partition.cli_common import run

if TYPE_CHECKING:
    from podrun.monitor.source import Device, View

NAMES = {"help_option_names": ["-h", "--help"]}


@click.command(context_settings=NAMES)
@click.version_option(package_name="podrun", prog_name="gc-monitor")
@click.option("--all-partitions", is_flag=True, help="Show the other partitions, too.")
@click.option("--no-card-info", is_flag=True, help="Leave out the table of devices.")
@click.option("-j", "--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--api-host", "-H", metavar="HOST", help="Server [environment, else a running one].")
@click.option("--api-port", type=click.IntRange(1, 65535), metavar="PORT", help="Port of the server.")
def gc_monitor(
    all_partitions: bool, no_card_info: bool, as_json: bool, api_host: str | None, api_port: int | None
) -> None:
    """Show the IPUs of the active partition and the processes attached to them.

    To see it change: watch -n 1 gc-monitor
    """
    from podrun.monitor.source import connect, on_stderr, views

    with connect(api_host, api_port, say=on_stderr) as client:
        found = views(client, everything=all_partitions)
    if as_json:
        click.echo(json.dumps(json_object(found), indent=2))
    else:
        from podrun.monitor.monitor_tables import whole

        click.echo(whole(found, cards=not no_card_info))


def json_object(found: list[View]) -> dict[str, Any]:
    """One object: ``cards`` holds an entry for each IPU-Machine, whose ``ipus`` hold PID where a process is
    attached.
    """
    from podrun.monitor.monitor_tables import machines
    from podrun.telemetry import SCHEMA_VERSION

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
    from podrun.monitor.trouble import trouble_of

    ipu, process = device.ipu, device.ipu.process
    trouble = trouble_of(partition, device)
    plain: dict[str, Any] = {
        "id": device.id,
        "ipu_number": device.number,
        "error_state": trouble.state if trouble else ipu.error_state,
        "recovery_action": trouble.action if trouble else None,
        "remedy": trouble.remedy if trouble else None,
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


def main() -> None:
    """Entry point of `gc-monitor`."""
    sys.exit(run(gc_monitor))


if __name__ == "__main__":
    main()
