"""A program that recovers by itself from an error of each class loses nothing: its losses are those without any."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Commands, tagged
from tests.system.conftest import PARTITION

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "recovery" / "train.py"
pytestmark = [pytest.mark.system, pytest.mark.slow]
RESET = f"$ vipu reset partition {PARTITION}"
CYCLE = [f"$ vipu-admin power-cycle agent ipum{n}" for n in (1, 2, 3, 4)]
LOOK = f"$ vipu --format=json get partition {PARTITION}"
FAULTS = {
    "ipu:5@step=17:tile-parity": ["recoverable_runtime_error IPU_RESET"],
    "ipu:1@step=12:overflow": ["application_runtime_error -"],
    "link:2-3@step=17:down": ["recoverable_runtime_error PARTITION_RESET", RESET],
    "machine:1@step=17:power": ["recoverable_runtime_error FULL_RESET", LOOK, *CYCLE, RESET],
    "ipu:1@step=12:unknown": ["unknown_runtime_error -", LOOK, *CYCLE, RESET],
    "machine:1@step=17:lost": [
        *("unrecoverable_runtime_error -", "$ gc-monitor --json", "$ vipu-admin restart agent ipum2", RESET)
    ],
    "machine:0@step=17:unrecoverable": [
        *("unrecoverable_runtime_error -", "$ gc-monitor --json", "$ vipu-admin restart agent ipum1", RESET)
    ],
}


def run(pod: Commands, home: Path, *options: str) -> list[str]:
    """What the program says."""
    words = ("podrun", "--num-replicas=16", "--vipu-partition", PARTITION, *options)
    done = pod.run(*words, PROGRAM, "--checkpoints", home)
    assert done.returncode == 0, done.stdout + done.stderr
    return tagged(done.stdout, 0)


def test_losses_after_recovery_are_those_without_an_error(pod: Commands, tmp_path: Path) -> None:
    (losses,) = run(pod, tmp_path)
    assert len(losses.split()) == 31
    for fault, done in FAULTS.items():
        assert run(pod, tmp_path, "--fault", fault) == [*done, losses], fault
