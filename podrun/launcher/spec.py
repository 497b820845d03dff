"""The description of a launch as plain values.

A `LaunchSpec` is what ``--dry-run`` prints and what the supervisor carries out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from podrun.faults import FaultSpec
    from podrun.launcher.recovery import RestartPolicy
    from podrun.record.events import LaunchHeader

from podrun.core.layout import InstancePart


@dataclass(frozen=True, slots=True)
class LaunchLayout:
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
        return self.part_of(0).local_replicas

    @property
    def ipus_per_instance(self) -> int:
        """IPUs that one instance owns."""
        return self.part_of(0).ipus.count

    def part_of(self, instance: int) -> InstancePart:
        """The replicas of an instance."""
        return InstancePart.of(instance, self.instances, self.replicas, self.ipus_per_replica)

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
    """A POD as placement sees it: its name, its IPUs, and the IPUs of one IPU-Link domain."""

    name: str
    ipus: int
    ild_ipus: int
    topology: str = "mesh"


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """The V-IPU server that the user names; None: not named. ``cluster``: the POD to emulate if podrun
    starts one; ``ray``: the Ray cluster for its machines; ``private``: podrun starts one whatever runs.
    """

    host: str | None = None
    port: int | None = None
    timeout: float = 120.0
    cluster: str | None = None
    ray: str | None = None
    private: bool = False


@dataclass(frozen=True, slots=True)
class PartitionSpec:
    """The user's requirements of the partition; None: decided when the server is known.

    ``faults`` are planned before the first instance attaches; only instances of this launch are hit.
    """

    size: int
    num_gcds: int
    name: str | None = None
    allocation: str | None = None
    num_ilds: int | None = None
    sync_type: str | None = None
    attempts: int = 1
    wait: bool = False
    update: bool = False
    reset: bool | None = None
    remove: bool = True
    faults: tuple[FaultSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """Where the output of instances goes. ``directory``: also to files ``DIR/1/rank.N/stdout`` and
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
    """A launch as the command line and the environment describe it. ``partition`` is None offline."""

    layout: LaunchLayout
    instances: tuple[InstanceSpec, ...]
    server: ServerSpec
    partition: PartitionSpec | None
    output: OutputSpec
    cache_path: str | None = None
    print_topology: bool = False
    verbosity: int = 0
    debug: bool = False
    host_subnet: str | None = None
    restarts: RestartPolicy | None = None
    check_replicas: int = 0
    """After how many batches replicas compare their weights; 0: never."""
    header: LaunchHeader | None = None
    """Of the launch's record; None: nothing is written down."""
    record: str | None = None
    """The file of the record."""
    warnings: tuple[str, ...] = ()
    """Warnings to print once before the launch."""
