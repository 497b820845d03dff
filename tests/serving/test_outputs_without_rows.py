"""Models whose outputs do not have the batch as their first dimension: served whole, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from podrun.core.errors import ConfigError, UsageError
from podrun.serving.compiler import Compiler
from podrun.serving.instance import PoplarInstance
from podrun.serving.repository import write_missing_config
from podrun.serving.runner import ModelRunner
from tests.serving.test_runner import OPTIONS

ROWS, PLACES, WIDTH = 2, 3, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version folder: ``y`` has the places of all samples in its first dimension."""
    shape, flat = (ROWS, PLACES, WIDTH), (ROWS * PLACES, WIDTH)
    graph = helper.make_graph(
        [helper.make_node("Tanh", ["x"], ["t"]), helper.make_node("Reshape", ["t", "flat"], ["y"])],
        "flattened",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, flat)],
        [helper.make_tensor("flat", TensorProto.INT64, [2], flat)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)
    onnx.checker.check_model(model)
    version = tmp_path_factory.mktemp("models") / "net" / "1"
    version.mkdir(parents=True)
    Compiler.compile_and_export(model, None, version, OPTIONS)
    return version


def config(batch: int) -> dict[str, object]:
    lead = [] if batch else [ROWS]
    return {
        "max_batch_size": batch,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [*lead, PLACES, WIDTH]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [WIDTH] if batch else [6, WIDTH]}],
    }


def test_the_written_configuration_has_whole_batches(folder: Path) -> None:
    path = write_missing_config(folder.parent)
    assert path is not None
    text = path.read_text()
    assert "max_batch_size: 0" in text
    assert "dims: [ 2, 3, 4 ]" in text
    assert "dims: [ 6, 4 ]" in text
    assert "dynamic_batching" not in text


def test_a_whole_batch_is_answered(folder: Path) -> None:
    instance = PoplarInstance(folder, json.loads(json.dumps(config(0))))
    x = np.linspace(-1, 1, ROWS * PLACES * WIDTH, dtype=np.float32).reshape(ROWS, PLACES, WIDTH)
    try:
        request = instance.prepared({"x": x})
        instance.answer([request])
        np.testing.assert_allclose(instance.results(request)["y"], np.tanh(x).reshape(6, WIDTH), rtol=1e-6)
    finally:
        instance.runner.close()


def test_a_configuration_with_batches_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"output 'y' is \[6, 4\] for a batch of 2") as caught:
        PoplarInstance(folder, config(ROWS))
    assert "max_batch_size: 0" in str(caught.value.hint)


def test_a_part_of_a_batch_is_refused(folder: Path) -> None:
    x, y = np.zeros((1, PLACES, WIDTH), np.float32), np.zeros((PLACES, WIDTH), np.float32)
    runner = ModelRunner(str(folder / "executable.popef"), batching_dim=0)
    try:
        with pytest.raises(UsageError, match=r"output 'y' is \[6, 4\] for 2 rows"):
            runner.execute({"x": x}, {"y": y})
    finally:
        runner.close()
