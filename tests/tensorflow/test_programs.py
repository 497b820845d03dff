"""Programs as users write them, run by ``python -m podrun.compat`` in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Commands

pytestmark = [
    pytest.mark.slow,
    pytest.mark.system,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]

PROGRAMS = Path(__file__).parent / "programs"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "tensorflow"


def run(name: str, *arguments: str, cwd: Path, folder: Path = PROGRAMS, **variables: str) -> str:
    """What a program of a folder prints, with more variables in its environment."""
    command = [sys.executable, "-m", "podrun.compat", str(folder / name), *arguments]
    environment = os.environ | variables
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_learns(name: str, tmp_path: Path) -> None:
    # Each ends with an assertion about its loss or accuracy.
    assert "loss" in run(name, cwd=tmp_path, folder=EXAMPLES)


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_loop_of_version_1_learns(replicas: int, tmp_path: Path) -> None:
    lines = re.findall(r"loss (\(.*\)) (\S+)", run("train_v1.py", str(replicas), cwd=tmp_path))
    assert [shape for shape, _ in lines] == ["(10,)" if replicas == 1 else "(10, 4)"] * 4
    losses = [float(value) for _, value in lines]
    assert losses[-1] < losses[0]


def test_a_keras_model_learns(tmp_path: Path) -> None:
    output = run("train_keras.py", cwd=tmp_path)
    losses = [float(v) for v in re.findall(r"[\d.]+", output.split("\n")[0])]
    assert losses[-1] < losses[0]
    assert "predicted (256, 2)" in output


def test_a_pipeline_of_version_1_learns(tmp_path: Path) -> None:
    lines = re.findall(r"loss (\(.*\)) (\S+)", run("pipeline_v1.py", cwd=tmp_path))
    assert [shape for shape, _ in lines] == ["(40,)"] * 3
    assert float(lines[-1][1]) < float(lines[0][1])


@pytest.mark.parametrize("optimizer", ["Adam", "SGD", "RMSprop", "adam"])
def test_plain_names_of_optimizers_accumulate_gradients(optimizer: str, tmp_path: Path) -> None:
    output = run("accumulate_keras.py", optimizer, cwd=tmp_path)
    assert "updates 8" in output
    assert float(re.findall(r"difference (\S+)", output)[0]) < 1e-5


def test_an_optimizer_that_cannot_accumulate_is_refused(tmp_path: Path) -> None:
    output = run("accumulate_keras.py", "AdamW", cwd=tmp_path)
    assert "does not accumulate gradients for AdamW" in output


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_estimator_trains_resumes_evaluates_and_predicts(replicas: int, tmp_path: Path) -> None:
    output = run("estimator_v1.py", str(replicas), cwd=tmp_path)
    assert "steps 16 96" in output
    first, second = (float(v) for v in re.findall(r"^loss (\S+) (\S+)", output, re.MULTILINE)[0])
    assert second < first
    count, share = re.findall(r"predictions (\d+) (\S+)", output)[0]
    assert int(count) == 256
    assert float(share) > 0.7


def test_a_pipelined_estimator_learns(tmp_path: Path) -> None:
    output = run("pipeline_estimator_v1.py", cwd=tmp_path)
    steps, losses, _ = zip(*re.findall(r"result (\d+) (\S+) (\S+)", output), strict=True)
    assert steps == ("256", "512")
    assert float(losses[1]) < float(losses[0])
    assert "predictions (512, 2)" in output


def launched(commands: Commands, *program: str | Path, instances: int = 2, replicas: int = 4) -> str:
    """What the instances of a program print."""
    options = ("--num-replicas", str(replicas), "--num-instances", str(instances))
    home = {"XDG_CONFIG_HOME": str(commands.home)}
    done = commands.run(sys.executable, "-m", "podrun", *options, *program, timeout=900, env=home)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def weights_of(output: str) -> list[np.ndarray]:
    """The weights that each instance prints."""
    texts = re.findall(r"weights (\w+)", output)
    return [np.frombuffer(bytes.fromhex(text), np.float32) for text in texts]


@pytest.mark.parametrize("replicas", [4, 8])
def test_instances_give_the_bits_of_one_process(replicas: int, commands: Commands, tmp_path: Path) -> None:
    """Of eight replicas, two machines update a slice of the weights each."""
    alone = run("popdist_v1.py", str(replicas), cwd=tmp_path)
    output = launched(commands, PROGRAMS / "popdist_v1.py", str(replicas), replicas=replicas)
    weights = re.findall(r"weights (\w+)", output)
    assert len(weights) == 2
    assert weights == re.findall(r"weights (\w+)", alone) * 2
    # The host takes the mean of the instances' means: the same sum in another order.
    means = [float(mean) for mean in re.findall(r"mean (\S+)", output)]
    assert means == pytest.approx([float(mean) for mean in re.findall(r"mean (\S+)", alone)] * 2, rel=1e-6)


@pytest.mark.parametrize("name", ["popdist_strategy_v1.py", "own_reductions_v1.py"])
def test_a_strategy_of_version_1_gives_instances_the_same_weights(name: str, commands: Commands) -> None:
    (alone,) = weights_of(launched(commands, PROGRAMS / name, instances=1))
    output = launched(commands, PROGRAMS / name)
    first, second = weights_of(output)
    np.testing.assert_array_equal(first, second)
    # One instance has the same samples in a step, whose gradients it adds in another order.
    np.testing.assert_allclose(first, alone, rtol=1e-4, atol=1e-5)
    losses = re.findall(r"loss (\S+) (\S+)", output)
    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert float(losses[0][1]) < float(losses[0][0])
    assert (commands.home / "instance_1" / "checkpoint").is_file()


def test_inference_with_queues_and_a_report(tmp_path: Path) -> None:
    engine = json.dumps({"autoReport.all": "true", "autoReport.directory": str(tmp_path / "reports")})
    output = run("inference_v1.py", cwd=tmp_path, POPLAR_ENGINE_OPTIONS=engine)
    assert "shapes (6, 2, 10) (6, 2)" in output
    assert "sums True" in output
    assert "equal True" in output
    (folder,) = (tmp_path / "reports").iterdir()
    assert "Conv2D" in (folder / "summary.txt").read_text(encoding="utf-8")


def test_synthetic_data_leave_outfeeds_empty_and_executables_are_cached(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    flags = f"--use_synthetic_data --synthetic_data_initializer=2 --executable_cache_path={cache}"
    output = run("inference_v1.py", cwd=tmp_path, TF_POPLAR_FLAGS=flags)
    assert "shapes (0, 2, 10) (0, 2)" in output
    assert list(cache.iterdir())


def test_training_is_resumed_from_a_checkpoint(tmp_path: Path) -> None:
    output = run("checkpoint_v1.py", cwd=tmp_path)
    assert "equal True" in output
    early, late = (float(v) for v in re.findall(r"loss (\S+) (\S+)", output)[0])
    assert late < early


@pytest.mark.parametrize("name", ["sharded_v1.py", "lstm_v1.py"])
def test_models_of_version_1_learn(name: str, tmp_path: Path) -> None:
    output = run(name, cwd=tmp_path, PODRUN_CUSTOM_OPS=str(PROGRAMS / "scale_op.py"))
    first, last = (float(v) for v in re.findall(r"loss \(\d+,\) (\S+) (\S+)", output)[0])
    assert last < 0.9 * first


def test_an_encoder_and_a_decoder_with_attention_learn_and_translate(tmp_path: Path) -> None:
    output = run("translate_v1.py", cwd=tmp_path)
    assert float(re.findall(r"^difference (\S+)", output, re.MULTILINE)[0]) <= 1e-5
    losses = [float(v) for v in re.findall(r"^loss \(60,\) (\S+)", output, re.MULTILINE)]
    assert losses[-1] < 0.3 * losses[0]
    assert float(re.findall(r"^right (\S+)", output, re.MULTILINE)[0]) >= 0.9
    assert "lengths True" in output


@pytest.mark.parametrize("replicas", [1, 2])
def test_host_embeddings_and_attentional_units_learn_what_users_click(replicas: int, tmp_path: Path) -> None:
    lines = re.findall(r"loss (\S+) accuracy (\S+)", run("recommend_v1.py", str(replicas), cwd=tmp_path))
    assert len(lines) == 8
    assert float(lines[-1][0]) < 0.1 * float(lines[0][0])
    assert float(lines[-1][1]) > 0.95
    assert (tmp_path / "model.index").is_file()


def test_an_autoencoder_learns_with_samples_of_a_chain(tmp_path: Path) -> None:
    output = run("vae_v1.py", cwd=tmp_path)
    bounds = [float(bound) for bound in re.findall(r"^bound (\S+)", output, re.MULTILINE)]
    # Of pixels without a pattern the log is -16 log 2; those of four patterns have an entropy of 4.6.
    assert bounds[0] < -16 * np.log(2) + 1
    assert -8 < bounds[-1] < -4.6
    one, many, size = (float(v) for v in re.findall(r"one and many (\S+) (\S+) size (\S+)", output)[0])
    assert one < many < -4
    assert size > 0.1


def test_a_pipelined_conformer_has_the_losses_of_the_host(tmp_path: Path) -> None:
    output = run("speech_v1.py", cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"^loss (\S+)", output, re.MULTILINE)]
    assert losses[-1] < 0.2 * losses[0]
    assert float(re.findall(r"difference (\S+)", output)[0]) < 1e-4


def test_a_detector_in_half_precision_finds_objects(tmp_path: Path) -> None:
    output = run("keras_detector.py", cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"^loss (.*)", output, re.MULTILINE)[0].split()]
    assert losses[-1] < 0.2 * losses[0]
    # Scores of about 5 in halves are 2^-8 apart; the host rounds within other sums.
    assert float(re.findall(r"difference (\S+)", output)[0]) < 0.1
    assert float(re.findall(r"right (\S+)", output)[0]) > 0.7


def test_two_optimizers_in_one_loop_train_as_on_the_host(tmp_path: Path) -> None:
    output = run("adversaries_v1.py", cwd=tmp_path)
    assert "shapes (1, 16, 2) (40, 16, 2)" in output
    assert min(float(v) for v in re.findall(r"^deviations (\S+) (\S+)", output, re.MULTILINE)[0]) > 0.05
    numbers = re.findall(r"^(?:losses 100|difference) (\S+)", output, re.MULTILINE)
    assert len(numbers) == 2
    assert max(map(float, numbers)) < 1e-5


def test_a_pipelined_estimator_finds_what_is_bright(tmp_path: Path) -> None:
    output = run("segment_v1.py", "float32", cwd=tmp_path)
    dices = [float(value) for value in re.findall(r"dice (\S+)", output)]
    assert len(dices) == 3
    assert dices[-1] > 0.9
    assert "received (48, 2, 4, 16, 16, 1) float32" in output  # Two IPUs without a pipeline are two replicas.
