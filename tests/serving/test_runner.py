"""ONNX models compiled to files and run by the runtime, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from podrun.core.errors import CallError, UnsupportedError, UsageError
from podrun.serving import loaded_model
from podrun.serving.compiler import Compiler, CompilerOptions, ServedModel
from podrun.serving.loaded_model import DeviceWait, LoadedModel, acquire_device
from podrun.serving.runner import ModelRunner, RuntimeConfig

WEIGHT = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)


def model(rows: int = 4) -> onnx.ModelProto:
    """``y = relu(x @ w)``."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, 3])],
        [numpy_helper.from_array(WEIGHT, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)


def expected(x: np.ndarray) -> np.ndarray:
    return np.maximum(x.astype(np.float64) @ WEIGHT, 0)


def rows_of(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 8)).astype(np.float32)


OPTIONS = CompilerOptions(partials_type="float")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("compiled")
    Compiler.compile_and_export(model(), None, folder, OPTIONS)
    return str(folder / "executable.popef")


@pytest.fixture
def runner(file: str) -> Iterator[ModelRunner]:
    with ModelRunner(file, RuntimeConfig(batching_dim=0, timeout_ns=2_000_000)) as runner:
        yield runner


def test_a_compiled_file_runs_without_its_model(file: str) -> None:
    with ModelRunner(file) as runner:
        assert [(d.name, d.shape) for d in runner.get_execute_inputs()] == [("x", (4, 8))]
        assert runner.get_execute_outputs()[0].numpy_data_type() == np.float32
        for count in (4, 12):
            x, y = rows_of(count), np.zeros((count, 3), np.float32)
            runner.execute({"x": x}, {"y": y})
            np.testing.assert_allclose(y, expected(x), rtol=1e-5, atol=1e-6)
        with pytest.raises(UsageError, match="a request of 5 rows"):
            runner.execute({"x": rows_of(5)}, {"y": np.zeros((5, 3), np.float32)})
    with pytest.raises(CallError, match="closed"):
        runner.execute({"x": x}, {"y": y})


def test_requests_of_any_size_share_batches(runner: ModelRunner) -> None:
    inputs = [rows_of(count, count) for count in (1, 4, 7, 2, 3, 1)]
    outputs = [np.full((len(x), 3), np.nan, np.float32) for x in inputs]
    futures = [runner.execute_async({"x": x}, {"y": y}) for x, y in zip(inputs, outputs, strict=True)]
    for future, x, y in zip(futures, inputs, outputs, strict=True):
        future.wait(60)
        np.testing.assert_allclose(y, expected(x), rtol=1e-5, atol=1e-6)
        assert future.modelled is not None
        assert future.modelled.compute_s > 0


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, r"the inputs are \['x'\], not \[\]"),
        ({"x": np.zeros((4, 8))}, "has type float64; the model takes float32"),
        ({"x": np.zeros((4, 9), np.float32)}, r"has shape \[4, 9\]"),
        ({"x": np.zeros((0, 8), np.float32)}, "at least one row"),
        ({"x": [1.0]}, "is list, not an array"),
    ],
)
def test_wrong_requests_are_named_and_disturb_nothing(
    runner: ModelRunner, inputs: dict[str, np.ndarray], message: str
) -> None:
    y = np.zeros((4, 3), np.float32)
    with pytest.raises(UsageError, match=message):
        runner.execute(inputs, {"y": y})
    with pytest.raises(UsageError, match="no output 'z'"):
        runner.execute({"x": rows_of(4)}, {"z": y})
    with pytest.raises(UsageError, match=r"output 'y' is float32\[4, 3\]"):
        runner.execute({"x": rows_of(4)}, {"y": np.zeros((4, 4), np.float32)})
    runner.execute({"x": rows_of(4)}, {"y": y})
    np.testing.assert_allclose(y, expected(rows_of(4)), rtol=1e-5, atol=1e-6)


def test_replicas_take_micro_batches_in_order() -> None:
    options = CompilerOptions(
        num_ipus=2,
        partials_type="float",
        popart_options={"enableReplicatedGraphs": True, "replicatedGraphCount": 2},
    )
    with LoadedModel(Compiler.compile(model(), ["y"], options)) as loaded:
        assert loaded.group == 2
        for count in (1, 3):
            x = rows_of(4 * count)
            results, cost = loaded.run({"x": x}, count)
            np.testing.assert_allclose(results["y"], expected(x), rtol=1e-5, atol=1e-6)
            assert cost.transfer_s >= 0


def test_files_and_options_that_cannot_be(file: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no compiler option 'num_ipu'"):
        CompilerOptions.from_dict({"num_ipu": 2})
    with pytest.raises(UnsupportedError, match="custom_transform_applier_settings"):
        CompilerOptions.from_dict({"custom_transform_applier_settings": "{'Fwd0': ['Own']}"})
    for told, error, message in (
        ({"MainLoops": [], "Prealias": ["Own"]}, UnsupportedError, "'Own' at Prealias"),
        ({"MainLoop": ["Own"]}, UsageError, "no checkpoint 'MainLoop'"),
        ({"Final": "Own"}, UsageError, "Final takes a list of names"),
    ):
        with pytest.raises(error, match=message):
            CompilerOptions.from_dict({"custom_transform_applier_settings": told})
    names = ("Fwd0", "Fwd1", "Bwd0", "Prealias", "MainLoops", "Final")
    CompilerOptions.from_dict({"custom_transform_applier_settings": {key: [] for key in names}})
    for name, value in (
        ("num_ipus", "2"),
        ("enable_fast_reduce", 1),
        ("partials_type", "full"),
        ("num_ipus", 0),
    ):
        with pytest.raises(UsageError, match=f"the compiler option {name} is"):
            CompilerOptions.from_dict({name: value})
    assert CompilerOptions.from_dict({"enable_fast_reduce": True, "num_ipus": 2}).num_ipus == 2
    with pytest.raises(UsageError, match="at most 1, not 2"):
        Compiler.compile(model(), None, CompilerOptions(available_memory_proportion=2.0))
    with pytest.raises(UsageError, match="not int"):
        Compiler.compile(3)
    assert ServedModel(Path(file).read_bytes()).metadata.deviceIterations == 1
    assert "One batch (1 replica x 1 micro-batch)" in Compiler.compile_and_get_summary_report(
        model(), None, OPTIONS
    )


def test_an_unknown_graph_mode_is_refused_by_name() -> None:
    for mode in ("auto", "", ["off"]):
        options = CompilerOptions.from_dict({"virtual_graph_mode": mode})
        with pytest.raises(UsageError, match="no virtual_graph_mode") as caught:
            Compiler.compile(model(), None, options)
        assert repr(mode) in caught.value.message
        assert caught.value.hint == "The modes are off, manual, automatic."


def test_a_mapping_to_tiles_is_printed_as_a_model_is_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in PopRT's example of the operator: a product of 1024 elements, passed on as it is."""
    shape = (4, 4, 8, 8)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["z"]),
        helper.make_node("PrintTileMapping", ["z"], ["y"], domain="ai.graphcore"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "w", "y")]
    graph = helper.make_graph(nodes, "net", ends[:2], ends[2:])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)
    Compiler.compile_and_export(proto.SerializeToString(), None, tmp_path, OPTIONS)
    told = "PrintTileMapping z: 1024 elements on 1024 of 1472 tiles, at most 1 on one (modelled: spread evenly)\n"
    assert told in capsys.readouterr().err
    source = np.random.default_rng(0)
    x, w = (source.standard_normal(shape).astype(np.float32) for _ in range(2))
    with ModelRunner(str(tmp_path / "executable.popef")) as runner:
        y = np.empty(shape, np.float32)
        runner.execute({"x": x, "w": w}, {"y": y})
    np.testing.assert_allclose(y, x.astype(np.float64) @ w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("wait", "moments"),
    [
        (RuntimeConfig().device_wait_config, [0.0]),  # The SDK's: a timeout of 1 s, 6 s between two attempts.
        (DeviceWait(), [0.0]),
        (DeviceWait(5.0, 2.0), [0.0, 2.0, 4.0, 5.0]),
        (DeviceWait(2.0, 2.0), [0.0]),
    ],
)
def test_ipus_are_asked_for_as_often_as_the_settings_say(
    wait: DeviceWait, moments: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, asked = [0.0], []

    def attempt(*arguments: object) -> tuple[None, list[str]]:
        asked.append(clock[0])
        return None, ["another program holds them"]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(loaded_model, "_attempt", attempt)
    monkeypatch.setattr(loaded_model, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    with pytest.raises(UsageError, match="no device with 4 IPUs is free: another program holds them"):
        acquire_device(4, {}, wait)
    assert asked == moments
