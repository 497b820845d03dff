"""The digits example as a user runs it: it learns, saves what others can run, and does not depend on how it
was cut.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from popart_sessions import run_program

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "digits" / "train.py"


def train(*arguments: str) -> str:
    command = [sys.executable, "-m", "podrun.compat", str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracy(output: str) -> float:
    line = next(line for line in output.splitlines() if line.startswith("test accuracy"))
    return float(line.split()[2].rstrip("%")) / 100


@pytest.mark.system
@pytest.mark.parametrize(
    ("model", "replicas"),
    [
        pytest.param("cnn", 1, marks=pytest.mark.slow),
        ("cnn", 16),
        pytest.param("mlp", 16, marks=pytest.mark.slow),
    ],
)
def test_it_learns_and_saves_what_onnxruntime_runs_as_well(tmp_path, model, replicas):
    path = tmp_path / "digits.onnx"
    output = train("--model", model, "--replicas", str(replicas), "--save", str(path))
    assert accuracy(output) >= 0.97
    onnx.checker.check_model(onnx.load(path), full_check=True)
    runtime = pytest.importorskip("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    images, labels = held_out()
    guesses = runtime.run(None, {"images": images})[0].argmax(axis=1)
    assert (guesses == labels).mean() == pytest.approx(accuracy(output), abs=1e-4)


def held_out():
    from sklearn.datasets import load_digits

    data = load_digits()
    chosen = np.random.RandomState(0).permutation(len(data.target))[: round(0.2 * len(data.target))]
    return (data.images[chosen, None] / 16).astype(np.float32), data.target[chosen]


@pytest.mark.system
def test_a_seed_fixes_every_byte(tmp_path, monkeypatch):
    """In a process of its own, and twice in this one, which has computed other things before."""
    files = [tmp_path / name for name in "abc"]
    short = ["--epochs", "1", "--model", "mlp", "--replicas", "4"]
    train(*short, "--seed", "1", "--save", str(files[0]))
    for path, seed in zip(files[1:], ("1", "2"), strict=True):
        run_program(monkeypatch, SCRIPT, *short, "--seed", seed, "--save", str(path))
    first, again, other = (path.read_bytes() for path in files)
    assert first == again
    assert first != other


@pytest.mark.system
def test_without_popart_it_says_how_to_start_it():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=60, env={})
    assert done.returncode == 1
    assert "python" in done.stderr
    assert "-m podrun.compat" in done.stderr
    assert "Traceback" not in done.stderr
