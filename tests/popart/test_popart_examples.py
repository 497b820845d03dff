"""Every program in examples/popart runs as a user starts it, and says what it claims."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest

from podrun.compat import COMPAT_PATH

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "popart"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "network")

EXPECTED = {
    "build_graph": "has shape [2, 3] and type float32",
    "import_graph": "largest difference from NumPy",
    "training_loop": "epoch 3",
    "sharding": "4 IPU(s), Auto",
    "pipelining": "pipelined:",
    "phases": "6 phases on two IPUs, Preload",
    "large_replicas": "8 stages, 1 replica(s)",
    "recomputation": "RecomputeAll: loss",
    "callbacks": "x: consumed",
    "replication": "4 replicas, 4 of them here",
    "replica_groups": "weights of 4 models: [4, 784, 10]",
    "optimizers": "LAMB: mean loss",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program, monkeypatch):
    """In process, with popart and popdist on the path as `python -m podrun.compat` puts them."""
    for name in ("popart", "popdist", "popdist.popart", "popart.session", "network"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(FOLDER), COMPAT_PATH, *sys.path])
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(FOLDER / f"{program}.py"), run_name="__main__")
    for name in ("popart", "popdist", "popdist.popart", "popart.session", "network"):
        sys.modules.pop(name, None)
    assert EXPECTED[program] in printed.getvalue()


def test_every_program_is_tested():
    assert set(EXPECTED) == set(PROGRAMS)
