"""A fixed part of the random operations; `tests.partition.operations` runs as many as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import real_operations
from .operations import run


@pytest.mark.parametrize(("seed", "count"), [(3, 300), pytest.param(11, 300, marks=pytest.mark.slow)])
def test_nothing_is_lost_or_owned_twice(tmp_path: Path, seed: int, count: int) -> None:
    world = run(seed, count, tmp_path)
    assert sum(world.done.values()) == count
    assert world.refused["ExhaustedError"] > 0


def test_a_seed_gives_the_same_operations_again(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    first, second = (run(5, 60, directory) for directory in directories)
    assert (first.done, first.refused, first.now) == (second.done, second.refused, second.now)


@pytest.mark.slow
@pytest.mark.system
def test_with_real_processes_and_real_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(tmp_path / "run"))
    pod = real_operations.run(seed=7, count=80, directory=tmp_path)
    assert sum(pod.done.values()) == 80
    assert pod.done["kill server"] > 0
