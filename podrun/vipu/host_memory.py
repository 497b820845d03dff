"""Memory that this process can still take: what the kernel says is available, or less in a container.

Containers and batch systems limit a control group (version 1 or 2), which ``/proc/meminfo`` does not show. The page
cache of a control group counts as free, since the kernel gives it back when needed.

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
"""For each version: controller in /proc/self/cgroup, mount point, files with limit and use, and the name of the page
cache in the statistics."""


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process can take before the host swaps. ``root``: the directory of ``proc`` and ``sys``."""
    return min([psutil.virtual_memory().available, *_left(root)])


def _left(root: Path) -> Iterator[int]:
    """Bytes that each limited control group of this process has left."""
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
    """A file's text; empty if it cannot be read: an unknown limit counts as none."""
    try:
        return file.read_text()
    except OSError:
        return ""
