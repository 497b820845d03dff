"""What `podrun estimate` takes of TensorFlow: Keras models in files, SavedModels, programs."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from podrun.core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from podrun.estimate.model import Estimate

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)

NET = """
from tensorflow import keras

def Net():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(64, "relu", input_shape=(20,)), keras.layers.Dense(3)]
    return keras.Sequential(layers)

def broken():
    return undefined_name

number = 5
"""
WEIGHTS = 20 * 64 + 64 + 64 * 3 + 3
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "tensorflow"


@pytest.fixture
def net(tmp_path: Path, ipu: Any) -> Path:
    path = tmp_path / "net.py"
    path.write_text(NET)
    return path


def _estimate(source: Any, micro_batch: int, *, train: bool) -> Estimate:
    from podrun.costmodel.target import system
    from podrun.estimate.layout import ProgramLayout
    from podrun.estimate.model import estimate
    from podrun.estimate.tracing import trace_model

    target, layout = system("ipu-m2000"), ProgramLayout(micro_batch)
    return estimate(trace_model(source, target.chip, layout, train=train), target, layout, train=train)


def test_a_saved_model_and_its_keras_model_have_one_estimate(net: Path, tmp_path: Path) -> None:
    import tensorflow as tf

    from podrun.tensorflow.execution.estimating import keras_source, saved_model_source

    model = keras_source(net, "Net", (), train=False)
    assert model.micro_batch is None
    tf.saved_model.save(runpy.run_path(str(net))["Net"](), str(tmp_path / "saved"))
    saved = saved_model_source(tmp_path / "saved", ())
    ours, theirs = (_estimate(source, 8, train=False) for source in (model, saved))
    assert sum(weights for _, _, weights in ours.modules) == 4 * WEIGHTS
    assert ours.seconds == theirs.seconds
    assert ours.max_tile_bytes == theirs.max_tile_bytes


def test_training_takes_longer_than_inference(net: Path) -> None:
    from podrun.tensorflow.execution.estimating import keras_source

    ahead, whole = (
        _estimate(keras_source(net, "Net", (), train=train), 8, train=train).seconds["compute"]
        for train in (False, True)
    )
    assert ahead < whole


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("Nett", (), "has no Nett"),
        ("number", (), "number of .* is a int, not a Keras model"),
        ("broken", (), r"broken\(\) of .* fails: NameError: .*net.py:10"),
        ("Net", ("8x20", "8x20"), "has 1 inputs, and there are 2 --input"),
        ("Net", ("8xfour",), "is no shape"),
    ],
)
def test_a_wrong_name_or_input_is_named(net: Path, name: str, inputs: tuple[str, ...], message: str) -> None:
    from podrun.tensorflow.execution.estimating import keras_source

    with pytest.raises(UsageError, match=message):
        keras_source(net, name, inputs, train=False)


def test_a_folder_that_holds_no_saved_model_is_refused(tmp_path: Path, ipu: Any) -> None:
    from podrun.tensorflow.execution.estimating import saved_model_source

    (tmp_path / "saved_model.pb").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="TensorFlow cannot read"):
        saved_model_source(tmp_path, ())


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize(("program", "samples"), [("keras_digits.py", 8), ("queues_v1.py", 16)])
def test_a_program_is_estimated_by_its_first_step(program: str, samples: int, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "podrun",
        "estimate",
        str(EXAMPLES / program),
        "--train",
        "--format",
        "json",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (estimate,) = json.loads(done.stdout)["estimates"]
    assert estimate["micro_batch"] == samples
    assert estimate["fits"]
