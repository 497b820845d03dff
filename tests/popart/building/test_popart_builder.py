"""Builder: names, opsets, attributes, placement, inference while building, reading and writing models."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import podrun.popart as popart


@pytest.fixture
def builder():
    return popart.Builder()


# --- Names --------------------------------------------------------------------------------------


def test_tensors_have_names_of_their_operators_or_given_ones(builder):
    x, y = builder.addInputTensor("FLOAT", [2]), builder.addInputTensor(popart.TensorInfo("FLOAT", [2]))
    assert (x, y, builder.addInputTensor("FLOAT", [2], "data")) == ("input", "input/1", "data")
    one = np.ones(2, np.float32)
    assert [builder.addInitializedInputTensor(one) for _ in range(2)] == ["init_input", "init_input/1"]
    assert builder.addInitializedInputTensor(one, "w") == "w"
    assert builder.addInitializedInputTensor(one, debugContext="w") == "w/1"
    adds = [builder.aiOnnx.add([x, y]), builder.aiOnnx.add([x, y], "named"), builder.aiOnnx.add([x, y])]
    assert adds == ["Add:0", "Add:0/1", "Add:0/2"]
    with builder.nameScope("a"):
        assert builder.getNameScope("t") == "a/t"
        with builder.nameScope("b"):
            assert builder.aiOnnx.relu([x]) == "a/b/Relu:0"
            assert builder.addInitializedInputTensor(one, "w") == "a/b/w"
    assert builder.aiOnnx.split([x], 2) == ["Split:0", "Split:1"]
    model = onnx.load_from_string(builder.getModelProto())
    assert [node.name for node in model.graph.node if node.name] == ["named"]


def test_names_are_unique_over_parent_and_child(builder):
    x = builder.addInputTensor("FLOAT", [2])
    child = builder.createSubgraphBuilder()
    a = child.addInputTensor("FLOAT", [2])
    assert a == "input/1"
    assert child.aiOnnx.add([a, a]) == "Add:0"
    assert builder.aiOnnx.add([x, x]) == "Add:0/1"
    assert popart.Builder().addInputTensor("FLOAT", [2]) == "input"


def test_the_former_name_of_debug_contexts(builder):
    x = builder.addInputTensor("FLOAT", [2])
    builder.aiOnnx.relu([x], debugPrefix="act")
    builder.aiGraphcore.l1loss([x], 0.5, debugPrefix="far")
    value = np.zeros(2, np.float32)
    assert builder.addInputTensor("FLOAT", [2], debugPrefix="images") == "images"
    assert builder.addInitializedInputTensor(value, debugPrefix="w") == "w"
    assert [node.name for node in onnx.load_from_string(builder.getModelProto()).graph.node] == ["act", "far"]


def test_unknown_tensors_name_candidates(builder):
    builder.addInputTensor("FLOAT", [2], "images")
    with pytest.raises(popart.popart_exception, match=r"'image'.*Candidates: 'images'"):
        builder.aiOnnx.relu(["image"])
    with pytest.raises(popart.popart_exception, match="'nothing' is not an input or output tensor"):
        builder.addOutputTensor("nothing")


# --- Opsets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(6, 12))
def test_one_opset_for_each_builder(version):
    builder = popart.Builder()
    opset = getattr(builder, f"aiOnnxOpset{version}")
    x = builder.addInputTensor("FLOAT", [2])
    opset.abs([x])
    assert builder.aiOnnx.version == version
    other = 6 if version != 6 else 7
    with pytest.raises(
        RuntimeError,
        match=f"^Invalid opset 'aiOnnxOpset{other}' selected.*ai.onnx already defined as {version}",
    ):
        getattr(builder, f"aiOnnxOpset{other}")
    model = onnx.load_from_string(builder.getModelProto())
    assert model.opset_import[0].version == version
    assert model.ir_version == (3 if version <= 8 else 4)
    onnx.checker.check_model(model)


def test_opsets_are_chosen_up_front_or_default_to_ten():
    assert popart.Builder(opsets={"ai.onnx": 9, "ai.graphcore": 1}).aiOnnx.version == 9
    assert popart.Builder().aiOnnx.version == 10
    with pytest.raises(AttributeError, match="no operator 'expand'"):
        _ = popart.Builder().aiOnnxOpset6.expand
    with pytest.raises(AttributeError, match="Did you mean 'relu'"):
        _ = popart.Builder().aiOnnx.rellu


def test_every_operator_of_every_opset_has_a_signature():
    from podrun.popart.building.opsets import AiGraphcore, AiOnnx
    from podrun.popart.building.schemas import onnx_methods, onnx_parameters
    from podrun.popart.operators.graphcore_ops import OPS

    for version in range(6, 24):
        for method, op_type in onnx_methods(version).items():
            assert callable(getattr(AiOnnx(popart.Builder(), version), method))
            names = [parameter.name for parameter in onnx_parameters(op_type, version)]
            assert len(names) == len(set(names))
    for method in OPS:
        assert callable(getattr(AiGraphcore(popart.Builder()), method))


@pytest.mark.parametrize("known", [True, False], ids=["known", "of a later ONNX"])
def test_operators_are_the_same_one_by_one_and_all_together(known, monkeypatch):
    from onnx import defs

    from podrun.popart.building import schemas

    find = schemas.onnx_operator.__wrapped__
    if not known:
        monkeypatch.setattr(schemas, "_BY_METHOD", {})
    versions = range(6, defs.onnx_opset_version() + 1)
    every = {method for version in versions for method in schemas.onnx_methods(version)} | {"no_such"}
    for version in versions:
        methods = schemas.onnx_methods(version)
        assert {name: find(name, version) for name in every} == {name: methods.get(name) for name in every}


def test_every_operator_of_the_installed_onnx_is_looked_up_by_itself():
    from onnx import defs

    from podrun.popart.building.schemas import _BY_METHOD

    offered = {
        schema.name for schema in defs.get_all_schemas() if schema.domain == "" and not schema.deprecated
    }
    assert len(offered) > 150
    assert sorted(offered - set(_BY_METHOD.values())) == [], "add these to _KNOWN in podrun/popart/building"


def test_a_network_is_built_without_a_list_of_all_operators(monkeypatch):
    from podrun.popart.building import opsets, schemas

    def listed(version):
        raise AssertionError("a list of all schemas takes long")

    schemas.onnx_operator.cache_clear()
    monkeypatch.setattr(schemas, "onnx_methods", listed)
    monkeypatch.setattr(opsets, "onnx_methods", listed)
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2, 3]))
    builder.aiOnnx.logical_not([builder.aiOnnx.isnan([builder.aiOnnx.relu([x])])])


@pytest.mark.parametrize(
    ("call", "error", "word"),
    [
        (lambda o, x: o.add([x]), popart.popart_exception, "Add has invalid number of inputs: 1 given, 2"),
        (lambda o, x: o.add(x), TypeError, r"add\(\): incompatible function arguments"),
        (lambda o, x: o.add([x, 1]), TypeError, r"add\(\): incompatible function arguments"),
        (lambda o, x: o.softmax([x], axis=1.5), TypeError, r"softmax\(\): incompatible"),
        (lambda o, x: o.softmax([x], axes=1), TypeError, r"softmax\(\): incompatible"),
        (lambda o, x: o.cast([x]), TypeError, r"cast\(\): incompatible"),
        (lambda o, x: o.constant([1, 2]), TypeError, r"constant\(\): incompatible"),
        (lambda o, x: o.split([x]), TypeError, r"split\(\): incompatible"),
        (lambda o, x: o.maxpool([x], 3, [2]), popart.popart_exception, "invalid number of outputs"),
    ],
)
def test_wrong_calls_of_operators_are_refused_where_they_stand(builder, call, error, word):
    x = builder.addInputTensor("FLOAT", [2, 3])
    with pytest.raises(error, match=word):
        call(builder.aiOnnx, x)


def test_attributes_are_written_unless_they_are_the_default(builder):
    x = builder.addInputTensor("FLOAT", [1, 2, 4, 4])
    w = builder.addInitializedInputTensor(np.ones((2, 2, 3, 3), np.float32))
    builder.aiOnnx.conv([x, w], [1, 1], 1, [3, 3], pads=[1, 1, 1, 1])
    builder.aiOnnx.cast([x], "FLOAT16")
    builder.aiOnnx.leakyrelu([x], np.float32(0.25))
    nodes = onnx.load_from_string(builder.getModelProto()).graph.node
    found = [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in nodes]
    assert found == [
        {"dilations": [1, 1], "kernel_shape": [3, 3], "pads": [1, 1, 1, 1]},
        {"to": TensorProto.FLOAT16},
        {"alpha": 0.25},
    ]


# --- Inference while building -------------------------------------------------------------------


def test_shapes_and_types_are_known_while_building(builder):
    x = builder.addInputTensor("FLOAT", [2, 6])
    labels = builder.addInputTensor("INT32", [2])
    for tensor, shape, dtype in [
        (builder.aiOnnx.transpose([x]), [6, 2], "float32"),
        (builder.reshape_const(builder.aiOnnx, [x], [3, -1]), [3, 4], "float32"),
        (builder.aiOnnx.argmax([x], 1), [2, 1], "int64"),
        (builder.aiOnnx.cast([x], "FLOAT16"), [2, 6], "float16"),
        (builder.aiGraphcore.nllloss([x, labels]), [], "float32"),
        (builder.aiGraphcore.l1loss([x], 0.1, popart.ReductionType.NoReduction), [2, 6], "float32"),
        (builder.aiGraphcore.subsample([x], [2, 3]), [1, 2], "float32"),
        (builder.aiGraphcore.reshape([x], [0, 2, -1]), [2, 2, 3], "float32"),
        (builder.aiGraphcore.init([3], popart.DataType.INT32, popart.InitType.Zero), [3], "int32"),
        (builder.aiGraphcore.gelu([x]), [2, 6], "float32"),
    ]:
        assert builder.getTensorShape(tensor) == shape
        assert builder.getTensorDtypeString(tensor) == dtype


def test_types_that_popart_takes_and_onnx_does_not(builder, device):
    """UINT32 indices, as PopART's language models have them."""
    table = builder.addInitializedInputTensor(np.arange(8, dtype=np.float32).reshape(4, 2))
    ids = builder.addInputTensor("UINT32", [3])
    rows = builder.aiOnnx.gather([table, ids])
    assert builder.getTensorShape(rows) == [3, 2]
    session = popart.InferenceSession(builder.getModelProto(), popart.DataFlow(1, [rows]), device)
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({ids: np.array([3, 0, 1], np.uint32)}, anchors))
    np.testing.assert_array_equal(anchors[rows], [[6, 7], [0, 1], [2, 3]])


def test_what_is_not_known_says_so(builder):
    x = builder.addInputTensor("FLOAT", ["batch", 3])
    assert builder.getTensorShape(builder.aiOnnx.relu([x])) == ["batch", 3]
    y = builder.aiOnnx.nonzero([x])
    assert builder.getTensorShape(y)[0] == 2
    assert builder.isInitializer(x) is False
    (z,) = builder.customOp("Mine", 1, "my.domain", [x], {"a": 1})
    with pytest.raises(popart.popart_exception, match="not known"):
        builder.getTensorShape(z)


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_initial_values_of_types_the_ipu_lacks(builder, dtype):
    with pytest.raises(popart.popart_exception, match="not taken"):
        builder.addInitializedInputTensor(np.zeros(2, dtype))
    with pytest.raises(TypeError, match="incompatible function arguments"):
        builder.addInitializedInputTensor([1.0, 2.0])


# --- Node attributes and placement --------------------------------------------------------------


def test_node_attributes_are_written_read_and_removed(builder):
    x = builder.addInputTensor("FLOAT", [2])
    y = builder.aiOnnx.relu([x])
    values = {"i": 3, "f": 1.5, "s": "text", "ints": [1, 2], "floats": [0.5, 1.5], "strings": ["a", "b"]}
    for name, value in values.items():
        builder.addNodeAttribute(name, value, {y})
    kinds = ["Int64", "Float", "String", "Int64Vector", "FloatVector", "StringVector"]
    for kind, (name, value) in zip(kinds, values.items(), strict=True):
        assert getattr(builder, f"get{kind}NodeAttribute")(name, {y}) == value
    assert builder.getAllNodeAttributeNames({y}) == list(values)
    with pytest.raises(popart.popart_exception, match="already"):
        builder.addNodeAttribute("i", 4, {y})
    with pytest.raises(popart.popart_exception, match="not an integer, it is a float"):
        builder.getInt64NodeAttribute("f", {y})
    builder.removeNodeAttribute("i", {y})
    assert not builder.nodeHasAttribute("i", {y})
    with pytest.raises(popart.popart_exception, match=r"^Cannot remove attribute i as it does not exist.$"):
        builder.removeNodeAttribute("i", {y})
    with pytest.raises(popart.popart_exception, match=r"^Could not find a node with outputs nothing"):
        builder.nodeHasAttribute("i", {"nothing"})


def test_nodes_are_named_by_all_their_outputs(builder):
    a, b = builder.aiOnnx.split([builder.addInputTensor("FLOAT", [4])], 2)
    builder.virtualGraph([a, b], 3)
    assert builder.getVirtualGraph([a, b]) == 3
    with pytest.raises(popart.popart_exception, match="all of its outputs"):
        builder.virtualGraph([a], 1)


def test_scopes_place_what_is_added_inside_and_nest(builder):
    x = builder.addInputTensor("FLOAT", [2])
    with pytest.raises(popart.popart_exception, match="scope"):
        builder.getVirtualGraph()
    with builder.virtualGraph(1), builder.pipelineStage(2):
        a = builder.aiOnnx.relu([x])
        with builder.virtualGraph(0):
            b = builder.aiOnnx.relu([a])
            assert (builder.getVirtualGraph(), builder.getPipelineStage()) == (0, 2)
        c = builder.aiOnnx.relu([b])
    d = builder.aiOnnx.relu([c])
    assert [builder.getVirtualGraph([t]) for t in (a, b, c)] == [1, 0, 1]
    assert not builder.nodeHasAttribute("__ipu_number", [d])
    assert not builder.hasVirtualGraph()
    builder.virtualGraph(d, 5)
    assert builder.getVirtualGraph(d) == 5
    onnx.checker.check_model(onnx.load_from_string(builder.getModelProto()))


def test_hints_are_kept_and_checked(builder):
    x = builder.addInputTensor("FLOAT", [4, 6])
    y = builder.aiOnnx.matmul([x, builder.addInitializedInputTensor(np.ones((6, 2), np.float32))])
    z = builder.aiOnnx.relu([y])
    assert builder.getPartialsType(y) == "FLOAT"
    builder.setPartialsType(y, "HALF")
    assert builder.getPartialsType(y) == "HALF"
    builder.setAvailableMemoryProportion(y, 0.3)
    builder.setAvailableMemoryProportion(y, 0.4)
    assert builder.getFloatNodeAttribute("__available_memory", y) == pytest.approx(0.4)
    builder.setSerializeMatMul({y}, "reducing_dim", 3)
    builder.recomputeOutputInBackwardPass(z)
    assert builder.getRecomputeOutputInBackwardPass(z)
    (kept,) = builder.checkpointOutput([z])
    assert builder.getTensorShape(kept) == [4, 2]
    for call, word in [
        (lambda: builder.setAvailableMemoryProportion(y, 0.0), r"\(0,1\]"),
        (lambda: builder.setAvailableMemoryProportion(y, 1.1), r"\(0,1\]"),
        (lambda: builder.setPartialsType(z, "HALF"), "Relu"),
        (lambda: builder.setPartialsType(y, "DOUBLE"), "FLOAT or HALF"),
        (
            lambda: builder.setSerializeMatMul({y}, "some", 2),
            "^Unsupported mat mul serialization mode 'some'. Supported modes are 'input_channels', 'reducing_dim', ",
        ),
        (lambda: builder.setSerializeMatMul({z}, "none", 2), "MatMul"),
        (lambda: builder.setEnableConvDithering(z, 1), "convolutions"),
    ]:
        with pytest.raises(popart.popart_exception, match=word):
            call()


# --- Models in and out --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "field"),
    [
        ("float32", "float_data"),
        ("int64", "int64_data"),
        ("int32", "int32_data"),
        ("uint32", "uint64_data"),
    ],
)
def test_values_are_in_typed_fields_and_come_back(builder, dtype, field):
    value = np.array([[0, 1, 5], [2, 3, 1]]).astype(dtype)
    builder.addInitializedInputTensor(value, "w")
    tensor = onnx.load_from_string(builder.getModelProto()).graph.initializer[0]
    assert len(getattr(tensor, field)) == 6
    assert not tensor.HasField("raw_data")
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), value)


def test_a_loaded_model_can_be_continued(builder, tmp_path):
    x = builder.addInputTensor("FLOAT", [2, 3])
    w = builder.addInitializedInputTensor(np.ones((3, 4), np.float32), "w")
    builder.addOutputTensor(builder.aiOnnx.matmul([x, w]))
    path = str(tmp_path / "m.onnx")
    builder.saveModelProto(path)
    for source in (path, builder.getModelProto()):
        again = popart.Builder(source)
        assert again.getInputTensorIds() == ["input", "w"]
        assert again.getTrainableTensorIds() == ["w"]
        assert again.getTensorShape("MatMul:0") == [2, 4]
        y = again.aiOnnx.matmul([x, w])
        assert y == "MatMul:0/1"
        onnx.checker.check_model(onnx.load_from_string(again.getModelProto()), full_check=True)


def test_values_can_be_saved_outside_of_the_model(builder, tmp_path, device):
    x = builder.addInputTensor("FLOAT", [1, 2])
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    w = builder.addInitializedInputTensor(value)
    y = builder.aiOnnx.matmul([x, w])
    data = tmp_path / "weights.bin"
    with pytest.raises(popart.popart_exception, match="does not exist"):
        builder.saveInitializersExternally([w], str(tmp_path / "none" / "weights.bin"))
    with pytest.raises(popart.popart_exception, match="is not an initializer"):
        builder.saveInitializersExternally([x], str(data))
    builder.saveInitializersExternally([w], str(data))
    with pytest.raises(popart.popart_exception, match="already has an external data_location"):
        builder.saveInitializersExternally([w], str(data))
    assert data.stat().st_size == 24
    path = tmp_path / "m.onnx"
    path.write_bytes(builder.getModelProto())
    for model in (str(path), builder.getModelProto()):
        session = popart.InferenceSession(model, popart.DataFlow(1, [y]), device)
        session.prepareDevice()
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({x: np.ones((1, 2), np.float32)}, anchors))
        np.testing.assert_array_equal(anchors[y], [[3, 5, 7]])


def test_subgraphs_call_and_if(builder, device):
    x = builder.addInputTensor("FLOAT", [2])
    double = builder.createSubgraphBuilder()
    a = double.addInputTensor("FLOAT", [2])
    double.addOutputTensor(double.aiOnnx.add([a, a]))
    (y,) = builder.aiGraphcore.call([x], 1, double)
    condition = builder.addInputTensor("BOOL", [])
    then, other = builder.createSubgraphBuilder(), builder.createSubgraphBuilder()
    then.addOutputTensor(then.aiOnnx.neg([y]))
    other.addInputTensorFromParentGraph(x)
    other.addOutputTensor(other.aiOnnx.abs([x]))
    (z,) = builder.aiOnnx.logical_if([condition], 1, other, then)
    session = popart.InferenceSession(builder.getModelProto(), popart.DataFlow(1, [y, z]), device)
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    for choice, expected in ((True, [-2, 4]), (False, [1, 2])):
        io = popart.PyStepIO({x: np.array([1, -2], np.float32), condition: np.array(choice)}, anchors)
        session.run(io)
        np.testing.assert_array_equal(anchors[y], [2, -4])
        np.testing.assert_array_equal(anchors[z], expected)
    with pytest.raises(popart.popart_exception, match="no tensor"):
        then.addInputTensorFromParentGraph("nothing")


def test_the_index_of_the_largest_meets_labels_of_int32(builder):
    """ONNX types ArgMax as INT64 and Equal wants one type; on the IPU both are INT32."""
    scores = builder.addInputTensor("FLOAT", [6, 9])
    label = builder.addInputTensor("UINT32", [6])
    best = builder.aiOnnx.argmax([scores], axis=1, keepdims=0)
    right = builder.aiOnnx.equal([best, builder.aiOnnx.cast([label], "INT32")])
    count = builder.aiOnnx.reducesum([builder.aiOnnx.cast([right], "INT32")], axes=range(1), keepdims=0)
    assert builder.getTensorDtypeString(right) == "bool"
    assert builder.getTensorShape(count) == []


# --- What real programs ask for -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda o, x, w: o.conv([x, w], strides=[1]), "^Length of strides vector 1 != number of spatial"),
        (
            lambda o, x, w: o.conv([x, w], dilations=[1] * 3),
            "^Length of dilations vector 3 != number of spatial",
        ),
        (
            lambda o, x, w: o.conv([x, w], pads=[0, 0]),
            r"^Padding vector \(length 2\) does not have 2 values for each",
        ),
        (lambda o, x, w: o.maxpool([x], 1, [2, 2], pads=[0]), r"^Padding vector \(length 1\)"),
        (lambda o, x, w: o.pad([x], [0, 1]), r"^Padding vector \(length 2\)"),
        (
            lambda o, x, w: o.conv([x, w], kernel_shape=[2, 5]),
            r"^kernel_shape, \[2 5\], does not match inferred shape from weight input 'w', \[3 3\]$",
        ),
        (lambda o, x, w: o.conv([x, w], dilations=[9, 1]), r"invalid spatial output shape: \[-10 6\]$"),
        (lambda o, x, w: o.averagepool([x], [20, 2]), r"invalid spatial output shape: \[-11 7\]$"),
    ],
)
def test_windows_that_do_not_fit_are_refused_while_building(builder, call, match):
    x = builder.addInputTensor("FLOAT", [1, 2, 8, 8])
    w = builder.addInputTensor("FLOAT", [4, 2, 3, 3], "w")
    with pytest.raises(popart.popart_exception, match=match):
        call(builder.aiOnnx, x, w)


def test_shapes_are_known_where_the_session_will_judge_types(builder):
    x = builder.addInputTensor("FLOAT", [3, 1])
    h = builder.addInputTensor("FLOAT16", [1, 2])
    assert builder.getTensorShape(builder.aiOnnx.logical_and([x, x])) == [3, 1]
    assert builder.getTensorDtypeString(builder.aiOnnx.logical_not([x])) == "bool"
    assert builder.getTensorShape(builder.aiOnnx.equal([h, h])) == [1, 2]


def test_tensors_that_nodes_make_are_values_also_where_they_are_outputs(builder):
    x = builder.addInputTensor("FLOAT", [2])
    y = builder.aiOnnx.exp([x])
    builder.addOutputTensor(y)
    assert builder.getValueTensorIds() == [y]


def test_only_subgraphs_have_untyped_inputs(builder):
    with pytest.raises(popart.popart_exception, match=r"^Can not add untyped tensors to the top-level graph"):
        builder.addUntypedInputTensor()
    assert builder.createSubgraphBuilder().addUntypedInputTensor()


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("PipelineStage", "Pipeline stage"),
        ("VirtualGraph", "Virtual graph"),
        ("ExecutionPhase", "Execution phase"),
    ],
)
def test_places_are_asked_for_inside_their_scopes(builder, what, name):
    with pytest.raises(popart.popart_exception, match=f"^{name} not set in current scope"):
        getattr(builder, f"get{what}")()
    with getattr(builder, what[0].lower() + what[1:])(3):
        assert getattr(builder, f"get{what}")() == 3


def test_operators_say_their_opset_and_are_logged(builder, capsys):
    assert str(builder.aiOnnx) == "AiOnnx10"
    x = builder.addInputTensor("FLOAT", [2])
    popart.getLogger().setLevel("TRACE")
    try:
        builder.aiOnnx.floor([x])
        assert "Adding ai.onnx.Floor" in capsys.readouterr().err
        popart.getLogger().setLevel("OFF")
        builder.aiOnnx.floor([x])
        assert capsys.readouterr().err == ""
    finally:
        popart.getLogger().setLevel("WARN")


def test_a_call_that_no_signature_takes_shows_the_signature(builder):
    x = builder.addInputTensor("FLOAT", [2])
    for call in (lambda: builder.aiOnnx.elu([x], 1.0, "name", 3), lambda: builder.aiOnnx.elu([x], "name")):
        with pytest.raises(
            TypeError, match=r"^elu\(\): incompatible function arguments. The following argument types"
        ):
            call()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda b, y: b.setAvailableMemoryProportion(y, 1.5),
            r"^availableMemoryProportion must be in \(0,1\]",
        ),
        (
            lambda b, y: b.setEnableConvDithering(y, True),
            "only be called on convolutions but was given: Exp$",
        ),
        (lambda b, y: b.setPartialsType(y, "HALF"), "convolutions and matrix products but was given: Exp$"),
    ],
)
def test_hints_that_an_operator_does_not_take(builder, call, match):
    y = builder.aiOnnx.exp([builder.addInputTensor("FLOAT", [2])])
    with pytest.raises(popart.popart_exception, match=match):
        call(builder, y)
