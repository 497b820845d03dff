"""``--dry-run``: the launch as text, and nothing starts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from podrun.launcher.launch_server import LaunchServer
from podrun.launcher.own_streams import Log
from podrun.launcher.placement import fit_to_pod
from podrun.launcher.server import choose_cluster, facts_of, find_launch_server, pods_by_size
from podrun.launcher.spec import CurrentLaunch, InstanceSpec, LaunchSpec, PodFacts, layout_variables
from podrun.launcher.topology import topology_table


def describe(spec: LaunchSpec, pod: PodFacts | None, server: str) -> str:
    """The launch as text. ``server``: where the partition service is, or that one would be started."""
    return "\n".join([*_lines(spec, pod, server), ""])


def _lines(spec: LaunchSpec, pod: PodFacts | None, server: str) -> Iterator[str]:
    layout = spec.layout
    yield topology_table(layout)
    if spec.partition is None:
        yield "offline: no partition, no IPUs"
    else:
        wanted = spec.partition
        yield f"server:     {server}"
        if pod is not None:
            yield f"POD:        {pod.name}, {pod.ipus} IPUs, IPU-Link domains of {pod.ild_ipus}"
        yield f"partition:  {wanted.name or 'the only one there is, else a new one'}, {wanted.size} IPUs"
        for fault in wanted.faults:
            yield f"fault:      {fault.text}"
    yield f"cache:      {spec.cache_path or 'that of the user'}"
    for instance in spec.instances:
        yield ""
        yield from _instance(spec, instance)


def _instance(spec: LaunchSpec, instance: InstanceSpec) -> Iterator[str]:
    last = instance.first_replica + instance.replicas - 1
    owned = f"replica {last}" if instance.replicas == 1 else f"replicas {instance.first_replica} to {last}"
    yield f"instance {instance.index} on {instance.host}: {owned}"
    yield f"  in        {instance.directory}"
    variables = layout_variables(spec.layout, instance)
    named = {name: value for name, value in instance.exports.items() if value is not None}
    for name, value in (variables | named).items():
        if name.startswith("POPDIST_") or name in named:
            yield f"  with      {name}={value}"
    yield f"  run       {shlex.join(instance.command)}"


def preview(spec: LaunchSpec, environ: Mapping[str, str]) -> str:
    """The text of ``--dry-run``. Asks a running server for its POD; starts nothing."""
    if spec.partition is None:
        return describe(spec, None, "")
    address = find_launch_server(spec.server, environ)
    if address is None:
        pod = facts_of(choose_cluster(spec))
        return describe(fit_to_pod(spec, pod, pods_by_size), pod, "podrun starts one for the run")
    server = LaunchServer(CurrentLaunch(spec), environ, Log(-1))
    try:
        pod = server.connect()
    finally:
        server.close()
    return describe(fit_to_pod(spec, pod), pod, str(address))
