"""What is to be launched, as plain values: nothing here knows how it is done.

A `LaunchSpec` is what ``--dry-run`` prints and what the supervisor carries out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Layout:
    """How replicas, instances, hosts and IPU-Link domains (ILDs) lie over each other; blocks in order at each
    level.

    Instance *i* owns replicas ``[i*L, (i+1)*L)`` with ``L = replicas // instances``; hosts and ILDs each hold
    a whole number of instances.
    """

    replicas: int
    ipus_per_replica: int
    instances: int
    hosts: tuple[str, ...]
    ilds: int = 1

    @property
    def ipus(self) -> int:
        """Size of the partition."""
        return self.replicas * self.ipus_per_replica

    @property
    def replicas_per_instance(self) -> int:
        """Replicas that one instance owns."""
        return self.replicas // self.instances

    @property
    def ipus_per_instance(self) -> int:
        """IPUs that one instance owns."""
        return self.replicas_per_instance * self.ipus_per_replica

    @property
    def instances_per_host(self) -> int:
        """Instances on each host."""
        return self.instances // len(self.hosts)

    def host_of(self, instance: int) -> str:
        """Host of an instance."""
        return self.hosts[instance // self.instances_per_host]

    def local_index(self, instance: int) -> int:
        """Index of an instance on its host."""
        return instance % self.instances_per_host

    def ild_of(self, instance: int) -> int:
        """IPU-Link domain that holds an instance's IPUs."""
        return instance * self.ilds // self.instances


@dataclass(frozen=True, slots=True)
class PodFacts:
    """What placement must know of a POD: its name, its IPUs, and how many of them IPU-Links alone join."""

    name: str
    ipus: int
    ild_ipus: int
    topology: str = "mesh"


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Where the user says the V-IPU server is; None: not said. ``cluster``: the POD to emulate if podrun
    starts one; ``ray``: the Ray cluster for its machines.
    """

    host: str | None = None
    port: int | None = None
    timeout: float = 120.0
    cluster: str | None = None
    ray: str | None = None


@dataclass(frozen=True, slots=True)
class PartitionSpec:
    """What the user says about the partition; None for what is decided when the server is known.

    ``faults`` are planned before the first instance attaches.
    """

    size: int
    num_gcds: int
    name: str | None = None
    allocation: str | None = None
    num_ilds: int | None = None
    sync_type: str | None = None
    attempts: int = 1
    update: bool = False
    reset: bool | None = None
    remove: bool = True
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What becomes of what instances print. ``directory``: also to files ``DIR/1/rank.N/stdout`` and
    ``stderr``.
    """

    only_instance: int | None = None
    directory: str | None = None


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One host process. ``exports``: variables the user names for it; None: the value podrun itself has.

    ``forward_stdin``: it reads podrun's standard input (instance 0 alone, as under mpirun).
    """

    index: int
    host: str
    local_index: int
    first_replica: int
    replicas: int
    ild: int
    gcd: int
    command: tuple[str, ...]
    directory: str
    exports: Mapping[str, str | None] = field(default_factory=dict)
    forward_stdin: bool = False


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What the command line and the environment say about a launch. ``partition`` is None offline."""

    layout: Layout
    instances: tuple[InstanceSpec, ...]
    server: ServerSpec
    partition: PartitionSpec | None
    output: OutputSpec
    cache_path: str | None = None
    print_topology: bool = False
    verbosity: int = 0
    debug: bool = False
    host_subnet: str | None = None
    warnings: tuple[str, ...] = ()
    """Said once before the launch."""
