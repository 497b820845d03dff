"""`vipu`: partitions, for users."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from podrun.vipu import cli_partitions as partitions
from podrun.vipu import cli_queue as queue
from podrun.vipu.cli_common import HELP_OPTIONS, SuggestingGroup, run
from podrun.vipu.cli_connection import global_options, open_context


def add_user_commands(root: click.Group, refused: Mapping[str, str] | None = None) -> dict[str, click.Group]:
    """Give a root command the verbs of `vipu`; returns them by name, for `vipu-admin` to add to.

    ``refused``: what cannot be created, with what to do instead.
    """
    plurals = {
        "partition": "partitions",
        "allocation": "allocations",
        "ipu-attr": "ipu-attrs",
        "agent": "agents",
        "reservation": "reservations",
    }
    singulars = {plural: one for one, plural in plurals.items()}
    verbs = {
        "create": SuggestingGroup("create", help="Create something.", aliases=singulars, refused=refused),
        "list": SuggestingGroup("list", help="List what there is.", aliases=plurals),
        "get": SuggestingGroup("get", help="Show one thing.", aliases=singulars),
        "reset": SuggestingGroup("reset", help="Re-initialise something.", aliases=singulars),
        "remove": SuggestingGroup("remove", help="Remove something (also: delete).", aliases=singulars),
    }
    for verb in verbs.values():
        root.add_command(verb)
    verbs["create"].add_command(partitions.create_partition)
    verbs["list"].add_command(partitions.list_partitions)
    verbs["list"].add_command(partitions.list_allocations)
    verbs["list"].add_command(partitions.list_ipu_attrs)
    verbs["list"].add_command(queue.list_queue)
    verbs["list"].add_command(queue.list_reservations)
    verbs["get"].add_command(partitions.get_partition)
    verbs["reset"].add_command(partitions.reset_partition)
    verbs["remove"].add_command(partitions.remove_partition)
    root.add_command(queue.explain)
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
def vipu(ctx: click.Context, /, **options: Any) -> None:
    """Partitions of an emulated IPU-POD: create, list, get, reset, remove.

    Example: vipu create partition p16 --size 16 --reconfigurable
    """
    open_context(ctx, **options)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


add_user_commands(vipu)


def main() -> None:
    """Entry point of `vipu`."""
    sys.exit(run(vipu))


if __name__ == "__main__":
    main()
