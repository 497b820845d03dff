"""The description of a POD: which IPU-M2000s there are, how they are linked, and who may use them.

A `Cluster` is read from one of ``cluster_configs/*.yaml`` (or a file of the user's own) by `load_cluster` and
never changes afterwards. It describes the modelled machines, not processes: addresses and serial numbers here
are what tools print, while the partition service knows where each emulated machine really listens.

Order matters: agents stand in the order of their IPUs. Agent *a* holds IPUs ``4a .. 4a+3``; consecutive
agents fill an IPU-Link domain (ILD) before the next one starts.

A POD is one V-IPU cluster, unless an administrator has changed its agents and clusters while the service runs: then it
has `Cluster.parts`, one for each V-IPU cluster, and perhaps agents in none (`arrange_pod`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass

IPUS_PER_MACHINE = 4
"""IPUs of one IPU-M2000 or Bow-2000."""
ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Names of agents, allocations and PODs."""
MAX_ILD_IPUS = 64
"""Most IPUs that IPU-Links alone join: one POD64."""


class LinkTopology(enum.Enum):
    """How IPU-Links join the IPUs of an ILD: a ladder whose rungs are pairs of IPUs, with machines stacked along it."""

    MESH = "mesh"
    """An open ladder."""
    TORUS = "torus"
    """A ladder whose ends are joined."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How the IPUs of a partition are wired, in the words of V-IPU and of Poplar's target options."""

    ild_routing: str
    link_configuration: str
    link_topology: LinkTopology


ROUTINGS = {
    routing.ild_routing: routing
    for routing in (
        Routing("DNC", "default", LinkTopology.MESH),
        Routing("SWNC", "slidingWindow", LinkTopology.MESH),
        Routing("RINGSWNC", "slidingWindow", LinkTopology.TORUS),
        Routing("BTNC", "barleyTwist", LinkTopology.TORUS),
    )
}
"""By the name that V-IPU shows. BTNC has not been observed: what it stands for is inferred from its name."""


class GatewayTopology(enum.Enum):
    """How GW-Links join ILDs."""

    NONE = "none"
    """One ILD: nothing to join."""
    LOOPED = "looped"
    """Machine *m* of each ILD is joined to machine *m* of the next one, and the last to the first."""


_TopologyName = TypeVar("_TopologyName", LinkTopology, GatewayTopology)


def named_topology(kind: type[_TopologyName], text: str) -> _TopologyName:
    """The topology of a name, in any case. Raises UsageError, which lists them."""
    try:
        return kind(text.lower())
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise UsageError(
            f"there is no topology {text!r} of these links", hint=f"There are: {known}."
        ) from None


@dataclass(frozen=True, slots=True)
class Topology:
    """Links of the POD. ``ild_ipus``: IPUs in each ILD."""

    ipu_links: LinkTopology
    ild_ipus: int
    gateway: GatewayTopology


@dataclass(frozen=True, slots=True)
class Agent:
    """One IPU-M2000.

    ``index`` counts agents of the POD, ``ild`` is its IPU-Link domain and ``position`` its place in it.
    ``serial_pattern`` holds ``{board}`` where the number of the board stands: a machine has two boards of two IPUs.
    """

    id: str
    index: int
    host: str
    port: int
    serial_pattern: str
    ild: int
    position: int

    @property
    def first_ipu(self) -> int:
        """Index in the POD of its first IPU."""
        return self.index * IPUS_PER_MACHINE

    @property
    def serial(self) -> str:
        """Serial number of the machine: that of its first board."""
        return self.board_serial(0)

    def board_serial(self, ipu_number: int) -> str:
        """Serial number, ``NNNN.BBBB.YYYYYYY``, of the board that holds IPU# ``ipu_number``.

        The field in the middle is 0001 for IPU# 0 and 1, 0002 for IPU# 2 and 3, as gc-monitor shows it.
        """
        return self.serial_pattern.replace("{board}", f"{1 + ipu_number // 2:04d}")


def ipu_number(slot: int) -> int:
    """IPU# that tools print for IPU ``slot`` (0 to 3 in device order) of a machine: 3, 2, 1, 0."""
    return IPUS_PER_MACHINE - 1 - slot


@dataclass(frozen=True, slots=True)
class Ild:
    """An IPU-Link domain: consecutive agents."""

    index: int
    agents: tuple[Agent, ...]

    @property
    def ipu_count(self) -> int:
        """Number of IPUs."""
        return len(self.agents) * IPUS_PER_MACHINE


@dataclass(frozen=True, slots=True)
class Allocation:
    """Agents that users have access to, by id; partitions do not span allocations."""

    name: str
    agents: tuple[str, ...]


@dataclass(frozen=True)
class Cluster:
    """A POD, or one V-IPU cluster of it. ``target`` is the chip: "gc200" or "bow". ``gateway_memory_bytes``: streaming
    memory of each machine. ``parts``: the V-IPU clusters of a POD that was divided, in the order of their agents, which
    come before those in no cluster; None: the POD is one cluster."""

    name: str
    description: str
    target: str
    machine_model: str
    gateway_memory_bytes: int
    topology: Topology
    agents: tuple[Agent, ...]
    allocations: tuple[Allocation, ...]
    parts: tuple[Cluster, ...] | None = None

    @property
    def ipu_count(self) -> int:
        """Number of its IPUs."""
        return len(self.agents) * IPUS_PER_MACHINE

    @property
    def first_ipu(self) -> int:
        """Index in the POD of its first IPU."""
        return self.agents[0].first_ipu if self.agents else 0

    @property
    def clusters(self) -> tuple[Cluster, ...]:
        """The V-IPU clusters of a POD."""
        return (self,) if self.parts is None else self.parts

    @cached_property
    def clusters_by_agent(self) -> dict[str, Cluster]:
        """The V-IPU cluster of each agent that is in one."""
        return {agent.id: cluster for cluster in self.clusters for agent in cluster.agents}

    @cached_property
    def ilds(self) -> tuple[Ild, ...]:
        """IPU-Link domains of one V-IPU cluster in order."""
        members: dict[int, list[Agent]] = {}
        for agent in self.agents:
            members.setdefault(agent.ild, []).append(agent)
        return tuple(Ild(i, tuple(members.get(i, ()))) for i in range(1 + max(members, default=-1)))

    @cached_property
    def agents_by_id(self) -> dict[str, Agent]:
        """Agents by id."""
        return {agent.id: agent for agent in self.agents}

    def agent_of(self, ipu: int) -> Agent:
        """The agent that holds IPU ``ipu`` of the POD."""
        return self.agents[(ipu - self.first_ipu) // IPUS_PER_MACHINE]

    def ipu_links(self) -> tuple[tuple[int, int], ...]:
        """Pairs of IPUs of the POD joined by IPU-Links, each once, lower first.

        The ladder: rung (2r, 2r+1), rails (2r, 2r+2) and (2r+1, 2r+3); a torus joins its ends.
        """
        links: list[tuple[int, int]] = []
        for ild in self.ilds:
            links += ladder_links(ild.ipu_count, self.topology.ipu_links, ild.agents[0].first_ipu)
        return tuple(links)


def arrange_pod(
    pod: Cluster, clusters: Iterable[tuple[str, Topology, tuple[str, ...]]], agents: Iterable[Agent]
) -> Cluster:
    """The POD with these agents and V-IPU clusters: name, links, agents by id in the order of their links. Agents in
    no cluster come last."""
    left = {agent.id: agent for agent in agents}
    parts: list[Cluster] = []
    index = 0
    for name, topology, members in clusters:
        per_ild = topology.ild_ipus // IPUS_PER_MACHINE
        placed = tuple(
            replace(left.pop(agent), index=index + i, ild=i // per_ild, position=i % per_ild)
            for i, agent in enumerate(members)
        )
        parts.append(replace(pod, name=name, topology=topology, agents=placed, allocations=(), parts=None))
        index += len(placed)
    free = tuple(replace(a, index=index + i, ild=0, position=0) for i, a in enumerate(left.values()))
    everyone = tuple(agent for part in parts for agent in part.agents) + free
    return replace(pod, agents=everyone, parts=tuple(parts))


def ladder_links(ipus: int, topology: LinkTopology, first: int = 0) -> list[tuple[int, int]]:
    """IPU-Links of ``ipus`` IPUs numbered from ``first``, as pairs, lower first (see `Cluster.ipu_links`)."""
    rungs = ipus // 2
    links = [(2 * r, 2 * r + 1) for r in range(rungs)]
    links += [(2 * r + side, 2 * r + 2 + side) for r in range(rungs - 1) for side in (0, 1)]
    if topology is LinkTopology.TORUS and rungs > 2:
        links += [(side, 2 * rungs - 2 + side) for side in (0, 1)]
    return [(first + a, first + b) for a, b in links]


def config_directory() -> Path:
    """Where the POD descriptions are: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "_cluster_configs"
    return inside if inside.is_dir() else package.parent / "cluster_configs"


ANNOUNCED = ("pod64k",)
"""PODs that were announced and never built: for simulations, which name them; no launch and no hint chooses one."""


def cluster_names() -> list[str]:
    """Names of PODs that were built, smallest POD first (by IPUs, then name). `load_cluster` knows `ANNOUNCED` too."""
    names = (path.stem for path in config_directory().glob("*.yaml"))
    return sorted((name for name in names if name not in ANNOUNCED), key=_natural)


def _natural(name: str) -> tuple[bool, int, str]:
    digits = "".join(c for c in name if c.isdecimal())
    number = int(digits or 0)
    return (name.startswith("bow"), 4 if number >= 1000 else number, name)
