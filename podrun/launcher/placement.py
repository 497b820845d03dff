"""Placement: replicas on instances, hosts and IPU-Link domains. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from podrun.core.errors import UsageError
from podrun.launcher.host_names import LOCAL_HOST, parse_hosts, read_hostfile
from podrun.launcher.spec import LaunchLayout, LaunchSpec, PodFacts

MAX_IPUS_PER_INSTANCE = 64
"""The most IPUs that one process drives: those of an IPU-POD64."""


def plan_layout(values: Mapping[str, Any]) -> LaunchLayout:
    """Replicas over instances over hosts. Raises UsageError naming the numbers that do not divide."""
    replicas, instances = values["num-replicas"], values["num-instances"]
    if replicas % instances:
        fitting = _near([n for n in range(1, replicas + 1) if replicas % n == 0], instances)
        raise UsageError(
            f"{replicas} replicas cannot be divided evenly among {instances} instances",
            hint=f"Type --num-instances {' or '.join(map(str, fitting))}.",
        )
    hosts = _hosts(values)
    if instances % len(hosts):
        fitting = _near(
            [n for n in range(1, replicas + 1) if replicas % n == 0 and n % len(hosts) == 0], instances
        )
        choice = f"Type --num-instances {' or '.join(map(str, fitting))}." if fitting else "Name fewer hosts."
        raise UsageError(
            f"{instances} instances cannot be divided evenly among {len(hosts)} hosts", hint=choice
        )
    layout = LaunchLayout(replicas, values["ipus-per-replica"], instances, hosts, values["num-ilds"] or 1)
    if layout.instances % layout.ilds:
        raise UsageError(
            f"{instances} instances cannot be divided evenly among {layout.ilds} IPU-Link domains",
            hint=f"No instance spans IPU-Link domains: type --num-instances {layout.ilds} or a multiple.",
        )
    if not values["offline-mode"]:
        _check_size(layout)
    return layout


def _check_size(layout: LaunchLayout) -> None:
    size, per_replica = layout.ipus, layout.ipus_per_replica
    if size & (size - 1):
        powers = [1 << bit for bit in range(22) if (1 << bit) % per_replica == 0]
        fitting = _near([power // per_replica for power in powers], layout.replicas)
        unit = "IPU" if per_replica == 1 else "IPUs"
        words = " or ".join(f"--num-replicas {n} ({n * per_replica} IPUs)" for n in fitting)
        raise UsageError(
            f"{layout.replicas} replicas of {per_replica} {unit} need {size} IPUs, and a partition has a power of two",
            hint=f"Type {words}." if fitting else "Make --ipus-per-replica a power of two.",
        )
    if layout.ipus_per_instance > MAX_IPUS_PER_INSTANCE:
        needed = size // MAX_IPUS_PER_INSTANCE
        raise UsageError(
            f"an instance would drive {layout.ipus_per_instance} IPUs; {MAX_IPUS_PER_INSTANCE} is the most",
            hint=f"Type --num-instances {max(needed, 1)} or more.",
        )


def fit_to_pod(
    spec: LaunchSpec, pod: PodFacts, pods: Callable[[], Mapping[str, int]] | None = None
) -> LaunchSpec:
    """The launch with its IPU-Link domains settled on this POD. ``pods``: IPUs of the PODs one could ask for instead.

    Raises UsageError if the POD is too small, its IPU-Link domains do not hold whole instances, or it lacks what a
    planned fault hits.
    """
    layout = spec.layout
    if layout.ipus > pod.ipus:
        larger = [name for name, ipus in (pods() if pods else {}).items() if ipus >= layout.ipus]
        raise UsageError(
            f"the run needs {layout.ipus} IPUs; {pod.name} has {pod.ipus}",
            hint=f"Type --cluster {larger[0]}, or fewer replicas." if larger else "Type fewer replicas.",
        )
    least = -(-layout.ipus // pod.ild_ipus)
    asked = spec.partition.num_ilds if spec.partition else None
    ilds = asked or least
    if ilds < least or ilds * pod.ild_ipus > pod.ipus:
        raise UsageError(
            f"{layout.ipus} IPUs do not lie on {ilds} IPU-Link domain{'s' if ilds > 1 else ''} of "
            f"{pod.name}, which has {pod.ipus // pod.ild_ipus} of {pod.ild_ipus} IPUs",
            hint=f"Type --num-ilds {least}, or leave it out.",
        )
    if layout.instances % ilds:
        raise UsageError(
            f"{layout.ipus} IPUs lie on {ilds} IPU-Link domains of {pod.ild_ipus}, which {layout.instances} "
            f"instance{'s' if layout.instances > 1 else ''} cannot share evenly",
            hint=f"No instance spans IPU-Link domains: type --num-instances {ilds} or a multiple.",
        )
    _check_faults(spec, pod, ilds)
    settled = dataclasses.replace(layout, ilds=ilds)
    # A GCD lies in one IPU-Link domain: with several there is one GCD for each instance, as PopRun makes them.
    several = ilds > 1
    instances = tuple(
        dataclasses.replace(i, ild=settled.ild_of(i.index), gcd=i.index if several else 0)
        for i in spec.instances
    )
    partition = spec.partition
    if partition is not None and several:
        partition = dataclasses.replace(partition, num_gcds=layout.instances)
    return dataclasses.replace(spec, layout=settled, instances=instances, partition=partition)


def _hosts(values: Mapping[str, Any]) -> tuple[str, ...]:
    if values["host"] and values["hostfile"]:
        raise UsageError("--host and --hostfile exclude each other", hint="Keep one of them.")
    if values["host"]:
        return parse_hosts(values["host"])
    if values["hostfile"]:
        return read_hostfile(Path(values["hostfile"]))
    return (LOCAL_HOST,)


def _check_faults(spec: LaunchSpec, pod: PodFacts, ilds: int) -> None:
    """Raise UsageError for a fault whose IPU, machine or IPU-Link the partition does not have."""
    if spec.partition is None or not spec.partition.faults:
        return
    from podrun.core.cluster import LinkTopology
    from podrun.faults import partition_links, validate

    ipus = spec.layout.ipus
    # An IPU-Link domain that the partition does not fill has no links between its ends.
    topology = LinkTopology(pod.topology) if ipus // ilds == pod.ild_ipus else LinkTopology.MESH
    validate(spec.partition.faults, ipus=ipus, links=partition_links(ipus, ilds, topology), ilds=ilds)


def _near(values: list[int], wanted: int) -> list[int]:
    """The closest value below and above ``wanted``, if any."""
    below = [value for value in values if value < wanted]
    above = [value for value in values if value > wanted]
    return [*below[-1:], *above[:1]]
