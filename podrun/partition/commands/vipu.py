"""`vipu`: partitions, queue and reservations, for users; and the verbs of `vipu-admin` about agents out of service."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from podrun.core.terminal import fields, table
from podrun.partition.commands import partitions
from podrun.partition.commands.common import (
    HELP_OPTIONS,
    CliContext,
    SuggestingGroup,
    global_options,
    open_context,
    run,
)
from podrun.partition.state.codec import to_json

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient

NOT_KNOWN = "not known: what is in the way has no time limit"


@click.command("queue")
@click.pass_obj
def list_queue(cli: CliContext) -> None:
    """List requests that wait for IPUs, in the order in which they are served."""

    def once(client: VipuClient) -> None:
        found = client.list_queue()
        rows = (
            (
                str(info.position),
                info.name,
                str(info.size),
                str(info.priority),
                info.owner,
                moment(info.since),
                "-" if info.latest is None else moment(info.latest),
                " ".join(info.blockers) or "-",
            )
            for info in found
        )
        header = ("Position", "Partition", "Size", "Priority", "User", "Since", "Starts by", "Waits for")
        cli.show("queue", [to_json(info) for info in found], lambda: table(header, rows))

    cli.repeat(("partition",), once)


@click.command("explain")
@click.argument("name")
@click.pass_obj
def explain(cli: CliContext, name: str) -> None:
    """Say what a request waits for and when it starts at the latest, or what a partition is doing."""

    def once(client: VipuClient) -> None:
        waiting = {info.name: info for info in client.list_queue()}
        partition = None if name in waiting else client.get_partition(name)
        if partition is not None:
            from podrun.partition.commands.partitions import partition_fields

            cli.show("partition", to_json(partition), lambda: fields(partition_fields(partition)))
            return
        info = waiting[name]
        rows = [
            ("Partition", f"{info.name} ({info.size} IPUs), not there yet"),
            ("Waits since", moment(info.since)),
            ("Position", f"{info.position} of {len(waiting)} (priority {info.priority})"),
            ("Behind", " ".join(info.ahead) or "-"),
            ("Waits for", " ".join(info.blockers) or "-"),
            ("Starts by", NOT_KNOWN if info.latest is None else moment(info.latest)),
        ]
        cli.show("request", to_json(info), lambda: fields(rows))

    cli.repeat(("partition",), once, name)


@click.command("reservations")
@click.pass_obj
def list_reservations(cli: CliContext) -> None:
    """List reservations of agents."""

    def once(client: VipuClient) -> None:
        found = client.list_reservations()
        rows = ((r.name, " ".join(r.agents), moment(r.start), moment(r.end)) for r in found)
        cli.show(
            "reservations",
            [to_json(entry) for entry in found],
            lambda: table(("Reservation", "Agents", "From", "To"), rows),
        )

    cli.repeat(("reservation",), once)


@click.command("reservation")
@click.argument("name")
@click.option("--agents", required=True, metavar="A,B,...", help="Agents, separated by commas.")
@click.option("--begin-in", type=click.FloatRange(0), default=0.0, metavar="SECONDS", help="From now [0].")
@click.option(
    "--for", "seconds", type=click.FloatRange(1), required=True, metavar="SECONDS", help="How long."
)
@click.pass_obj
def create_reservation(cli: CliContext, name: str, agents: str, begin_in: float, seconds: float) -> None:
    """Keep agents for partitions created with --reservation NAME."""
    with cli.client() as client:
        names = [agent.strip() for agent in agents.split(",") if agent.strip()]
        client.create_reservation(name, names, begin_in_s=begin_in, for_s=seconds)
    cli.show("created", name, lambda: f"create reservation ({name}): success.")


@click.command("agent")
@click.argument("name")
@click.option("--reason", default="", help="Shown in the list of agents.")
@click.pass_obj
def cordon_agent(cli: CliContext, name: str, reason: str) -> None:
    """Make no new partitions on an agent; those on it stay."""
    with cli.client() as client:
        client.set_maintenance(name, reason=reason)
    cli.show("cordoned", name, lambda: f"cordon agent ({name}): success.")


@click.command("agent")
@click.argument("name")
@click.option(
    "--deadline",
    type=click.FloatRange(0),
    default=0.0,
    metavar="SECONDS",
    help="Then remove the partitions on it, or move them if they are relocatable [never].",
)
@click.option("--reason", default="", help="Shown in the list of agents.")
@click.pass_obj
def drain_agent(cli: CliContext, name: str, deadline: float, reason: str) -> None:
    """Make no new partitions on an agent, and end those on it at the deadline."""
    with cli.client() as client:
        client.set_maintenance(name, drain=True, deadline_s=deadline, reason=reason)
    cli.show("draining", name, lambda: f"drain agent ({name}): success.")


def moment(seconds: float) -> str:
    """A time as people read it, UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def add_user_commands(root: click.Group) -> dict[str, click.Group]:
    """Give a root command the verbs of `vipu`; returns them by name, for `vipu-admin` to add to."""
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
    verbs["create"].add_command(partitions.create_partition)
    verbs["list"].add_command(partitions.list_partitions)
    verbs["list"].add_command(partitions.list_allocations)
    verbs["list"].add_command(partitions.list_clusters)
    verbs["list"].add_command(partitions.list_ipu_attrs)
    verbs["list"].add_command(list_queue)
    verbs["list"].add_command(list_reservations)
    verbs["get"].add_command(partitions.get_partition)
    verbs["reset"].add_command(partitions.reset_partition)
    verbs["remove"].add_command(partitions.remove_partition)
    root.add_command(explain)
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
