"""Options: checks of every setter, freezing, files, the environment, PopART's own options."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402
from podrun.core.errors import ConfigError  # noqa: E402
from podrun.popart.values.enums import SyntheticDataMode  # noqa: E402
from podrun.poptorch.api.logs import log_options  # noqa: E402
from podrun.poptorch.compile.batches import batch_dimensions  # noqa: E402
from podrun.poptorch.executor import devices  # noqa: E402

O = poptorch.Options  # noqa: E741

WRONG: dict[str, tuple[Any, type[Exception]]] = {
    "iterations as text": (lambda: O().deviceIterations("2"), AssertionError),
    "text nested too deeply": (lambda: O().from_json("[" * 100_000), ConfigError),
    "text that is a list": (lambda: O().from_json("[]"), ConfigError),
    "a device as a file": (lambda: O().loadFromFile("/dev/zero"), ConfigError),
    "iterations 0": (lambda: O().deviceIterations(0), AssertionError),
    "replicas as a fraction": (lambda: O().replicationFactor(1.5), AssertionError),
    "accumulation 0": (lambda: O().Training.gradientAccumulation(0), AssertionError),
    "EveryN without a period": (lambda: O().outputMode(poptorch.OutputMode.EveryN), AssertionError),
    "mode as a number": (lambda: O().outputMode(2), AssertionError),
    "grouping of all": (lambda: O().inputReplicaGrouping(1, poptorch.CommGroupType.All), ValueError),
    "grouping too large": (
        lambda: O().inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive),
        ValueError,
    ),
    "grouping that does not divide": (
        lambda: O().replicationFactor(4).inputReplicaGrouping(3, poptorch.CommGroupType.Orthogonal),
        ValueError,
    ),
    "odd I/O tiles": (lambda: O().TensorLocations.numIOTiles(33), AssertionError),
    "too many I/O tiles": (lambda: O().TensorLocations.numIOTiles(194), AssertionError),
    "location": (lambda: O().TensorLocations.setWeightLocation(True), AssertionError),
    "reduction": (
        lambda: O().Training.accumulationAndReplicationReductionType(poptorch.ReductionType.NoReduction),
        ValueError,
    ),
    "partials": (lambda: O().Precision.setPartialsType(torch.int32), ValueError),
    "rounding": (lambda: O().Precision.enableStochasticRounding(1), AssertionError),
    "exceptions": (lambda: O().Precision.enableFloatingPointExceptions("yes"), AssertionError),
    "connection": (lambda: O().connectionType(1), AssertionError),
    "sync pattern": (lambda: O().syncPattern(0), AssertionError),
    "strategy": (lambda: O().setExecutionStrategy(poptorch.Stage("a")), AssertionError),
    "memory of no IPU": (lambda: O().setAvailableMemoryProportion({"GPU0": 0.5}), AssertionError),
    "memory above 1": (lambda: O().setAvailableMemoryProportion({"IPU0": 1.5}), AssertionError),
    "tracing": (lambda: O().Jit.traceModel(True), ValueError),
    "version": (lambda: O().useOfflineIpuTarget(3), AssertionError),
    "process": (lambda: O().Distributed.configureProcessId(2, 2), AssertionError),
    "strategy of means": (
        lambda: O().Training.setMeanAccumulationAndReplicationReductionStrategy(1),
        AssertionError,
    ),
    "seed": (lambda: O().randomSeed("1"), AssertionError),
    "unknown name": (lambda: O().set(absent=1), AssertionError),
    "reading an unknown name": (lambda: O().absent, AttributeError),
    "reading a seed that was not set": (lambda: O().random_seed, AttributeError),
    "patterns": (lambda: O()._Popart.setPatterns({}, level="2"), AssertionError),
    "engine options": (lambda: O()._Popart.setEngineOptions([]), AssertionError),
    "dictionary without a mode": (lambda: O().toDict(), AssertionError),
}


@pytest.mark.parametrize("what", list(WRONG))
def test_setters_of_options_refuse_wrong_values(what: str) -> None:
    make, kind = WRONG[what]
    with pytest.raises(kind):
        make()


def test_setters_return_options_and_values_are_attributes() -> None:
    options = O().deviceIterations(2).replicationFactor(4).randomSeed(9).modelName("net").logDir("x")
    options.output_mode = poptorch.OutputMode.Sum
    options.Training.gradientAccumulation(3)
    assert (options.device_iterations, options.replication_factor, options.random_seed) == (2, 4, 9)
    assert (options.model_name, options.log_dir, options.Training.gradient_accumulation) == ("net", "x", 3)
    assert torch.initial_seed() == 9
    made = options.toDict()
    assert (made["gradient_accumulation"], made["execution_mode"], made["random_seed"]) == (3, 0, 9)
    assert repr(options).startswith("Options(")


def test_frozen_options_stay_and_copies_can_change() -> None:
    options = O()
    poptorch.inferenceModel(torch.nn.Linear(1, 1), options)
    assert options.defaultOutputMode()
    changes = (
        lambda o: o.deviceIterations(2),
        lambda o: setattr(o, "replication_factor", 2),
        lambda o: o.Training.gradientAccumulation(2),
        lambda o: o.Precision.enableStochasticRounding(True),
        lambda o: o.Precision.setPartialsType(torch.half),
        lambda o: o.TensorLocations.numIOTiles(32),
        lambda o: o.Distributed.disable(),
        lambda o: o._Popart.set("x", 1),
        lambda o: o.setExecutionStrategy(poptorch.ShardedExecution()),
        lambda o: o.enableProfiling(),
    )
    for change in changes:
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            change(options)
        for copied in (options.clone(), copy.deepcopy(options)):
            change(copied)
    assert options.device_iterations == 1


def test_a_copy_has_values_of_its_own() -> None:
    """As the SDK's published test of copies; two options are equal if they are one object, as there."""
    options = O().deviceIterations(5)
    options.Distributed.configureProcessId(5, 15)
    options.anchorTensor("t1", "tensor1", poptorch.OutputMode.EveryN, 2)
    options._Popart.set("dummyKey", 5)
    location = poptorch.TensorLocationSettings().useOnChipStorage(True)
    options.TensorLocations.setWeightLocation(location)
    copied = copy.deepcopy(options)
    location.useOnChipStorage(False)
    assert options.TensorLocations.location_weight["onChip"]
    options.deviceIterations(4).anchorTensor("t2", "tensor2", poptorch.OutputMode.Final)
    options.Distributed.configureProcessId(2, 15)
    options._Popart.set("dummyKey", 6)
    options.TensorLocations.setWeightLocation(location)
    assert (copied.device_iterations, list(copied.anchored_tensors)) == (5, ["t1"])
    assert copied.Distributed.distributed_process_id == 5
    assert copied._Popart.options["dummyKey"] == 5
    assert copied.TensorLocations.location_weight["onChip"]
    assert not options.TensorLocations.location_weight["onChip"]
    assert options != copied
    assert options == options
    options.freeze()
    sent = pickle.loads(pickle.dumps(options))  # noqa: S301 - what it has just written
    assert repr(sent) == repr(options)
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        sent.deviceIterations(2)


def test_synthetic_data_are_a_flag_or_a_mode_of_poparts() -> None:
    for mode in (True, 1, 2, 3, SyntheticDataMode.RandomNormal, int(SyntheticDataMode.RandomNormal)):
        assert O().enableSyntheticData(mode).extra("enable_synthetic_data") is True
    for mode in (False, 0, SyntheticDataMode.Off):
        assert O().enableSyntheticData(mode).extra("enable_synthetic_data") is False
    with pytest.raises(AssertionError, match="SyntheticDataMode"):
        O().enableSyntheticData("normal")


def test_the_version_of_ipus_is_what_an_offline_target_takes() -> None:
    version = poptorch.ipuHardwareVersion()
    assert version == 2
    assert O().useOfflineIpuTarget(version).extra("ipu_version") == 2


def test_deprecated_options_warn() -> None:
    with pytest.warns(UserWarning, match="halfFloatCasting"):
        O().Precision.halfFloatCasting(poptorch.HalfFloatCastingBehavior.Default)
    with pytest.warns(UserWarning, match="runningStatisticsAlwaysFloat"):
        O().Precision.runningStatisticsAlwaysFloat(False)
    with pytest.raises(ValueError, match="True or False"):
        O().Precision.runningStatisticsAlwaysFloat(1)


def test_options_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "options"
    file.write_text(
        "# a comment\n\n"
        "deviceIterations(3)\n"
        "Training.gradientAccumulation(4)\n"
        "outputMode(poptorch.OutputMode.EveryN, 3)\n"
        "Precision.setPartialsType(torch.half)\n"
        "setAvailableMemoryProportion({'IPU0': 0.2})\n"
        '_Popart.set("enableOutlining", False)\n'
    )
    options = O()
    options.loadFromFile(str(file))
    assert (options.device_iterations, options.Training.gradient_accumulation) == (3, 4)
    assert (options.output_mode, options.output_return_period) == (poptorch.OutputMode.EveryN, 3)
    assert options._Popart.options["partialsTypeMatMuls"] == "half"
    for line in (
        "deviceIterations(",
        "absent(1)",
        "deviceIterations(__import__('os'))",
        "1 + 1",
        "setExecutionStrategy(poptorch.load('model'))",
        "setExecutionStrategy(poptorch.ShardedExecution()._stage_of('a'))",
        "_values.clear()",
        "__init__()",
    ):
        file.write_text(line)
        with pytest.raises(poptorch.ConfigFileError, match="options:1"):
            O().loadFromFile(str(file))


def test_an_options_file_makes_strategies_and_locations_and_says_where_it_is_wrong(tmp_path: Path) -> None:
    """As the SDK's published test of options files, whose error counts lines that are no comments."""
    file = tmp_path / "tmp.conf"
    lines = [
        "deviceIterations(1)",
        "setExecutionStrategy(poptorch.ShardedExecution())",
        "  replicationFactor(2)",
        " ",
        "TensorLocations.setWeightLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))  # Kept away",
        "# Not an option",
    ]
    file.write_text("\n".join(lines))
    options = O()
    options.loadFromFile(file)
    assert isinstance(options._execution_strategy, poptorch.ShardedExecution)
    assert not options.TensorLocations.location_weight["onChip"]
    file.write_text("\n".join([*lines, "outputMode(poptorch.OutputMode.All"]))
    with pytest.raises(poptorch.ConfigFileError) as caught:
        O().loadFromFile(file)
    assert str(caught.value) == (
        "SyntaxError at line 5 of tmp.conf: unexpected EOF while parsing\n"
        f"> options.outputMode(poptorch.OutputMode.All\n({file}:7)"
    )
    file.write_text(
        'setExecutionStrategy(poptorch.PipelinedExecution(poptorch.Stage("a"), poptorch.Stage("b").ipu(1)))'
    )
    options.loadFromFile(file)
    assert options._execution_strategy.placement("b", None)[1] == 1
    file.write_text("deviceIterations('two')")
    with pytest.raises(poptorch.ConfigFileError, match="deviceIterations"):
        O().loadFromFile(file)


def test_options_are_read_from_the_environment(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv(
        "POPTORCH_DEFAULT_OPTIONS",
        '{"deviceIterations": 5, "Training.gradientAccumulation": 2, "outputMode": ["OutputMode.EveryN", 5],'
        ' "_Popart.set": ["enableOutlining", false]}',
    )
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path))
    options = O()
    assert (options.device_iterations, options.Training.gradient_accumulation) == (5, 2)
    assert options.output_mode == poptorch.OutputMode.EveryN
    assert options._Popart.options["enableOutlining"] is False
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (3, 4)
    assert options.cache_path == str(tmp_path)
    monkeypatch.setenv("MY_SIZE", "two")
    with pytest.raises(poptorch.Error, match="MY_SIZE"):
        options.Distributed.setEnvVarNames("MY_SIZE", "MY_RANK")
    assert options.Distributed.disable().numProcesses == 1
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"absent": 1}')
    with pytest.raises(AttributeError, match="absent"):
        O()


def test_profiling_writes_a_report(tmp_path: Path) -> None:
    options = O().enableProfiling(str(tmp_path)).modelName("small")
    poptorch.inferenceModel(torch.nn.Linear(2, 2), options)(torch.ones(1, 2))
    summary = (tmp_path / "small" / "summary.txt").read_text()
    assert "fullest tile" in summary
    assert "linear:0" in summary


@pytest.mark.parametrize("of_floats", [False, True])
def test_half_partials_take_fewer_cycles_and_change_no_number(of_floats: bool) -> None:
    """Of halves; products of floats have no others than floats."""

    def run(kind: Any, dtype: Any) -> tuple[int, Any]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(256, 256).to(dtype)
        options = O().logCycleCount(True)
        options.Precision.setPartialsType(kind)
        model = poptorch.inferenceModel(layer, options)
        made = model(torch.ones(64, 256, dtype=dtype))
        return model.cycleCount(), made

    dtype = torch.float if of_floats else torch.half
    (halves, one), (floats, other) = (run(kind, dtype) for kind in (torch.half, torch.float))
    assert halves == floats if of_floats else halves < floats
    assert of_floats or torch.equal(one, other)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("absent", 1, "Unknown PopART option"),
        ("accumulateOuterFragmentSettings.absent", 1, "Unknown PopART option"),
        ("autoRecomputation", 99, "cannot be 99"),
        ("enableOutlining", object(), "cannot be"),
    ],
)
def test_popart_options_are_checked_when_a_model_is_compiled(key: str, value: Any, message: str) -> None:
    options = O()
    options._Popart.set(key, value)
    with pytest.raises(poptorch.Error, match=message):
        poptorch.inferenceModel(torch.nn.Linear(2, 2), options)(torch.ones(1, 2))


def test_popart_options_that_programs_set_are_taken() -> None:
    options = O()
    settings = options._Popart
    settings.set("saveInitializersToFile", "weights.onnx").set("outlineThreshold", 10.0)
    settings.set("autoRecomputation", 3).set("replicatedCollectivesSettings.mergeAllReduceCollectives", True)
    settings.set("accumulateOuterFragmentSettings.excludedVirtualGraphs", ["0"])
    settings.setPatterns({"TiedGather": True}, level=0).setEngineOptions({"opt.enableInlining": "true"})
    options.setAvailableMemoryProportion({"IPU0": 0.3})
    found = poptorch.inferenceModel(torch.nn.Linear(2, 2), options)(torch.ones(1, 2))
    assert found.shape == (1, 2)
    wrong = O()
    wrong._Popart.setPatterns({"NoPattern": True})
    with pytest.raises(poptorch.Error, match="NoPattern"):
        poptorch.inferenceModel(torch.nn.Linear(2, 2), wrong)(torch.ones(1, 2))


class Twice(torch.nn.Module):
    """A result with samples and one without."""

    def forward(self, x: Any) -> Any:
        return 2 * x, x.sum()


@pytest.mark.parametrize("mode", ["All", "Final", "Sum", "EveryN"])
def test_output_modes_give_the_sdks_shapes_and_orders(mode: str) -> None:
    iterations, replicas, micro = 4, 2, 3
    options = O().deviceIterations(iterations).replicationFactor(replicas)
    chosen = poptorch.OutputMode[mode]
    options.outputMode(*((chosen, 2) if mode == "EveryN" else (chosen,)))
    x = torch.arange(iterations * replicas * micro * 2.0).reshape(-1, 2)
    whole, total = poptorch.inferenceModel(Twice(), options)(x)
    each = (2 * x).reshape(iterations, replicas, micro, 2)
    sums = x.reshape(iterations, replicas, -1).sum(-1)
    if mode == "All":
        expected = each, sums
    elif mode == "Final":
        expected = each[-1], sums[-1]
    elif mode == "Sum":
        expected = each.sum(0), sums.sum(0)
    else:
        expected = each[1::2], sums[1::2]
    torch.testing.assert_close(whole, expected[0].reshape(-1, 2))
    torch.testing.assert_close(total, expected[1].reshape(-1))


@pytest.mark.parametrize("kind", ["Consecutive", "Orthogonal"])
def test_replicas_of_an_input_group_have_the_same_input(kind: str) -> None:
    options = O().replicationFactor(4).inputReplicaGrouping(2, poptorch.CommGroupType[kind])
    assert batch_dimensions(options, training=False).inputs == 2
    x = torch.arange(4.0).reshape(2, 2)
    _, totals = poptorch.inferenceModel(Twice(), options)(x)
    assert totals.tolist() == ([1, 1, 5, 5] if kind == "Consecutive" else [1, 5, 1, 5])


def test_results_have_the_types_that_ipus_compute() -> None:
    class Same(torch.nn.Module):
        def forward(self, *values: Any) -> Any:
            return tuple(value + value for value in values)

    given = (torch.int64, torch.float64, torch.float16, torch.int32, torch.int8, torch.uint8)
    values = [torch.ones(2, dtype=kind) for kind in given]
    found = poptorch.inferenceModel(Same())(*values)
    expected = [torch.int32, torch.float32, torch.float16, torch.int32, torch.int8, torch.uint8]
    assert [value.dtype for value in found] == expected


def test_synthetic_data_are_not_the_programs(caplog: Any) -> None:
    inference = poptorch.inferenceModel(Twice(), O().enableSyntheticData(True))
    with caplog.at_level(logging.WARNING):
        whole, _ = inference(torch.full((2, 2), 100.0))
    assert whole.abs().max() <= 2
    assert inference.getLatency() == (0.0, 0.0, 0.0)
    assert inference.getPerfCounters()["input"] == [[0.0]]


def test_numbers_of_ipus_that_cannot_be_had_are_refused_by_name(monkeypatch: Any) -> None:
    class Three(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            for ipu in range(3):
                poptorch.Block.start(ipu_id=ipu)
                x = x + 1
            return x

    def options() -> Any:
        return O().setExecutionStrategy(poptorch.ShardedExecution())

    x = torch.ones(1)
    with pytest.raises(poptorch.Error, match="power of two"):
        poptorch.inferenceModel(Three(), options())(x)
    with pytest.warns(UserWarning, match="1 are idle"):
        assert poptorch.inferenceModel(Three(), options().autoRoundNumIPUs(True))(x).tolist() == [4]
    with pytest.raises(poptorch.Error, match="64"):
        poptorch.inferenceModel(Three(), options().replicationFactor(32))(torch.ones(32))
    with pytest.raises(poptorch.Error, match="device 0 has 1 IPU"):
        poptorch.inferenceModel(Three(), options().useIpuId(0).autoRoundNumIPUs(True))(x)
    distributed = O()
    distributed.Distributed.configureProcessId(0, 2)
    with pytest.raises(poptorch.Error, match="podrun has not launched them"):
        poptorch.inferenceModel(Twice(), distributed)(x)
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    assert not poptorch.ipuHardwareIsAvailable()
    assert poptorch.inferenceModel(Three(), options())(x).tolist() == [4]
    monkeypatch.setenv("POPTORCH_IPU_MODEL_VERSION", "ipu9")
    with pytest.raises(poptorch.Error, match="ipu9"):
        poptorch.inferenceModel(Three(), options())(x)


def test_a_dropped_training_model_gives_its_ipus_back() -> None:
    class Squared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: Any) -> Any:
            return poptorch.identity_loss((self.weight * x) ** 2, reduction="sum")

    for _ in range(2):
        model = Squared()
        training = poptorch.trainingModel(model, O().useIpuId(7))
        training(torch.ones(1))
        assert model.weight < 1
        del model, training


def test_waiting_for_ipus_that_others_have(monkeypatch: Any) -> None:
    answers = [None] * 5 + [
        "device"
    ]  # Two for each attempt: it collects what the program has dropped in between.
    slept: list[float] = []
    collected: list[None] = []
    monkeypatch.setattr(devices.gc, "collect", lambda: collected.append(None))
    monkeypatch.setattr(devices, "_acquired", lambda *_: answers.pop(0))
    with pytest.raises(poptorch.Error, match="Failed to acquire 1"):
        devices.acquire(O(), 1, slept.append)
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    assert devices.acquire(O(), 1, slept.append) == "device"
    assert slept == [devices.SECONDS_BETWEEN_ATTEMPTS]
    assert len(collected) == 3


def test_a_program_may_ask_for_no_engine(caplog: Any) -> None:
    options = O()
    options._Popart.set("compileEngine", False)
    model = poptorch.inferenceModel(torch.nn.Linear(2, 2), options)
    refused = pytest.raises(poptorch.Error, match="The program is not compiled")
    with caplog.at_level(logging.WARNING, "poptorch::python"), refused as caught:
        model(torch.ones(1, 2))
    assert "Not compiling engine by request" in caplog.text
    assert "compileEngine" in str(caught.value)
    assert "session" not in str(caught.value)
    assert not model.isCompiled()


def _fields_of(group: Any, prefix: str = "") -> dict[str, Any]:
    """PopART's options and their defaults, by the names under which PopTorch's programs set them."""
    fields: dict[str, Any] = {}
    for name in getattr(type(group), "__dataclass_fields__", None) or group.__slots__:
        value = getattr(group, name)
        if name.endswith(("Settings", "location")) and not isinstance(value, dict):
            fields |= _fields_of(value, f"{prefix}{name}.")
        elif not name.startswith("_") and name != "shardingDomain":
            fields[prefix + name] = value
    return fields


def test_popart_options_are_those_of_popart_with_their_types() -> None:
    from podrun.popart.options.session_options import SessionOptions
    from podrun.poptorch.compile.popart_options import DECIDED_BY, OPTIONS

    fields = _fields_of(SessionOptions())
    former = {"defaultPrefetchBufferingDepth", "prefetchBufferingDepthMap", "saveInitializersToFile"}
    assert set(fields) == (set(OPTIONS) - former) | set(DECIDED_BY)
    for name in set(OPTIONS) & set(fields) - {"automaticLossScalingSettings.toTrackTensors"}:
        kind, default = OPTIONS[name].kind, fields[name]
        if isinstance(kind, range):
            assert {int(member) for member in type(default)} == set(kind), name
        else:
            assert type(default) is kind, name


def test_an_option_that_another_one_decides_is_refused_with_its_name() -> None:
    options = O()
    options._Popart.set("accumulationFactor", 2)
    with pytest.raises(poptorch.Error, match=r"use options\.Training\.gradientAccumulation"):
        poptorch.inferenceModel(torch.nn.Linear(2, 2), options)(torch.ones(1, 2))


def test_wrong_values_are_errors_of_poptorch_and_assertion_errors() -> None:
    with pytest.raises(poptorch.Error, match="deviceIterations must be above 0") as caught:
        O().deviceIterations(0)
    assert isinstance(caught.value, AssertionError)


def test_the_log_tells_options_in_the_words_of_the_sdk(caplog: Any) -> None:
    options = O().deviceIterations(2).enableSyntheticData(True)
    options.setExecutionStrategy(poptorch.ShardedExecution())
    options.Training.setAutomaticLossScaling(False)
    options._Popart.set("hardwareInstrumentations", {0, 1}).set("enableOutlining", True)
    options._Popart.set("engineOptions", {"debug.allowOutOfMemory": "true"})
    logger = logging.getLogger("poptorch::python")
    with patch.object(logger, "propagate", True), caplog.at_level(logging.DEBUG, logger.name):
        log_options(options)
    told = {record.getMessage() for record in caplog.records}
    assert told >= {
        "poptorch.Options set device_iterations to value 2",
        "poptorch.Options set execution_mode to value 1",
        "poptorch.Options set syntheticDataMode to value 2",
        "poptorch.Options set automaticLossScalingSettings.enabled to value false",
        "poptorch.Options added 0 to hardwareInstrumentations",
        "poptorch.Options set enableOutlining to value true",
        "poptorch.Options set engineOptions[debug.allowOutOfMemory] to true",
    }


def test_tensor_locations_are_set_for_each_kind_of_tensor() -> None:
    settings = poptorch.TensorLocationSettings().useReplicatedTensorSharding().useIOTilesToLoad()
    locations = O().TensorLocations
    locations.setActivationLocation(settings).setAccumulatorLocation(settings.useIOTilesToStore(False))
    assert locations.location_activation == {"useReplicatedTensorSharding": True, "useIOTilesToLoad": True}
    assert locations.location_accumulator == {**locations.location_activation, "useIOTilesToStore": False}
    assert locations.location_weight == {}
