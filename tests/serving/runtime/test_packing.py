"""Samples of different lengths packed into rows: places that overlap nowhere, and the numbers of samples run alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from podrun.core.errors import UsageError
from podrun.serving.compiler import Compiler, CompilerOptions, ServedModel
from podrun.serving.loaded_model import LoadedModel
from podrun.serving.runtime.pack_runner import PackRunner, PackRunnerConfig
from podrun.serving.runtime.packing import OpenPack, PackAlgorithm, PackingShape

ROWS, PLACES, WIDTH = 2, 8, 4
WEIGHT = np.random.default_rng(3).standard_normal((WIDTH, WIDTH)).astype(np.float32)


def attention() -> onnx.ModelProto:
    """``y = softmax(x w x^T, over places of the same sample) x``, with samples numbered by ``mask``."""
    value = helper.make_tensor_value_info
    constants = {
        "w": WEIGHT,
        "rows": np.array([ROWS, PLACES, 1], np.int64),
        "columns": np.array([ROWS, 1, PLACES], np.int64),
        "far": np.float32([-1e4]),
        "none": np.float32([0]),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"]),
        helper.make_node("Transpose", ["x"], ["xt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["xw", "xt"], ["scores"]),
        helper.make_node("Reshape", ["mask", "rows"], ["from"]),
        helper.make_node("Reshape", ["mask", "columns"], ["to"]),
        helper.make_node("Equal", ["from", "to"], ["same"]),
        helper.make_node("Where", ["same", "none", "far"], ["bias"]),
        helper.make_node("Add", ["scores", "bias"], ["kept"]),
        helper.make_node("Softmax", ["kept"], ["shares"], axis=2),
        helper.make_node("MatMul", ["shares", "x"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "attention",
        [
            value("x", TensorProto.FLOAT, [ROWS, PLACES, WIDTH]),
            value("mask", TensorProto.INT32, [ROWS, PLACES]),
        ],
        [value("y", TensorProto.FLOAT, [ROWS, PLACES, WIDTH])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def alone(x: np.ndarray) -> np.ndarray:
    """The attention of one sample, in float64."""
    x = x.astype(np.float64)
    scores = x @ WEIGHT @ x.T
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True) @ x


@pytest.fixture(scope="module")
def compiled() -> ServedModel:
    return Compiler.compile(attention(), None, CompilerOptions(partials_type="float"))


def samples(count: int, seed: int = 0) -> list[np.ndarray]:
    source = np.random.default_rng(seed)
    return [
        source.standard_normal((int(source.integers(1, PLACES + 1)), WIDTH), np.float32) for _ in range(count)
    ]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 9), max_size=12),
    st.sampled_from(PackAlgorithm),
    st.integers(0, 2),
    st.booleans(),
    st.integers(0, 4),
)
def test_samples_overlap_nowhere(
    lengths: list[int], algorithm: PackAlgorithm, delimiters: int, end_to_end: bool, most: int
) -> None:
    shape = PackingShape(3, 8, most, 0 if end_to_end else delimiters, end_to_end, algorithm)
    pack, used = OpenPack(shape), np.zeros(24, int)
    for length in lengths:
        place = pack.add(length)
        if place is None:
            continue
        assert place.length == length
        used[place.begin : place.begin + length] += 1
        if not end_to_end:
            assert place.begin // 8 == (place.begin + length - 1) // 8
    assert used.max() <= 1
    assert not most or len(pack.samples) <= most
    numbers = pack.numbers()
    np.testing.assert_array_equal(numbers.reshape(-1) > 0, used > 0)
    for row in numbers if not end_to_end else ():
        assert sorted(set(row[row > 0])) == list(range(1, len(set(row[row > 0])) + 1))


def test_first_fit_fills_rows_that_next_fit_leaves() -> None:
    for algorithm, packed in ((PackAlgorithm.next_fit, 3), (PackAlgorithm.first_fit, 4)):
        pack = OpenPack(PackingShape(2, 8, algorithm=algorithm))
        assert sum(pack.add(length) is not None for length in (5, 6, 3, 2)) == packed


@pytest.mark.parametrize("algorithm", PackAlgorithm)
def test_packed_samples_have_the_numbers_of_samples_alone(
    compiled: ServedModel, algorithm: PackAlgorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[np.ndarray] = []
    run = LoadedModel.run

    def watched(self: LoadedModel, inputs: Any, *more: Any) -> Any:
        runs.append(inputs["mask"])
        return run(self, inputs, *more)

    monkeypatch.setattr(LoadedModel, "run", watched)
    config = PackRunnerConfig(timeout_microseconds=20_000, dynamic_input_name="x", algorithm=algorithm)
    config.enable_input_single_row_mode("mask", delimiter_num=1)
    given_samples = samples(12)
    outputs = [np.full_like(x, np.nan) for x in given_samples]
    with PackRunner(compiled, config) as runner:
        assert [d.name for d in runner.get_execute_inputs()] == ["x"]
        futures = [
            runner.execute_async({"x": x}, {"y": y}) for x, y in zip(given_samples, outputs, strict=True)
        ]
        for future in futures:
            future.wait(60)
    for x, y in zip(given_samples, outputs, strict=True):
        np.testing.assert_allclose(y, alone(x), rtol=1e-4, atol=1e-5)
    assert len(runs) < len(given_samples)
    assert sum(len(set(row[row > 0])) for mask in runs for row in mask) == len(given_samples)


def test_padding_is_taken_out_of_requests(compiled: ServedModel) -> None:
    config = PackRunnerConfig(max_valid_num=3)
    config.enable_padding_remove_mode("mask", ["x"])
    with PackRunner(compiled, config) as runner:
        for sample in samples(3, 1):
            padded, mask = np.full((1, PLACES, WIDTH), 9, np.float32), np.zeros((1, PLACES), np.int32)
            padded[0, : len(sample)], mask[0, : len(sample)] = sample, 1
            y = np.full_like(sample, np.nan)
            runner.execute({"x": padded, "mask": mask}, {"y": y})
            np.testing.assert_allclose(y, alone(sample), rtol=1e-4, atol=1e-5)
        with pytest.raises(UsageError, match="a sample of 0 places"):
            runner.execute({"x": padded, "mask": 0 * mask}, {"y": y})


def test_wrong_samples_disturb_no_other(compiled: ServedModel) -> None:
    config = PackRunnerConfig(dynamic_input_name="x")
    config.enable_input_single_row_mode("mask")
    good, y = samples(1)[0], np.full_like(samples(1)[0], np.nan)
    with PackRunner(compiled, config) as runner:
        for inputs, message in (
            ({"x": np.zeros((9, WIDTH), np.float32)}, "1 to 8 can be packed"),
            ({"x": np.zeros((3, 5), np.float32)}, r"has shape \[3, 5\]"),
            ({"x": np.zeros((3, WIDTH))}, "type float64"),
            ({"z": good}, r"the inputs are \['x'\]"),
        ):
            with pytest.raises(UsageError, match=message):
                runner.execute(inputs, {"y": y})
        with pytest.raises(UsageError, match="the array is float32"):
            runner.execute({"x": good}, {"y": np.zeros((len(good) + 1, WIDTH), np.float32)})
        runner.execute({"x": good}, {"y": y})
        np.testing.assert_allclose(y, alone(good), rtol=1e-4, atol=1e-5)
    for wrong, message in (
        (PackRunnerConfig(dynamic_input_name="x"), "need unpack_info"),
        (PackRunnerConfig(dynamic_input_name="x", single_row=True, mask="m"), "no input 'm'"),
        (PackRunnerConfig(dynamic_input_name="x", single_row=True, mask="x"), "no input 'x' of integers"),
    ):
        with pytest.raises(UsageError, match=message):
            PackRunner(compiled, wrong)
