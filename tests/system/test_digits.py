"""The digits example, launched and alone: the same bits."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import ROOT, Commands, tagged
from tests.copies import COMPAT, run_command, run_copied
from tests.system.conftest import PARTITION

pytestmark = pytest.mark.system

EXAMPLE = ROOT / "examples/digits/train.py"
RUN = ("podrun", "--num-replicas=16", "--vipu-partition", PARTITION)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def launched(pod: Commands, path: Path, instances: int, *words: str) -> str:
    done = run_command(pod, *RUN, f"--num-instances={instances}", EXAMPLE, "--save", path, *words)
    assert done.returncode == 0, done.stderr
    assert tagged(done.stdout, 0)[-1] == f"saved {path}"
    assert "16 replicas" in done.stderr
    assert "samples/s" in done.stderr
    assert "modelled on IPUs: " in done.stderr
    return digest(path)


def test_the_same_bits_for_two_instances_and_alone(pod: Commands, tmp_path: Path) -> None:
    few = ("--epochs", "1", "--model", "mlp")
    words = [str(EXAMPLE), "--replicas=16", "--save", str(tmp_path / "0.onnx"), *few]
    with ThreadPoolExecutor() as pool:
        alone = pool.submit(run_copied, COMPAT, words, env=pod.environment())
        together = launched(pod, tmp_path / "2.onnx", 2, *few)
        assert alone.result().returncode == 0, alone.result().stderr
    assert together == digest(tmp_path / "0.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_the_same_bits_for_1_2_and_4_instances_repeats_and_alone(
    pod: Commands, tmp_path: Path, model: str
) -> None:
    few = ("--epochs", "2", "--model", model, "--seed", "3")
    digests = [launched(pod, tmp_path / f"{k}.onnx", n, *few) for k, n in enumerate((1, 1, 2, 4))]
    alone = pod.run(
        "python", "-m", "podrun.compat", EXAMPLE, "--replicas=16", "--save", tmp_path / "a.onnx", *few
    )
    assert alone.returncode == 0, alone.stderr
    assert set(digests) == {digest(tmp_path / "a.onnx")}


@pytest.mark.slow
def test_it_learns(pod: Commands) -> None:
    done = pod.run(*RUN, EXAMPLE, timeout=120)
    assert done.returncode == 0, done.stderr
    accuracy = next(line for line in tagged(done.stdout, 0) if line.startswith("test accuracy"))
    assert float(accuracy.split()[2].rstrip("%")) >= 97
