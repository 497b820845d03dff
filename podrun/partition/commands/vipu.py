"""`vipu_command`: partitions, queue and reservations, for users."""

from __future__ import annotations

import click

from podrun.core.command_line import HELP_OPTIONS, SuggestingGroup
from podrun.partition.commands.context import open_context
from podrun.partition.commands.create import create_partition
from podrun.partition.commands.get import capture_state, explain, get_partition
from podrun.partition.commands.listing import (
    list_allocations,
    list_clusters,
    list_ipu_attrs,
    list_partitions,
    list_queue,
    list_reservations,
)
from podrun.partition.commands.remove import remove_partition
from podrun.partition.commands.reset import reset_partition
from podrun.partition.commands.shared_options import global_options

_LISTS = (list_partitions, list_allocations, list_clusters, list_ipu_attrs, list_queue, list_reservations)


def add_user_commands(root: click.Group) -> dict[str, click.Group]:
    """Give a root command the verbs of `vipu_command`; returns them by name, for `vipu-admin` to add to."""
    plurals = {
        "partition": "partitions",
        "allocation": "allocations",
        "ipu-attr": "ipu-attrs",
        "agent": "agents",
        "cluster": "clusters",
        "reservation": "reservations",
        "user": "users",
    }
    singulars = {plural: one for one, plural in plurals.items()}
    verbs = {
        "create": SuggestingGroup("create", help="Create something.", aliases=singulars),
        "list": SuggestingGroup("list", help="List what there is.", aliases=plurals),
        "get": SuggestingGroup("get", help="Show one thing.", aliases=singulars),
        "reset": SuggestingGroup("reset", help="Re-initialise something.", aliases=singulars),
        "remove": SuggestingGroup("remove", help="Remove something (also: delete).", aliases=singulars),
    }
    for verb in verbs.values():
        root.add_command(verb)
    verbs["create"].add_command(create_partition)
    for listing in _LISTS:
        verbs["list"].add_command(listing)
    verbs["get"].add_command(get_partition)
    verbs["reset"].add_command(reset_partition)
    verbs["remove"].add_command(remove_partition)
    root.add_command(explain)
    root.add_command(capture_state)
    return dict(verbs)


@click.group(
    cls=SuggestingGroup,
    aliases={"delete": "remove"},
    context_settings=HELP_OPTIONS,
    invoke_without_command=True,
)
@click.version_option(package_name="podrun", prog_name="vipu")
@global_options
@click.pass_context
def vipu_command(ctx: click.Context, /, **options: object) -> None:
    """Partitions of an emulated IPU-POD: create, list, get, reset, remove.

    Example: vipu create partition p16 --size 16 --reconfigurable
    """
    open_context(ctx, **options)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


add_user_commands(vipu_command)
