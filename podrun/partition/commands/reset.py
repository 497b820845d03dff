"""The verb ``reset``: IPUs and links of a partition."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import click

from podrun.core.environment import IPUOF_VIPU_API_PARTITION_ID, environment
from podrun.core.errors import ConflictError
from podrun.core.telemetry import attached_processes
from podrun.partition.commands.context import CliContext, partition_names, without_suggestions
from podrun.partition.commands.create import ipuof_files, service_of, write_ipuof_files
from podrun.partition.commands.shared_options import generation_option
from podrun.partition.state.codec import value_to_json

if TYPE_CHECKING:
    from podrun.core.telemetry import MachineReport


@click.command("partition")
@click.argument("name", shell_complete=partition_names)
@click.option("--no-wait", is_flag=True, help="Do not wait until the partition is active.")
@generation_option("it has")
@click.option(
    "--force", is_flag=True, help="Also while a process works on its IPUs, which ends that program."
)
@click.pass_obj
def reset_partition(cli: CliContext, name: str, no_wait: bool, generation: int, force: bool) -> None:
    """Re-initialise IPUs and links of a partition, and write its files in ~/.ipuof.conf.d anew, if there are any."""
    from podrun.partition.state.values import PartitionState

    with cli.client() as client, without_suggestions(name):
        if not force:
            check_not_in_use(name, client.machine_reports(name), f"vipu reset partition {name} --force")
        client.reset_partition(name, generation)
        if not no_wait:
            client.wait_for_state(name, {PartitionState.ACTIVE}, cli.timeout)
        info = client.get_partition(name)
        if not no_wait and ipuof_files(name, service_of(client, name)):
            write_ipuof_files(client, info)
    cli.show("partition", value_to_json(info), lambda: f"reset partition ({name}): success.")


def check_not_in_use(
    name: str, reports: Sequence[MachineReport], forced: str, chosen: Collection[int] | None = None
) -> None:
    """Raise ConflictError if processes hold IPUs of a partition that are to be reset: those ``chosen`` by their index
    in the partition, or all. ``forced``: the command that resets them all the same.

    A program may reset IPUs of its own partition. While an IPU has an error no program works on the partition, and all
    can be reset.
    """
    if any(report.state.is_silent or any(ipu.has_error for ipu in report.ipus) for report in reports):
        return
    held = attached_processes(reports)
    holders = {(p.host, p.pid): p for ipu, p in held.items() if chosen is None or ipu in chosen}
    if not holders or environment().get(IPUOF_VIPU_API_PARTITION_ID) == name:
        return
    first = next(iter(holders.values()))
    more = f" and {len(holders) - 1} more" if len(holders) > 1 else ""
    raise ConflictError(
        f"partition {name} is in use by {first.in_words} of {first.user}{more}",
        hint=f"Wait until it ends, or end its use: {forced}",
    )
