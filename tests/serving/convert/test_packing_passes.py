"""Packed samples give what each gives alone: end to end over rows, and several in a row."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from podrun.core.errors import UnsupportedError, UsageError
from podrun.serving.compiler import Compiler, CompilerOptions
from podrun.serving.convert.converter import Converter
from podrun.serving.convert.reference_runs import run_onnxruntime
from podrun.serving.runtime.pack_runner import PackRunner, PackRunnerConfig
from tests.serving.convert.models import bert, convolutional
from tests.serving.convert.test_passes import operators, results

LENGTH, WIDTH = 8, 16
LENGTHS = (3, 8, 2, 1, 6)


def model(rows: int) -> onnx.ModelProto:
    return bert(layers=1, hidden=WIDTH, heads=2, length=LENGTH, batch=rows, positions=True)


def sample(length: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    ids, kinds = random.integers(0, 50, length), random.integers(0, 2, length)
    return {"input_ids": ids, "token_type_ids": kinds, "position_ids": np.arange(length)}


def alone(one: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One sample in a row of its own, by onnxruntime."""
    length = len(one["input_ids"])
    feed = {name: np.pad(value, (0, LENGTH - length))[None] for name, value in one.items()}
    feed["attention_mask"] = (np.arange(LENGTH) < length).astype(np.int64)[None]
    right = run_onnxruntime(model(1), feed)
    return {"last_hidden_state": right["last_hidden_state"][0, :length], "pooled": right["pooled"][0]}


@pytest.mark.slow
def test_samples_end_to_end_give_what_each_gives_alone() -> None:
    packed = Converter(pack_args={"max_valid_num": 6}).convert(model(3))
    assert {"Unpack", "Pack", "AttentionMask"} <= set(operators(packed))
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in packed.graph.output}
    assert shapes == {"last_hidden_state": [3, LENGTH, WIDTH], "pooled": [6, WIDTH]}
    samples = [sample(length, seed) for seed, length in enumerate(LENGTHS)]
    total = 3 * LENGTH
    feed = {
        name: np.pad(np.concatenate([one[name] for one in samples]), (0, total - sum(LENGTHS))).reshape(
            3, LENGTH
        )
        for name in samples[0]
    }
    numbers = np.repeat(np.arange(1, len(LENGTHS) + 1), LENGTHS)
    feed["attention_mask"] = np.pad(numbers, (0, total - sum(LENGTHS))).reshape(3, LENGTH)
    feed["unpack_info"] = np.array([[*LENGTHS, 0]]).T
    ours = results(packed, feed)
    flat, begin = ours["last_hidden_state"].reshape(total, WIDTH), 0
    for index, one in enumerate(samples):
        right = alone(one)
        np.testing.assert_allclose(
            flat[begin : begin + LENGTHS[index]], right["last_hidden_state"], atol=2e-5
        )
        np.testing.assert_allclose(ours["pooled"][index], right["pooled"], atol=2e-5)
        begin += LENGTHS[index]


@pytest.mark.slow
def test_the_runner_packs_for_a_converted_model() -> None:
    packed = Converter(pack_args={"max_valid_num": 4}).convert(model(2))
    config = PackRunnerConfig(timeout_microseconds=200_000, dynamic_input_name="input_ids")
    config.mask, config.unpack_info = "attention_mask", "unpack_info"
    compiled = Compiler.compile(packed, None, CompilerOptions(partials_type="float"))
    samples = [sample(length, seed) for seed, length in enumerate(LENGTHS)]
    with PackRunner(compiled, config) as runner:
        held = []
        for one in samples:
            outputs = {
                "last_hidden_state": np.zeros((len(one["input_ids"]), WIDTH), np.float32),
                "pooled": np.zeros(WIDTH, np.float32),
            }
            inputs = {name: value.astype(np.int32) for name, value in one.items()}
            held.append((runner.execute_async(inputs, outputs), outputs, one))
        for future, outputs, one in held:
            future.wait()
            for name, right in alone(one).items():
                np.testing.assert_allclose(outputs[name], right, atol=2e-5)


@pytest.mark.slow
def test_several_samples_in_a_row() -> None:
    packed = Converter(pack_args={}).convert(model(1))
    first, second = sample(3, 1), sample(4, 2)
    feed = {name: np.concatenate([first[name], second[name], [0]])[None] for name in first}
    feed["attention_mask"] = np.array([[1, 1, 1, 2, 2, 2, 2, 0]])
    hidden = results(packed, feed)["last_hidden_state"][0]
    np.testing.assert_allclose(hidden[:3], alone(first)["last_hidden_state"], atol=2e-5)
    np.testing.assert_allclose(hidden[3:7], alone(second)["last_hidden_state"], atol=2e-5)


def test_what_cannot_be_packed_is_named() -> None:
    for made, arguments, error, message in (
        (convolutional(), {"max_valid_num": 2}, UnsupportedError, "no attention of the usual form"),
        (bert(layers=1), {"max_valid_num": 2}, UnsupportedError, "adds positions that are constants"),
        (model(2), {"segment_max_size": "13+51"}, UnsupportedError, "several segments"),
        (model(2), {"max_valid_num": 0}, UsageError, "above 0"),
        (model(2), {"most": 1}, UsageError, "most"),
    ):
        with pytest.raises(error, match=message):
            Converter(pack_args=arguments).convert(made)
