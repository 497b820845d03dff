"""The verb ``list``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from podrun.core.identity import user_name
from podrun.core.terminal import text_table
from podrun.partition.commands.context import CliContext
from podrun.partition.commands.rows import PARTITION_COLUMNS, agent_row, moment, partition_row
from podrun.partition.state.codec import value_to_json
from podrun.partition.state.values import agent_json

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient


@click.command("partitions")
@click.pass_obj
def list_partitions(cli: CliContext) -> None:
    """List all partitions."""

    def once(client: VipuClient) -> None:
        partitions = client.list_partitions()
        several = len({info.owner for info in partitions} | {user_name(os.getuid())}) > 1
        cli.show(
            "partitions",
            [value_to_json(info) for info in partitions],
            lambda: text_table(
                (*PARTITION_COLUMNS, *(["Owner"] * several)),
                ((*partition_row(info), *([info.owner] * several)) for info in partitions),
            ),
        )

    cli.repeat(("partition",), once)


@click.command("allocations")
@click.pass_obj
def list_allocations(cli: CliContext) -> None:
    """List allocations: agents that users have access to."""

    def once(client: VipuClient) -> None:
        allocations = client.list_allocations()
        cli.show(
            "allocations",
            [value_to_json(info) for info in allocations],
            lambda: text_table(
                ("Allocation ID", "Agents"), ((info.name, " ".join(info.agents)) for info in allocations)
            ),
        )

    cli.repeat(("allocation",), once)


@click.command("clusters")
@click.pass_obj
def list_clusters(cli: CliContext) -> None:
    """List clusters: agents that links join."""

    def once(client: VipuClient) -> None:
        clusters = client.list_clusters()
        rows = (
            (
                info.name,
                str(info.num_ipus // info.ipu_link_domain_size),
                str(info.num_ipus),
                info.ipu_link_topology,
                info.gateway_topology,
                " ".join(info.agents),
            )
            for info in clusters
        )
        header = ("Cluster", "ILDs", "IPUs", "Topology", "GW Topology", "Agents")
        cli.show("clusters", [value_to_json(info) for info in clusters], lambda: text_table(header, rows))

    cli.repeat(("cluster",), once)


@click.command("ipu-attrs")
@click.pass_obj
def list_ipu_attrs(cli: CliContext) -> None:
    """List attributes of all IPUs."""
    from podrun.partition.client.device_attributes import ipu_attributes

    def once(client: VipuClient) -> None:
        numbers = {
            (info.name, device.partition_ipu): device.ipu_number
            for info in client.list_partitions()
            for gcd in range(info.num_gcds)
            for device in client.ipuof_config(info.name, gcd).devices
        }
        groups = ipu_attributes(client.machine_reports(), numbers)
        rows = []
        for group in groups:
            for i, (key, value) in enumerate(group.values.items()):
                first = i == 0
                rows.append((group.agent if first else "", str(group.ipu) if first else "", key, value))
        cli.show(
            "ipus",
            [{"agent": group.agent, "ipu": group.ipu, "attributes": dict(group.values)} for group in groups],
            lambda: text_table(("Agent", "IPU", "Attribute", "Value"), rows),
        )

    cli.repeat(("partition", "machine"), once)


@click.command("queue")
@click.pass_obj
def list_queue(cli: CliContext) -> None:
    """List requests that wait for IPUs, in the order in which they are served."""

    def once(client: VipuClient) -> None:
        requests = client.list_queue()
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
            for info in requests
        )
        header = ("Position", "Partition", "Size", "Priority", "User", "Since", "Starts by", "Waits for")
        cli.show("queue", [value_to_json(info) for info in requests], lambda: text_table(header, rows))

    cli.repeat(("partition",), once)


@click.command("reservations")
@click.pass_obj
def list_reservations(cli: CliContext) -> None:
    """List reservations of agents."""

    def once(client: VipuClient) -> None:
        reservations = client.list_reservations()
        rows = ((r.name, " ".join(r.agents), moment(r.start), moment(r.end)) for r in reservations)
        cli.show(
            "reservations",
            [value_to_json(entry) for entry in reservations],
            lambda: text_table(("Reservation", "Agents", "From", "To"), rows),
        )

    cli.repeat(("reservation",), once)


@click.command("agents")
@click.pass_obj
def list_agents(cli: CliContext) -> None:
    """List agents, one for each IPU-M2000."""

    def once(client: VipuClient) -> None:
        agents = client.list_agents()
        cli.show(
            "agents",
            [agent_json(info) for info in agents],
            lambda: text_table(
                ("Agent", "Host", "Serial", "Cluster", "ILD", "State", "Partitions", "Health"),
                (agent_row(info) for info in agents),
            ),
        )

    cli.repeat(("machine",), once)


@click.command("users")
@click.pass_obj
def list_users(cli: CliContext) -> None:
    """List the users of a server that was started with --secure."""

    def once(client: VipuClient) -> None:
        users = client.list_users()
        rows = (
            (
                u.name,
                u.role,
                " ".join(u.allocations) or "all",
                "yes" if u.may_inject else "no",
                moment(u.created),
            )
            for u in users
        )
        cli.show(
            "users",
            [value_to_json(user) for user in users],
            lambda: text_table(("User", "Role", "Allocations", "May inject", "Since"), rows),
        )

    cli.repeat(("user",), once)
