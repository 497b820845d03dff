"""Estimates of what a session saved: no outputs, optimizer state beside weights, halves as PopART packs them."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import podrun.popart as popart
from podrun.estimate.command import main
from podrun.estimate.tracing import completed


def saved(path: Path, *, output: bool, dtype: type = np.float32, momentum: float = 0.9) -> Path:
    """A classifier whose labels are compared beside its loss, saved by modelToHost after training was set up."""
    path.write_bytes(_classifier(output, dtype, momentum))
    return path


@functools.cache
def _classifier(output: bool, dtype: type, momentum: float) -> bytes:
    builder = popart.Builder()
    kind = "FLOAT16" if dtype is np.float16 else "FLOAT"
    x, label = builder.addInputTensor(kind, [4, 32]), builder.addInputTensor("INT32", [4])
    y = builder.aiOnnx.matmul([x, builder.addInitializedInputTensor(np.ones((32, 8), dtype), "w")])
    p = builder.aiOnnx.softmax([y])
    best = builder.aiOnnx.argmax([p], 1, 0)
    loss = builder.aiGraphcore.nllloss([p, label])
    if output:
        builder.addOutputTensor(loss)
    session = popart.TrainingSession(
        builder.getModelProto(),
        popart.DataFlow(1, [loss, best]),
        loss,
        popart.SGD({"defaultLearningRate": (0.1, False), "defaultMomentum": (momentum, True)}),
        deviceInfo=popart.DeviceManager().createIpuModelDevice({}),
    )
    session.prepareDevice()
    session.weightsFromHost()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        session.modelToHost(str(path))
        return path.read_bytes()


def answer(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    assert main([str(path), "--target", "pod4", "--format", "json", *options]) == 0, capsys.readouterr().err
    found: dict[str, object] = json.loads(capsys.readouterr().out)["estimates"][0]
    return found


@pytest.mark.parametrize("options", [(), ("--train",)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.sample(3)
def test_a_model_without_outputs_is_estimated_as_one_with_its_loss_as_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: type, options: tuple[str, ...]
) -> None:
    bare = answer(saved(tmp_path / "bare.onnx", output=False, dtype=dtype), capsys, *options)
    marked = answer(saved(tmp_path / "marked.onnx", output=True, dtype=dtype), capsys, *options)
    assert bare == marked


def test_saved_optimizer_state_is_no_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = onnx.load(saved(tmp_path / "state.onnx", output=False))
    assert any(tensor.name.startswith("Accl___") for tensor in held.graph.initializer)
    assert [tensor.name for tensor in completed(held).graph.initializer] == ["w"]
    builder = popart.Builder(str(tmp_path / "state.onnx"))
    assert "w" in builder.getTrainableTensorIds()


def test_training_without_anything_to_differentiate_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [helper.make_node("ArgMax", ["x"], ["y"], axis=1)]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 8])], [])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 10)]), tmp_path / "m.onnx")
    assert main([str(tmp_path / "m.onnx"), "--train"]) == 2
    said = capsys.readouterr().err
    assert "nothing to train" in said
    assert "addOutputTensor" in said


def test_the_answer_says_its_kind_and_lists_a_layout_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(saved(tmp_path / "m.onnx", output=True))
    assert main([path, "--target", "pod4"]) == 0
    assert capsys.readouterr().out.startswith("Inference: ")
    assert main([path, "--target", "pod4", "--train", "--scan", "--accumulation", "1", "--top", "50"]) == 0
    said = capsys.readouterr().out
    assert "\nTraining: " in said
    rows = [line.split()[:3] for line in said.splitlines()[1:] if line[:6].strip().isdigit()]
    assert len(rows) == len({tuple(row) for row in rows}) > 1


def with_leaves(path: Path, *, first: str) -> Path:
    """A model without outputs whose loss has two other tensors beside it that nothing reads: of integers and of
    floating-point numbers, before or behind it as ``first`` says.
    """
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [4, 32])
    y = builder.aiOnnx.matmul([x, builder.addInitializedInputTensor(np.ones((32, 8), np.float32), "w")])
    makers = {
        "loss": lambda: builder.aiGraphcore.l1loss([builder.aiOnnx.relu([y])], 0.1),
        "best": lambda: builder.aiOnnx.argmax([y], 1),
        "early": lambda: builder.aiOnnx.sigmoid([x]),
    }
    for name in sorted(makers, key=lambda name: name != first):
        makers[name]()
    path.write_bytes(builder.getModelProto())
    return path


@pytest.mark.parametrize("first", ["loss", "best", "early"])
@pytest.mark.sample(2)
def test_of_several_unread_tensors_the_one_that_needs_most_of_the_model_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: str
) -> None:
    answers = [
        answer(with_leaves(tmp_path / f"{name}.onnx", first=name), capsys, "--train")
        for name in (first, "loss")
    ]
    assert answers[0]["seconds_by_cause"] == answers[1]["seconds_by_cause"]


def test_files_that_hold_no_whole_model_say_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = saved(tmp_path / "whole.onnx", output=False).read_bytes()
    external = onnx.load_from_string(whole)
    for tensor in external.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    onnx.save(
        external, tmp_path / "parts.onnx", save_as_external_data=True, location="w.bin", size_threshold=0
    )
    parts = (tmp_path / "parts.onnx").read_bytes()
    for name, data, weights, said in (
        ("empty", b"", None, ("is not an ONNX model", "hint: Name a model in ONNX's format")),
        ("half", whole[: len(whole) // 2], None, ("is not an ONNX model", "hint: Name a model")),
        ("text", b"no model", None, ("is not an ONNX model", "hint: Name a model")),
        ("alone", parts, None, ("keeps its data in w.bin", "hint: Put that file beside the model")),
        ("short", parts, b"123", ("of a file of 3", "copy w.bin whole")),
    ):
        path = tmp_path / name / "model.onnx"
        path.parent.mkdir()
        path.write_bytes(data)
        if weights is not None:
            (path.parent / "w.bin").write_bytes(weights)
        assert main([str(path)]) == 2
        shown = capsys.readouterr().err
        assert all(words in shown for words in said), shown
        assert shown.count("ONNX model") <= 1


def test_inference_has_a_rate_of_one_run_of_many_batches_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rate that reports give, which count no wait around a run."""
    builder = popart.Builder()
    y = builder.addInputTensor("FLOAT", [4, 64])
    for _ in range(2):
        y = builder.aiOnnx.relu(
            [builder.aiOnnx.matmul([y, builder.addInitializedInputTensor(np.eye(64, dtype=np.float32))])]
        )
    builder.addOutputTensor(y)
    path = tmp_path / "m.onnx"
    path.write_bytes(builder.getModelProto())
    device = popart.DeviceManager().createOfflineIPUDevice({"numIPUs": "1"})
    session = popart.InferenceSession(str(path), popart.DataFlow(1, [y]), device)
    session.prepareDevice()
    report = session.getReport()
    assert main([str(path), "--target", "ipu-m2000", "--format", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["estimates"]
    assert found["samples_per_second_in_a_run"] == pytest.approx(4 * report.samples_per_second, rel=0.1)
    assert found["samples_per_second"] < 0.1 * found["samples_per_second_in_a_run"]
    assert main([str(path), "--target", "ipu-m2000"]) == 0
    assert "Batches of one run follow one another at " in capsys.readouterr().out
