"""`vipu-admin`: what `vipu` does, and verbs about agents, allocations and faults."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podrun.core.terminal import fields, table
from podrun.partition.commands.common import (
    HELP_OPTIONS,
    CliContext,
    SuggestingGroup,
    global_options,
    open_context,
    run,
    write_account,
)
from podrun.partition.commands.vipu import (
    add_user_commands,
    cordon_agent,
    create_reservation,
    drain_agent,
    moment,
)
from podrun.partition.state.codec import to_json
from podrun.partition.state.values import agent_json

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient
    from podrun.partition.state.values import AgentInfo


@click.group(
    cls=SuggestingGroup,
    aliases={"delete": "remove"},
    refused={"discover": "The POD's agents are all there: vipu-admin list agents"},
    context_settings=HELP_OPTIONS,
    invoke_without_command=True,
)
@click.version_option(package_name="podrun", prog_name="vipu-admin")
@global_options
@click.pass_context
def vipu_admin(ctx: click.Context, /, **options: Any) -> None:
    """Administer an emulated IPU-POD: agents, allocations, partitions, faults.

    Example: vipu-admin restart agent ipum2
    """
    open_context(ctx, **options)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@click.command("agents")
@click.pass_obj
def list_agents(cli: CliContext) -> None:
    """List agents, one for each IPU-M2000."""

    def once(client: VipuClient) -> None:
        found = client.list_agents()
        cli.show(
            "agents",
            [agent_json(info) for info in found],
            lambda: table(
                ("Agent", "Host", "Serial", "Cluster", "ILD", "State", "Partitions", "Health"),
                (agent_row(info) for info in found),
            ),
        )

    cli.repeat(("machine",), once)


@click.command("agent")
@click.argument("name")
@click.pass_obj
def get_agent(cli: CliContext, name: str) -> None:
    """Show one agent."""
    from podrun.partition.state.requirements import unknown_name

    def once(client: VipuClient) -> None:
        agents = {info.agent_id: info for info in client.list_agents()}
        info = agents.get(name)
        if info is None:
            raise unknown_name("agent", name, agents, "vipu-admin list agents")
        cli.show("agent", agent_json(info), lambda: fields(agent_fields(info)))

    cli.repeat(("machine",), once, name)


def agent_fields(info: AgentInfo) -> list[tuple[str, str]]:
    """An agent as names and values."""
    return [
        ("Agent ID", info.agent_id),
        ("Host", info.host),
        ("Port", str(info.port)),
        ("Status", info.state.name.capitalize()),
        ("Health", _health(info)),
        ("Board serial number", info.serial),
        ("Num of IPUs", str(info.num_ipus)),
        ("Cluster", info.cluster or "-"),
        ("ILD", _ild(info)),
        ("Partitions", " ".join(info.partitions) or "-"),
        ("Endpoints", " ".join(info.endpoints) or "-"),
    ]


def _ild(info: AgentInfo) -> str:
    return str(info.ild) if info.cluster else "-"


@click.command("allocation")
@click.argument("name")
@click.option("--agents", required=True, metavar="A,B,...", help="Agents, separated by commas.")
@click.pass_obj
def create_allocation(cli: CliContext, name: str, agents: str) -> None:
    """Create an allocation of agents that are in no other one."""
    with cli.client() as client:
        client.create_allocation(name, [agent.strip() for agent in agents.split(",") if agent.strip()])
    cli.show("created", name, lambda: f"create allocation ({name}): success.")


@click.command("agent")
@click.argument("name")
@click.option("--host", required=True, help="Its address in the POD, which tools show.")
@click.option("--port", type=click.IntRange(1, 65535), default=8080, help="Its port there [8080].")
@click.pass_obj
def create_agent(cli: CliContext, name: str, host: str, port: int) -> None:
    """Add an IPU-M2000. It is in no cluster: put it into one next (create cluster)."""
    with cli.client() as client:
        client.create_agent(name, host, port)
    cli.show("created", name, lambda: f"create agent ({name}): success.")


@click.command("cluster")
@click.argument("name")
@click.option("--agents", required=True, metavar="A,B,...", help="Agents, in the order of their links.")
@click.option("--num-ipulinkdomains", type=click.IntRange(1), default=1, help="IPU-Link domains [1].")
@click.option("--topology", default="mesh", help="IPU-Links: mesh or torus [mesh].")
@click.option("--cluster-topology", default="", help="GW-Links between domains: looped [if several].")
@click.pass_obj
def create_cluster(
    cli: CliContext, name: str, agents: str, num_ipulinkdomains: int, topology: str, cluster_topology: str
) -> None:
    """Create a cluster of agents that are in no other one, and an allocation of the same name."""
    with cli.client() as client:
        client.create_cluster(
            name,
            [agent.strip() for agent in agents.split(",") if agent.strip()],
            ilds=num_ipulinkdomains,
            ipu_links=topology,
            gateway=cluster_topology,
        )
    cli.show("created", name, lambda: f"create cluster ({name}): success.")


@click.command("fault")
@click.argument("partition")
@click.argument("faults", nargs=-1, required=True, metavar="SPEC...")
@click.pass_obj
def inject_fault(cli: CliContext, partition: str, faults: tuple[str, ...]) -> None:
    """Plan faults on a partition, such as ipu:5@batch=17:tile-parity."""
    with cli.client() as client:
        client.inject_faults(partition, faults)
    cli.show("injected", list(faults), lambda: f"inject fault ({partition}): success.")


@click.command("user")
@click.argument("name")
@click.option("--role", default="user", help="viewer, user, operator or admin [user].")
@click.option("--allocations", default="", metavar="A,B,...", help="Whose partitions it may use [all].")
@click.option("--may-inject", is_flag=True, help="May inject faults.")
@click.pass_obj
def create_user(cli: CliContext, name: str, role: str, allocations: str, may_inject: bool) -> None:
    """Create a user of a server that was started with --secure, and a file for its commands."""
    with cli.client() as client:
        names = [text.strip() for text in allocations.split(",") if text.strip()]
        key = client.create_user(name, role, names, may_inject=may_inject)
        where = cli.endpoint()
    path = Path(f"{name}.vipu-cli.hcl")
    again = f"The user was made. Remove it and try elsewhere: vipu-admin remove user {name}"
    write_account(path, where.host, where.port, (name, key), again)
    cli.show(
        "user",
        {"id": name, "role": role, "allocations": names, "access_key": key, "config": str(path)},
        lambda: (
            f"create user ({name}): success.\naccess key: {key}\nUse it: vipu --config {path} list partitions"
        ),
    )


@click.command("users")
@click.pass_obj
def list_users(cli: CliContext) -> None:
    """List the users of a server that was started with --secure."""

    def once(client: VipuClient) -> None:
        found = client.list_users()
        rows = (
            (
                u.name,
                u.role,
                " ".join(u.allocations) or "all",
                "yes" if u.may_inject else "no",
                moment(u.created),
            )
            for u in found
        )
        cli.show(
            "users",
            [to_json(user) for user in found],
            lambda: table(("User", "Role", "Allocations", "May inject", "Since"), rows),
        )

    cli.repeat(("user",), once)


def _health(info: AgentInfo) -> str:
    """Health with what is known about it."""
    parts = [info.health]
    if info.stale_seconds is not None:
        parts.append(f"no answer for {info.stale_seconds:.0f} s")
    if info.reason:
        parts.append(info.reason)
    if info.deadline:
        parts.append(f"until {moment(info.deadline)}")
    return ", ".join(parts)


def agent_row(info: AgentInfo) -> tuple[str, ...]:
    """An agent as a row of `list agents`."""
    return (
        info.agent_id,
        info.host,
        info.serial,
        info.cluster or "-",
        _ild(info),
        info.state.name,
        " ".join(info.partitions),
        info.health,
    )


def _named(
    verb: str, noun: str, done: str, help_text: str, ask: Callable[[VipuClient, str], None]
) -> click.Command:
    """A command with one argument, the name of the object on which the server acts."""

    @click.command(noun, help=help_text)
    @click.argument("name")
    @click.pass_obj
    def command(cli: CliContext, name: str) -> None:
        with cli.client() as client:
            ask(client, name)
        cli.show(done, name, lambda: f"{verb} {noun} ({name}): success.")

    return command


def _on_agent(
    verb: str, done: str, help_text: str, ask: Callable[[VipuClient, str, int], None]
) -> click.Command:
    """A command that acts on an agent once for each generation of its partitions."""

    @click.command("agent", help=help_text)
    @click.argument("name")
    @click.option(
        "--generation",
        type=click.IntRange(min=0),
        default=0,
        show_default=False,
        metavar="N",
        help="Leave it alone if all its partitions have been reset since this generation (vipu get partition).",
    )
    @click.pass_obj
    def command(cli: CliContext, name: str, generation: int) -> None:
        with cli.client() as client:
            ask(client, name, generation)
        cli.show(done, name, lambda: f"{verb} agent ({name}): success.")

    return command


remove_user = _named(
    "remove",
    "user",
    "removed",
    "Remove a user; its access key becomes invalid.",
    lambda client, name: client.remove_user(name),
)
remove_agent = _named(
    "remove",
    "agent",
    "removed",
    "Remove an IPU-M2000 that is in no cluster.",
    lambda client, name: client.remove_agent(name),
)
remove_cluster = _named(
    "remove",
    "cluster",
    "removed",
    "Remove a cluster without partitions, and the allocation of its name.",
    lambda client, name: client.remove_cluster(name),
)
remove_reservation = _named(
    "remove",
    "reservation",
    "removed",
    "End a reservation; partitions in it stay.",
    lambda client, name: client.remove_reservation(name),
)
return_agent = _named(
    "return",
    "agent",
    "returned",
    "Return an agent that is cordoned or draining to service.",
    lambda client, name: client.end_maintenance(name),
)
remove_allocation = _named(
    "remove",
    "allocation",
    "removed",
    "Remove an allocation that has no partitions.",
    lambda client, name: client.remove_allocation(name),
)
power_cycle_agent = _on_agent(
    "power-cycle",
    "power_cycled",
    "Power-cycle an IPU-M2000. Its partitions need a reset afterwards.",
    lambda client, name, generation: client.power_cycle_agent(name, generation),
)
restart_agent = _on_agent(
    "restart",
    "restarted",
    "Replace a lost machine by a fresh one. Its partitions need a reset afterwards.",
    lambda client, name, generation: client.restart_agent(name, generation),
)


def _verb(name: str, help_text: str, command: click.Command, alias: str) -> None:
    group = SuggestingGroup(name, help=help_text, aliases={alias: command.name or ""})
    group.add_command(command)
    vipu_admin.add_command(group)


_verbs = add_user_commands(vipu_admin)
_verbs["list"].add_command(list_agents)
_verbs["get"].add_command(get_agent)
_verbs["create"].add_command(create_allocation)
_verbs["remove"].add_command(remove_allocation)
_verbs["create"].add_command(create_agent)
_verbs["create"].add_command(create_cluster)
_verbs["remove"].add_command(remove_agent)
_verbs["remove"].add_command(remove_cluster)
_verbs["create"].add_command(create_user)
_verbs["remove"].add_command(remove_user)
_verbs["list"].add_command(list_users)
_verbs["create"].add_command(create_reservation)
_verbs["remove"].add_command(remove_reservation)
_verb("cordon", "Keep new partitions off an agent.", cordon_agent, "agents")
_verb("drain", "Empty an agent.", drain_agent, "agents")
_verb("return", "Return an agent to service.", return_agent, "agents")
_verb("power-cycle", "Power-cycle a machine.", power_cycle_agent, "agents")
_verb("restart", "Replace a lost machine.", restart_agent, "agents")
_verb("inject", "Inject a fault.", inject_fault, "faults")


def main() -> None:
    """Entry point of `vipu-admin`."""
    sys.exit(run(vipu_admin))


if __name__ == "__main__":
    main()
