"""What ``--dry-run`` prints: the launch as it would be carried out, without starting anything."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from podrun.launcher.environment import layout_variables
from podrun.launcher.spec import InstanceSpec, LaunchSpec, PodFacts
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
            yield f"fault:      {fault}"
    yield f"cache:      {spec.cache_path or 'a directory that is removed afterwards'}"
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
