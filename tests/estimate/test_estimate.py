"""Offline estimates: sensible answers, their trends, and clear refusals."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import podrun
from podrun import models
from podrun.core.errors import InvalidOptionError, UsageError
from podrun.costmodel import planners
from podrun.costmodel.target import GC200, system
from podrun.estimate import ProgramLayout, Traced, answer, estimate, scan, tracing
from podrun.estimate.command import DOES_NOT_FIT, estimate_command, main
from podrun.estimate.model import Choices, _layouts, _rank
from podrun.estimate.tracing import trace_model


def _perceptron(width: int = 256, layers: int = 4, activation: str = "Relu") -> onnx.ModelProto:
    nodes, weights, name = [], [], "x"
    for index in range(layers):
        value = np.zeros((width, width), np.float16)
        weights.append(numpy_helper.from_array(value, f"w{index}"))
        nodes.append(helper.make_node("MatMul", [name, f"w{index}"], [f"m{index}"], name=f"dense{index}"))
        nodes.append(helper.make_node(activation, [f"m{index}"], [f"r{index}"], name=f"relu{index}"))
        name = f"r{index}"
    graph = helper.make_graph(
        nodes,
        "perceptron",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["batch", width])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["batch", width])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 10)])


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace_model(_perceptron(), GC200, ProgramLayout(micro_batch=16), train=True)


def test_training_costs_more_than_inference(traced: Traced) -> None:
    assert traced.step["step"]["cycles"] > 1.5 * traced.forward["step"]["cycles"]
    assert traced.weights == 4 * 256 * 256
    assert traced.input_bytes == 16 * 256 * 2


def test_more_ipus_are_faster(traced: Traced) -> None:
    def rate(name: str, **changes: object) -> float:
        layout = ProgramLayout(**{"micro_batch": 16, "accumulation": 64, **changes})  # type: ignore[arg-type]
        return estimate(traced, system(name), layout, train=True).samples_per_second

    assert rate("pod64") > rate("pod16") > rate("pod4")
    assert rate("bow-pod16") > rate("pod16")


def test_recomputing_costs_time_where_the_backward_pass_reads_more_than_outputs() -> None:
    """The derivative of erf reads its input, that of relu its output, which the next product keeps anyway."""
    made = trace_model(_perceptron(activation="Erf"), GC200, ProgramLayout(micro_batch=16), train=True)
    kept, again = (
        estimate(made, system("pod16"), ProgramLayout(16, 64, recompute=flag), train=True)
        for flag in (False, True)
    )
    assert again.samples_per_second < 0.999 * kept.samples_per_second


@pytest.mark.parametrize("activation", ["Relu", "Softmax", "LogSoftmax", "Elu", "Sigmoid"])
def test_recomputing_is_never_less_work(activation: str) -> None:
    """What nothing reads (derivatives of a maximum, masks) is dropped with and without recomputation."""
    made = trace_model(_perceptron(64, 2, activation), GC200, ProgramLayout(micro_batch=16), train=True)
    assert made.remade["step"]["cycles"] >= made.step["step"]["cycles"]
    assert (
        made.remade["memory"]["not_always_live_peak_bytes"]
        <= 1.01 * made.step["memory"]["not_always_live_peak_bytes"]
    )


def test_state_off_chip_saves_tiles_and_costs_time(traced: Traced) -> None:
    on, off = (
        estimate(
            traced, system("pod16"), ProgramLayout(16, optimizer="adam", state_off_chip=flag), train=True
        )
        for flag in (False, True)
    )
    assert off.max_tile_bytes < on.max_tile_bytes
    assert off.seconds["state"] > on.seconds["state"] == 0


def test_a_model_too_large_for_one_ipu_needs_more() -> None:
    large = trace_model(_perceptron(3328, 8), GC200, ProgramLayout(), train=True)
    one, eight = (
        estimate(large, system("pod16"), ProgramLayout(ipus_per_replica=ipus, optimizer="adam"), train=True)
        for ipus in (1, 8)
    )
    assert not one.fits
    assert eight.fits


def test_a_scan_lists_what_fits_first_and_the_fastest_first() -> None:
    found = scan(_perceptron(), system("pod4"), ProgramLayout(), Choices((1, 4), global_batch=64), train=True)
    assert all(one.layout.micro_batch * one.layout.accumulation * one.replicas == 64 for one in found)
    fits = [one.fits for one in found]
    assert fits == sorted(fits, reverse=True)
    rates = [one.samples_per_second for one in found if one.fits]
    assert all(later <= 1.001 * sooner for sooner, later in itertools.pairwise(rates))
    plain = next(one for one in found if not one.layout.recompute)
    assert _rank(plain) < _rank(replace(plain, layout=replace(plain.layout, recompute=True)))
    assert {one.layout.ipus_per_replica for one in found} == {1, 2, 4}
    with pytest.raises(UsageError, match="global batch of 7"):
        scan(_perceptron(), system("pod4"), ProgramLayout(), Choices((4,), global_batch=7), train=True)


def test_a_scan_without_a_batch_tries_accumulation_too() -> None:
    found = scan(_perceptron(), system("pod4"), ProgramLayout(), Choices((4,), (1, 8)), train=True)
    assert {(one.layout.accumulation, one.layout.recompute) for one in found} == {
        (1, False),
        (1, True),
        (8, False),
        (8, True),
    }
    best = found[0]
    assert best.layout.accumulation == 8
    assert best.samples == 4 * 8 * best.replicas


# --- Layers and what each IPU has
# -------------------------------------------------------------------------------------


def test_layers_hold_all_that_the_trace_holds(traced: Traced) -> None:
    layers = traced.layers
    assert [layer.name for layer in layers] == [f"{kind}{n}" for n in range(4) for kind in ("dense", "relu")]
    assert sum(layer.weights for layer in layers) == traced.weights
    assert sum(layer.weight_bytes for layer in layers) == traced.weight_bytes
    assert sum(layer.step_cycles for layer in layers) == pytest.approx(
        traced.step["step"]["cycles"], rel=0.01
    )
    assert all(layer.crossing_bytes == 16 * 256 * 2 for layer in layers[:-1])
    assert layers[-1].crossing_bytes == 0
    # Each product keeps its input for the weights' gradient; the first one's is the model's own.
    assert sum(layer.saved_bytes for layer in layers) >= 3 * 16 * 256 * 2


def test_a_pipeline_splits_all_layers_and_keeps_most_in_front(traced: Traced) -> None:
    layout = ProgramLayout(16, 8, ipus_per_replica=4)
    found = estimate(traced, system("pod16"), layout, train=True)
    assert sum(ipu.layers for ipu in found.ipus) == len(traced.layers)
    assert sum(ipu.cycles for ipu in found.ipus) == pytest.approx(
        sum(layer.step_cycles for layer in traced.layers), rel=1e-3
    )
    kept = [ipu.bytes_by_content["stash"] for ipu in found.ipus]
    assert kept[0] > kept[-1]
    assert kept[1:] == sorted(kept[1:], reverse=True)
    again = estimate(
        traced, system("pod16"), ProgramLayout(16, 8, ipus_per_replica=4, recompute=True), train=True
    )
    stashed = [sum(ipu.bytes_by_content["stash"] for ipu in one.ipus) for one in (again, found)]
    assert stashed[0] < stashed[1]
    with pytest.raises(InvalidOptionError, match="8 layers cannot be split over 16"):
        estimate(traced, system("pod16"), ProgramLayout(ipus_per_replica=16), train=True)


def test_it_says_the_same_as_the_compiler_does_of_the_program_itself() -> None:
    import podrun.popart as popart

    model = _perceptron()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 16
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 16
    device = popart.DeviceManager().createOfflineIPUDevice({"numIPUs": 1})
    flow = popart.DataFlow(1, ["r3"])
    session = popart.InferenceSession(model.SerializeToString(), flow, device)
    session.prepareDevice()
    layout = ProgramLayout(micro_batch=16, partials_type="float32")
    found = estimate(trace_model(model, GC200, layout, train=False), system("ipu-m2000"), layout, train=False)
    report = session.getReport()
    assert found.seconds["compute"] == pytest.approx(report.seconds_by_cause["compute"], rel=0.02)
    assert found.max_tile_bytes == pytest.approx(report.fullest().memory.max_tile_bytes, rel=0.1)


def _session(shares: Sequence[int], accumulation: int, recompute: bool) -> Any:
    """A compiled training session of the perceptron; each IPU of a pipeline has so many products and relus."""
    import podrun.popart as popart

    builder, ipus = popart.Builder(), len(shares)
    x = name = builder.addInputTensor(popart.TensorInfo("FLOAT16", [256, 256]))
    for index, ipu in enumerate(ipu for ipu, share in enumerate(shares) for _ in range(share)):
        with builder.virtualGraph(ipu), builder.pipelineStage(ipu):
            if index % 2:
                name = builder.aiOnnx.relu([name])
            else:
                w = builder.addInitializedInputTensor(np.zeros((256, 256), np.float16))
                name = builder.aiOnnx.matmul([name, w])
    with builder.virtualGraph(ipus - 1), builder.pipelineStage(ipus - 1):
        loss = builder.aiGraphcore.identityloss([name], reduction=popart.ReductionType.Mean)
    options = popart.SessionOptions()
    options.enableGradientAccumulation = accumulation > 1
    options.accumulationFactor = accumulation
    if ipus > 1:
        options.virtualGraphMode, options.enablePipelining = popart.VirtualGraphMode.Manual, True
    if recompute:
        rule = popart.RecomputationType
        options.autoRecomputation = rule.Pipeline if ipus > 1 else rule.Standard
    device = popart.DeviceManager({}).createOfflineIPUDevice({"numIPUs": ipus})
    optimizer = popart.Adam({"defaultLearningRate": (0.1, True)})
    flow = popart.DataFlow(1, {loss: popart.AnchorReturnType("Final")})
    session = popart.TrainingSession(
        builder.getModelProto(), flow, loss, optimizer, device, userOptions=options
    )
    session.prepareDevice()
    assert x
    return session


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("ipus", "accumulation"), [(1, 1), (1, 4), (4, 16)])
@pytest.mark.sample(5)
def test_it_holds_what_the_compiler_says_a_training_program_holds(
    ipus: int, accumulation: int, recompute: bool
) -> None:
    layers = 8
    layout = ProgramLayout(256, accumulation, ipus, recompute, "adam", partials_type="float32")
    traced = trace_model(_perceptron(256, layers), GC200, layout, train=True)
    found = estimate(traced, system("ipu-m2000"), layout, train=True)
    report = _session([share.layers for share in found.ipus], accumulation, recompute).getReport()
    assert len(found.ipus) == len(report.ipu_memory) == ipus
    for ours, theirs in zip(found.ipus, report.ipu_memory, strict=True):
        compiled = theirs.memory.bytes_by_content
        for content in ("weights", "optimizer_state", "accumulators"):
            assert ours.bytes_by_content.get(content, 0) == pytest.approx(compiled.get(content, 0), rel=1e-3)
        kept = [held.get("stash", 0) + held["activations"] for held in (ours.bytes_by_content, compiled)]
        assert kept[0] == pytest.approx(kept[1], rel=0.2 if ipus > 1 else 0.01)
        # Of a pipeline the estimate takes code for an upper bound.
        loose = 0.2 if ipus > 1 else 0.02
        assert ours.max_tile_bytes == pytest.approx(theirs.memory.max_tile_bytes, rel=loose)


def test_command_answers_in_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(_perceptron(64, 2), str(path))
    assert main([str(path), "--target", "bow-pod16", "--train", "--micro-batch", "4"]) == 0
    assert "samples/s on 16 replicas" in capsys.readouterr().out
    assert main([str(path), "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["schema_version"]) == ("podrun.estimate", 2)
    assert answer["estimates"][0]["fits"] is True


def test_bad_input_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], traced: Traced
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(_perceptron(64, 2), str(path))
    path.with_name("text.onnx").write_text("no model")
    script = tmp_path / "train.py"
    script.write_text("import numpy as np, popart\nraise AssertionError('runs')\n")
    for arguments, word in (
        ([str(path), "--target", "pod17"], "pod17"),
        ([str(tmp_path / "none.onnx")], "none.onnx"),
        ([str(path), "--available-memory-proportion", "0"], "availableMemoryProportion"),
        ([str(path), "--ipus-per-replica", "3"], "3 IPUs per replica"),
        ([str(path), "--train", "--optimizer", "magic"], "magic"),
        ([str(path), "--accumulation", "4"], "--accumulation means nothing in inference"),
        ([str(path), "--recompute"], "--recompute means nothing in inference"),
        ([str(tmp_path)], "is a directory"),
        ([str(path), "--train", "--scan", "--global-batch", "-7"], "--global-batch must be at least 1"),
        ([str(path), "--micro-batch", "0"], "--micro-batch must be at least 1"),
        ([str(path), "--train", "--accumulation", "-2"], "--accumulation must be at least 1"),
        ([str(path), "--top", "0"], "--top"),
        ([str(path), "--global-batch", "64"], "--scan and --train"),
        (
            [str(path), "--train", "--scan", "--global-batch", "64", "--accumulation", "2"],
            "exclude each other",
        ),
        ([str(path), "--partials-type", "float8"], "float16"),
        ([str(path), "--frobnicate"], "frobnicate"),
        ([str(path), "--tain"], "Did you mean one of: '--input', '--scan', '--train'?"),
        ([str(path), "--top", "3"], "--top goes with --scan"),
        ([str(script)], "podrun profile"),
        ([], "MODEL"),
        ([str(Path(__file__).with_name("__init__.py"))], "compiles no poptorch.inferenceModel"),
    ):
        assert main(arguments) == 2
        assert word in capsys.readouterr().err
    with pytest.raises(InvalidOptionError):
        estimate(traced, system("pod16"), ProgramLayout(ipus_per_replica=32), train=True)


def test_open_dimensions_beside_the_batch_are_refused() -> None:
    model = _perceptron(64, 1)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "width"
    with pytest.raises(UsageError, match="'x'"):
        trace_model(model, GC200, ProgramLayout(), train=False)


def test_state_cut_over_replicas_is_smaller_where_there_are_more() -> None:
    traced = trace_model(_perceptron(), GC200, ProgramLayout(micro_batch=16), train=True)

    def state(target: str, **changes: Any) -> int:
        layout = ProgramLayout(16, optimizer="adam", **changes)
        (ipu,) = estimate(traced, system(target), layout, train=True).ipus
        return ipu.bytes_by_content["optimizer_state"]

    whole = 2 * 4 * traced.weights
    assert state("pod16") == whole
    assert state("pod16", shard_state=True) == whole // 16
    assert state("pod64", shard_state=True) == whole // 64


def test_the_best_of_a_scan_recomputes_only_to_fit() -> None:
    """Same model, less memory: what is recomputed fits where the rest does not."""
    found = scan(
        _perceptron(1024, 16),
        system("pod4"),
        ProgramLayout(proportion=0.2),
        Choices((4096, 16384), (8,)),
        train=True,
    )
    by_layout = {(e.layout.micro_batch, e.layout.ipus_per_replica, e.layout.recompute): e for e in found}
    for (micro_batch, ipus, recompute), one in by_layout.items():
        plain = by_layout[micro_batch, ipus, False]
        if recompute:
            assert one.max_tile_bytes < plain.max_tile_bytes
        if recompute and ipus == 1:  # In a pipeline less memory lets the layers be split more evenly.
            assert one.samples_per_second <= plain.samples_per_second
    saved = [
        layout
        for layout, e in by_layout.items()
        if layout[2] and e.fits and not by_layout[*layout[:2], False].fits
    ]
    assert saved
    best = found[0]
    assert best.fits
    assert all(1.001 * best.samples_per_second >= e.samples_per_second for e in found if e.fits)


def test_strict_mode_names_what_no_planner_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(planners.PLANNERS, "cumsum")
    axis = numpy_helper.from_array(np.asarray(1, np.int32), "axis")
    graph = helper.make_graph(
        [helper.make_node("CumSum", ["x", "axis"], ["y"], name="running")],
        "sums",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 16])],
        [axis],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)]), str(path))
    assert main([str(path)]) == 0
    assert "Bounded, no planner: cumsum" in capsys.readouterr().out
    assert main([str(path), "--strict"]) == 2
    assert "no tile planner knows 1 kind(s) of equations: cumsum x 1 (running" in capsys.readouterr().err


def test_answers_are_kept_by_the_text_of_all_rooms_that_decide_them() -> None:
    """Lowering had moved to a room of its own, whose changes then made no new answers."""
    package = Path(podrun.__file__).parent
    used = {
        room
        for deciding in tracing.DECIDING_ROOMS
        for file in (package / deciding).rglob("*.py")
        for room in re.findall(r"(?:from|import) podrun\.(\w+)", file.read_text(encoding="utf-8"))
    }
    of_every_key = {"costmodel"}
    without_influence = {
        "collectives",
        "core",
        "device",
        "popdist",
        "popef",
        "private_apis",
        "record",
        "report",
        "serving",
    }
    assert used <= {*tracing.DECIDING_ROOMS} | of_every_key | without_influence
    assert {"numerics", "popart"} <= {*tracing.DECIDING_ROOMS}


def test_a_repeat_reads_what_the_first_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PODRUN_PLAN_CACHE", str(tmp_path))
    layout = ProgramLayout(micro_batch=4)
    first = trace_model(_perceptron(64, 2), GC200, layout, train=True)
    calls: list[int] = []
    make = tracing._trace
    monkeypatch.setattr(tracing, "_trace", lambda *a, **k: calls.append(1) or make(*a, **k))
    assert trace_model(_perceptron(64, 2), GC200, layout, train=True) == first
    assert calls == []
    trace_model(_perceptron(64, 2), GC200, ProgramLayout(micro_batch=8), train=True)
    trace_model(_perceptron(64, 2), GC200, ProgramLayout(micro_batch=4, proportion=0.3), train=True)
    trace_model(_perceptron(64, 3), GC200, layout, train=True)
    trace_model(_perceptron(64, 2), GC200, layout, train=False)
    assert len(calls) == 4


def _fixed_batch(path: Path, batch: int) -> Path:
    """A model whose shapes hold its batch, as programs that fix every shape write them."""
    weight = numpy_helper.from_array(np.ones((64, 10), np.float32), "w")
    shape = numpy_helper.from_array(np.asarray([batch, 64], np.int64), "shape")
    graph = helper.make_graph(
        [
            helper.make_node("Reshape", ["x", "shape"], ["flat"]),
            helper.make_node("MatMul", ["flat", "w"], ["y"]),
        ],
        "fixed",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 10])],
        [weight, shape],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)]), str(path))
    return path


def test_a_model_is_estimated_at_the_batch_it_is_written_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(_fixed_batch(tmp_path / "fixed.onnx", 6))
    assert main([path, "--target", "pod4", "--train"]) == 0
    assert "Micro-batch 6," in capsys.readouterr().out
    assert main([path, "--target", "pod4", "--micro-batch", "4"]) == 2
    said = capsys.readouterr().err
    assert "takes no micro-batch of 4" in said
    assert "type --micro-batch 6" in said


def test_a_scan_leaves_out_micro_batches_that_the_model_does_not_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(_fixed_batch(tmp_path / "fixed.onnx", 6))
    assert main([path, "--target", "pod4", "--train", "--scan", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["estimates"]
    assert {one["micro_batch"] for one in found} == {6}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--available-memory-proportion", "1.5"], "availableMemoryProportion 1.5"),
        (["--available-memory-proportion", "0"], "availableMemoryProportion 0"),
        (["--optimizer", "adamw"], "unknown optimizer 'adamw'"),
        (["--ipus-per-replica", "3"], "3 IPUs per replica do not divide"),
        (["--scan", "--optimizer", "adamw"], "unknown optimizer 'adamw'"),
    ],
)
def test_a_layout_is_checked_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main([str(tmp_path / "missing.onnx"), "--train", *options]) == 2
    assert said in capsys.readouterr().err


def test_sharded_state_pays_for_gathering_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(_perceptron(256, 4), str(path))
    assert main([str(path), "--target", "pod4", "--train", "--optimizer", "adam", "--shard-state"]) == 0
    said = capsys.readouterr().out
    assert "all_gather" in said
    assert "reduce_scatter" in said
    assert "all_reduce" not in said


def test_what_crosses_behind_a_layer_does_not_grow_with_depth() -> None:
    """Layers that are views alone stand where they are met, not behind all others, or everything would
    cross to them.
    """
    built = models.build("bert_tiny", size=16, weights=models.Random(dtype="float16"))
    traced = trace_model(onnx.load_from_string(built.model), GC200, ProgramLayout(), train=False)
    behind = {layer.name: layer.crossing_bytes for layer in traced.layers}
    rows = 16 * 128 * 2
    assert behind["layer0/layer_norm2/GroupNormalization:0"] == rows
    assert behind["layer1/layer_norm2/GroupNormalization:0"] == rows


def test_a_scan_keeps_what_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(_perceptron(8, 1), str(path))
    asked: list[Choices] = []
    monkeypatch.setattr(answer, "scan", lambda _1, _2, _3, choices, **_: asked.append(choices) or [])
    words = [str(path), "--train", "--scan", "--micro-batch", "4", "--ipus-per-replica", "2", "--recompute"]
    with pytest.raises(IndexError):  # No layout comes back that could be shown.
        estimate_command.main(words, standalone_mode=False)
    (given,) = asked
    assert (given.micro_batches, given.pipelines, given.recomputing) == ((4,), (2,), (True,))
    tried = list(_layouts(system("pod4"), ProgramLayout(4), given))
    assert {(one.ipus_per_replica, one.recompute) for one in tried} == {(2, True)}
    assert [one.accumulation for one in tried] == list(Choices().accumulations)


def test_a_scan_says_which_layout_it_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr("podrun.estimate.model.report_step", lambda *step: told.append(step))
    found = scan(_perceptron(), system("pod4"), ProgramLayout(), Choices((1, 4), global_batch=64), train=True)
    total = told[0][2]
    assert told == [("layout", number, total) for number in range(1, total + 1)]
    assert total >= len(found) > 2


def test_scripts_can_ask_whether_a_model_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(_perceptron(1024, 2), str(path))
    small = ["--target", "pod4:tile_kib=16"]
    assert main([str(path)]) == 0
    assert main([str(path), "--train", *small]) == DOES_NOT_FIT == 1
    told = capsys.readouterr()
    assert "DOES NOT FIT" in told.out
    assert told.err == "hint: --scan tries layouts and lists those that fit.\n"
    assert main([str(path), "--train", *small, "--format", "json"]) == DOES_NOT_FIT
