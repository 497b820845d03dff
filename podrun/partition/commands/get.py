"""The verbs ``get`` and ``explain``: one partition, its IPUoF configuration, one agent; what a request waits for."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podrun.core.documents import write_output
from podrun.core.errors import UsageError
from podrun.core.terminal import fields
from podrun.partition.commands.context import CliContext, partition_names
from podrun.partition.commands.rows import agent_fields, moment, partition_fields
from podrun.partition.commands.shared_options import names_in
from podrun.partition.host.ipuof_files import (
    ipuof_json,
)
from podrun.partition.state.codec import value_to_json
from podrun.partition.state.values import Requirements, agent_json

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
@click.argument("name", required=False)
@click.option(
    "--if",
    "asked",
    metavar="size=N,limit=TIME,...",
    help="When and where this partition would start, were it asked for now (limit: 90, 30m, 2h, 1d).",
)
@click.pass_obj
def explain(cli: CliContext, name: str | None, asked: str | None) -> None:
    """Say what a request waits for and when it starts at the latest, or what a partition is doing.

    With --if: say where and when a request would start. Its keys: size, limit, gcds, ilds, allocation, cluster,
    reservation, priority.
    """
    if (name is None) == (asked is None):
        raise UsageError(
            "what is to be explained?", hint="vipu explain NAME, or vipu explain --if size=64,limit=2h"
        )
    if asked is not None:
        needs, priority = asked_for(asked)
        cli.repeat(("partition",), lambda client: _show_plan(cli, client, needs, priority))
        return

    def once(client: VipuClient) -> None:
        waiting = {info.name: info for info in client.list_queue()}
        partition = None if name in waiting else client.get_partition(name or "")
        if partition is not None:
            cli.show("partition", value_to_json(partition), lambda: fields(partition_fields(partition)))
            return
        info = waiting[name or ""]
        rows = [
            ("Partition", f"{info.name} ({info.size} IPUs), not there yet"),
            ("Waits since", moment(info.since)),
            ("Position", f"{info.position} of {len(waiting)} (priority {info.priority})"),
            ("Behind", " ".join(info.ahead) or "-"),
            ("Waits for", " ".join(info.blockers) or "-"),
            ("Starts by", NOT_KNOWN if info.latest is None else moment(info.latest)),
        ]
        cli.show("request", value_to_json(info), lambda: fields(rows))

    cli.repeat(("partition",), once, name or "")


def _show_plan(cli: CliContext, client: VipuClient, needs: Requirements, priority: int) -> None:
    told = client.plan_partition(needs, priority=priority)
    info, in_s = told.request, None
    if info.latest is not None:
        in_s = round(max(0.0, info.latest - info.since), 3)
    when = (
        "now"
        if told.starts
        else NOT_KNOWN
        if info.latest is None
        else f"{moment(info.latest)}, in {in_s:g} s"
    )
    rows = [
        ("Partition", f"{info.size} IPUs, not asked for"),
        ("Starts by", when),
        ("Where", f"cluster {told.cluster}, allocation {told.allocation}" if told.allocation else "-"),
        ("Agents", " ".join(told.agents) or "-"),
        ("Behind", " ".join(info.ahead) or "-"),
        ("Waits for", "-" if told.starts else " ".join(info.blockers) or "-"),
    ]
    plain = value_to_json(told)
    request = plain.pop("request")
    keys = ("size", "priority", "position", "ahead", "blockers", "starts_by_s")
    cli.show(
        "plan", plain | {key: request[key] for key in keys} | {"starts_in_s": in_s}, lambda: fields(rows)
    )


_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def asked_for(text: str) -> tuple[Requirements, int]:
    """The request that ``size=64,limit=2h`` describes, and its priority. Raises UsageError, which lists the keys."""
    numbers = {"size": "size", "gcds": "num_gcds", "ilds": "num_ilds", "priority": "priority"}
    names = {"allocation": "allocation", "cluster": "cluster", "reservation": "reservation"}
    numbers_given: dict[str, int] = {}
    names_given: dict[str, str] = {}
    limit = 0.0
    for part in names_in(text):
        key, _, value = part.partition("=")
        if key == "limit":
            limit = _seconds(value)
        elif key in names and value:
            names_given[names[key]] = value
        elif key in numbers and re.fullmatch(r"-?\d{1,18}", value):
            numbers_given[numbers[key]] = int(value)
        elif key in numbers:
            raise UsageError(f"--if {text}: {key} is {value!r}, not a whole number", hint=f"As in {key}=4.")
        else:
            known = ", ".join(["limit", *numbers, *names])
            raise UsageError(f"--if {text}: {part!r} says nothing of a partition", hint=f"Known: {known}.")
    if "size" not in numbers_given:
        raise UsageError(f"--if {text}: a partition has a size", hint="vipu explain --if size=64,limit=2h")
    priority, size = numbers_given.pop("priority", 0), numbers_given.pop("size")
    values = {"num_gcds": 0, **numbers_given}
    return Requirements("if", size, limit_s=limit, **values, **names_given), priority  # type: ignore[arg-type]


def _seconds(text: str) -> float:
    number, unit = (text[:-1], text[-1]) if text[-1:].isalpha() else (text, "")
    try:
        seconds = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise UsageError(f"{text!r} is no time limit", hint="limit=90, 30m, 2h or 1d")
    return seconds


@click.command("capture")
@click.argument("file", type=click.Path(path_type=Path))
@click.pass_obj
def capture_state(cli: CliContext, file: Path) -> None:
    """Write the POD, its partitions and its queue into FILE, from which a simulation starts.

    podrun simulate --start FILE
    """
    with cli.client() as client:
        document = json.loads(client.capture())
    write_output(file, json.dumps(document, indent=1) + "\n", hint="vipu capture FILE")
    kinds = [kind for kind, _, _ in document["plans"]]
    counts = (len(document["partitions"]), kinds.count("queue"), kinds.count("reservations"))
    value = {"file": str(file), **dict(zip(("partitions", "queued", "reservations"), counts, strict=True))}
    nouns = ("partition", "queued request", "reservation")
    parts = (f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in zip(counts, nouns, strict=True))
    text = f"{file}: {', '.join(parts)}."
    cli.show("capture", value, lambda: text)
