"""Programs of the kind that users have run unmodified; each compares itself with torch on the CPU."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT, Commands

PROGRAMS = sorted(path.name for path in (ROOT / "examples" / "poptorch").glob("*.py"))
pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


@pytest.mark.system
@pytest.mark.slow  # By default the checkpoints of `executor/test_poptorch_checkpoints.py` resume training here.
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_users_program_runs_unmodified(commands: Commands, tmp_path: Path, name: str) -> None:
    program = ROOT / "examples" / "poptorch" / name
    done = commands.run(sys.executable, "-m", "podrun.compat", program, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("instances", [1, 2])
def test_a_resnet_trains_on_the_replicas_it_is_launched_with(
    commands: Commands, tmp_path: Path, instances: int
) -> None:
    """One instance compares its losses with torch's."""
    program = ROOT / "examples" / "poptorch" / "resnet_replicas.py"
    words = ("podrun", "--num-replicas=16", f"--num-instances={instances}", program)
    done = commands.run(*words, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("on 16 replicas") == instances


LOGS = """
import logging, numpy
logging.basicConfig(level=logging.INFO)
numpy.random.seed(3)
expected = numpy.random.RandomState(3).rand()
import poptorch, torch
poptorch.inferenceModel(torch.nn.Linear(2, 2))(torch.ones(1, 2))
assert numpy.random.rand() == expected
"""


@pytest.mark.system
@pytest.mark.slow
def test_jax_says_nothing_in_a_program_that_logs_and_draws_no_numbers(commands: Commands) -> None:
    done = commands.run(sys.executable, "-m", "podrun.compat", "-c", LOGS, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "jax" not in done.stderr


@pytest.mark.system
@pytest.mark.slow
def test_a_program_is_profiled_on_the_ipus_that_it_needs(commands: Commands, tmp_path: Path) -> None:
    fixed = tmp_path / "fixed.py"
    fixed.write_text(
        "import poptorch, torch\n"
        "options = poptorch.Options().replicationFactor(2)\n"
        "poptorch.inferenceModel(torch.nn.Linear(2, 2), options)(torch.ones(2, 2))\n"
    )
    done = commands.run("podrun", "profile", fixed, timeout=120, cwd=tmp_path)
    assert done.returncode
    assert "podrun --num-replicas 2 --ipus-per-replica 1" in done.stderr
    program = ROOT / "examples" / "poptorch" / "mnist.py"
    done = commands.run("podrun", "profile", "--num-replicas=2", program, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "features/0/conv2d" in done.stdout
    found = json.loads((tmp_path / "podrun-profile__instance_0" / "training" / "profile.json").read_text())
    assert found["profile"]["ipu_memory"][0]["memory"]["by_tile"]


def test_at_least_ten_programs_are_tried() -> None:
    assert len(PROGRAMS) >= 10
