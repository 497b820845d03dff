"""Which POD a launch is to run on when no server says so: ``--cluster``, else the smallest that holds the
run.
"""

from __future__ import annotations

from podrun.cluster import Cluster, cluster_names, load_cluster
from podrun.launcher.spec import LaunchSpec, PodFacts

SMALLEST_DEFAULT = 16
"""Without --cluster a run gets an IPU-POD16 or larger."""


def choose_cluster(spec: LaunchSpec) -> Cluster:
    """The POD of ``--cluster``; else the smallest GC200 POD that holds the run, else the largest there is.

    Raises NotFoundError and ConfigError for a POD that is not there or whose description is wrong.
    """
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
    """What placement must know of it."""
    return PodFacts(
        cluster.name, cluster.ipu_count, cluster.topology.ild_ipus, cluster.topology.ipu_links.value
    )


def pods_by_size() -> dict[str, int]:
    """IPUs of the GC200 PODs that can be asked for by name, smallest first: for hints."""
    return {name: load_cluster(name).ipu_count for name in cluster_names() if name.startswith("pod")}
