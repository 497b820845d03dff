"""Every script in ``benchmarks/`` runs, on smaller input (``--short``), and writes its figures.

A file with a main part is a script. Scripts that another one starts by name are tested with that one.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Commands

FOLDER = ROOT / "benchmarks"
SOURCES = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.py"))}
SCRIPTS = [
    name
    for name, text in SOURCES.items()
    if 'if __name__ == "__main__":' in text
    and not any(f'with_name("{name}")' in each for each in SOURCES.values())
]
NEED_ROOT = ("collectives_hosts.py",)
SECONDS = 600


def test_there_are_scripts_and_each_has_a_short_mode() -> None:
    assert len(SCRIPTS) > 15
    assert [name for name in SCRIPTS if "add_short(" not in SOURCES[name]] == []


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_runs(commands: Commands, tmp_path: Path, name: str) -> None:
    if name in NEED_ROOT and os.geteuid():
        pytest.skip("it makes network namespaces, which needs root")
    figures = tmp_path / "figures.json"
    program = (sys.executable, FOLDER / name, "--short", "--json", figures)
    done = commands.run(*program, timeout=SECONDS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    numbers = list(numbers_in(json.loads(figures.read_text(encoding="utf-8"))))
    assert numbers
    assert all(map(math.isfinite, numbers))
    assert not (commands.home / ".ipuof.conf.d").exists(), "it leaves files in the home directory"


def numbers_in(value: Any) -> Iterator[float]:
    """All numbers of a document."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers_in(each)
    elif isinstance(value, (int, float)):
        yield value
