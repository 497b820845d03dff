"""``poprt``: shapes fixed, a model compiled, checked, run and exported."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from podrun.core.errors import PodrunError, UsageError
from podrun.serving.convert.reference_runs import run_onnxruntime
from podrun.serving.poprt_command import poprt_command
from podrun.serving.runner import ModelRunner
from tests.serving.test_runner import WEIGHT, expected, model, rows_of


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


PLAIN = ["--input_shape", "x=2,8"]


def test_what_cannot_be_is_named(tmp_path: Path) -> None:
    onnx.save(open_model(), tmp_path / "net.onnx")
    (tmp_path / "data.pkl").write_bytes(b"")
    (tmp_path / "options.yaml").write_text("input_shap: x=1,8\n")
    (tmp_path / "shards.yaml").write_text("- {node: Nothing, device: 0}\n")
    words = ["-i", str(tmp_path / "net.onnx"), "--output_dir", str(tmp_path)]
    data = str(tmp_path / "data.pkl")
    calibration = ["--precision", "fp8", "--calibration_with_data"]
    for more, message in (
        ([], "the shape of input 'x' is not known"),
        (["--input_shape", "z=1,8"], "no input 'z'"),
        (["--input_shape", "x=1,9"], r"cannot become \[1, 9\]"),
        (["--input_shape", "x=a"], "numbers above 0"),
        (["--input_shape", "x"], "takes NAME=VALUE"),
        (["--batch_size", "2"], "batch_axis is missing"),
        ([*PLAIN, "--run", "--compiler_options", "num_ipu=2"], "no compiler option 'num_ipu'"),
        ([*PLAIN, "--run", "--compiler_options", "num_ipus=two"], "cannot be 'two'"),
        ([*PLAIN, "--passes", "sort_graf"], "there is no pass 'sort_graf'"),
        ([*PLAIN, "--skip_passes", "sort_graf"], "there is no pass 'sort_graf'"),
        ([*PLAIN, "--remap_mode", "after_matmul"], "needs --enable_insert_remap"),
        ([*PLAIN, "--calibration_with_data"], "is for --precision fp8"),
        ([*PLAIN, "--fp8_params", "F143,F143,0,0"], "--fp8_params is for --precision fp8"),
        (
            [*PLAIN, "--precision", "fp16", "--fp8_skip_op_names", "a"],
            "--fp8_skip_op_names is for --precision fp8",
        ),
        ([*PLAIN, *calibration, "--fp8_params", "F143,F143,0,0"], "exclude each other"),
        ([*PLAIN, *calibration, "--data_preprocess", data], "does not open pickles"),
        ([*PLAIN, *calibration, "--calibration_loss_type", "gptq"], "gptq is for precision fp8_weight"),
        ([*PLAIN, "--precision", "fp8", "--fp8_params", "F144,F143,0,0"], "no 8-bit float 'F144'"),
        ([*PLAIN, "--precision", "fp8", "--fp8_skip_op_names", "z"], "no node 'z'"),
        ([*PLAIN, "--checkpoints", "z"], "no node of the model makes a tensor 'z'"),
        ([*PLAIN, "--remove_outputs", "y"], "nothing would be left"),
        ([*PLAIN, "--convert_version", "99"], "from 7 to"),
        ([*PLAIN, "--merge_matmul", "a,b"], "no node 'a'"),
        ([*PLAIN, "--serialize_matmul", "a=b"], "no node 'a'"),
        ([*PLAIN, "--apply_hcsr", "fp32,[2]"], "0 inputs are FLOAT"),
        ([*PLAIN, "--pack_args", "most=3"], "no key 'most'"),
        ([*PLAIN, "--output_model", "a/b.onnx"], "is a name, not the path"),
        ([*PLAIN, "--manual_sharding_config", str(tmp_path / "shards.yaml")], "no node 'Nothing'"),
        ([*PLAIN, "--manual_sharding_config", "none.yaml"], "there is no file"),
        ([*PLAIN, "--only_manual_sharding"], "needs --manual_sharding_config"),
        (["--config_yaml", str(tmp_path / "options.yaml")], "there is no option 'input_shap'"),
        ([*PLAIN, "--custom_pass_config", "none.py"], "there is no file"),
        ([*PLAIN, "--custom_library_so_paths", "ops.so"], "cannot run here"),
        ([*PLAIN, "tf2onnx", "--opset", "11"], "is for --framework tensorflow"),
        (["--framework", "tensorflow"], "holds no saved_model.pb"),
    ):
        with pytest.raises(PodrunError, match=message):
            run(*words, *more)


def test_options_come_from_a_file_and_the_command_line_wins(tmp_path: Path) -> None:
    onnx.save(open_model(), tmp_path / "net.onnx")
    (tmp_path / "options.yaml").write_text(
        f"input_model: {tmp_path / 'net.onnx'}\noutput_dir: {tmp_path}\ninput_shape: [x=4,8]\nshow: true\n"
        "precision: fp16\n"
    )
    text = run("--config_yaml", str(tmp_path / "options.yaml"), "--input_shape", "x=2,8")
    assert text == "Input x: dtype - float16, shape - [2, 8]\nOutput y: dtype - float16, shape - [2, 3]\n"


def test_models_of_a_file_are_fused(tmp_path: Path) -> None:
    onnx.save(open_model(), tmp_path / "net.onnx")
    one = f"{{input_model: {tmp_path / 'net.onnx'}, input_shape: [x=%d,8]}}"
    (tmp_path / "fusion.yaml").write_text(
        f"output_dir: {tmp_path}\nmodel_fusion:\n- {one % 2}\n- {one % 4}\n"
    )
    run("--config_yaml", str(tmp_path / "fusion.yaml"))
    fused = onnx.load(tmp_path / "fused.optimized.onnx")
    assert [value.name for value in fused.graph.input] == ["index", "graph0/x", "graph1/x"]
    x = rows_of(4)
    feed = {"index": np.array([1], np.int32), "graph0/x": rows_of(2), "graph1/x": x}
    right = run_onnxruntime(fused, feed)
    np.testing.assert_allclose(right["graph1/y"], expected(x), rtol=1e-5, atol=1e-6)
    assert not right["graph0/y"].any()


def test_passes_and_shapes_of_ones_own(tmp_path: Path) -> None:
    onnx.save(open_model(), tmp_path / "net.onnx")
    (tmp_path / "own.py").write_text(
        "from poprt.passes import Pass, register\n"
        "@register('negate_weights')\n"
        "class Negate(Pass):\n"
        "    def run(self, model):\n"
        "        import onnx\n"
        "        for w in model.graph.initializer:\n"
        "            w.CopyFrom(onnx.numpy_helper.from_array(-onnx.numpy_helper.to_array(w), w.name))\n"
        "        return model\n"
    )
    words = ["-i", str(tmp_path / "net.onnx"), "--output_dir", str(tmp_path), *PLAIN]
    run(*words, "--custom_pass_config", str(tmp_path / "own.py"), "--passes", "negate_weights")
    x = rows_of(2)
    right = run_onnxruntime(onnx.load(tmp_path / "net.optimized.onnx"), {"x": x})
    np.testing.assert_allclose(
        right["y"], np.maximum(-(x.astype(np.float64) @ WEIGHT), 0), rtol=1e-5, atol=1e-6
    )
    listed = run("--list_all_passes", "--custom_pass_config", str(tmp_path / "own.py")).split()
    assert {"negate_weights", "float_to_half"} <= set(listed)


def test_a_full_disk_is_told_and_the_old_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(open_model(), tmp_path / "net.onnx")
    target = tmp_path / "net.optimized.onnx"
    target.write_bytes(b"before")

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("podrun.serving.convert.frontends.os.fsync", full)
    with pytest.raises(UsageError, match=r"cannot write .*net\.optimized\.onnx.*No space left"):
        run("-i", str(tmp_path / "net.onnx"), "--output_dir", str(tmp_path), *PLAIN)
    assert target.read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.onnx", "net.optimized.onnx"]


def test_versions_and_completion_are_printed() -> None:
    assert run("-v").splitlines()[1:] == ["Build with SDK: 3.4.0", "Runtime SDK: 3.4.0"]
    assert "_POPRT_COMPLETE" in run("--print_completion", "bash")
