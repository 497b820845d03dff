"""Verbs about partitions, for users and administrators, and the lists of allocations and IPU attributes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podrun.core.environment import environment
from podrun.core.errors import ConflictError, NotFoundError, PodrunError, UsageError
from podrun.core.identity import user_name
from podrun.core.telemetry import NO_ANSWER
from podrun.core.terminal import fields, table
from podrun.faults import parse_fault
from podrun.partition.commands.common import CliContext, partition_names
from podrun.partition.host.holders import parse_holder, this_holder
from podrun.partition.host.ipuof_files import (
    ipuof_directory,
    ipuof_json,
    read_mark,
    remove_dead,
    write_config,
)
from podrun.partition.state.codec import to_json

if TYPE_CHECKING:
    from podrun.core.telemetry import MachineReport
    from podrun.partition.client.vipu_client import VipuClient
    from podrun.partition.state.values import PartitionInfo

PARTITION_COLUMNS = ("Partition", "Cluster", "ILDs", "GW Routing", "ILD Routing", "Size", "GCDs", "State")


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
@click.option(
    "--time-limit", type=click.FloatRange(0), default=0.0, metavar="SECONDS", help="Remove it then."
)
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
    cli.show("partition", to_json(info), lambda: f"create partition ({name}): success.")


def _wait_in_queue(client: VipuClient, name: str) -> None:
    """Wait without a limit; an interrupted request leaves the queue at once."""
    try:
        client.wait_in_queue(name)
    except KeyboardInterrupt:
        with contextlib.suppress(PodrunError):
            client.remove_partition(name)
        raise


@click.command("partitions")
@click.pass_obj
def list_partitions(cli: CliContext) -> None:
    """List all partitions."""

    def once(client: VipuClient) -> None:
        found = client.list_partitions()
        several = len({info.owner for info in found} | {user_name(os.getuid())}) > 1
        cli.show(
            "partitions",
            [to_json(info) for info in found],
            lambda: table(
                (*PARTITION_COLUMNS, *(["Owner"] * several)),
                ((*partition_row(info), *([info.owner] * several)) for info in found),
            ),
        )

    cli.repeat(("partition",), once)


@click.command("allocations")
@click.pass_obj
def list_allocations(cli: CliContext) -> None:
    """List allocations: agents that users have access to."""

    def once(client: VipuClient) -> None:
        found = client.list_allocations()
        cli.show(
            "allocations",
            [to_json(info) for info in found],
            lambda: table(
                ("Allocation ID", "Agents"), ((info.name, " ".join(info.agents)) for info in found)
            ),
        )

    cli.repeat(("allocation",), once)


@click.command("clusters")
@click.pass_obj
def list_clusters(cli: CliContext) -> None:
    """List clusters: agents that links join."""

    def once(client: VipuClient) -> None:
        found = client.list_clusters()
        rows = (
            (
                info.name,
                str(info.num_ipus // info.ipu_link_domain_size),
                str(info.num_ipus),
                info.ipu_link_topology,
                info.gateway_topology,
                " ".join(info.agents),
            )
            for info in found
        )
        header = ("Cluster", "ILDs", "IPUs", "Topology", "GW Topology", "Agents")
        cli.show("clusters", [to_json(info) for info in found], lambda: table(header, rows))

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
            lambda: table(("Agent", "IPU", "Attribute", "Value"), rows),
        )

    cli.repeat(("partition", "machine"), once)


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
            cli.show("partition", to_json(info), lambda: fields(partition_fields(info)))

    cli.repeat(("partition",), once, name)


@click.command("partition")
@click.argument("name", shell_complete=partition_names)
@click.option("--no-wait", is_flag=True, help="Do not wait until the partition is active.")
@click.option(
    "--generation",
    type=click.IntRange(min=0),
    default=0,
    show_default=False,
    metavar="N",
    help="Leave it alone if it has been reset since this generation (vipu get partition).",
)
@click.option(
    "--force", is_flag=True, help="Also while a process works on its IPUs, which ends that program."
)
@click.pass_obj
def reset_partition(cli: CliContext, name: str, no_wait: bool, generation: int, force: bool) -> None:
    """Re-initialise IPUs and links of a partition, and write its files in ~/.ipuof.conf.d anew, if there are any."""
    from podrun.partition.state.values import PartitionState

    with cli.client() as client, _no_guesses(name):
        if not force:
            check_not_in_use(name, client.machine_reports(name), f"vipu reset partition {name} --force")
        client.reset_partition(name, generation)
        if not no_wait:
            client.wait_for_state(name, {PartitionState.ACTIVE}, cli.timeout)
        info = client.get_partition(name)
        if not no_wait and ipuof_files(name, service_of(client, name)):
            write_ipuof_files(client, info)
    cli.show("partition", to_json(info), lambda: f"reset partition ({name}): success.")


@click.command("partition")
@click.argument("name", shell_complete=partition_names)
@click.option("--force", is_flag=True, help="Also if processes are attached: they lose their IPUs.")
@click.option("--no-wait", is_flag=True, help="Do not wait until the partition is gone.")
@click.pass_obj
def remove_partition(cli: CliContext, name: str, force: bool, no_wait: bool) -> None:
    """Give the IPUs of a partition back, or give up a request that waits in the queue.

    Its files in ~/.ipuof.conf.d are removed too.
    """
    from podrun.partition.state.values import PartitionState

    with cli.client() as client, _no_guesses(name):
        service = service_of(client, name)
        client.remove_partition(name, force=force)
        if not no_wait:
            client.wait_for_state(name, {PartitionState.REMOVED}, cli.timeout)
    for path in ipuof_files(name, service):
        with contextlib.suppress(OSError):
            path.unlink()
    cli.show("removed", name, lambda: f"remove partition ({name}): success.")


def check_not_in_use(
    name: str, reports: Sequence[MachineReport], forced: str, chosen: Collection[int] | None = None
) -> None:
    """Raise ConflictError if processes hold IPUs of a partition that are to be reset: those ``chosen`` by their index
    in the partition, or all. ``forced``: the command that resets them all the same.

    A program may reset IPUs of its own partition. While an IPU has an error no program works on the partition, and all
    can be reset.
    """
    ipus = [ipu for report in reports for ipu in report.ipus]
    lost = any(report.state in ("lost", NO_ANSWER) for report in reports)
    if lost or any(ipu.has_error for ipu in ipus):
        return
    chosen = range(len(ipus)) if chosen is None else chosen
    holders = {
        (p.host, p.pid): p for ipu in ipus if ipu.partition_ipu in chosen and (p := ipu.process) is not None
    }
    if not holders or environment().get("IPUOF_VIPU_API_PARTITION_ID") == name:
        return
    first = next(iter(holders.values()))
    more = f" and {len(holders) - 1} more" if len(holders) > 1 else ""
    raise ConflictError(
        f"partition {name} is in use by process {first.pid} ({first.command}) of {first.user}{more}",
        hint=f"Wait until it ends, or end its use: {forced}",
    )


@contextmanager
def _no_guesses(name: str) -> Iterator[None]:
    """Drop suggestions for verbs that destroy: a missing name is no reason to suggest another run's partition."""
    try:
        yield
    except NotFoundError as error:
        raise NotFoundError(
            error.message,
            hint=f"If a run or a server made {name}, it went with it, and there is nothing to do. vipu list partitions "
            "shows which there are and in what state.",
        ) from error


def partition_row(info: PartitionInfo) -> tuple[str, ...]:
    """A partition as a row of `PARTITION_COLUMNS`."""
    return (
        info.name,
        info.cluster,
        str(info.num_ilds),
        info.gw_routing,
        info.ild_routing,
        str(info.size),
        str(info.num_gcds),
        info.state.name,
    )


def partition_fields(info: PartitionInfo) -> list[tuple[str, str]]:
    """A partition as names and values."""
    rows = list(zip(PARTITION_COLUMNS, partition_row(info), strict=True))
    rows += [
        ("Allocation", info.allocation),
        ("Reconfigurable", str(info.reconfigurable).lower()),
        ("Sync Type", info.sync_type.value),
        ("Agents", " ".join(info.agents)),
        ("Generation", str(info.generation)),
        *([("Owner", info.owner)] if info.owner else []),
        *([("Ends With", parse_holder(info.holder).in_words)] if info.holder else []),
    ]
    return rows + ([("Error", info.error)] if info.error else [])


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
