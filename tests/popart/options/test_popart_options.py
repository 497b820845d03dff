"""SessionOptions, patterns, placement and small value classes: names, types, and combinations that are
refused.
"""

from __future__ import annotations

import numpy as np
import pytest

import podrun.popart as popart
from tests.popart.popart_sessions import INPUTS, MICRO_BATCH, linear, options

OFFLINE = {n: popart.DeviceManager({}).createOfflineIPUDevice({"numIPUs": n}) for n in (1, 2, 4, 8)}


def session(ipus=1, opts=None, training=True, anchors=None, batches=1, model=None, **values):
    case = linear()
    opts = opts or options(**values)
    flow = popart.DataFlow(batches, anchors or [case.y])
    data = model or case.model
    if not training:
        return popart.InferenceSession(data, flow, OFFLINE[ipus], userOptions=opts)
    return popart.TrainingSession(
        data, flow, case.loss, popart.ConstSGD(0.1), OFFLINE[ipus], userOptions=opts
    )


def test_unknown_options_and_wrong_types():
    opts = popart.SessionOptions()
    with pytest.raises(AttributeError, match="Did you mean 'accumulationFactor'"):
        opts.acumulationFactor = 2
    for name, value in [
        ("accumulationFactor", "2"),
        ("accumulationFactor", 2.0),
        ("enablePipelining", "yes"),
        ("outlineThreshold", "1.5"),
        ("virtualGraphMode", "Manual"),
        ("cachePath", 3),
        ("engineOptions", []),
    ]:
        with pytest.raises(TypeError, match=f"incompatible function arguments.*{name}"):
            setattr(opts, name, value)
    opts.executionPhaseSettings.phases = 2
    with pytest.raises(AttributeError):
        opts.executionPhaseSettings.phase = 2


def test_options_are_taken_when_the_session_is_made():
    opts = popart.SessionOptions()
    made = session(opts=opts)
    opts.enableReplicatedGraphs, opts.replicatedGraphCount = True, 2
    assert made.replicationFactor == 1


@pytest.mark.parametrize(
    ("ipus", "values", "word"),
    [
        (1, {"accumulationFactor": 2}, "enableGradientAccumulation"),
        (1, {"accumulationFactor": 0}, "at least 1"),
        (1, {"replicatedGraphCount": 2}, "enableReplicatedGraphs"),
        (4, {"enableReplicatedGraphs": True, "replicatedGraphCount": 3}, "not divisible"),
        (
            4,
            {"enableReplicatedGraphs": True, "replicatedGraphCount": 2},
            r"graph count \(2\) needs to be equal",
        ),
        (
            1,
            {"enableExplicitMainLoops": True, "useHostCopyOps": True, "aliasZeroCopy": True},
            "implicit recomp",
        ),
        (1, {"enablePipelining": True}, "more than 1 IPU"),
        (2, {"enablePipelining": True}, "virtualGraphMode"),
        (1, {"enableExplicitMainLoops": True}, "useHostCopyOps"),
        (1, {"numIOTiles": 31}, "numIOTiles"),
        (1, {"numIOTiles": 33}, "numIOTiles"),
        (1, {"numIOTiles": 2000}, "numIOTiles"),
        (1, {"defaultBufferingDepth": 0}, "buffering depth"),
        (1, {"partialsTypeMatMuls": "double"}, "partialsTypeMatMuls"),
        (1, {"customCodelets": ["a.cpp"]}, "register_op"),
        (
            2,
            {"virtualGraphMode": popart.VirtualGraphMode.Auto, "virtualGraphSplitRatios": [0.5, 0.6]},
            "sum 1",
        ),
        (2, {"virtualGraphMode": popart.VirtualGraphMode.Manual}, "no operator has a virtual graph"),
        (1, {"enableDistributedReplicatedGraphs": True, "globalReplicationFactor": 0}, "at least 1"),
        (1, {"enableDistributedReplicatedGraphs": True, "globalReplicaOffset": 5}, "globalReplicaOffset"),
        (
            1,
            {
                "enableDistributedReplicatedGraphs": True,
                "enableReplicatedGraphs": True,
                "globalReplicationFactor": 2,
            },
            "single replica",
        ),
    ],
)
def test_combinations_that_are_refused(ipus, values, word):
    with pytest.raises(popart.popart_exception, match=word):
        session(ipus, **values)


def test_inference_has_no_accumulation():
    opts = options(enableGradientAccumulation=True, accumulationFactor=2)
    with pytest.raises(popart.popart_exception, match=r"^Gradient Accumulation only available when training"):
        session(opts=opts, training=False)


def test_execution_phases_and_automatic_loss_scaling():
    opts = popart.SessionOptions()
    opts.executionPhaseSettings.phases = 2
    with pytest.raises(popart.popart_exception, match="ExecutionPhases"):
        session(opts=opts)
    opts = popart.SessionOptions()
    opts.automaticLossScalingSettings.enabled = True
    opts.automaticLossScalingSettings.binEdgeLocation = 1.5
    with pytest.raises(popart.popart_exception, match="binEdgeLocation"):
        session(opts=opts)


def test_distributed_graphs_need_ipus():
    opts = options(enableDistributedReplicatedGraphs=True)
    device = popart.DeviceManager({}).createIpuModelDevice({})
    case = linear()
    with pytest.raises(popart.popart_exception, match="IpuModel"):
        popart.InferenceSession(case.model, popart.DataFlow(1, [case.y]), device, userOptions=opts)


def test_explicit_ir_sets_three_options():
    opts = popart.SessionOptions()
    opts.enableExplicitIR(True)
    assert (opts.useHostCopyOps, opts.enableExplicitMainLoops, opts.explicitRecomputation) == (
        True,
        True,
        True,
    )
    assert opts.getGlobalReplicationFactor() == 1


# --- Placement --------------------------------------------------------------------------------------


def chain(places, stages=()):
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [MICRO_BATCH, INPUTS])
    y = x
    for index, place in enumerate(places):
        w = builder.addInitializedInputTensor(np.eye(INPUTS, dtype=np.float32))
        y = builder.aiOnnx.matmul([y, w])
        if place is not None:
            builder.virtualGraph(y, place)
        if index < len(stages) and stages[index] is not None:
            builder.pipelineStage(y, stages[index])
    return builder.getModelProto(), y


def place(ipus, places, stages=(), batches=1, **values):
    model, y = chain(places, stages)
    values.setdefault("virtualGraphMode", popart.VirtualGraphMode.Manual)
    return popart.InferenceSession(
        model, popart.DataFlow(batches, [y]), OFFLINE[ipus], userOptions=options(**values)
    )


@pytest.mark.parametrize(
    ("ipus", "places", "stages", "values", "word"),
    [
        (2, [0, None], [], {}, "Either all Ops must have their virtual graph ids set, or none"),
        (2, [0, 2], [], {}, "invalid virtual graph 2"),
        (2, [0, 1], [0, None], {"enablePipelining": True}, "Only some ops have had their pipeline stage set"),
        (2, [0, 1], [0, 2], {"enablePipelining": True}, "without gaps"),
        (2, [0, 1], [1, 0], {"enablePipelining": True}, "earlier pipeline stage than it is produced"),
        (2, [0, 1], [0, 0], {"enablePipelining": True}, "^Ops .* have the same pipeline stage 0, but"),
        (
            2,
            [1, 0],
            [],
            {"enablePipelining": True},
            "^Tensor MatMul:0 is consumed in an earlier pipeline stage",
        ),
        (2, [0, 1], [0, 1], {"enablePipelining": True}, "depth"),
        (4, [0, 1], [], {"virtualGraphMode": popart.VirtualGraphMode.Auto}, "enough splits"),
    ],
)
def test_placements_that_are_refused(ipus, places, stages, values, word):
    with pytest.raises(popart.popart_exception, match=word):
        place(ipus, places, stages, **values)


def test_placements_that_are_taken():
    assert place(2, [0, 1]).replicationFactor == 1
    assert place(2, [0, 1], [0, 1], batches=2, enablePipelining=True)
    assert place(2, [None, None], virtualGraphMode=popart.VirtualGraphMode.Auto)
    assert place(2, [7, None], virtualGraphMode=popart.VirtualGraphMode.Off)


def test_recomputation_by_hand_and_automatically():
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [2])
    y = builder.aiOnnx.relu([x])
    builder.recomputeOutputInBackwardPass(y)
    opts = options(autoRecomputation=popart.RecomputationType.Standard)
    with pytest.raises(
        popart.popart_exception, match=r"^A mixture of auto and manual recomputaion is not supported$"
    ):
        popart.InferenceSession(
            builder.getModelProto(), popart.DataFlow(1, [y]), OFFLINE[1], userOptions=opts
        )


# --- Patterns ---------------------------------------------------------------------------------------


def test_patterns_are_switched_by_name_and_by_attribute():
    patterns = popart.Patterns(popart.PatternsLevel.NoPatterns).enableRuntimeAsserts(False)
    assert not patterns.InPlace
    patterns.enablePattern("InPlace", True)
    assert patterns.isPatternEnabled("InPlace")
    assert repr(patterns) == "InPlace"
    patterns.InPlace = False
    assert not patterns.InPlace
    assert not popart.Patterns().TiedGather
    assert popart.Patterns(popart.PatternsLevel.All).TiedGather
    assert popart.Patterns(["PreUniRepl"]).PreUniRepl
    with pytest.raises(popart.popart_exception, match=r"Invalid pattern name.*PreUniRepl"):
        popart.Patterns(["PreUniRep"])
    with pytest.raises(popart.popart_exception, match="mandatory"):
        popart.Patterns().enablePattern("MatMulOp", False)
    with pytest.raises(AttributeError):
        popart.Patterns().Nothing = True


# --- Values -----------------------------------------------------------------------------------------


def test_tensor_info_tells_type_shape_and_size_and_refuses_unknown_types():
    info = popart.TensorInfo("FLOAT16", [2, 3])
    assert (info.rank(), info.nelms(), info.nbytes(), info.shape(), info.dim(1)) == (2, 6, 12, [2, 3], 3)
    assert (info.data_type(), info.data_type_lcase(), info.strides()) == ("FLOAT16", "float16", [6, 2])
    assert popart.TensorInfo(np.zeros((4, 1), np.int8)) == popart.TensorInfo(popart.DataType.INT8, [4, 1])
    with pytest.raises(popart.popart_exception, match="FLOT"):
        popart.TensorInfo("FLOT", [1])
    with pytest.raises(TypeError, match="incompatible"):
        popart.TensorInfo("FLOAT", 3)
    with pytest.raises(popart.popart_exception, match="InputShapeInfo"):
        popart.TensorInfo("FLOAT", ["n"]).nelms()


def test_enumerations_have_popart_s_numbers():
    assert int(popart.DataType.FLOAT) == 11
    assert int(popart.ReplicatedStreamMode.Broadcast) == 0
    assert popart.BatchSerializationTransformContext.Forward is popart.BatchSerializationTransformContext.Fwd
    assert popart.AdamMode.AdaMax.value == 2
    with pytest.raises(TypeError):
        _ = popart.DataType.FLOAT + 1


def test_comm_groups_and_variable_settings():
    groups = popart.VariableSettings(popart.CommGroup(popart.CommGroupType.Orthogonal, 2))
    assert groups.groups(8) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    groups = popart.VariableSettings(
        popart.CommGroup(popart.CommGroupType.Consecutive, 4), popart.VariableRetrievalMode.AllReplicas
    )
    assert groups.groups(8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups.shapeOnHost([3], 8) == [8, 3]
    assert groups.shapeOnReplica([2, 3], 8, "w") == [3]
    assert popart.VariableSettings(2, 2).groups(8) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    with pytest.raises(popart.popart_exception, match="divide"):
        groups.groups(6)


def test_tensor_locations_keep_their_values_and_refuse_other_types():
    location = popart.TensorLocation(popart.TensorStorage.OffChip, popart.ReplicatedTensorSharding.On)
    settings = popart.TensorLocationSettings(location, 4)
    opts = options(weightTensorLocationSettings=settings)
    assert opts.weightTensorLocationSettings.location.storage is popart.TensorStorage.OffChip
    assert popart.TensorLocationSettings(popart.TensorStorage.OffChip).minElementsForOffChip == 2
    with pytest.raises(TypeError, match="incompatible"):
        popart.TensorLocation("OffChip")


def test_reserved_prefixes_are_popart_s():
    assert popart.reservedGradientPrefix() == "Gradient___"
    assert popart.reservedAcclFinalOutPrefix() == "AcclOutOfAcclUpdate___"
    assert popart.reservedDefaultScaledLearningRate0Prefix() == "scaledLearningRate0___default___"
    assert popart.reservedSpecificAdamBeta1Prefix() == "adamBeta1___specific___"


def test_every_public_name_is_there():
    for name in popart.__all__:
        assert getattr(popart, name) is not None
    assert popart.versionString().startswith("3.4")
    with pytest.raises(AttributeError):
        _ = popart.nothing


@pytest.mark.parametrize(
    "name", ["engineOptions", "matmulOptions", "gclOptions", "tensorLocationSettingsOverride"]
)
def test_dictionaries_have_the_names_of_the_binding_too(name: str) -> None:
    options = popart.SessionOptions()
    setattr(options, f"_{name}", {})
    assert getattr(options, f"_{name}") is getattr(options, name)
    with pytest.raises(TypeError, match=name):
        setattr(options, f"_{name}", 3)


def test_explicit_pipelining_says_what_has_taken_its_place() -> None:
    with pytest.raises(AttributeError, match="enableExplicitIR"):
        popart.SessionOptions().explicitPipelining = True


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("DotCheck", "dotChecks"),
        ("PreAliasPatternType", r"popart\.Patterns\("),
        ("DataFeed", r"popart\.DataFlow\("),
        ("SessionOptionsCore", r"popart\.SessionOptions\(\)$"),
        ("ir", "popxl"),
        ("nothing", r"nothing'$"),
    ],
)
def test_names_of_earlier_popart_say_what_has_taken_their_place(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=instead):
        getattr(popart, name)


def test_a_retired_option_says_so_when_it_is_read_and_when_it_is_set() -> None:
    opts = popart.SessionOptions()
    for name, words in [
        ("hostAllReduce", "configureSessionOptions"),
        ("enablePipeling", "'enablePipelining'"),
    ]:
        for use in (lambda name=name: getattr(opts, name), lambda name=name: setattr(opts, name, True)):
            with pytest.raises(AttributeError, match=words) as caught:
                use()
            assert not str(caught.value).endswith(".")  # Python may put a guess of its own behind it.
    assert not hasattr(opts, "pingPongPhases")


def test_a_learning_rate_alone_is_told_how_to_be_given() -> None:
    with pytest.raises(TypeError, match=r'popart\.SGD\(\{"defaultLearningRate": \(0\.01, False\)\}\)'):
        popart.SGD(0.01)  # type: ignore[arg-type]


def test_former_methods_say_what_has_taken_their_place() -> None:
    made = session()
    for name, instead in [
        ("infer", r"session\.run\(stepio\)"),
        ("getGraphReport", r"getReport\(\)"),
        ("getExecutionReport", r"getReport\(\)"),
        ("getTensorTileMap", r"compilation\.tiles"),
        ("nothing", r"'TrainingSession' object has no attribute 'nothing'$"),
    ]:
        assert not hasattr(made, name)
        with pytest.raises(AttributeError, match=instead):
            getattr(made, name)
    with pytest.raises(TypeError, match=r"'passes'\. It is patterns now"):
        popart.InferenceSession(fnModel=b"", passes=None, deviceInfo=OFFLINE[1])
    with pytest.raises(AttributeError, match="executionPhase"):
        _ = popart.Builder().pingPongPhase


def test_what_podrun_does_not_do_is_said(caplog: pytest.LogCaptureFixture) -> None:
    session(serializedPoprithmsShiftGraphsDir="graphs")
    said = [record.getMessage() for record in caplog.records]
    assert any("serializedPoprithmsShiftGraphsDir has no effect" in text for text in said)
    opts = popart.SessionOptions()
    opts.experimentalSettings.customTransformApplierSettings = {"Fwd0": ["MyTransform"]}
    with pytest.raises(popart.popart_exception, match="customTransformApplierSettings"):
        session(opts=opts)
