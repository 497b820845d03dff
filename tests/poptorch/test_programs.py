"""Programs of the kind that users have run unmodified; each compares itself with torch on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.conftest import ROOT, Commands

QUICK = ("resume.py",)
PROGRAMS = sorted(path.name for path in (ROOT / "examples" / "poptorch").glob("*.py"))
pytestmark = pytest.mark.system


@pytest.mark.parametrize(
    "name", [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in PROGRAMS]
)
def test_a_program_runs(commands: Commands, tmp_path: Path, name: str) -> None:
    program = ROOT / "examples" / "poptorch" / name
    done = commands.run(sys.executable, "-m", "podrun.compat", program, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 10
