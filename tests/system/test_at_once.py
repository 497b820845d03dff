"""Several runs on one host at the same time: none notices the others, whatever becomes of them."""

from __future__ import annotations

import hashlib
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, Commands
from tests.system.conftest import PROGRAMS

pytestmark = [pytest.mark.system, pytest.mark.slow]
EXAMPLE = ROOT / "examples/digits/train.py"
TRAIN = ("--num-replicas=8", EXAMPLE, "--epochs=1", "--model=mlp", "--seed=9", "--save")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def end(process: subprocess.Popen[str]) -> str:
    """The output of a run, once it has succeeded."""
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, out + err
    return out + err


def test_runs_with_pods_of_their_own(commands: Commands, tmp_path: Path) -> None:
    alone = tmp_path / "alone.onnx"
    end(commands.start("podrun", *TRAIN, alone))
    saved = [tmp_path / f"{n}.onnx" for n in range(2)]
    for run in [commands.start("podrun", *TRAIN, path) for path in saved]:
        end(run)
    assert [digest(path) for path in saved] == [digest(alone)] * 2


def test_partitions_of_one_pod(commands: Commands, tmp_path: Path) -> None:
    """Two train while a third has an error, and a fourth is ended."""
    server = commands.start("vipu-server", "--cluster=pod64", "--port=0", "--no-state")
    assert server.stdout is not None
    assert "listens on" in server.stdout.readline()
    for name in "abcd":
        done = commands.run("vipu", "create", "partition", name, "--size=8", timeout=90)
        assert done.returncode == 0, done.stderr
    small = ("--num-replicas=8", PROGRAMS / "small.py", "1000000")
    ended = commands.start("podrun", "--vipu-partition=d", *small)
    assert ended.stdout is not None
    while "stepping" not in (line := ended.stdout.readline()):
        assert line, ended.communicate()
    saved = [tmp_path / f"{n}.onnx" for n in range(2)]
    train = [
        commands.start("podrun", f"--vipu-partition={name}", *TRAIN, path)
        for name, path in zip("ab", saved, strict=True)
    ]
    broken = commands.run(
        "podrun", "--vipu-partition=c", "--fault=machine:1@batch=9:lost", *small, timeout=120
    )
    assert "poplar_unrecoverable_runtime_error" in broken.stdout + broken.stderr
    ended.send_signal(signal.SIGINT)
    ended.communicate(timeout=120)
    assert ended.returncode == 130
    for run in train:
        end(run)
    assert digest(saved[0]) == digest(saved[1])
    states = commands.run("vipu", "list", "partitions").stdout
    assert [state in states for state in ("ACTIVE", "ERROR")] == [True, True]
    assert states.count("ACTIVE") == 3
    server.terminate()
    server.communicate(timeout=120)
