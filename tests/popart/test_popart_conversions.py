"""Arguments that PopART's bindings convert: NumPy scalars, flags, former names."""

from __future__ import annotations

import numpy as np
import pytest

import podrun.popart as popart
from podrun.popart.values.tensor_info import boolean, integer, number


@pytest.mark.parametrize("value", [0.25, np.float32(0.25), np.float16(0.25), np.array(0.25)])
def test_numbers_of_every_kind_are_hyper_parameters(value):
    optimizer = popart.SGD({"defaultLearningRate": (value, np.bool_(False)), "defaultWeightDecay": (0, True)})
    assert optimizer.learningRates().getDefault() == popart.OptimizerValue(0.25, False)


@pytest.mark.parametrize("pair", [0.1, (0.1,), (0.1, False, 1), ("0.1", False), (0.1, "no"), (None, True)])
def test_what_is_no_pair_of_number_and_flag(pair):
    with pytest.raises(popart.popart_exception, match="takes a pair"):
        popart.SGD({"defaultLearningRate": pair})


def test_options_take_what_pybind11_converts():
    opts = popart.SessionOptions()
    opts.replicatedGraphCount = np.int64(4)
    opts.enablePipelining = None
    opts.enableOutlining = 1
    opts.outlineThreshold = np.float32(0.5)
    opts.timeLimitScheduler = 3
    opts.virtualGraphSplitRatios = np.array([0.25, 0.75])
    opts.dotChecks = ["Fwd0"]
    assert (opts.replicatedGraphCount, opts.enablePipelining, opts.enableOutlining) == (4, False, True)
    assert type(opts.replicatedGraphCount) is int
    assert (opts.outlineThreshold, opts.timeLimitScheduler) == (0.5, 3.0)
    assert opts.virtualGraphSplitRatios == [0.25, 0.75]
    assert opts.dotChecks == {"Fwd0"}


@pytest.mark.parametrize(
    ("convert", "value"), [(boolean, "yes"), (boolean, []), (integer, 1.0), (integer, "1"), (number, "1.0")]
)
def test_values_that_pybind11_does_not_convert_are_refused(convert, value):
    with pytest.raises(TypeError):
        convert(value)


def test_former_names_of_options_warn_and_act(capsys):
    opts = popart.SessionOptions()
    opts.defaultPrefetchBufferingDepth = 5
    opts.prefetchBufferingDepthMap = {"x": 3}
    said = capsys.readouterr().err
    assert (opts.defaultBufferingDepth, opts.bufferingDepthMap) == (5, {"x": 3})
    for name in ("defaultPrefetchBufferingDepth", "prefetchBufferingDepthMap"):
        assert f"{name} has been deprecated" in said


@pytest.mark.parametrize(
    ("name", "word"),
    [("enableGroupedMatmuls", "delete"), ("hostAllReduce", "popdist"), ("ignoreData", "synthetic")],
)
def test_options_that_the_sdk_has_no_more_say_what_to_do(name, word):
    with pytest.raises(AttributeError, match=word):
        setattr(popart.SessionOptions(), name, True)


def test_numpy_types_and_numbers_are_taken_as_python_s():
    assert popart.TensorInfo(np.float16, [2]) == popart.TensorInfo("FLOAT16", [2])
    assert popart.TensorInfo(np.dtype("int32"), (np.int64(2), 3)) == popart.TensorInfo("INT32", [2, 3])
    flow = popart.DataFlow(np.int64(4), {"y": popart.AnchorReturnType("EveryN", np.int32(2))})
    assert (flow.batchesPerStep(), flow.art("y").rp()) == (4, 2)
    with pytest.raises(TypeError, match="batchesPerStep"):
        popart.DataFlow(1.5, [])


# --- Shapes while building ----------------------------------------------------------------------------


def test_custom_op_knows_ai_graphcore_s_operators():
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT16", [2, 4])
    scale = builder.addInitializedInputTensor(np.ones(4, np.float16))

    def added(name, inputs, **attributes):
        return builder.customOp(name, 1, "ai.graphcore", inputs, attributes, 3 if len(inputs) > 1 else 1)

    (detached,) = added("Detach", [x], pass_through_creation=1)
    (scaled,) = added("Scale", [x], scale=2.0)
    normal, mean, _ = added("GroupNormalization", [x, scale, scale], num_groups=2, epsilon=1e-3)
    assert [builder.getTensorShape(t) for t in (detached, scaled, normal, mean)] == [
        [2, 4],
        [2, 4],
        [2, 4],
        [4],
    ]
    assert builder.getTensorDtypeString(normal) == "float16"


def test_operators_without_a_rule_are_traced():
    builder = popart.Builder()
    image = builder.addInputTensor("FLOAT", [1, 8, 2, 3])
    x = builder.addInputTensor("FLOAT", [5, 2, 3])
    weights = builder.addInitializedInputTensor(np.zeros([4, 3 + 6, 6], np.float32))
    deep = builder.aiGraphcore.depthtospace([image], 2, "DCR")
    sequence, cell = builder.aiGraphcore.lstm([x, weights])
    assert builder.getTensorShape(deep) == [1, 2, 4, 6]
    assert (builder.getTensorShape(sequence), builder.getTensorShape(cell)) == ([5, 2, 6], [2, 6])


def test_what_is_not_known_of_one_operator_does_not_stop_the_next():
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT16", [2, 4, 8, 8])
    (unknown,) = builder.customOp("Nothing", 1, "com.acme", [x], {})
    y = builder.aiOnnx.matmul([builder.aiOnnx.add([x, unknown]), x])
    builder.reshape_const(builder.aiOnnx, [builder.aiOnnx.transpose([y], perm=[0, 2, 1, 3])], [4, -1])
    builder.aiGraphcore.groupnormalization([unknown, x, x], 1)
    builder.aiOnnx.reducesum([y], axes=range(2))
    with pytest.raises(popart.popart_exception, match="not known while building"):
        builder.getTensorShape(unknown)
