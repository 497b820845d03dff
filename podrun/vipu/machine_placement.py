"""Which host runs which machines, and how many machines share a process there. Pure.

Over several hosts, agents go in blocks in the POD's order to hosts in the order of their addresses: whole IPU-Link
domains if there are at least as many domains as hosts, else equal shares of the machines. The same POD on the same
hosts is always placed the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podrun.core.cluster import Cluster
from podrun.core.errors import UsageError

MACHINE_BYTES = 220 << 20
"""Memory of a machine's process without a program: Python, Ray's worker, gRPC, JAX. Measured with
`benchmarks/weak_scaling.py`."""
PROCESSES_PER_CORE = 2
"""Up to this many machines a core have a process each, so that what kills one leaves the others. More of them share one
process for each core and compute in turn: they start sooner, take less memory and run faster."""
MOST_TOGETHER = 32
"""Largest number of machines in a process: each has threads for its server and its sessions."""
MEMORY_SHARE = 0.5
"""Share of a host's free memory for the processes of machines; the rest is for programs."""
PER_PROCESS_VARIABLE = "PODRUN_MACHINES_PER_PROCESS"
"""Environment variable: the user's own number of machines in a process."""


@dataclass(frozen=True, slots=True)
class Host:
    """A node of the Ray cluster: its id there, its address, its cores, and its free memory in bytes."""

    node: str
    address: str
    cores: int
    memory: int


def host_of_agents(cluster: Cluster, hosts: Sequence[Host]) -> dict[str, Host]:
    """A host for each agent of the POD; see the module docstring."""
    ordered = sorted(hosts, key=lambda host: _sortable(host.address))
    blocks: list[tuple[str, ...]] = [tuple(agent.id for agent in ild.agents) for ild in cluster.ilds]
    if len(blocks) < len(ordered):
        blocks = [(agent,) for block in blocks for agent in block]
    return {
        agent: ordered[index * len(ordered) // len(blocks)]
        for index, block in enumerate(blocks)
        for agent in block
    }


def machines_per_process(machines: int, cores: int, memory: int, wanted: str = "") -> int:
    """How many of a host's ``machines`` share a process: 1 if the host has room for a process each, else the least
    power of two that leaves at most one process for each core, or fewer if memory is short. ``wanted``: the user's
    number from $PODRUN_MACHINES_PER_PROCESS."""
    if wanted:
        if not wanted.isdecimal() or not 1 <= int(wanted) <= 64:
            raise UsageError(
                f"{PER_PROCESS_VARIABLE} is {wanted!r}; it can be 1 to 64", hint="Unset it, or correct it."
            )
        return int(wanted)
    room = max(int(memory * MEMORY_SHARE) // MACHINE_BYTES, 1)
    if machines <= min(PROCESSES_PER_CORE * cores, room):
        return 1
    each = 1
    while -(-machines // each) > max(min(cores, room), 1) and each < MOST_TOGETHER:
        each *= 2
    return each


def in_processes(agents: Sequence[str], host_of: dict[str, Host], each: dict[Host, int]) -> list[list[str]]:
    """Agents by process, in the order given. A process holds agents of one host, each at most once."""
    groups: list[list[str]] = []
    open_group: dict[Host, list[str]] = {}
    for agent in agents:
        host = host_of[agent]
        group = open_group.get(host)
        if group is None or len(group) >= each[host] or agent in group:
            group = open_group[host] = []
            groups.append(group)
        group.append(agent)
    return groups


def _sortable(address: str) -> tuple[int, ...] | tuple[str]:
    parts = address.split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else (address,)
