"""Finds the V-IPU server, or else chooses the POD that podrun emulates: ``--cluster``, else the smallest that holds the
run.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from podrun.core.access import account_of
from podrun.core.cluster import Cluster, cluster_names
from podrun.core.environment import IPUOF_VIPU_API_HOST, IPUOF_VIPU_API_PORT, VIPU_CLI_API_HOST
from podrun.core.errors import ConflictError, PodrunError, ServiceError
from podrun.core.identity import connect_tcp, user_name
from podrun.core.quick_dataclass import dataclass
from podrun.launcher.option_table import PORT_DEFAULT
from podrun.launcher.spec import LaunchSpec, PodFacts, ServerSpec
from podrun.partition.commands.which_server import port_in

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient
    from podrun.partition.state.values import PartitionInfo

LOCAL = "127.0.0.1"
_OF_A_LAUNCH = re.compile(r"podrun-(\d+)")
"""Names of partitions that podrun makes for one launch; the number is podrun's process id."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A V-IPU server and where its address came from."""

    host: str
    port: int
    source: str
    own: bool = True
    """The user has not named the server, so it has to prove that it is this user's."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port} ({self.source})"


def find_launch_server(server: ServerSpec, environ: Mapping[str, str]) -> ServerAddress | None:
    """The server to use, or None if podrun has to start one. Does not connect to a server that the user names.

    In this order: --vipu-server-host, $IPUOF_VIPU_API_HOST, a `vipu-server` of this user on this host,
    $VIPU_CLI_API_HOST, a V-IPU server at the default port of this host that proves that it is this user's. The port is
    that of --vipu-server-port, else of the variable beside the one that names the host (..._API_PORT), else 8090. With
    --private: none.
    """
    if server.private:
        return None
    port = server.port or _environment_port(environ, IPUOF_VIPU_API_PORT) or PORT_DEFAULT
    if server.host:
        return ServerAddress(server.host, port, "--vipu-server-host", own=False)
    if host := environ.get(IPUOF_VIPU_API_HOST):
        return ServerAddress(host, port, "$IPUOF_VIPU_API_HOST", own=False)
    published = _published(server)
    if published is not None:
        return published
    if host := environ.get(VIPU_CLI_API_HOST):
        port = server.port or _environment_port(environ, "VIPU_CLI_API_PORT") or port
        return ServerAddress(host, port, "$VIPU_CLI_API_HOST", own=False)
    default = ServerAddress(LOCAL, port, "the default port")
    return default if _answers(default, server.cluster) else None


def _environment_port(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    return port_in(text, name, "Unset it, or correct it.") if text else None


def _published(server: ServerSpec) -> ServerAddress | None:
    from podrun.partition.host.discovery import VIPU_SERVER, Registry

    for entry in Registry().entries():
        if entry.kind != VIPU_SERVER or not entry.port:
            continue
        if server.port not in (None, entry.port) or server.cluster not in (None, entry.cluster):
            continue
        return ServerAddress(entry.host, entry.port, "running on this host")
    return None


def _answers(address: ServerAddress, cluster: str | None) -> bool:
    """True iff a V-IPU server of this user answers there, and has the POD that the user asks for."""
    try:
        with connect_tcp(address.host, address.port, 0.5):
            pass
    except OSError:
        return False
    from podrun.partition.client.vipu_client import VipuClient

    try:
        with VipuClient(address.host, address.port, timeout=2.0, own=True) as client:
            return cluster in (None, client.cluster().name)
    except PodrunError:
        return False


SMALLEST_DEFAULT = 16
"""Without --cluster a run gets an IPU-POD16 or larger."""


def choose_cluster(spec: LaunchSpec) -> Cluster:
    """The POD of ``--cluster``; else the smallest GC200 POD that holds the run, else the largest one.

    Raises NotFoundError for an unknown POD, ConfigError for a wrong description.
    """
    from podrun.core.cluster_file import load_cluster

    if spec.server.cluster:
        return load_cluster(spec.server.cluster)
    candidates = [name for name in cluster_names() if name.startswith("pod")]
    chosen = None
    for name in candidates:
        chosen = load_cluster(name)
        if chosen.ipu_count >= max(spec.layout.ipus, SMALLEST_DEFAULT):
            return chosen
    return chosen or load_cluster("pod16")


def facts_of(cluster: Cluster) -> PodFacts:
    """The POD as placement sees it."""
    return PodFacts(
        cluster.name, cluster.ipu_count, cluster.topology.ild_ipus, cluster.topology.ipu_links.value
    )


def pods_by_size() -> dict[str, int]:
    """IPUs of the named GC200 PODs, smallest first: for hints."""
    from podrun.core.cluster_file import load_cluster

    return {name: load_cluster(name).ipu_count for name in cluster_names() if name.startswith("pod")}


def usable_names(existing: Mapping[str, PartitionInfo], environ: Mapping[str, str]) -> list[str]:
    """The names of this user's partitions, without those that end with a process: another podrun has made them for its
    own launch, or a client waits for them. A server with users of its own (--secure) says itself whose they are.
    """
    ours = ("", user_name(os.getuid()))
    return sorted(
        name
        for name, info in existing.items()
        if (account_of(environ)[0] or info.owner in ours) and not (info.holder or _goes_with_a_launch(name))
    )


def _goes_with_a_launch(name: str) -> bool:
    match = _OF_A_LAUNCH.fullmatch(name)
    return match is not None and int(match[1]) != os.getpid() and os.path.exists(f"/proc/{match[1]}")


def check_may_use(client: VipuClient, name: str) -> None:
    """Raise DeniedError, which says whose it is, for a partition whose devices this user may not use."""
    with contextlib.suppress(ServiceError, ConflictError):
        client.ipuof_config(name)
