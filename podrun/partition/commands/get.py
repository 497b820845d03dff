"""The verbs ``get`` and ``explain``: one partition, its IPUoF configuration, one agent; what a request waits for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from podrun.core.terminal import fields
from podrun.partition.commands.context import CliContext, partition_names
from podrun.partition.commands.rows import agent_fields, moment, partition_fields
from podrun.partition.host.ipuof_files import (
    ipuof_json,
)
from podrun.partition.state.codec import value_to_json
from podrun.partition.state.values import agent_json

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient


@click.command("partition")
@click.argument("name", shell_complete=partition_names)
@click.option("--gcd", type=click.IntRange(0), help="Only this GCD.")
@click.option("--ipuof-configs", is_flag=True, help="Print the IPUoF configuration as JSON.")
@click.pass_obj
def get_partition(cli: CliContext, name: str, gcd: int | None, ipuof_configs: bool) -> None:
    """Show one partition, or its IPUoF configuration."""

    def once(client: VipuClient) -> None:
        info = client.get_partition(name)
        gcds = range(info.num_gcds) if gcd is None else (gcd,)
        configs = [client.ipuof_config(name, i) for i in gcds] if ipuof_configs or gcd is not None else []
        if configs:
            plain = [ipuof_json(config) for config in configs]
            texts = [
                f"IPUoF configuration of partition {name}, GCD {i}:\n{json.dumps(config, indent=2)}"
                for i, config in zip(gcds, plain, strict=True)
            ]
            cli.show("ipuof_configs", plain, lambda: "\n".join(texts))
        else:
            cli.show("partition", value_to_json(info), lambda: fields(partition_fields(info)))

    cli.repeat(("partition",), once, name)


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


NOT_KNOWN = "not known: what is in the way has no time limit"


@click.command("explain")
@click.argument("name")
@click.pass_obj
def explain(cli: CliContext, name: str) -> None:
    """Say what a request waits for and when it starts at the latest, or what a partition is doing."""

    def once(client: VipuClient) -> None:
        waiting = {info.name: info for info in client.list_queue()}
        partition = None if name in waiting else client.get_partition(name)
        if partition is not None:
            from podrun.partition.commands.rows import partition_fields

            cli.show("partition", value_to_json(partition), lambda: fields(partition_fields(partition)))
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
        cli.show("request", value_to_json(info), lambda: fields(rows))

    cli.repeat(("partition",), once, name)
