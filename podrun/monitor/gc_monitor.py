"""`gc-monitor`: the IPUs of the active partition and the processes that use them. Reads only."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from podrun.vipu.cli_common import HELP_OPTIONS, run, server_options

if TYPE_CHECKING:
    from podrun.monitor.devices import Device, View


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
    from podrun.monitor.source import connect, on_stderr, views

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


def main() -> None:
    """Entry point of `gc-monitor`."""
    sys.exit(run(gc_monitor))


if __name__ == "__main__":
    main()
