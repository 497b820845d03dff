"""The names that programs import from ``poprt``, used as PopRT's examples use them."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from podrun.core.errors import UnsupportedError, UsageError
from podrun.serving.convert.frontends import TensorflowFrontend
from podrun.serving.convert.reference_runs import run_onnxruntime
from podrun.serving.sessions import get_session
from tests.conftest import ROOT
from tests.serving.convert.models import bert, convolutional, untidy
from tests.serving.test_runner import expected, model, rows_of


@pytest.fixture
def poprt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "podrun" / "compat"))
    before = set(sys.modules)
    yield importlib.import_module("poprt")
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "poprt":
            del sys.modules[name]


@pytest.mark.slow
def test_a_model_is_converted_and_run(poprt: Any, tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "net.onnx")
    origin = poprt.frontend.get_frontend(str(tmp_path), "onnx").load_model()
    converted = poprt.Converter(precision="fp32").convert(origin)
    options = poprt.CompilerOptions()
    options.partials_type, options.enable_fast_reduce = "float", True
    with poprt.Backend(converted.SerializeToString(), compiler_options=options) as session:
        inputs, outputs = session.get_io_info()
        assert (inputs["x"], outputs["y"]) == (([4, 8], np.float32), ([4, 3], np.float32))
        (y,) = session.run(["y"], {"x": rows_of(4)})
        for feed, message in (
            ({}, "input 'x' has no value"),
            ({"z": rows_of(4)}, "no input 'z'"),
            ({"x": rows_of(3)}, r"is \[4, 8\], not \[3, 8\]"),
            ({"x": rows_of(4).astype(np.int32)}, "is float32, not int32"),
        ):
            with pytest.raises(UsageError, match=message):
                session.run(None, feed)
    np.testing.assert_allclose(y, expected(rows_of(4)), rtol=1e-5, atol=1e-6)
    other = poprt.backend.get_session(str(tmp_path / "net.onnx"), None, "onnxruntime")
    other.load()
    np.testing.assert_allclose(other.run(None, {"x": rows_of(4)})[0], y, rtol=1e-5, atol=1e-6)
    for call in (other.set_input_names, other.set_output_names):
        with pytest.raises(UnsupportedError, match=r"set_(in|out)put_names is for models of TensorFlow"):
            call(["x"])
    with pytest.raises(UsageError, match="no backend 'paddle'"):
        poprt.backend.get_session(str(tmp_path / "net.onnx"), None, "paddle")


def test_names_and_keywords_are_those_of_the_reference(poprt: Any) -> None:
    keywords = inspect.signature(poprt.Converter).parameters
    assert {p.kind for p in keywords.values()} == {inspect.Parameter.KEYWORD_ONLY}
    defaults = {
        "convert_version": 11,
        "precision": "fp32",
        "fp8_params": "F143,F143,0,0",
        "max_tensor_size": -1,
        "remap_mode": ["after_matmul"],
        "used_passes": [],
        "optimize_internal_exchange_code": False,
    }
    assert {name: keywords[name].default for name in defaults} == defaults
    assert importlib.import_module("poprt._names").sHostConcatRunnerConfig == "hostConcatRunnerConfig"


def test_helpers_of_passes(poprt: Any) -> None:
    matcher = poprt.passes.pattern_helper.PatternMatcher(["s:0->MatMul:m->Add:a->e:0"])
    graph, count = bert(layers=1).graph, 0
    while (match := matcher.next_pattern(graph)) is not None:
        assert match["m"].output[0] in match["a"].input
        count += 1
    assert count == 7  # Queries, keys, values, the join, two layers, the pooler; scores are divided first.
    with pytest.raises(UsageError, match="is no pattern"):
        poprt.passes.pattern_helper.PatternMatcher(["MatMul:m"])
    messy = untidy()
    poprt.passes.onnx_helper.topological_sort(messy.graph)
    assert poprt.optimizer.Optimizer(["eliminate_identity"]).run(messy).graph.node[0].op_type == "Cast"
    shapes, dtypes = poprt.utils.get_input_info_from_model_proto(messy)
    assert (shapes, dtypes) == ({"x": [2, 3, 4]}, {"x": np.float32})
    assert poprt.profile.get_model_flops(model()) == 2 * 4 * 8 * 3 + 4 * 3


def test_models_are_fused(poprt: Any) -> None:
    models = [model(), poprt.Converter(convert_version=13).convert(convolutional())]
    with pytest.raises(UsageError, match="has opset 11, another 13"):
        poprt.converter.MFConverter().convert(models)
    fused = poprt.converter.MFConverter().convert([models[0], poprt.Converter().convert(convolutional())])
    image = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    right = run_onnxruntime(convolutional(), {"x": image})["y"]
    ours = run_onnxruntime(fused, {"index": np.array([1]), "graph0/x": rows_of(4), "graph1/x": image})
    np.testing.assert_allclose(ours["graph1/y"], right, rtol=1e-5, atol=1e-5)
    assert not ours["graph0/y"].any()


@pytest.mark.slow
def test_a_saved_model_is_read(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    pytest.importorskip("tf2onnx")
    module = tf.Module()
    weight = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    module.f = tf.function(
        lambda x: tf.nn.relu(x @ weight), input_signature=[tf.TensorSpec([None, 4], tf.float32, name="x")]
    )
    tf.saved_model.save(module, str(tmp_path), signatures=module.f)
    session = get_session(str(tmp_path), 2, "tensorflow")
    x = np.random.default_rng(1).standard_normal((2, 4)).astype(np.float32)
    inputs, outputs = session.get_io_info()
    assert list(inputs.values()) == [([2, 4], np.float32)]
    assert list(outputs.values()) == [([2, 3], np.float32)]
    (name,) = inputs
    (y,) = session.run(None, {name: x})
    np.testing.assert_allclose(y, np.maximum(x @ weight, 0), rtol=1e-5, atol=1e-6)
    (inner,) = [
        op.outputs[0].name for op in session.load().load().graph.get_operations() if op.type == "MatMul"
    ]
    session.set_output_names([inner])
    session.set_input_names([name])
    assert list(session.get_io_info()[1]) == [inner]
    np.testing.assert_allclose(session.run(None, {name: x})[0], x @ weight, rtol=1e-5, atol=1e-6)
    for call, names, message in (
        (session.set_output_names, ["nothing:0"], "no tensor 'nothing:0'"),
        (session.set_input_names, "x:0", "takes a list of names"),
    ):
        with pytest.raises(UsageError, match=message):
            call(names)
    with pytest.raises(UsageError, match="has no value"):
        session.run(None, {})
    graph = get_session(session.load().load().graph.as_graph_def().SerializeToString(), None, "tensorflow")
    np.testing.assert_allclose(graph.run([inner], {name: x})[0], x @ weight, rtol=1e-5, atol=1e-6)
    proto = TensorflowFrontend(tmp_path, signature_def="serving_default", tag="serve").load_model()
    (y,) = run_onnxruntime(proto, {proto.graph.input[0].name: x}).values()
    np.testing.assert_allclose(y, np.maximum(x @ weight, 0), rtol=1e-5, atol=1e-6)
