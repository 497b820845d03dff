"""Which host runs which machines, and how many of them share a process there. Pure.

Over several hosts agents go in blocks, in the POD's order, hosts in the order of their addresses: whole IPU-Link
domains to a host if there are at least as many domains as hosts, else equal shares of the machines. The same POD on the
same hosts is always spread the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podrun.cluster import Cluster
from podrun.errors import UsageError

MACHINE_BYTES = 220 << 20
"""Memory that a machine's process takes before it holds a program: Python, Ray's worker, gRPC, JAX. Measured with
`benchmarks/weak_scaling.py`."""
PROCESSES_PER_CORE = 2
"""Machines up to this have a process each, as real ones have hardware of their own: what kills one leaves the others.
More start sooner, take less memory and step faster in one process for each core, where they compute in turn."""
MOST_TOGETHER = 32
"""Machines in a process at most: each has threads for its server and its sessions."""
MEMORY_SHARE = 0.5
"""Of a host's free memory that machines' processes may take; the rest is for programs."""
VARIABLE = "PODRUN_MACHINES_PER_PROCESS"


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


def machines_per_process(machines: int, cores: int, memory: int, asked: str = "") -> int:
    """How many of a host's ``machines`` share a process: 1 if the host holds a process for each, else the least power
    of two with which there is one process for each core, or fewer if memory is short. ``asked``: what the user wants
    instead, from $PODRUN_MACHINES_PER_PROCESS."""
    if asked:
        if not asked.isdecimal() or not 1 <= int(asked) <= 64:
            raise UsageError(f"{VARIABLE} is {asked!r}; it can be 1 to 64", hint="Unset it, or correct it.")
        return int(asked)
    room = max(int(memory * MEMORY_SHARE) // MACHINE_BYTES, 1)
    if machines <= min(PROCESSES_PER_CORE * cores, room):
        return 1
    each = 1
    while -(-machines // each) > max(min(cores, room), 1) and each < MOST_TOGETHER:
        each *= 2
    return each


def in_processes(agents: Sequence[str], host_of: dict[str, Host], each: dict[Host, int]) -> list[list[str]]:
    """Agents that share a process, in the order given; agents of different hosts never do, nor does one agent
    twice."""
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
