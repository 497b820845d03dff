"""What podrun prints about a launch: before it, as ``--print-topology`` and ``--dry-run``; after it, as a summary."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from podrun.launcher.instance_environment import layout_variables
from podrun.launcher.spec import InstanceSpec, LaunchLayout, LaunchSpec, PodFacts

if TYPE_CHECKING:
    from podrun.core.telemetry import MachineReport

NETWORK_MEDIAN, NETWORK_WORST = 10, 30
"""Errors of the model on networks, in percent, rounded up to tens. A test compares them with docs/fidelity.md."""
TRUST = f"an estimate; published networks within {NETWORK_MEDIAN} % in the median, {NETWORK_WORST} % at worst"


def summary(layout: LaunchLayout, reports: Sequence[MachineReport], wall_seconds: float) -> list[str]:
    """Lines without line ends. Figures that machines do not report are left out."""
    machines = len(reports)
    parts = [counted(layout.replicas, "replica"), counted(layout.instances, "instance")]
    if machines:
        parts.append(counted(machines, "machine"))
    lines = [f"{', '.join(parts)}; {wall_seconds:.1f} s"]
    emulation = _emulation(reports)
    if emulation:
        lines.append(emulation)
    model = _model(reports)
    if model:
        lines += model
    return lines


def counted(number: int, noun: str) -> str:
    """``1 machine``, ``4 machines``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _emulation(reports: Sequence[MachineReport]) -> str:
    """Batches (weight updates) and samples a second. Machines work side by side, so the slowest counts."""
    batches = max((report.batches_done for report in reports), default=0)
    if not batches:
        return ""
    text = f"emulation: {batches} {'batch' if batches == 1 else 'batches'}"
    seconds = max((report.emulation_s or 0.0 for report in reports), default=0.0)
    if seconds <= 0:
        return text
    text += f" in {seconds:.2f} s"
    if all(report.samples_done is not None for report in reports):
        samples = sum(report.samples_done or 0 for report in reports)
        text += f", {samples / seconds:,.0f} samples/s"
    return text


def _model(reports: Sequence[MachineReport]) -> list[str]:
    """Modelled time of a batch, pipelined or not. Machines run in lockstep, so the longest counts."""
    times = [
        report.modelled_s / report.batches_done
        for report in reports
        if report.modelled_s and report.batches_done
    ]
    if not times:
        return []
    return [f"modelled on IPUs: {duration(max(times))} per batch ({TRUST})"]


def duration(seconds: float) -> str:
    """A time in a unit that leaves at most three digits before the point."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


TITLE = "poprun topology"
LABEL_WIDTH = 11


def topology_table(layout: LaunchLayout) -> str:
    """The whole table, ready to be written in one piece."""
    per_instance = layout.replicas_per_instance
    instances = [replica // per_instance for replica in range(layout.replicas)]
    cell = len(str(layout.replicas - 1)) + 2
    width = layout.replicas * (cell + 1) - 1
    full = LABEL_WIDTH + 1 + width
    hosts = [instance // layout.instances_per_host for instance in instances]
    rows = [
        _row("hosts", _merged(hosts, cell, lambda host, room: _host_label(layout, host, room))),
        _row("ILDs", _merged([layout.ild_of(i) for i in instances], cell, lambda ild, _: str(ild))),
        _row("instances", _merged(instances, cell, lambda instance, _: str(instance))),
        _row("replicas", "|".join(f" {replica}".ljust(cell) for replica in range(layout.replicas))),
    ]
    between = f"|{'-' * LABEL_WIDTH}|{'-' * width}|"
    lines = [f" {'=' * full}", f"|{_centred(TITLE, full)}|", f"|{'=' * full}|", rows[0]]
    for row in rows[1:]:
        lines += [between, row]
    lines.append(f" {'-' * full}")
    return "\n".join(lines) + "\n"


def _row(label: str, cells: str) -> str:
    return f"|{f' {label}'.ljust(LABEL_WIDTH)}|{cells}|"


def _merged(owners: list[int], cell: int, label: Callable[[int, int], str]) -> str:
    """Cells of one row: neighbouring replicas with one owner share a cell."""
    parts = []
    for owner, group in groupby(owners):
        room = len(list(group)) * (cell + 1) - 1
        parts.append(_centred(label(owner, room), room))
    return "|".join(parts)


def _host_label(layout: LaunchLayout, host: int, room: int) -> str:
    name = layout.hosts[host]
    return name if len(name) + 2 <= room else f"[{host}]"


def _centred(text: str, width: int) -> str:
    left = max((width - len(text)) // 2, 0)
    return (" " * left + text).ljust(width)


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
