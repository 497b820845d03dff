"""The transformer examples, launched and alone: falling loss, and the same bits."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT, Commands
from tests.system.conftest import PARTITION

pytestmark = pytest.mark.system

FOLDER = ROOT / "examples/transformer"
LAYOUTS = {"pipelined.py": (2, 8), "sharded.py": (4, 4)}


def trained(text: str) -> tuple[str, float, float]:
    """The digest of the weights, the first loss and the last one."""
    digest = re.search(r"weights ([0-9a-f]{16})", text)
    losses = re.search(r"loss ([0-9.]+) -> ([0-9.]+)", text)
    assert digest, text
    assert losses, text
    return digest[1], float(losses[1]), float(losses[2])


def launched(pod: Commands, program: str, instances: int, steps: int) -> tuple[str, float, float]:
    replicas, ipus = LAYOUTS[program]
    run = (
        "podrun",
        "--vipu-partition",
        PARTITION,
        f"--num-replicas={replicas}",
        f"--ipus-per-replica={ipus}",
    )
    done = pod.run(*run, f"--num-instances={instances}", FOLDER / program, "--steps", str(steps), timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return trained(done.stdout)


@pytest.mark.slow
def test_it_learns_launched(pod: Commands) -> None:
    _, first, last = launched(pod, "pipelined.py", instances=2, steps=3)
    assert last < first - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(LAYOUTS))
def test_it_learns_the_same_bits_launched_and_alone(pod: Commands, program: str) -> None:
    replicas, ipus = LAYOUTS[program]
    alone = pod.start(
        "python",
        "-m",
        "podrun.compat",
        FOLDER / program,
        f"--replicas={replicas}",
        f"--ipus={ipus}",
        "--steps=3",
    )
    digest, first, last = launched(pod, program, instances=2, steps=3)
    assert last < first - 0.1
    out, error = alone.communicate(timeout=150)
    assert alone.returncode == 0, out + error
    assert trained(out)[0] == digest


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(LAYOUTS))
def test_it_learns_for_any_number_of_instances(pod: Commands, program: str) -> None:
    found = [launched(pod, program, instances, steps=20) for instances in (1, 2)]
    assert found[0][0] == found[1][0]
    assert all(last < 2.9 < first for _, first, last in found)


def test_a_script_without_podrun_says_what_to_type(pod: Commands) -> None:
    done = pod.run("python", FOLDER / "pipelined.py")
    assert done.returncode == 1
    assert "-m podrun.compat" in done.stderr
