"""Conversion of SavedModels for IPUs: what changes in the graph, and that converted models compute the same."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.usefixtures("ipu"),
]
X = np.linspace(-2, 2, 16, dtype=np.float32).reshape(4, 4)


@pytest.fixture
def model() -> Callable[..., Any]:
    """Makes a frozen model of a function of a placeholder ``x``."""
    import tensorflow as tf

    from podrun.tensorflow.sdk.models_for_tests import ModelForTest

    def make(
        function: Callable[[tf.Tensor], tf.Tensor], dtype: Any = tf.float32, *, save: bool = False
    ) -> Any:
        class OfFunction(ModelForTest):
            def create(self) -> tf.Tensor:
                return function(tf.compat.v1.placeholder(dtype, [4, 4], "x"))

        return OfFunction(freeze=True, save=save)

    return make


def two_products(x: Any) -> Any:
    import tensorflow as tf

    for name in ("first", "second"):
        weights = tf.compat.v1.get_variable(name, initializer=np.eye(4, dtype=np.float32) * 0.5 + 0.25)
        x = tf.matmul(weights, x, name=f"{name}_product")
    return x


def computed(graph_def: Any, name: str) -> np.ndarray:
    import tensorflow as tf

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.graph_util.import_graph_def(graph_def, name="")
        return np.asarray(session.run(name, {"x:0": X}))


def nodes_of(folder: Path) -> dict[str, Any]:
    from podrun.private_apis.tensorflow import private_module

    kind = private_module("saved_model.loader_impl").saved_model_pb2.SavedModel
    saved = kind.FromString((folder / "saved_model.pb").read_bytes())
    return {node.name: node for node in saved.meta_graphs[0].graph_def.node}


def test_a_converted_model_runs_from_its_folder(
    model: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from podrun.tensorflow.sdk.saved_model_conversion import saved_model_command

    made = model(two_products, save=True)
    np.save(tmp_path / "x.npy", X)
    source = ["--dir", made.model_path, "--tag_set", "serve"]
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"excluded_nodes": ["^first"], "num_ipus": 2.5, "conv_amp": 0.3}))
    for case, options in {
        "all": [], "part": ["--config_file", str(config)], "none": ["--no_ipu_placement"],
        "rest": ["--excluded_nodes", "^first", "--remove_excluded_nodes"],
    }.items():  # fmt: skip
        folder = tmp_path / case
        saved_model_command(["convert", *source, "--output_dir", str(folder), "ipu", *options])
        nodes = nodes_of(folder)
        placed = {name for name, node in nodes.items() if node.device == "/device:IPU:0"}
        expected = {n for n in nodes if nodes[n].op != "Placeholder" and case != "none"}
        assert placed == {n for n in expected if case == "all" or not n.startswith("first")}
        if case == "rest":
            assert nodes["first_product"].op == "Placeholder"
            assert "x" not in nodes
            continue
        run = ["run", "--dir", str(folder), "--tag_set", "serve", "--signature_def", "serving_default"]
        inputs = ["--inputs", f"x={tmp_path / 'x.npy'}", "--outdir", str(tmp_path / f"{case}_results")]
        saved_model_command([*run, *inputs, "--init_ipu"])
        result = np.load(tmp_path / f"{case}_results" / "second_product.npy")
        weights = np.eye(4) * 0.5 + 0.25
        np.testing.assert_allclose(result, weights @ weights @ X, rtol=1e-5, atol=1e-6)
    assert json.loads((tmp_path / "part" / "conversion_params.json").read_text())["conv_amp"] == 0.3
    assert "Initializing IPU System" in capsys.readouterr().out
    with pytest.raises(AttributeError, match="At least one of --inputs"):
        saved_model_command(run)


def test_gelu_becomes_one_operation(model: Callable[..., Any]) -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.conversion_params import IpuConversionParams
    from podrun.tensorflow.sdk.graph_converters import GeluReplacement, IPUPlacement

    def two_gelus(x: tf.Tensor) -> tf.Tensor:
        sides = []
        for name in ("left", "right"):
            with tf.name_scope(name):
                biased = tf.add(x, float(len(name)) - 4.5, name="BiasAdd")
                with tf.name_scope("gelu"):
                    cubed = biased + 0.044715 * tf.pow(biased, 3.0)
                    sides.append(
                        biased * 0.5 * (1.0 + tf.tanh(np.sqrt(2 / np.pi).astype(np.float32) * cubed))
                    )
        return tf.matmul(sides[0], sides[1], name="product")

    made = model(two_gelus)
    patterns = {"nodes": ["/gelu/"], "node_as_gelu_input": ["BiasAdd$"], "node_use_gelu_output": ["product"]}
    params = IpuConversionParams(gelu_replacement=patterns)
    expected = computed(made.graph_def, "product:0")
    graph_def, _ = GeluReplacement(params).apply(made.graph_def, made.signature_def)
    replaced = {node.name: node.op for node in graph_def.node}
    assert [n for n, op in replaced.items() if op == "IpuGelu"] == [
        "left/BiasAdd/IpuGelu",
        "right/BiasAdd/IpuGelu",
    ]
    assert not any("/gelu/" in name for name in replaced)
    np.testing.assert_allclose(computed(graph_def, "product:0"), expected, atol=1e-5)
    graph_def, _ = IPUPlacement(params).apply(graph_def, made.signature_def)
    np.testing.assert_allclose(computed(graph_def, "product:0"), expected, atol=1e-5)
    for wrong in ([], {"nodes": []}, dict.fromkeys(patterns, "a")):
        with pytest.raises(ValueError, match="gelu"):
            GeluReplacement(IpuConversionParams(gelu_replacement=wrong))


def test_precision_goes_to_halves_between_inputs_and_outputs(model: Callable[..., Any]) -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.conversion_params import IpuConversionParams
    from podrun.tensorflow.sdk.graph_converters import PrecisionConversion

    made = model(lambda x: tf.reduce_sum(tf.nn.relu(two_products(x)), name="total"))
    expected = computed(made.graph_def, "total:0")
    params = IpuConversionParams(
        precision_mode="FP16", precision_conversion_excluded_nodes=["^second_product$"]
    )
    graph_def, _ = PrecisionConversion(params).apply(made.graph_def, made.signature_def)
    nodes = {node.name: node for node in graph_def.node}
    half, full = tf.float16.as_datatype_enum, tf.float32.as_datatype_enum
    kinds = {
        name: nodes[name].attr["T"].type for name in ("first_product", "second_product", "Relu", "total")
    }
    assert kinds == {"first_product": half, "second_product": full, "Relu": half, "total": full}
    assert nodes["x"].attr["dtype"].type == full
    casts = {"first_product/CastInsertion_1", "second_product/CastInsertion_1", "total/CastInsertion_0"}
    assert casts <= nodes.keys()
    np.testing.assert_allclose(computed(graph_def, "total:0"), expected, rtol=2e-3)


def test_integers_become_narrow_and_shards_are_named(model: Callable[..., Any]) -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.conversion_params import IpuConversionParams
    from podrun.tensorflow.sdk.graph_converters import (
        SHARDING,
        GraphSharding,
        Int64Conversion,
        IPUCompilerWrapper,
        IPUPlacement,
    )

    params = IpuConversionParams(
        int64_to_int32_conversion=True,
        num_ipus=2,
        manual_sharding=[["add"], ["product"]],
        merge_subgraphs=True,
    )
    made = model(lambda x: tf.matmul(tf.add(x, tf.constant(7, tf.int64), "add"), x, name="product"), tf.int64)
    graph_def, signature = Int64Conversion(params).apply(made.graph_def, made.signature_def)
    wide = tf.int64.as_datatype_enum
    assert not any(a.type == wide or a.tensor.dtype == wide for n in graph_def.node for a in n.attr.values())
    with pytest.raises(ValueError, match="No ops placed on IPU"):
        GraphSharding(params).apply(graph_def, signature)
    graph_def, _ = IPUPlacement(params).apply(graph_def, signature)
    graph_def, _ = GraphSharding(params).apply(graph_def, signature)
    shards = {n.name: n.attr[SHARDING].s[-1] for n in graph_def.node if SHARDING in n.attr}
    assert shards == {"add": 0, "product": 1, "Const": 0}
    assert IPUCompilerWrapper(params).apply(graph_def, signature)[0] is graph_def
    next(n for n in graph_def.node if n.name == "product").device = ""
    with pytest.raises(ValueError, match="Please place add on CPU"):
        IPUCompilerWrapper(params).apply(graph_def, signature)
    large = model(lambda x: x + tf.constant(2**40, tf.int64), tf.int64)
    with pytest.raises(OverflowError, match="32 bits cannot hold"):
        Int64Conversion(params).apply(large.graph_def, large.signature_def)


def test_what_cannot_be_converted_is_refused() -> None:
    from podrun.tensorflow.sdk.conversion_params import IpuConversionParams, check_conversion_params
    from podrun.tensorflow.sdk.graph_converters import GraphSharding, LoopRepeatWrapper
    from podrun.tensorflow.sdk.saved_model_conversion import IpuGraphConverter

    def params(**options: Any) -> IpuConversionParams:
        return IpuConversionParams(**options)

    with pytest.raises(ValueError, match="num_ipus should be an integer"):
        check_conversion_params(params(num_ipus=0))
    with pytest.raises(TypeError, match="excluded_nodes should be a list"):
        check_conversion_params(params(excluded_nodes="a"))
    with pytest.raises(ValueError, match="merge_subgraphs should be True or False"):
        check_conversion_params(params(merge_subgraphs=1))
    with pytest.raises(TypeError, match="must be a list"):
        GraphSharding(params(manual_sharding=True))
    with pytest.raises(TypeError, match="must only contain lists of strings"):
        GraphSharding(params(manual_sharding=["a"]))
    with pytest.raises(ValueError, match=r"manual_sharding \(1\) should be equal to num_ipus \(2\)"):
        GraphSharding(params(manual_sharding=[["a"]], num_ipus=2))
    runtime = {"embedded_runtime_exec_cachedir": "a", "runtime_api_timeout_us": 1}
    with pytest.raises(ValueError, match="int64_to_int32_conversion=True"):
        LoopRepeatWrapper(params(embedded_runtime_save_config=runtime))
    with pytest.raises(TypeError, match="must be a dictionary containing"):
        LoopRepeatWrapper(params(embedded_runtime_save_config=["a"], int64_to_int32_conversion=True))
    wrapper = LoopRepeatWrapper(params(embedded_runtime_save_config=runtime, int64_to_int32_conversion=True))
    with pytest.raises(NotImplementedError, match=r"use ipu\.serving\.export_single_step"):
        wrapper.apply(None, None)
    with pytest.raises(NotImplementedError, match=r"ipu\.serving\.export_pipeline"):
        LoopRepeatWrapper(params(pipeline_cfg={"converter": "auto"})).apply(None, None)
    with pytest.raises(ValueError, match="Must specify one of"):
        IpuGraphConverter()
    with pytest.raises(ValueError, match="is not readable"):
        params().load_from_json_file("/nowhere/at/all.json")


def saved_by_version_2(
    folder: Path, dtype: Any = np.float32, *, loop: bool = False
) -> tuple[Any, np.ndarray]:
    """A model of `tf.saved_model.save`, whose signature calls a function that calls another; its output for `X`."""
    import tensorflow as tf

    class Saved(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = tf.Variable(np.eye(4, dtype=dtype) * 2 + 1)

        @tf.function
        def inner(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            product = tf.matmul(self.weights, x, name="product")
            return tuple(tf.identity_n([product, x]))

        @tf.function(input_signature=[tf.TensorSpec([4, 4], dtype, "x")])
        def call(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
            if loop:
                return {"y": tf.while_loop(lambda y: tf.reduce_sum(y) < 1, lambda y: [y + 1], [x])[0]}
            product, same = self.inner(x)
            return {"y": tf.add(product, same, "total")}

    module = Saved()
    tf.saved_model.save(module, str(folder), signatures=module.call)
    return np.asarray(module.call(tf.constant(X.astype(dtype)))["y"])


def test_models_of_version_2_are_converted_inside_their_functions(tmp_path: Path) -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.saved_model_conversion import create_inference_graph

    expected = saved_by_version_2(tmp_path / "source")
    half = tf.float16.as_datatype_enum
    options = {"precision_mode": "FP16", "excluded_nodes": ["total"], "num_ipus": 2}
    graph_def = create_inference_graph(
        1, str(tmp_path / "source"), ["serve"], output_saved_model_dir=str(tmp_path / "halves"),
        manual_sharding=[["nothing"], ["product"]], **options,
    )  # fmt: skip
    product = next(node for node in graph_def.node if node.op == "MatMul")
    assert product.attr["T"].type == half
    assert product.attr["_XlaSharding"].s[-1] == 1
    assert list(next(n for n in graph_def.node if n.op == "IdentityN").attr["T"].list.type) == [half, half]
    assert next(node for node in graph_def.node if node.name.endswith("total")).device == ""
    casts = [node.input[0] for node in graph_def.node if node.op == "Cast"]
    assert (len(casts), casts[0]) == (2, "serving_default_x")  # None behind the weights.
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.graph_util.import_graph_def(graph_def, name="")
        fetched = nodes_of(tmp_path / "halves")
        assert fetched.keys() == {node.name for node in graph_def.node}
        result = session.run("StatefulPartitionedCall:0", {"serving_default_x:0": X})
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected, rtol=4e-3, atol=4e-3)


def test_integers_of_version_2_become_narrow_in_the_signature_too(tmp_path: Path) -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.saved_model_conversion import create_inference_graph

    expected = saved_by_version_2(tmp_path / "source", np.int64)
    create_inference_graph(
        1, str(tmp_path / "source"), ["serve"], output_saved_model_dir=str(tmp_path / "narrow"),
        int64_to_int32_conversion=True,
    )  # fmt: skip
    nodes = nodes_of(tmp_path / "narrow").values()
    wide = tf.int64.as_datatype_enum
    assert not any(wide in (a.type, *a.list.type) for n in nodes for a in n.attr.values())
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], str(tmp_path / "narrow"))
        signature = loaded.signature_def["serving_default"]
        ends = signature.inputs["x"], signature.outputs["y"]
        assert [end.dtype for end in ends] == [tf.int32.as_datatype_enum] * 2
        result = session.run(ends[1].name, {ends[0].name: X.astype(np.int32)})
    np.testing.assert_array_equal(result, expected)


def test_types_in_loops_are_refused_by_name(tmp_path: Path) -> None:
    from podrun.tensorflow.sdk.saved_model_conversion import create_inference_graph

    saved_by_version_2(tmp_path / "source", loop=True)
    with pytest.raises(
        NotImplementedError, match=r"precision_mode does not reach .*While\) calls: convert without it"
    ):
        create_inference_graph(1, str(tmp_path / "source"), ["serve"], precision_mode="FP16")
    create_inference_graph(1, str(tmp_path / "source"), ["serve"])


def test_operations_with_wide_results_alone_are_cast(model: Callable[..., Any]) -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.conversion_params import IpuConversionParams
    from podrun.tensorflow.sdk.graph_converters import Int64Conversion

    made = model(lambda x: tf.add(tf.where(x > 0), tf.constant(7, tf.int64), "places"))
    expected = computed(made.graph_def, "places:0")
    params = IpuConversionParams(int64_to_int32_conversion=True)
    graph_def, _ = Int64Conversion(params).apply(made.graph_def, made.signature_def)
    narrow = computed(graph_def, "places:0")
    assert (narrow.dtype, expected.dtype) == (np.int32, np.int64)
    np.testing.assert_array_equal(narrow, expected)
