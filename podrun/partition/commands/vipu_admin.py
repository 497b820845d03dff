"""`vipu-admin`: what `vipu` does, and verbs about agents, allocations and faults."""

from __future__ import annotations

import click

from podrun.core.command_line import HELP_OPTIONS, SuggestingGroup
from podrun.partition.commands.agent_verbs import (
    cordon_agent,
    drain_agent,
    inject_fault,
    power_cycle_agent,
    restart_agent,
    return_agent,
)
from podrun.partition.commands.context import open_context
from podrun.partition.commands.create import (
    create_agent_verb,
    create_allocation,
    create_cluster_verb,
    create_reservation_verb,
    create_user,
)
from podrun.partition.commands.get import get_agent
from podrun.partition.commands.listing import list_agents, list_users
from podrun.partition.commands.remove import (
    remove_agent_verb,
    remove_allocation,
    remove_cluster_verb,
    remove_reservation_verb,
    remove_user,
)
from podrun.partition.commands.shared_options import global_options
from podrun.partition.commands.vipu import add_user_commands


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
def vipu_admin_command(ctx: click.Context, /, **options: object) -> None:
    """Administer an emulated IPU-POD: agents, allocations, partitions, faults.

    Example: vipu-admin restart agent ipum2
    """
    open_context(ctx, **options)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


_verbs = add_user_commands(vipu_admin_command)
for _verb, _commands in {
    "list": (list_agents, list_users),
    "get": (get_agent,),
    "create": (
        create_allocation,
        create_agent_verb,
        create_cluster_verb,
        create_user,
        create_reservation_verb,
    ),
    "remove": (
        remove_allocation,
        remove_agent_verb,
        remove_cluster_verb,
        remove_user,
        remove_reservation_verb,
    ),
}.items():
    for _command in _commands:
        _verbs[_verb].add_command(_command)
for _verb, _help, _command, _alias in (
    ("cordon", "Keep new partitions off an agent.", cordon_agent, "agents"),
    ("drain", "Empty an agent.", drain_agent, "agents"),
    ("return", "Return an agent to service.", return_agent, "agents"),
    ("power-cycle", "Power-cycle a machine.", power_cycle_agent, "agents"),
    ("restart", "Replace a lost machine.", restart_agent, "agents"),
    ("inject", "Inject a fault.", inject_fault, "faults"),
):
    _group = SuggestingGroup(_verb, help=_help, aliases={_alias: _command.name or ""})
    _group.add_command(_command)
    vipu_admin_command.add_command(_group)
