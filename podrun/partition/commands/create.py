"""The verb ``create``: partitions, reservations, and for administrators allocations, agents, clusters, users."""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podrun.core.command_line import seconds_range
from podrun.core.errors import PodrunError, UsageError
from podrun.faults import parse_fault
from podrun.partition.commands.context import CliContext
from podrun.partition.commands.shared_options import names_in
from podrun.partition.commands.which_server import write_account
from podrun.partition.host.holders import this_holder
from podrun.partition.host.ipuof_files import (
    ipuof_directory,
    read_mark,
    remove_dead,
    write_config,
)
from podrun.partition.state.codec import value_to_json

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient
    from podrun.partition.state.values import PartitionInfo


@click.command("partition")
@click.argument("name")
@click.option("--size", type=int, required=True, help="IPUs: a power of two.")
@click.option("--reconfigurable", is_flag=True, help="Expose every power-of-two sub-device.")
@click.option("--allocation", help="Allocation to take the IPUs from.")
@click.option("--cluster", help="Cluster to take the IPUs from (or an allocation: its old name).")
@click.option("--num-gcds", type=int, default=1, help="Graph compilation domains [1].")
@click.option("--num-ilds", type=int, default=0, help="IPU-Link domains [as few as possible].")
@click.option(
    "--gcd-sync-replicas", "--total-num-replicas", type=int, help="Accepted; PopRun decides the replicas."
)
@click.option("--sync-type", help="c2-compatible or pod-native-default.")
@click.option(
    "--routing", default="", help="DNC, SWNC, RINGSWNC or BTNC [by the size and the cluster's links]."
)
@click.option("--index", type=click.IntRange(1), help="Which of the cluster's places of this size [any].")
@click.option("--disable-auto-reset", is_flag=True, help="Leave IPU errors until they are reset.")
@click.option("--fault", "faults", multiple=True, metavar="SPEC", help="Plan a fault; may be repeated.")
@click.option("--relocatable", is_flag=True, help="May be moved to other IPUs when a machine fails.")
@click.option("--wait", is_flag=True, help="Wait in the queue until IPUs are free.")
@click.option("--priority", type=int, default=0, help="In the queue: higher goes first [0].")
@click.option("--time-limit", type=seconds_range(), default=0.0, metavar="SECONDS", help="Remove it then.")
@click.option("--reservation", default="", metavar="NAME", help="Use the IPUs of this reservation.")
@click.option("--no-wait", is_flag=True, help="Do not wait until the partition is active.")
@click.option("--no-ipuof-files", is_flag=True, help="Write no file into ~/.ipuof.conf.d.")
@click.pass_obj
def create_partition(cli: CliContext, /, name: str, **options: Any) -> None:
    """Create a partition of free IPUs, wait until it is active, and write its files into ~/.ipuof.conf.d."""
    from podrun.partition.state.values import PartitionState, Requirements, parse_sync_type

    needs = Requirements(
        name,
        options["size"],
        allocation=options["allocation"] or "",
        cluster=options["cluster"] or "",
        reconfigurable=options["reconfigurable"],
        num_gcds=options["num_gcds"],
        num_ilds=options["num_ilds"],
        sync_type=parse_sync_type(options["sync_type"]) if options["sync_type"] else None,
        auto_reset=not options["disable_auto_reset"],
        faults=tuple(map(parse_fault, options["faults"])),
        limit_s=options["time_limit"],
        relocatable=options["relocatable"],
        reservation=options["reservation"],
        routing=options["routing"],
        index=options["index"] or 0,
    )
    if options["wait"] and options["no_wait"]:
        raise UsageError("--wait and --no-wait contradict each other", hint="Give one of them.")
    if options["wait"]:
        needs = replace(needs, holder=str(this_holder()))
    with cli.client() as client:
        asked = client.create_partition(needs, wait=options["wait"], priority=options["priority"])
        if options["wait"]:
            if asked.state is PartitionState.QUEUED:
                waits = (
                    f"partition {name} waits for IPUs; vipu explain {name} says for which. Ctrl-C gives it up"
                )
                click.echo(waits, err=True)
            _wait_in_queue(client, name)
        if not options["no_wait"]:
            try:
                client.wait_for_state(name, {PartitionState.ACTIVE}, cli.timeout)
            finally:
                # Until here a partition from the queue ends with this process: nobody else knows that it is there.
                if options["wait"] and not isinstance(sys.exception(), KeyboardInterrupt):
                    client.hold_partition(name, needs.holder, keep=True)
        info = client.get_partition(name)
        if not (options["no_wait"] or options["no_ipuof_files"]):
            write_ipuof_files(client, info)
    cli.show("partition", value_to_json(info), lambda: f"create partition ({name}): success.")


def _wait_in_queue(client: VipuClient, name: str) -> None:
    """Wait without a limit; an interrupted request leaves the queue at once."""
    try:
        client.wait_in_queue(name)
    except KeyboardInterrupt:
        with contextlib.suppress(PodrunError):
            client.remove_partition(name)
        raise


@click.command("reservation")
@click.argument("name")
@click.option("--agents", required=True, metavar="A,B,...", help="Agents, separated by commas.")
@click.option("--begin-in", type=seconds_range(), default=0.0, metavar="SECONDS", help="From now [0].")
@click.option("--for", "seconds", type=seconds_range(1), required=True, metavar="SECONDS", help="How long.")
@click.pass_obj
def create_reservation_verb(cli: CliContext, name: str, agents: str, begin_in: float, seconds: float) -> None:
    """Keep agents for partitions created with --reservation NAME."""
    with cli.client() as client:
        names = names_in(agents)
        client.create_reservation(name, names, begin_in_s=begin_in, for_s=seconds)
    cli.show("created", name, lambda: f"create reservation ({name}): success.")


@click.command("allocation")
@click.argument("name")
@click.option("--agents", required=True, metavar="A,B,...", help="Agents, separated by commas.")
@click.pass_obj
def create_allocation(cli: CliContext, name: str, agents: str) -> None:
    """Create an allocation of agents that are in no other one."""
    with cli.client() as client:
        client.create_allocation(name, names_in(agents))
    cli.show("created", name, lambda: f"create allocation ({name}): success.")


@click.command("agent")
@click.argument("name")
@click.option("--host", required=True, help="Its address in the POD, which tools show.")
@click.option("--port", type=click.IntRange(1, 65535), default=8080, help="Its port there [8080].")
@click.pass_obj
def create_agent_verb(cli: CliContext, name: str, host: str, port: int) -> None:
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
def create_cluster_verb(
    cli: CliContext, name: str, agents: str, num_ipulinkdomains: int, topology: str, cluster_topology: str
) -> None:
    """Create a cluster of agents that are in no other one, and an allocation of the same name."""
    with cli.client() as client:
        client.create_cluster(
            name,
            names_in(agents),
            ilds=num_ipulinkdomains,
            ipu_links=topology,
            gateway=cluster_topology,
        )
    cli.show("created", name, lambda: f"create cluster ({name}): success.")


@click.command("user")
@click.argument("name")
@click.option("--role", default="user", help="viewer, user, operator or admin [user].")
@click.option("--allocations", default="", metavar="A,B,...", help="Whose partitions it may use [all].")
@click.option("--may-inject", is_flag=True, help="May inject faults.")
@click.pass_obj
def create_user(cli: CliContext, name: str, role: str, allocations: str, may_inject: bool) -> None:
    """Create a user of a server that was started with --secure, and a file for its commands."""
    with cli.client() as client:
        names = names_in(allocations)
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


def ipuof_files(name: str, service: str) -> list[Path]:
    """The IPUoF configuration files of a partition of a service that are there, also those without a mark."""
    pattern = re.compile(rf"{re.escape(name)}(_gcd\d+)?_ipuof\.conf")
    with contextlib.suppress(OSError):
        named = sorted(path for path in ipuof_directory().iterdir() if pattern.fullmatch(path.name))
        return [path for path in named if (mark := read_mark(path)) is None or mark.service == service]
    return []


def service_of(client: VipuClient, name: str) -> str:
    """The id of the service to which a partition belongs; empty if it does not say."""
    with contextlib.suppress(PodrunError):
        return client.ipuof_config(name).attributes.get("Service", "")
    return ""


def write_ipuof_files(client: VipuClient, info: PartitionInfo) -> None:
    """Write a file for each GCD of a partition, whole or not at all. Says so where that cannot be done: the partition
    is there nevertheless."""
    directory = ipuof_directory()
    remove_dead(directory)
    try:
        for gcd in range(info.num_gcds):
            suffix = f"_gcd{gcd}" if info.num_gcds > 1 else ""
            path = directory / f"{info.name}{suffix}_ipuof.conf"
            write_config(path, client.ipuof_config(info.name, gcd))
    except OSError as error:
        click.echo(f"note: no file was written into {directory}: {error.strerror or error}", err=True)
