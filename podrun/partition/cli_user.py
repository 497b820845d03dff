"""`vipu`: partitions, for users."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from podrun.errors import UnsupportedError
from podrun.partition.cli_common import Session, SuggestingGroup, open_session, run, session_options
from podrun.partition.tables import fields, table

if TYPE_CHECKING:
    from podrun.partition.types import IpuofConfig, PartitionInfo

NAMES = {"help_option_names": ["-h", "--help"]}
PARTITION_COLUMNS = ("Partition", "Cluster", "ILDs", "GW Routing", "ILD Routing", "Size", "GCDs", "State")


def add_user_commands(root: click.Group, refused: Mapping[str, str] | None = None) -> dict[str, click.Group]:
    """Give a root command the verbs of `vipu`; returns them by name, for `vipu-admin` to add to.

    ``refused``: what cannot be created, with what to do instead.
    """
    plurals = {
        "partition": "partitions",
        "allocation": "allocations",
        "ipu-attr": "ipu-attrs",
        "agent": "agents",
    }
    singulars = {plural: one for one, plural in plurals.items()}
    verbs = {
        "create": SuggestingGroup("create", help="Create something.", aliases=singulars, refused=refused),
        "list": SuggestingGroup("list", help="List what there is.", aliases=plurals),
        "get": SuggestingGroup("get", help="Show one thing.", aliases=singulars),
        "reset": SuggestingGroup("reset", help="Re-initialise something.", aliases=singulars),
        "remove": SuggestingGroup("remove", help="Remove something (also: delete).", aliases=singulars),
    }
    for verb in verbs.values():
        root.add_command(verb)
    verbs["create"].add_command(create_partition)
    verbs["list"].add_command(list_partitions)
    verbs["list"].add_command(list_allocations)
    verbs["list"].add_command(list_ipu_attrs)
    verbs["get"].add_command(get_partition)
    verbs["reset"].add_command(reset_partition)
    verbs["remove"].add_command(remove_partition)
    return dict(verbs)


@click.group(
    cls=SuggestingGroup, aliases={"delete": "remove"}, context_settings=NAMES, invoke_without_command=True
)
@click.version_option(package_name="podrun", prog_name="vipu")
@session_options
@click.pass_context
def vipu(ctx: click.Context, /, **options: Any) -> None:
    """Partitions of an emulated IPU-POD: create, list, get, reset, remove.

    Example: vipu create partition p16 --size 16 --reconfigurable
    """
    open_session(ctx, **options)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _refuse(context: click.Context, option: click.Parameter, value: str | None) -> None:
    """An option of the real tool that would choose what follows from others here."""
    if value is not None:
        assert isinstance(option, click.Option)
        raise UnsupportedError(f"{option.opts[0]} is not there in podrun", hint=option.help)


@click.command("partition")
@click.argument("name")
@click.option("--size", type=int, required=True, help="IPUs: a power of two.")
@click.option("--reconfigurable", is_flag=True, help="Expose every power-of-two sub-device.")
@click.option("--allocation", help="Allocation to take the IPUs from.")
@click.option("--cluster", help="Old name of --allocation.")
@click.option("--num-gcds", type=int, default=1, help="Graph compilation domains [1].")
@click.option("--num-ilds", type=int, default=0, help="IPU-Link domains [as few as possible].")
@click.option(
    "--gcd-sync-replicas", "--total-num-replicas", type=int, help="Accepted; PopRun decides the replicas."
)
@click.option("--sync-type", help="c2-compatible or pod-native-default.")
@click.option(
    "--routing", hidden=True, callback=_refuse, help="It follows from the size and the POD's topology."
)
@click.option("--index", hidden=True, callback=_refuse, help="IPUs are chosen by the server.")
@click.option("--disable-auto-reset", is_flag=True, help="Leave IPU errors until they are reset.")
@click.option("--fault", "faults", multiple=True, metavar="SPEC", help="Plan a fault; may be repeated.")
@click.option("--no-wait", is_flag=True, help="Do not wait until the partition is active.")
@click.pass_obj
def create_partition(session: Session, /, name: str, **options: Any) -> None:
    """Create a partition of free IPUs and wait until it is active."""
    from podrun.partition.types import PartitionState, Requirements, parse_sync_type

    needs = Requirements(
        name,
        options["size"],
        allocation=options["allocation"] or options["cluster"] or "",
        reconfigurable=options["reconfigurable"],
        num_gcds=options["num_gcds"],
        num_ilds=options["num_ilds"],
        sync_type=parse_sync_type(options["sync_type"]) if options["sync_type"] else None,
        auto_reset=not options["disable_auto_reset"],
        faults=options["faults"],
    )
    with session.client() as client:
        client.create_partition(needs)
        if not options["no_wait"]:
            client.wait_for_state(name, {PartitionState.ACTIVE}, session.timeout)
        info = client.get_partition(name)
    session.show("partition", partition_json(info), lambda: f"create partition ({name}): success.")


@click.command("partitions")
@click.pass_obj
def list_partitions(session: Session) -> None:
    """List all partitions."""
    with session.client() as client:
        found = client.list_partitions()
    session.show(
        "partitions",
        [partition_json(info) for info in found],
        lambda: table(PARTITION_COLUMNS, (partition_row(info) for info in found)),
    )


@click.command("allocations")
@click.pass_obj
def list_allocations(session: Session) -> None:
    """List allocations: agents that users have access to."""
    with session.client() as client:
        found = client.list_allocations()
    session.show(
        "allocations",
        [{"id": info.name, "cluster": info.cluster, "agents": list(info.agents)} for info in found],
        lambda: table(("Allocation ID", "Agents"), ((info.name, " ".join(info.agents)) for info in found)),
    )


@click.command("ipu-attrs")
@click.pass_obj
def list_ipu_attrs(session: Session) -> None:
    """List attributes of all IPUs."""
    from podrun.partition.attributes import ipu_attributes

    with session.client() as client:
        groups = ipu_attributes(client.machine_reports())
    rows = []
    for group in groups:
        for i, (key, value) in enumerate(group.values.items()):
            first = i == 0
            rows.append((group.agent if first else "", str(group.ipu) if first else "", key, value))
    session.show(
        "ipus",
        [{"agent": group.agent, "ipu": group.ipu, "attributes": dict(group.values)} for group in groups],
        lambda: table(("Agent", "IPU", "Attribute", "Value"), rows),
    )


@click.command("partition")
@click.argument("name")
@click.option("--gcd", type=click.IntRange(0), help="Only this GCD.")
@click.option("--ipuof-configs", is_flag=True, help="Print the IPUoF configuration as JSON.")
@click.pass_obj
def get_partition(session: Session, name: str, gcd: int | None, ipuof_configs: bool) -> None:
    """Show one partition, or its IPUoF configuration."""
    import json

    with session.client() as client:
        info = client.get_partition(name)
        gcds = range(info.num_gcds) if gcd is None else (gcd,)
        configs = [client.ipuof_config(name, i) for i in gcds] if ipuof_configs or gcd is not None else []
    if configs:
        plain = [ipuof_json(config) for config in configs]
        texts = [
            f"IPUoF configuration of partition {name}, GCD {i}:\n{json.dumps(config, indent=2)}"
            for i, config in zip(gcds, plain, strict=True)
        ]
        session.show("ipuof_configs", plain, lambda: "\n".join(texts))
    else:
        session.show("partition", partition_json(info), lambda: fields(partition_fields(info)))


@click.command("partition")
@click.argument("name")
@click.option("--no-wait", is_flag=True, help="Do not wait until the partition is active.")
@click.pass_obj
def reset_partition(session: Session, name: str, no_wait: bool) -> None:
    """Re-initialise IPUs and links of a partition."""
    from podrun.partition.types import PartitionState

    with session.client() as client:
        client.reset_partition(name)
        if not no_wait:
            client.wait_for_state(name, {PartitionState.ACTIVE}, session.timeout)
        info = client.get_partition(name)
    session.show("partition", partition_json(info), lambda: f"reset partition ({name}): success.")


@click.command("partition")
@click.argument("name")
@click.option("--no-wait", is_flag=True, help="Do not wait until the partition is gone.")
@click.pass_obj
def remove_partition(session: Session, name: str, no_wait: bool) -> None:
    """Give the IPUs of a partition back."""
    from podrun.partition.types import PartitionState

    with session.client() as client:
        client.remove_partition(name)
        if not no_wait:
            client.wait_for_state(name, {PartitionState.REMOVED}, session.timeout)
    session.show("removed", name, lambda: f"remove partition ({name}): success.")


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
    ]
    return rows + ([("Error", info.error)] if info.error else [])


def partition_json(info: PartitionInfo) -> dict[str, Any]:
    """A partition for --format json."""
    plain = asdict(info)
    return {
        **plain,
        "state": info.state.name,
        "sync_type": info.sync_type.value,
        "agents": list(info.agents),
        "error": info.error or None,
    }


def ipuof_json(config: IpuofConfig) -> dict[str, Any]:
    """An IPUoF configuration in the shape of the files in ~/.ipuof.conf.d."""
    return {"devices": [asdict(device) for device in config.devices], "attributes": dict(config.attributes)}


add_user_commands(vipu)


def main() -> None:
    """Entry point of `vipu`."""
    sys.exit(run(vipu))


if __name__ == "__main__":
    main()
