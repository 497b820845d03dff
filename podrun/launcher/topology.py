"""PopRun's topology table: how replicas lie on instances, IPU-Link domains and hosts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from podrun.launcher.spec import LaunchLayout

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
