"""``poprt``: shapes fixed, a model compiled, checked, run and exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from podrun.core.errors import UsageError
from podrun.serving.poprt_command import difference, poprt_command, with_shapes
from podrun.serving.runner import ModelRunner
from tests.serving.test_runner import expected, model, rows_of


def open_model() -> onnx.ModelProto:
    proto = model()
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return proto


def run(*words: str) -> str:
    return (
        CliRunner().invoke(poprt_command, list(words), standalone_mode=False, catch_exceptions=False).output
    )


def test_a_model_is_fixed_checked_run_and_exported(tmp_path: Path) -> None:
    onnx.save(open_model(), tmp_path / "net.onnx")
    words = ["-i", str(tmp_path / "net.onnx"), "--output_dir", str(tmp_path), "--input_shape", "x=2,8"]
    text = run(
        *words, "--compiler_options", "partials_type=float", "--check", "--run", "--show", "--export_popef"
    )
    assert "Input x: dtype - float32, shape - [2, 8]\nOutput y: dtype - float32, shape - [2, 3]\n" in text
    assert "Bs: 2\nLatency: " in text
    assert "The outputs are onnxruntime's to " in text
    fixed = onnx.load(tmp_path / "net.optimized.onnx")
    assert fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2
    with ModelRunner(str(tmp_path / "executable.popef")) as runner:
        x, y = rows_of(2), np.zeros((2, 3), np.float32)
        runner.execute({"x": x}, {"y": y})
    np.testing.assert_allclose(y, expected(x), rtol=1e-5, atol=1e-6)


def test_what_cannot_be_is_named(tmp_path: Path) -> None:
    onnx.save(open_model(), tmp_path / "net.onnx")
    words = ["-i", str(tmp_path / "net.onnx"), "--output_dir", str(tmp_path)]
    for more, message in (
        ([], "the shape of input 'x' is not known"),
        (["--input_shape", "z=1,8"], "no input 'z'"),
        (["--input_shape", "x=1,9"], r"cannot become \[1, 9\]"),
        (["--input_shape", "x=a"], "numbers above 0"),
        (["--input_shape", "x"], "takes NAME=VALUE"),
        (["--batch_size", "2", "--run", "--compiler_options", "num_ipu=2"], "no compiler option 'num_ipu'"),
        (["--batch_size", "2", "--run", "--compiler_options", "num_ipus=two"], "cannot be 'two'"),
    ):
        with pytest.raises(UsageError, match=message):
            run(*words, *more)


def test_a_difference_from_onnxruntime_is_seen() -> None:
    fixed, x = with_shapes(open_model(), {"x": [4, 8]}), rows_of(4)
    right = expected(x).astype(np.float32)
    assert difference(fixed, {"x": x}, {"y": right}) < 1e-5
    assert difference(fixed, {"x": x}, {"y": right + 1}) > 0.1
