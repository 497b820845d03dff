"""Models from people: every wrong file is refused with a message, before memory is taken, and nothing else happens."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from podrun.core.errors import PodrunError, UsageError
from podrun.onnx_models.lowering import lower
from podrun.onnx_models.model_loader import load_model

W = np.arange(12, dtype=np.float32).reshape(3, 4)


def good_model() -> onnx.ModelProto:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["again"]),
            helper.make_node("Add", ["v", "bias"], ["w"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, [2, 4]),
        ],
        [
            helper.make_tensor_value_info("again", TensorProto.BOOL, []),
            helper.make_tensor_value_info("w", TensorProto.FLOAT, [2, 4]),
        ],
        [numpy_helper.from_array(np.ones(4, np.float32), "bias")],
    )
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["a"], name="product"),
        helper.make_node("Constant", [], ["shape"], value=numpy_helper.from_array(np.array([2, -1]))),
        helper.make_node("Reshape", ["a", "shape"], ["b"]),
        helper.make_node("Constant", [], ["n"], value_int=2),
        helper.make_node("Loop", ["n", "", "b"], ["y"], body=body),
    ]
    graph = helper.make_graph(
        nodes,
        "good",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])],
        [numpy_helper.from_array(W, "W")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def test_good_model_loads_from_bytes_and_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(good_model().SerializeToString())
    for source in (path, str(path), path.read_bytes()):
        assert lower(load_model(source)).outputs["y"].shape == (2, 4)


def test_external_data_beside_the_model_are_read(tmp_path: Path) -> None:
    onnx.save(
        good_model(), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0
    )
    loaded = load_model(tmp_path / "m.onnx")
    np.testing.assert_array_equal(numpy_helper.to_array(loaded.graph.initializer[0]), W)


def _external(tensor: TensorProto, **entries: str) -> None:
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)


@pytest.mark.parametrize(
    "location",
    ["../secret.bin", "/etc/passwd", "a/../../secret.bin", "link.bin", "", "gone.bin", "x\0y", "."],
)
def test_external_data_elsewhere_are_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret.bin").write_bytes(b"\0" * 48)
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    model = good_model()
    _external(model.graph.initializer[0], location=location)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UsageError, match="tensor 'W'"):
        load_model(folder / "m.onnx")


@pytest.mark.parametrize("entries", [{"offset": "40"}, {"offset": "-1"}, {"length": "4"}, {"offset": "x"}])
def test_external_data_of_another_size_are_refused(tmp_path: Path, entries: dict[str, str]) -> None:
    model = good_model()
    (tmp_path / "w.bin").write_bytes(b"\0" * 48)
    _external(model.graph.initializer[0], location="w.bin", **entries)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UsageError, match="tensor 'W'"):
        load_model(tmp_path / "m.onnx")


def test_external_data_of_a_model_from_bytes_are_refused() -> None:
    model = good_model()
    _external(model.graph.initializer[0], location="w.bin")
    with pytest.raises(UsageError, match="has no folder"):
        load_model(model.SerializeToString())


@pytest.mark.parametrize("dims", [[2**40, 2**13], [2**62, 2**62], [-3, -4], [1] * 100])
@pytest.mark.parametrize("where", ["initializer", "constant", "subgraph"])
def test_tensors_that_claim_what_they_have_not_are_refused(dims: list[int], where: str) -> None:
    model = good_model()
    tensor = {
        "initializer": model.graph.initializer[0],
        "constant": model.graph.node[1].attribute[0].t,
        "subgraph": model.graph.node[4].attribute[0].g.initializer[0],
    }[where]
    del tensor.dims[:]
    tensor.dims.extend(dims)
    with pytest.raises(UsageError, match="tensor"):
        load_model(model.SerializeToString())


def test_shapes_of_petabytes_are_refused_by_size() -> None:
    nodes = [helper.make_node("ConstantOfShape", ["s"], ["y"])]
    given = [numpy_helper.from_array(np.array([10**6, 10**6, 10**4]), "s")]
    graph = helper.make_graph(
        nodes, "g", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 3)], given
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    with pytest.raises(UsageError, match=r"'y' would have .* TiB"):
        lower(load_model(model.SerializeToString()))


def _break(change: str, model: onnx.ModelProto) -> Any:
    graph = model.graph
    match change:
        case "cycle":
            graph.node[0].input[0] = "b"
        case "twice":
            graph.node[2].output[0] = "a"
        case "type":
            graph.initializer[0].data_type = 77
        case "opset":
            del model.opset_import[:]
        case "graph":
            model.ClearField("graph")
        case "deep":
            inner = graph.node[4].attribute[0]
            for _ in range(20):
                outer = onnx.AttributeProto(name="body", type=onnx.AttributeProto.GRAPH)
                outer.g.name = "deep"
                outer.g.node.add(op_type="Loop").attribute.append(inner)
                inner = outer
            graph.node[4].attribute[0].CopyFrom(inner)
        case "function":
            model.functions.add(name="F", domain="d").node.add(op_type="F", domain="d")
    return model


@pytest.mark.parametrize("change", ["cycle", "twice", "type", "opset", "graph", "deep", "function"])
def test_wrong_graphs_are_refused(change: str) -> None:
    with pytest.raises(UsageError):
        load_model(_break(change, good_model()).SerializeToString())


def test_names_that_are_not_text_are_refused() -> None:
    raw = good_model().SerializeToString().replace(b"product", b"\x80roduct")
    with pytest.raises(UsageError, match="node 1 of graph 'good' has a name that is not UTF-8"):
        load_model(raw)


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("this is not a model")
    for source in (tmp_path / "none.onnx", tmp_path, tmp_path / "text.onnx", b"", "a\0b"):
        with pytest.raises(UsageError):
            load_model(source)


@functools.cache
def _bytes() -> bytes:
    return good_model().SerializeToString()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_corrupt_bytes_load_or_are_refused(data: st.DataObject) -> None:
    """Whatever is cut off or changed: the model loads and lowers, or a `PodrunError` says why not; nothing else."""
    raw = bytearray(_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(1, len(raw)))
    raw = raw if data.draw(st.booleans()) else raw[:cut]
    with contextlib.suppress(PodrunError):
        lower(load_model(bytes(raw)))
