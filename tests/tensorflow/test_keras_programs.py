"""Keras programs as users write them, beside the same training of plain Keras on the host."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from tests.conftest import Commands
from tests.tensorflow.test_programs import PROGRAMS, launched, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.system,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]


def difference(output: str) -> float:
    """The largest difference from the host that a program prints."""
    return float(re.findall(r"^difference (\S+)", output, re.MULTILINE)[0])


CASES = [
    ("keras_mnist.py", "dense_1 (Dense)", 1e-5),
    ("keras_pipeline.py", "updates 16", 1e-5),
    ("keras_two_inputs.py", "metrics ['kind_accuracy', 'kind_loss', 'loss', 'price_loss']", 1e-5),
    ("keras_cnn.py", "metrics ['loss', 'sparse_top_k", 1e-4),
    ("keras_lstm.py", "", 1e-5),
    ("keras_transformer.py", "metrics ['nll']", 1e-4),
    ("keras_mixed_precision.py", "types ['float16', 'float32'] updates 32", 1e-2),
    ("keras_custom_loop.py", "losses 32", 1e-5),
    ("keras_resumed.py", "", 1e-5),
    ("keras_ncf.py", "batches 48", 1e-5),
    ("keras_popdist.py", "replicas 1", 1e-5),
    ("keras_graph_network.py", "metrics ['accuracy', 'area', 'loss']", 1e-5),
    ("keras_unet.py", "stages 4 shape (16, 4, 4, 2)", 1e-4),
    ("keras_voice.py", "outputs ['duration_loss', 'first_loss', 'pitch_loss', 'spectrum_loss']", 1e-4),
]
"""Program, a part of what it prints, and how far it may be from the host: halves differ in their rounding."""


@pytest.mark.parametrize(("name", "text", "most"), CASES)
def test_a_program_trains_as_on_the_host(name: str, text: str, most: float, tmp_path: Path) -> None:
    output = run(name, cwd=tmp_path)
    assert text in output
    assert difference(output) <= most


def test_instances_train_as_one_on_the_host(commands: Commands) -> None:
    output = launched(commands, sys.executable, PROGRAMS / "keras_popdist.py")
    values = [float(v) for v in re.findall(r"difference (\S+)", output)]
    assert len(values) == 2
    assert max(values) <= 1e-5
    assert output.count("replicas 4") == 2


def test_names_of_the_sdk_mean_what_they_say(tmp_path: Path) -> None:
    output = run("keras_names.py", cwd=tmp_path)
    assert "inside a `tf.function`" in output
    assert "contains 4 items, but all 8 replicas are requested" in output
    assert "`steps_per_execution` must be a divisor" in output
    assert "element [0. 1.]" in output
    assert "refused: podrun does not have ipu_tensorflow_addons.keras.layers.Dense" in output


def test_keras_may_be_what_a_program_imports_first(commands: Commands) -> None:
    """``import tf_keras`` imports TensorFlow, and with it the extensions, before it has any names."""
    program = (
        "import tf_keras, tensorflow as tf, keras.engine.training as old\n"
        "print(tf_keras.ipu.__name__, tf.keras.ipu is tf_keras.ipu, old.Model is tf_keras.Model)\n"
        "print(tf_keras.Model.set_gradient_accumulation_options.__name__, tf_keras.optimizers.Adam.__module__)"
    )
    folder = Path(importlib.import_module("podrun.compat").__path__[0])
    paths = {"PYTHONPATH": f"{folder}{os.pathsep}{folder.parents[1]}"}
    done = commands.run(sys.executable, "-c", program, timeout=300, env=paths)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [
        *("keras.ipu", "True", "True"),
        *("set_gradient_accumulation_options", "tf_keras.src.optimizers.legacy.adam"),
    ]
