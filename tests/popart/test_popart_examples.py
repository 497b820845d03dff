"""Every program in examples/popart runs as a user starts it, and says what it claims."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.popart.popart_sessions import run_program

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "popart"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "network")
SLOW = {"pretraining"}

EXPECTED = {
    "build_graph": "has shape [2, 3] and type float32",
    "import_graph": "largest difference from NumPy",
    "training_loop": "epoch 3",
    "sharding": "4 IPU(s), Auto",
    "pipelining": "pipelined:",
    "phases": "6 phases, weights Preload, updates Batch",
    "large_replicas": "8 stages, 1 replica(s)",
    "recomputation": "RecomputeAll: loss",
    "callbacks": "x: consumed",
    "custom_operator": "after 40 steps",
    "replication": "4 replicas, 4 of them here",
    "replica_groups": "weights of 4 models: [4, 784, 10]",
    "optimizers": "LAMB: mean loss",
    "pretraining": "masked tokens guessed",
}


@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in PROGRAMS]
)
@pytest.mark.sample(18)
def test_an_example_prints_what_its_page_says(program, monkeypatch):
    assert EXPECTED[program] in run_program(monkeypatch, FOLDER / f"{program}.py")


def test_every_program_is_tested():
    assert set(EXPECTED) == set(PROGRAMS)
