"""The description of a launch as plain values.

A `LaunchSpec` is what ``--dry-run`` prints and what the supervisor carries out.

`instance_environment` gives the variables of an instance, in addition to those of podrun itself: POPDIST_* is the
layout, IPUOF_* where the IPUs are, POPLAR_TARGET_OPTIONS what links them, OMPI_COMM_WORLD_* what programs written for
mpirun read (rank and size). PODRUN_LAUNCH_ID marks every process of a launch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from podrun.core.access import OWN_SERVER, VARIABLE
from podrun.core.cluster import MAX_ILD_IPUS, ROUTINGS
from podrun.core.environment import (
    IPUOF_VIPU_API_GCD_ID,
    IPUOF_VIPU_API_HOST,
    IPUOF_VIPU_API_PARTITION_ID,
    IPUOF_VIPU_API_PORT,
    IPUOF_VIPU_API_TIMEOUT,
    OMPI_COMM_WORLD_LOCAL_SIZE,
    OMPI_COMM_WORLD_RANK,
    OMPI_COMM_WORLD_SIZE,
    PODRUN_FIRST_IPU,
    PODRUN_HOST_COLLECTIVES,
    PODRUN_LAUNCH_ID,
    PODRUN_OFFLINE_MODE,
    PODRUN_OWN_CACHE,
    PODRUN_RUNTIME_DIR,
    POPDIST_EXECUTABLE_CACHE_PATH,
    POPDIST_LOCAL_INSTANCE_INDEX,
    POPDIST_NUM_IPUS_PER_REPLICA,
    POPDIST_NUM_LOCAL_REPLICAS,
    POPDIST_NUM_TOTAL_REPLICAS,
    POPDIST_REPLICA_INDEX_OFFSET,
    POPDIST_UNIFORM_REPLICAS_PER_INSTANCE,
    TLS_VARIABLES,
)
from podrun.core.errors import UsageError, present
from podrun.core.layout import InstancePart
from podrun.core.quick_dataclass import dataclass

if TYPE_CHECKING:
    from podrun.faults import FaultSpec
    from podrun.launcher.recovery import RestartPolicy
    from podrun.record.events import LaunchHeader


@dataclass(frozen=True, slots=True)
class LaunchLayout:
    """How replicas, instances, hosts and IPU-Link domains (ILDs) lie over each other; blocks in order at each level.

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
        """How many IPUs the launch's partition has."""
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
    """The user's requirements of the partition; None: podrun decides when it knows the server.

    ``faults`` are planned before the first instance attaches; they hit only instances of this launch.
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
    """Where the output of instances goes. ``directory``: also into files ``DIR/1/rank.N/stdout`` and ``stderr``."""

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
    """Number of batches after which replicas compare their weights; 0: never."""
    header: LaunchHeader | None = None
    """Header of the launch's record; None: nothing is recorded."""
    record: str | None = None
    """The file of the record."""
    warnings: tuple[str, ...] = ()
    """Warnings to print once before the launch."""


@dataclass(slots=True)
class CurrentLaunch:
    """A launch as it is now. Its specification changes when the POD is known, when faults have struck, and when it goes
    on with fewer replicas; everything that acts for the launch reads it here.
    """

    spec: LaunchSpec

    @property
    def wanted(self) -> PartitionSpec:
        """The requirements of the partition. A launch that is offline has none."""
        return present(self.spec.partition, "only a launch that is not offline asks for its partition")

    def keep_faults(self, faults: Sequence[FaultSpec]) -> None:
        """Let these faults be those that have still to strike."""
        self.spec = replace(self.spec, partition=replace(self.wanted, faults=tuple(faults)))


REMOTE_FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", *TLS_VARIABLES)
"""Variables that podrun passes to other hosts without -x. Each host has its own certificate in the same place."""


@dataclass(frozen=True, slots=True)
class PartitionAddress:
    """The service and partition that the IPUoF client asks for IPUs, and target options. ``timeout`` in seconds."""

    host: str
    port: int
    partition: str
    timeout: float
    target_options: Mapping[str, str] = field(default_factory=dict)
    token: str = field(default="", repr=False)
    """The secret by which instances on other hosts prove whose they are (`podrun.core.access`)."""
    directory: str = ""
    """The runtime directory, in which instances on this host find that secret."""
    own: bool = False
    """The service has to prove that it is this user's."""
    first_ipu: int = 0
    """The launch's first IPU in the partition; not 0 only where several launches share one."""


def compat_directory() -> Path:
    """The folder that holds podrun's ``popart`` and ``popdist``."""
    return Path(__file__).resolve().parent.parent / "compat"


def own_target_options(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's POPLAR_TARGET_OPTIONS. Raises UsageError if they are not a JSON object."""
    own = environ.get("POPLAR_TARGET_OPTIONS")
    if not own:
        return {}
    hint = """Unset it, or correct it, as in '{"gatewayMode": "true"}'."""
    try:
        options = json.loads(own)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"POPLAR_TARGET_OPTIONS is not JSON: {error}", hint=hint) from error
    if not isinstance(options, dict):
        raise UsageError("POPLAR_TARGET_OPTIONS is not a JSON object", hint=hint)
    return {str(key): str(value) for key, value in options.items()}


def target_options(
    size: int, ild_ipus: int, instance_ipus: int, routing: str = "", environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """POPLAR_TARGET_OPTIONS of a partition. Options in the user's environment take precedence.

    ``routing`` is the partition's ILD routing as V-IPU names it (DNC, SWNC, RINGSWNC, BTNC); empty: by size, as
    observed on real systems (mesh and default below a full POD64, torus and sliding window on it). Raises
    UsageError if the environment's value is not a JSON object.
    """
    domain = min(size, ild_ipus)
    wiring = ROUTINGS.get(routing or ("RINGSWNC" if domain >= MAX_ILD_IPUS else "DNC"), ROUTINGS["SWNC"])
    options = {
        "ipuLinkDomainSize": str(domain),
        "ipuLinkConfiguration": wiring.link_configuration,
        "ipuLinkTopology": wiring.link_topology.value,
        "gatewayMode": "true",
        "instanceSize": str(instance_ipus),
    }
    return options | own_target_options(environ or {})


def layout_variables(layout: LaunchLayout, instance: InstanceSpec) -> dict[str, str]:
    """POPDIST_* and OMPI_COMM_WORLD_*: the place of an instance in the launch."""
    return {
        POPDIST_NUM_TOTAL_REPLICAS: str(layout.replicas),
        POPDIST_NUM_IPUS_PER_REPLICA: str(layout.ipus_per_replica),
        POPDIST_NUM_LOCAL_REPLICAS: str(instance.replicas),
        POPDIST_UNIFORM_REPLICAS_PER_INSTANCE: "1",
        POPDIST_REPLICA_INDEX_OFFSET: str(instance.first_replica),
        POPDIST_LOCAL_INSTANCE_INDEX: str(instance.local_index),
        OMPI_COMM_WORLD_SIZE: str(layout.instances),
        OMPI_COMM_WORLD_RANK: str(instance.index),
        OMPI_COMM_WORLD_LOCAL_SIZE: str(layout.instances_per_host),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(instance.local_index),
        "OMPI_COMM_WORLD_NODE_RANK": str(instance.local_index),
        "OMPI_UNIVERSE_SIZE": str(layout.instances),
    }


def partition_variables(
    address: PartitionAddress, instance: InstanceSpec, *, local: bool = True
) -> dict[str, str]:
    """IPUOF_* and POPLAR_TARGET_OPTIONS, and where the secret is: on this host in a file, elsewhere (``local`` False)
    in a variable.
    """
    secret = {PODRUN_RUNTIME_DIR: address.directory} if local else {VARIABLE: address.token}
    own = {OWN_SERVER: "1"} if address.own else {}
    if address.first_ipu:
        own[PODRUN_FIRST_IPU] = str(address.first_ipu)
    return (
        {name: value for name, value in secret.items() if value}
        | own
        | {
            IPUOF_VIPU_API_HOST: address.host,
            IPUOF_VIPU_API_PORT: str(address.port),
            IPUOF_VIPU_API_PARTITION_ID: address.partition,
            IPUOF_VIPU_API_TIMEOUT: f"{address.timeout:g}",
            IPUOF_VIPU_API_GCD_ID: str(instance.gcd),
            "POPLAR_TARGET_OPTIONS": json.dumps(dict(address.target_options)),
        }
    )


def instance_environment(
    layout: LaunchLayout,
    instance: InstanceSpec,
    environ: Mapping[str, str],
    *,
    address: PartitionAddress | None,
    cache_path: str,
    own_cache: bool = False,
    launch_id: str,
    local: bool = True,
    debug: bool = False,
    exchange_point: str = "",
) -> dict[str, str]:
    """The whole environment of an instance. ``environ`` is podrun's own; instances elsewhere (``local``
    False) get only the variables that are forwarded and those named by -x. ``exchange_point``: ``ADDRESS:PORT:KEY``
    where instance 0 listens for host collectives (`podrun.popdist.collectives`). ``own_cache``: nobody asked for
    that cache, which goes with the launch.
    """
    kept = dict(environ) if local else {name: environ[name] for name in REMOTE_FORWARDED if name in environ}
    for name in [
        name
        for name in kept
        if name.startswith(("POPDIST_", "OMPI_COMM_WORLD_", "IPUOF_VIPU_API_"))
        or name in (OWN_SERVER, PODRUN_OWN_CACHE)
    ]:
        del kept[name]
    python_path = [str(compat_directory()), *filter(None, [environ.get("PYTHONPATH")])]
    kept |= {
        "PYTHONPATH": ":".join(python_path),
        POPDIST_EXECUTABLE_CACHE_PATH: cache_path,
        "IPUOF_LOG_LEVEL": environ.get("IPUOF_LOG_LEVEL", "WARN"),
        PODRUN_LAUNCH_ID: launch_id,
    }
    if own_cache:
        kept[PODRUN_OWN_CACHE] = "1"
    kept.pop(PODRUN_HOST_COLLECTIVES, None)
    if exchange_point:
        kept[PODRUN_HOST_COLLECTIVES] = exchange_point
    # Output goes through a pipe: without this a Python program's lines appear only when its buffer is full.
    kept.setdefault("PYTHONUNBUFFERED", "1")
    if debug:
        kept["PYTHONFAULTHANDLER"] = "1"
    kept |= partition_variables(address, instance, local=local) if address else {PODRUN_OFFLINE_MODE: "1"}
    for name, value in instance.exports.items():
        if value is not None:
            kept[name] = value
        elif name in environ and name != "PYTHONPATH":
            kept[name] = environ[name]
    return kept | layout_variables(layout, instance)
