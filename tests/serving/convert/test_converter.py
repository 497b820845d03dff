"""`Converter`: whole conversions against onnxruntime, by precision and version; what goes in and out."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from podrun.core.errors import UsageError
from podrun.serving.compiler import Compiler, CompilerOptions
from podrun.serving.convert.converter import Converter, stages_of
from podrun.serving.convert.opset import convert_opset
from podrun.serving.convert.sharder import Sharder, claimed
from podrun.serving.loaded_model import LoadedModel
from podrun.serving.runtime.host_concat import HostConcatRunner
from tests.serving.convert.models import MODELS, Writer, bert, choosing, convolutional, newer_bert, untidy
from tests.serving.convert.test_passes import expected, greatest_difference, operators, results

BOUNDS = {"fp32": 1e-5, "fp16": 5e-3, "fp8": 0.3, "fp8_weight": 0.15}


def worst_of(label: str, **options: Any) -> float:
    model, inputs, right = expected(label)
    ours = results(Converter(**options).convert(model), inputs)
    return max(greatest_difference(ours[name], value) for name, value in right.items())


@pytest.mark.parametrize(
    ("label", "precision"),
    [
        (n, p)
        if (n, p) in (("untidy", "fp16"), ("branching", "fp32"))
        else pytest.param(n, p, marks=pytest.mark.slow)
        for n in MODELS
        for p in BOUNDS
    ],
)
def test_conversions_keep_the_numbers(label: str, precision: str) -> None:
    assert worst_of(label, precision=precision, enable_erf_gelu=True) <= BOUNDS[precision]


@pytest.mark.parametrize(
    "make", [newer_bert, pytest.param(choosing, marks=pytest.mark.slow), untidy, convolutional]
)
@pytest.mark.parametrize("version", [11, 17, 21])
def test_other_versions_of_operators(make, version) -> None:  # type: ignore[no-untyped-def]
    label = next(
        name for name, one in MODELS.items() if one().SerializeToString() == make().SerializeToString()
    )
    _, inputs, right = expected(label)
    converted = convert_opset(make(), version)
    assert converted.opset_import[0].version == version
    onnx.checker.check_model(converted, full_check=True)
    ours = results(converted, inputs)
    assert max(greatest_difference(ours[name], value) for name, value in right.items()) <= 1e-5


def test_what_has_no_earlier_form_stays(caplog: pytest.LogCaptureFixture) -> None:
    w = Writer()
    w("GridSample", "x", "g", out="y")
    model = w.model(
        {"x": (TensorProto.FLOAT, [1, 1, 3, 3]), "g": (TensorProto.FLOAT, [1, 2, 2, 2])},
        {"y": (TensorProto.FLOAT, [1, 1, 2, 2])},
        16,
    )
    with caplog.at_level(logging.WARNING, "poprt"):
        assert Converter().convert(model).opset_import[0].version == 16
    assert "the model stays in opset 16: opset 11 has no GridSample" in caplog.text


def test_softmax_over_an_inner_axis_goes_down() -> None:
    w = Writer()
    w("Softmax", "x", axis=1, out="y")
    model = w.model({"x": (TensorProto.FLOAT, [2, 3, 4])}, {"y": (TensorProto.FLOAT, [2, 3, 4])})
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    both = [results(m, {"x": x})["y"] for m in (model, convert_opset(onnx.ModelProto.FromString(
        model.SerializeToString()), 11))]  # fmt: skip
    np.testing.assert_allclose(*both, rtol=1e-6)


def test_inputs_and_outputs_have_types_of_ipus() -> None:
    converted = Converter(precision="fp16").convert(bert(layers=1))
    kinds = {v.name: v.type.tensor_type.elem_type for v in (*converted.graph.input, *converted.graph.output)}
    assert {kinds[n] for n in ("input_ids", "attention_mask", "token_type_ids")} == {TensorProto.INT32}
    assert {kinds[n] for n in ("last_hidden_state", "pooled")} == {TensorProto.FLOAT16}
    assert len({node.name for node in converted.graph.node}) == len(converted.graph.node)
    assert converted.opset_import[0].version == 11


def test_checkpoints_and_outputs() -> None:
    model = bert(layers=1)
    told = Converter(checkpoints="t0", remove_outputs=["pooled"]).convert(model)
    assert [value.name for value in told.graph.output] == ["last_hidden_state", "t0"]
    assert "Tanh" not in operators(told)
    with pytest.raises(UsageError, match="Converter has no parameter 'precission'") as error:
        Converter(precission="fp16")
    assert error.value.hint == "Did you mean precision?"
    with pytest.raises(UsageError, match="batch_size or input_shape, not both"):
        Converter(batch_size=2, batch_axis=0, input_shape={"x": [1]})


@pytest.mark.slow
def test_clean_up_fusing_and_folding_cost_less() -> None:
    """The tile model's cycles of a step, and the memory that is never free."""
    model = bert(layers=1, hidden=16, heads=2, length=5)
    before = _cost(model)
    assert _cost(Converter(enable_erf_gelu=True).convert(model)) < 0.9 * before
    convolutions = convolutional()
    del convolutions.graph.node[-1]
    convolutions.graph.node[-1].output[0] = "y"
    assert _cost(Converter().convert(convolutions)) < _cost(convolutions)


def _cost(model: onnx.ModelProto) -> float:
    report = Compiler.compile(model, None, CompilerOptions()).program().tile_report
    return float(report["step"]["cycles"])


def test_nodes_are_sharded_by_their_points() -> None:
    model = Converter().convert(bert(layers=2))
    nodes = list(model.graph.node)
    point = next(
        i for i, node in enumerate(nodes) if node.op_type == "GroupNormalization" and i > len(nodes) // 3
    )
    numbers = claimed(nodes, {nodes[point].name: 0})
    assert numbers[point] == 0
    assert set(numbers) == {0, 1}
    sharded = Sharder({nodes[point].name: 0}, {nodes[point].name: 0}).run(model)
    places = [{a.name: a.i for a in n.attribute if a.name.startswith("__")} for n in sharded.graph.node]
    assert [place["__ipu_number"] for place in places] == numbers
    assert [place["__pipeline_stage"] for place in places] == numbers
    with pytest.raises(UsageError, match="no node 'z'"):
        Sharder({"z": 0}).run(model)
    with pytest.raises(UsageError, match="a number from 0 on"):
        Sharder({nodes[0].name: -1})


@pytest.mark.slow
def test_a_sharded_model_runs_on_two_ipus() -> None:
    origin, inputs, right = expected("bert")
    model = Converter().convert(origin)
    nodes = list(model.graph.node)
    middle = next(n.name for n in nodes if n.op_type == "Softmax")
    sharded = Sharder({middle: 0}, {middle: 0}).run(model)
    options = CompilerOptions(
        num_ipus=2,
        virtual_graph_mode="manual",
        enable_pipelining=True,
        batches_per_step=4,
        partials_type="float",
    )
    with LoadedModel(Compiler.compile(sharded, None, options)) as loaded:
        values = {n: np.concatenate([v.astype(loaded.inputs[n].dtype)] * 4) for n, v in inputs.items()}
        ours, _ = loaded.run(values, 4)
    for name, value in right.items():
        np.testing.assert_allclose(ours[name], np.concatenate([value] * 4), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_many_inputs_become_one() -> None:
    w = Writer()
    w("Sum", "a", "b", "c", out="y")
    model = w.model({n: (TensorProto.FLOAT, [2, 1]) for n in "abc"}, {"y": (TensorProto.FLOAT, [2, 1])})
    merged = Converter(apply_hcsr=["fp32,[2,1],3"]).convert(model)
    assert [value.name for value in merged.graph.input] == ["hcsr_input_0"]
    values = np.arange(6, dtype=np.float32).reshape(3, 2, 1)
    np.testing.assert_array_equal(results(merged, {"hcsr_input_0": values})["y"], values.sum(0))
    with HostConcatRunner(Compiler.compile(merged)) as runner:  # The file says what conversion has merged.
        assert [(d.name, d.shape) for d in runner.get_execute_inputs()] == [(n, (2, 1)) for n in "abc"]
        y = np.empty((2, 1), np.float32)
        runner.execute(dict(zip("abc", values, strict=True)), {"y": y})
    np.testing.assert_array_equal(y, values.sum(0))


def test_weights_that_repeat_themselves_are_tiled() -> None:
    w = Writer()
    held = w.constant(np.tile(np.arange(64.0).reshape(8, 8), (16, 8)))
    w("Add", "x", held, out="y")
    model = w.model({"x": (TensorProto.FLOAT, [128, 64])}, {"y": (TensorProto.FLOAT, [128, 64])})
    folded = Converter(fold_periodic_initializer=True).convert(model)
    assert "Tile" in operators(folded)
    assert len(folded.SerializeToString()) < 0.1 * len(model.SerializeToString())
    x = np.ones((128, 64), np.float32)
    np.testing.assert_array_equal(results(folded, {"x": x})["y"], results(model, {"x": x})["y"])


def test_images_in_eight_bits() -> None:
    w = Writer()
    w("Conv", w("Div", w("Sub", "x", w.constant(127.0)), w.constant(64.0)), w.weight(4, 3, 3, 3), out="y")
    model = w.model({"x": (TensorProto.FLOAT, [1, 3, 6, 6])}, {"y": (TensorProto.FLOAT, [1, 4, 4, 4])})
    small = Converter(eightbitsio=True).convert(model)
    assert {v.type.tensor_type.elem_type for v in (*small.graph.input, *small.graph.output)} == {
        TensorProto.UINT8
    }
    x = np.random.default_rng(0).integers(0, 256, (1, 3, 6, 6)).astype(np.uint8)
    right = results(model, {"x": x.astype(np.float32)})["y"]
    np.testing.assert_allclose(results(small, {"x": x})["y"], np.clip(np.rint(right), 0, 255), atol=1)


def test_the_order_of_passes_can_be_seen() -> None:
    names = list(stages_of(Converter(precision="fp8", used_passes=["pre_scale"]).options))
    assert names.index("constant_folding") < names.index("float_to_half") < names.index("float_to_fp8")
    assert names.index("float_to_fp8") < names.index("pre_scale") < names.index("final_check")
    assert helper.make_opsetid("", 11).version == 11
