"""How much memory this process's host has left for it: what the kernel says is available, or less in a container.

Containers and batch systems limit a control group, of either version; ``/proc/meminfo`` does not know. What files in
the page cache take of such a limit is given back when it is needed, so it counts as free.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_FILES = (
    ("", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "memory",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)
"""For each version: its controller in /proc/self/cgroup, where it is mounted, limit, use, and page cache in the
statistics."""


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken before anybody has to swap or is killed. ``root``: where ``/proc`` and ``/sys`` lie."""
    return min([psutil.virtual_memory().available, *_left(root)])


def _left(root: Path) -> Iterator[int]:
    """What each limited control group of this process has left."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller, mount, limit, used, cached in _FILES:
            if controller not in controllers.split(","):
                continue
            # In a container the path may be the host's, while the mount shows the container's own group as its root.
            own = root / mount / path.lstrip("/")
            for group in (own, *own.parents):
                limited, use = _text(group / limit).strip(), _text(group / used).strip()
                if limited.isdecimal() and use.isdecimal():
                    yield max(0, int(limited) - int(use) + _statistic(group / "memory.stat", cached))
                if group == root / mount:
                    break


def _statistic(file: Path, name: str) -> int:
    found = (line.split() for line in _text(file).splitlines())
    return next((int(words[1]) for words in found if words[0] == name), 0)


def _text(file: Path) -> str:
    """A file's text; nothing if there is none, or none for us: then it limits nothing that we know of."""
    try:
        return file.read_text()
    except OSError:
        return ""
