"""`vipu-admin`: what `vipu` does, and agents, allocations and faults besides."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from podrun.partition.cli_common import Session, SuggestingGroup, open_session, run, session_options
from podrun.partition.cli_user import NAMES, add_user_commands
from podrun.partition.tables import fields, table

if TYPE_CHECKING:
    from podrun.partition.client import VipuClient
    from podrun.partition.types import AgentInfo


@click.group(
    cls=SuggestingGroup,
    aliases={"delete": "remove"},
    refused={"discover": "The POD's agents are all there: vipu-admin list agents"},
    context_settings=NAMES,
    invoke_without_command=True,
)
@click.version_option(package_name="podrun", prog_name="vipu-admin")
@session_options
@click.pass_context
def vipu_admin(ctx: click.Context, /, **options: Any) -> None:
    """Administer an emulated IPU-POD: agents, allocations, partitions, faults.

    Example: vipu-admin restart agent ipum2
    """
    open_session(ctx, **options)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@click.command("agents")
@click.pass_obj
def list_agents(session: Session) -> None:
    """List agents, one for each IPU-M2000."""
    with session.client() as client:
        found = client.list_agents()
    session.show(
        "agents",
        [agent_json(info) for info in found],
        lambda: table(
            ("Agent", "Host", "Serial", "ILD", "State", "Partitions"), (agent_row(info) for info in found)
        ),
    )


@click.command("agent")
@click.argument("name")
@click.pass_obj
def get_agent(session: Session, name: str) -> None:
    """Show one agent."""
    from podrun.errors import NotFoundError

    with session.client() as client:
        agents = {info.agent_id: info for info in client.list_agents()}
    info = agents.get(name)
    if info is None:
        raise NotFoundError(f"there is no agent {name!r}", hint=f"There are: {', '.join(agents)}.")
    rows = [
        ("Agent ID", info.agent_id),
        ("Host", info.host),
        ("Port", str(info.port)),
        ("Status", info.state.name.capitalize()),
        ("Board serial number", info.serial),
        ("Num of IPUs", str(info.num_ipus)),
        ("ILD", str(info.ild)),
        ("Partitions", " ".join(info.partitions) or "-"),
        ("Endpoints", " ".join(info.endpoints) or "-"),
    ]
    session.show("agent", agent_json(info), lambda: fields(rows))


@click.command("allocation")
@click.argument("name")
@click.option("--agents", required=True, metavar="A,B,...", help="Agents, separated by commas.")
@click.pass_obj
def create_allocation(session: Session, name: str, agents: str) -> None:
    """Create an allocation of agents that are in no other one."""
    with session.client() as client:
        client.create_allocation(name, [agent.strip() for agent in agents.split(",") if agent.strip()])
    session.show("created", name, lambda: f"create allocation ({name}): success.")


@click.command("fault")
@click.argument("partition")
@click.argument("faults", nargs=-1, required=True, metavar="SPEC...")
@click.pass_obj
def inject_fault(session: Session, partition: str, faults: tuple[str, ...]) -> None:
    """Plan faults on a partition, such as ipu:5@step=17:tile-parity."""
    with session.client() as client:
        client.inject_faults(partition, faults)
    session.show("injected", list(faults), lambda: f"inject fault ({partition}): success.")


def agent_row(info: AgentInfo) -> tuple[str, ...]:
    """An agent as a row of `list agents`."""
    return (info.agent_id, info.host, info.serial, str(info.ild), info.state.name, " ".join(info.partitions))


def agent_json(info: AgentInfo) -> dict[str, Any]:
    """An agent for --format json."""
    return {
        "id": info.agent_id,
        "host": info.host,
        "port": info.port,
        "serial": info.serial,
        "state": info.state.name,
        "ild": info.ild,
        "num_ipus": info.num_ipus,
        "partitions": list(info.partitions),
        "endpoints": list(info.endpoints),
    }


def _named(
    verb: str, noun: str, done: str, help_text: str, ask: Callable[[VipuClient, str], None]
) -> click.Command:
    """A command that asks the server to do something to the thing of that name."""

    @click.command(noun, help=help_text)
    @click.argument("name")
    @click.pass_obj
    def command(session: Session, name: str) -> None:
        with session.client() as client:
            ask(client, name)
        session.show(done, name, lambda: f"{verb} {noun} ({name}): success.")

    return command


def _verb(name: str, help_text: str, command: click.Command, alias: str) -> None:
    group = SuggestingGroup(name, help=help_text, aliases={alias: command.name or ""})
    group.add_command(command)
    vipu_admin.add_command(group)


remove_allocation = _named(
    "remove",
    "allocation",
    "removed",
    "Remove an allocation that has no partitions.",
    lambda client, name: client.remove_allocation(name),
)
power_cycle_agent = _named(
    "power-cycle",
    "agent",
    "power_cycled",
    "Power-cycle an IPU-M2000. Its partitions need a reset afterwards.",
    lambda client, name: client.power_cycle_agent(name),
)
restart_agent = _named(
    "restart",
    "agent",
    "restarted",
    "Replace a lost machine by a fresh one. Its partitions need a reset afterwards.",
    lambda client, name: client.restart_agent(name),
)

_POD = "Agents and IPU-Link domains are those of the POD: vipu-server --cluster FILE"
_verbs = add_user_commands(
    vipu_admin,
    {
        "agent": _POD,
        "cluster": _POD,
        "user": "The server knows no users; allocations divide the agents: vipu-admin create allocation NAME",
    },
)
_verbs["list"].add_command(list_agents)
_verbs["get"].add_command(get_agent)
_verbs["create"].add_command(create_allocation)
_verbs["remove"].add_command(remove_allocation)
_verb("power-cycle", "Power-cycle a machine.", power_cycle_agent, "agents")
_verb("restart", "Replace a lost machine.", restart_agent, "agents")
_verb("inject", "Make something go wrong.", inject_fault, "faults")


def main() -> None:
    """Entry point of `vipu-admin`."""
    sys.exit(run(vipu_admin))


if __name__ == "__main__":
    main()
