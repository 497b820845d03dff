"""``--dry-run``: the launch as text, and nothing starts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from podrun.core.kept_files import kept_folder
from podrun.launcher.launch_server import LaunchServer
from podrun.launcher.own_streams import Log
from podrun.launcher.placement import fit_to_pod
from podrun.launcher.server import choose_cluster, facts_of, find_launch_server, pods_by_size
from podrun.launcher.spec import CurrentLaunch, InstanceSpec, LaunchSpec, PodFacts, layout_variables
from podrun.launcher.topology import topology_table


def describe(spec: LaunchSpec, pod: PodFacts | None, server: str, kept: str) -> str:
    """The launch as text. ``server``: where the partition service is, or that one would be started. ``kept``: where
    programs are kept unless the launch names a cache.
    """
    return "\n".join([*_lines(spec, pod, server, kept), ""])


def _lines(spec: LaunchSpec, pod: PodFacts | None, server: str, kept: str) -> Iterator[str]:
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
    yield f"cache:      {spec.cache_path or kept}"
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


def _of_first_instance(spec: LaunchSpec, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The variables of the launch's first instance."""
    exports = spec.instances[0].exports if spec.instances else {}
    merged = {**environ, **exports}
    return {name: value for name, value in merged.items() if value is not None}


def preview(spec: LaunchSpec, environ: Mapping[str, str]) -> str:
    """The text of ``--dry-run``. Asks a running server for its POD; starts nothing."""
    folder = kept_folder("programs", _of_first_instance(spec, environ))
    kept = "one for the launch alone" if folder is None else f"that of the user, {folder}"
    if spec.partition is None:
        return describe(spec, None, "", kept)
    address = find_launch_server(spec.server, environ)
    if address is None:
        pod = facts_of(choose_cluster(spec))
        return describe(fit_to_pod(spec, pod, pods_by_size), pod, "podrun starts one for the run", kept)
    server = LaunchServer(CurrentLaunch(spec), environ, Log(-1))
    try:
        pod = server.connect()
    finally:
        server.close()
    return describe(fit_to_pod(spec, pod), pod, str(address), kept)
