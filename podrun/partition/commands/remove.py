"""The verb ``remove``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from podrun.partition.commands.context import CliContext, partition_names, without_suggestions
from podrun.partition.commands.create import ipuof_files, service_of
from podrun.partition.commands.shared_options import command_on_name

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient


@click.command("partition")
@click.argument("name", shell_complete=partition_names)
@click.option("--force", is_flag=True, help="Also if processes are attached: they lose their IPUs.")
@click.option("--no-wait", is_flag=True, help="Do not wait until the partition is gone.")
@click.pass_obj
def remove_partition(cli: CliContext, name: str, force: bool, no_wait: bool) -> None:
    """Give the IPUs of a partition back, or give up a request that waits in the queue.

    Its files in ~/.ipuof.conf.d are removed too.
    """
    from podrun.partition.state.values import PartitionState

    with cli.client() as client, without_suggestions(name):
        service = service_of(client, name)
        client.remove_partition(name, force=force)
        if not no_wait:
            client.wait_for_state(name, {PartitionState.REMOVED}, cli.timeout)
    for path in ipuof_files(name, service):
        with contextlib.suppress(OSError):
            path.unlink()
    cli.show("removed", name, lambda: f"remove partition ({name}): success.")


def _removing(noun: str, help_text: str, ask: Callable[[VipuClient, str], None]) -> click.Command:
    return command_on_name("remove", noun, "removed", help_text, ask)


remove_user = _removing(
    "user", "Remove a user; its access key becomes invalid.", lambda client, name: client.remove_user(name)
)
remove_agent_verb = _removing(
    "agent", "Remove an IPU-M2000 that is in no cluster.", lambda client, name: client.remove_agent(name)
)
remove_cluster_verb = _removing(
    "cluster",
    "Remove a cluster without partitions, and the allocation of its name.",
    lambda client, name: client.remove_cluster(name),
)
remove_reservation_verb = _removing(
    "reservation",
    "End a reservation; partitions in it stay.",
    lambda client, name: client.remove_reservation(name),
)
remove_allocation = _removing(
    "allocation",
    "Remove an allocation that has no partitions.",
    lambda client, name: client.remove_allocation(name),
)
