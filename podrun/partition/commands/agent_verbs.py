"""Verbs of administrators about machines: cordon, drain and return; power-cycle and restart; inject."""

from __future__ import annotations

import click

from podrun.core.command_line import seconds_range
from podrun.partition.commands.context import CliContext
from podrun.partition.commands.shared_options import command_on_agent, command_on_name

_AT_ONCE_S = 1e-3
"""For a deadline of 0 seconds, which on the wire means none."""


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
    type=seconds_range(),
    metavar="SECONDS",
    help="Then remove the partitions on it, or move them if they are relocatable [never].",
)
@click.option("--reason", default="", help="Shown in the list of agents.")
@click.pass_obj
def drain_agent(cli: CliContext, name: str, deadline: float | None, reason: str) -> None:
    """Make no new partitions on an agent, and end those on it at the deadline."""
    seconds = 0.0 if deadline is None else max(deadline, _AT_ONCE_S)
    with cli.client() as client:
        client.set_maintenance(name, drain=True, deadline_s=seconds, reason=reason)
    cli.show("draining", name, lambda: f"drain agent ({name}): success.")


@click.command("fault")
@click.argument("partition")
@click.argument("faults", nargs=-1, required=True, metavar="SPEC...")
@click.pass_obj
def inject_fault(cli: CliContext, partition: str, faults: tuple[str, ...]) -> None:
    """Plan faults on a partition, such as ipu:5@batch=17:tile-parity."""
    with cli.client() as client:
        client.inject_faults(partition, faults)
    cli.show("injected", list(faults), lambda: f"inject fault ({partition}): success.")


return_agent = command_on_name(
    "return",
    "agent",
    "returned",
    "Return an agent that is cordoned or draining to service.",
    lambda client, name: client.end_maintenance(name),
)
power_cycle_agent = command_on_agent(
    "power-cycle",
    "power_cycled",
    "Power-cycle an IPU-M2000. Its partitions need a reset afterwards.",
    lambda client, name, generation: client.power_cycle_agent(name, generation),
)


restart_agent = command_on_agent(
    "restart",
    "restarted",
    "Replace a lost machine by a fresh one. Its partitions need a reset afterwards.",
    lambda client, name, generation: client.restart_agent(name, generation),
)
