"""Available memory: what the kernel says, or less if a control group limits it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from podrun.partition.machines.ray_starts import available_bytes

MIB = 1 << 20
NEW = ("memory.max", "memory.current", "inactive_file")
OLD = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def group(folder: Path, files: tuple[str, str, str], limit: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files[0]).write_text(f"{limit}\n")
    (folder / files[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - cached}\n{files[2]} {cached}\n")


def processes(root: Path, text: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)


@pytest.mark.parametrize(
    ("line", "mount", "files"),
    [
        ("0::/jobs/one\n", "sys/fs/cgroup", NEW),
        ("9:cpu:/elsewhere\n4:memory:/jobs/one\n0::/\n", "sys/fs/cgroup/memory", OLD),
    ],
    ids=["version 2", "version 1"],
)
def test_the_tightest_group_above_counts(
    tmp_path: Path, line: str, mount: str, files: tuple[str, str, str]
) -> None:
    processes(tmp_path, line)
    group(tmp_path / mount / "jobs/one", files, "max" if files is NEW else str(2**63 - 4096), 10 * MIB)
    group(tmp_path / mount / "jobs", files, str(100 * MIB), 80 * MIB, 30 * MIB)
    group(tmp_path / mount, files, str(300 * MIB), 90 * MIB)
    assert available_bytes(tmp_path) == 50 * MIB


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    processes(tmp_path, "0::/../../docker/4711\n")
    group(tmp_path / "sys/fs/cgroup", NEW, str(64 * MIB), 70 * MIB)
    assert available_bytes(tmp_path) == 0


def test_without_limits_it_is_what_the_kernel_says(tmp_path: Path) -> None:
    assert 0 < available_bytes(tmp_path) <= psutil.virtual_memory().total
    assert 0 <= available_bytes() <= psutil.virtual_memory().total
