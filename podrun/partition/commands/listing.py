"""The verb ``list``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import click

from podrun.core.identity import user_name
from podrun.core.terminal import text_table
from podrun.partition.commands.context import CliContext
from podrun.partition.commands.rows import PARTITION_COLUMNS, agent_row, moment, partition_row
from podrun.partition.state.codec import value_to_json
from podrun.partition.state.values import (
    AllocationInfo,
    ClusterInfo,
    QueueInfo,
    ReservationInfo,
    UserInfo,
    agent_json,
)

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient

Entry = TypeVar("Entry")
_Row = Sequence[str]


def _listing(
    noun: str,
    help_text: str,
    kind: str,
    ask: Callable[[VipuClient], list[Entry]],
    table: tuple[_Row, Callable[[Entry], _Row]],
    plain: Callable[[Entry], object] = value_to_json,
) -> click.Command:
    """A command that prints what ``ask`` answers: with ``table`` (the header, and the row of an entry), or ``plain`` in
    a list under ``noun``. With --watch it does so after each change of a kind.
    """
    header, row = table

    @click.command(noun, help=help_text)
    @click.pass_obj
    def command(cli: CliContext) -> None:
        def once(client: VipuClient) -> None:
            entries = ask(client)
            plain_entries = [plain(entry) for entry in entries]
            cli.show(noun, plain_entries, lambda: text_table(header, map(row, entries)))

        cli.repeat((kind,), once)

    return command


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


def _cluster_row(info: ClusterInfo) -> _Row:
    ilds = str(info.num_ipus // info.ipu_link_domain_size)
    links = (info.ipu_link_topology, info.gateway_topology)
    return (info.name, ilds, str(info.num_ipus), *links, " ".join(info.agents))


def _queue_row(info: QueueInfo) -> _Row:
    latest = "-" if info.latest is None else moment(info.latest)
    numbers = (str(info.size), str(info.priority))
    blockers = " ".join(info.blockers) or "-"
    return (str(info.position), info.name, *numbers, info.owner, moment(info.since), latest, blockers)


def _allocation_row(info: AllocationInfo) -> _Row:
    return (info.name, " ".join(info.agents))


def _reservation_row(info: ReservationInfo) -> _Row:
    return (info.name, " ".join(info.agents), moment(info.start), moment(info.end))


def _user_row(user: UserInfo) -> _Row:
    may_inject = "yes" if user.may_inject else "no"
    return (user.name, user.role, " ".join(user.allocations) or "all", may_inject, moment(user.created))


list_allocations = _listing(
    "allocations",
    "List allocations: agents that users have access to.",
    "allocation",
    lambda client: client.list_allocations(),
    (("Allocation ID", "Agents"), _allocation_row),
)
list_clusters = _listing(
    "clusters",
    "List clusters: agents that links join.",
    "cluster",
    lambda client: client.list_clusters(),
    (("Cluster", "ILDs", "IPUs", "Topology", "GW Topology", "Agents"), _cluster_row),
)
list_queue = _listing(
    "queue",
    "List requests that wait for IPUs, in the order in which they are served.",
    "partition",
    lambda client: client.list_queue(),
    (("Position", "Partition", "Size", "Priority", "User", "Since", "Starts by", "Waits for"), _queue_row),
)
list_reservations = _listing(
    "reservations",
    "List reservations of agents.",
    "reservation",
    lambda client: client.list_reservations(),
    (("Reservation", "Agents", "From", "To"), _reservation_row),
)
list_agents = _listing(
    "agents",
    "List agents, one for each IPU-M2000.",
    "machine",
    lambda client: client.list_agents(),
    (("Agent", "Host", "Serial", "Cluster", "ILD", "State", "Partitions", "Health"), agent_row),
    agent_json,
)
list_users = _listing(
    "users",
    "List the users of a server that was started with --secure.",
    "user",
    lambda client: client.list_users(),
    (("User", "Role", "Allocations", "May inject", "Since"), _user_row),
)
