"""The whole content of a state file as values: from rows, each checked, and checked together."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any

from podrun.core.cluster import (
    IPUS_PER_MACHINE,
    Agent,
    Allocation,
    Cluster,
    GatewayTopology,
    LinkTopology,
    Topology,
    arrange_pod,
)
from podrun.core.errors import InternalError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.partition.host.holders import parse_holder
from podrun.partition.state.accounts import account_of_row
from podrun.partition.state.allocator import NO_PLANS, Allocator, Plans
from podrun.partition.state.records import Maintenance, Partition, Queued, Reservation
from podrun.partition.state.requirements import validate_state
from podrun.partition.state.stored_rows import StateRows, check_pod, checked, parse_row
from podrun.partition.state.values import Requirements, check_name

PLAN_KINDS: tuple[tuple[str, type], ...] = (
    ("maintenance", Maintenance),
    ("queue", Queued),
    ("reservations", Reservation),
)
"""Kinds of rows in ``plans``: the name there, in `StateChange` and in `Plans`, and the class of an entry."""


@dataclass(frozen=True, slots=True)
class StoredState:
    """The content of a store. ``allocations`` None: those of the POD's description were never changed. ``users``: the
    record of each user of a server started with --secure, by name.
    """

    partitions: tuple[Partition, ...]
    allocations: tuple[Allocation, ...] | None
    lost: frozenset[str]
    plans: Plans = NO_PLANS
    users: Mapping[str, str] = field(default_factory=dict)
    layout: Cluster | None = None


def layout_rows(pod: Cluster) -> list[tuple[str, int, str]]:
    """Agents and clusters of a POD as rows of the table ``layout``: kind, position, JSON."""
    agents = [(a.id, a.host, a.port, a.serial_pattern) for a in pod.agents]
    clusters = [
        {
            "name": cluster.name,
            "agents": len(cluster.agents),
            "ild_ipus": cluster.topology.ild_ipus,
            "ipu_links": cluster.topology.ipu_links.value,
            "gateway": cluster.topology.gateway.value,
        }
        for cluster in pod.clusters
    ]
    return [("agent", i, json.dumps(row)) for i, row in enumerate(agents)] + [
        ("cluster", i, json.dumps(row)) for i, row in enumerate(clusters)
    ]


@dataclass(frozen=True, slots=True)
class _ClusterRow:
    """A row of a cluster in the table ``layout``."""

    name: str
    agents: int
    ild_ipus: int
    ipu_links: str
    gateway: str


def check_stored_name(name: object, what: str) -> None:
    """Raise ValueError for what is no name."""
    try:
        check_name(checked(str, name, "its name"), what)
    except UsageError as error:
        raise ValueError(error.message) from error


def stored_layout(pod: Cluster, rows: Iterable[tuple[Any, ...]]) -> Cluster:
    """The POD with the agents and clusters of rows of the table ``layout``. Raises ValueError if they make no POD."""
    kinds: dict[str, list[tuple[int, Any]]] = {"agent": [], "cluster": []}
    for kind, position, data in rows:
        if kind not in kinds:
            raise ValueError("a row is neither of an agent nor of a cluster")
        kinds[kind].append((checked(int, position, f"the position of a row of {kind}"), parse_row(data)))
    agents = []
    for position, row in sorted(kinds["agent"], key=lambda entry: entry[0]):
        if not isinstance(row, list) or len(row) != 4:
            raise ValueError(f"agent {position} is not recorded as name, host, port and serial number")
        name, host, serial = (checked(str, row[i], f"agent {position}") for i in (0, 1, 3))
        check_stored_name(name, "an agent")
        agents.append(Agent(name, 0, host, checked(int, row[2], f"agent {position}.port"), serial, 0, 0))
    if len({agent.id for agent in agents}) != len(agents):
        raise ValueError("two agents have one name")
    clusters: list[tuple[str, Topology, tuple[str, ...]]] = []
    first = 0
    for position, data in sorted(kinds["cluster"], key=lambda entry: entry[0]):
        row = checked(_ClusterRow, data, f"cluster {position}")
        check_stored_name(row.name, "a cluster")
        domain, count = row.ild_ipus, row.agents
        links = Topology(LinkTopology(row.ipu_links), domain, GatewayTopology(row.gateway))
        members = tuple(agent.id for agent in agents[first : first + count])
        if (
            domain not in (4, 8, 16, 32, 64)
            or not count
            or len(members) != count
            or count * IPUS_PER_MACHINE % domain
        ):
            raise ValueError(f"cluster {row.name} has {len(members)} agents and domains of {domain} IPUs")
        clusters.append((row.name, links, members))
        first += count
    if len({name for name, _, _ in clusters}) != len(clusters):
        raise ValueError("two clusters have one name")
    return arrange_pod(pod, clusters, agents)


def entry_of(kind: type, name: str, data: str) -> Any:
    """The entry of a row of the table of plans. Raises ValueError if the row is none."""
    entry = checked(kind, parse_row(data), "")
    named = entry.needs if isinstance(entry, Queued) else entry
    recorded = named.agent if isinstance(named, Maintenance) else named.name
    if isinstance(named, Requirements) and named.holder:
        parse_holder(named.holder)
    if recorded != name:
        raise ValueError(f"it is recorded as {recorded}")
    return entry


def partition_of(name: str, data: str) -> Partition:
    """The partition that a row of the stored state holds: its name, and JSON. ValueError for a row that holds none."""
    partition: Partition = checked(Partition, parse_row(data), "")
    if partition.holder:
        parse_holder(partition.holder)
    if partition.name != name:
        raise ValueError(f"it is recorded as {partition.name}")
    return partition


def allocation_of(name: str, agents: str) -> Allocation:
    """The allocation of a row. Raises ValueError if the row is none."""
    check_stored_name(name, "an allocation")
    return Allocation(name, checked(tuple[str, ...], parse_row(agents), "agents"))


def state_from_rows(cluster: Cluster, rows: StateRows) -> StoredState:
    """The state that the rows of a file hold: what a server starts with, and what `vipu-server check` calls without
    problems. Raises ValueError that names the first row which cannot be read, or what does not hold together."""
    if rows.unreadable or rows.pod is None:
        raise ValueError(rows.unreadable[0] if rows.unreadable else "it names no POD")
    check_pod(rows.pod)
    pod = cluster
    if rows.layout is not None:
        with _in_row("its agents and clusters"):
            pod = stored_layout(cluster, rows.layout)
    partitions = []
    for name, data in rows.partitions:
        with _in_row(f"partition {name}"):
            partitions.append(partition_of(name, data))
    allocations: list[Allocation] = []
    for name, agents in rows.allocations or ():
        with _in_row(f"allocation {name}"):
            allocations.append(allocation_of(name, agents))
    plans: dict[str, list[Any]] = {kind: [] for kind, _ in PLAN_KINDS}
    for kind, name, data in rows.plans:
        with _in_row(f"{kind} {name}"):
            if kind not in plans:
                raise ValueError("there are no plans of that kind")
            plans[kind].append(entry_of(dict(PLAN_KINDS)[kind], name, data))
    for name, data in rows.users:
        with _in_row(f"user {name}"):
            account_of_row(name, data)
    lost = frozenset(checked(str, agent, "a lost agent") for agent in rows.lost)
    partitions.sort(key=lambda p: (p.created, p.name))
    state = StoredState(
        tuple(partitions),
        None if rows.allocations is None else tuple(allocations),
        lost,
        Plans(**{kind: tuple(entries) for kind, entries in plans.items()}),
        layout=None if rows.layout is None else pod,
    )
    _check_together(pod, state)
    return state


def _check_together(pod: Cluster, state: StoredState) -> None:
    """Raise ValueError that says what of a state does not hold together."""
    known = pod.allocations if state.allocations is None else state.allocations
    for what, names in (
        ("partition", [p.name for p in state.partitions]),
        ("allocation", [a.name for a in known]),
    ):
        if len(set(names)) != len(names):
            raise ValueError(f"two rows hold a {what} of the same name")
    try:
        validate_state(pod, {p.name: p for p in state.partitions}, {a.name: a for a in known}, state.lost)
        Allocator(
            pod, allocations=known, partitions=state.partitions, lost=state.lost, plans=state.plans
        ).validate_state()
    except InternalError as error:
        raise ValueError(error.message) from error


@contextlib.contextmanager
def _in_row(row: str) -> Iterator[None]:
    """Errors in this context name the row."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{row}: {error}") from error
