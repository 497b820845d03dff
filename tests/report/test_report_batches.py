"""A batch in every report is one weight update (in inference one pass), pipelined or not; totals are a whole run's."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest

import podrun.popart as popart
from podrun.report.document import from_json, profile_to_json
from podrun.report.text import summary

BATCHES, SIZE = 6, 64


def session_of(*, pipelined: bool, training: bool, accumulation: int = 1) -> popart.InferenceSession:
    """Two layers on two IPUs, ``BATCHES`` micro-batches a run."""
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [4, SIZE])
    y = x
    for stage in range(2):
        w = builder.addInitializedInputTensor(np.eye(SIZE, dtype=np.float32), f"w{stage}")
        with builder.virtualGraph(stage), builder.pipelineStage(stage):
            y = builder.aiOnnx.matmul([y, w])
            if stage == 1:
                y = builder.aiGraphcore.l1loss([y], 1.0)
    options = popart.SessionOptions()
    options.virtualGraphMode = popart.VirtualGraphMode.Manual
    options.enablePipelining = pipelined
    options.instrumentWithHardwareCycleCounter = True
    if accumulation > 1:
        options.enableGradientAccumulation, options.accumulationFactor = True, accumulation
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 2})
    flow = popart.DataFlow(BATCHES // accumulation, {y: popart.AnchorReturnType("Final")})
    proto = builder.getModelProto()
    if training:
        made = popart.TrainingSession(
            proto, flow, y, popart.ConstSGD(0.1), deviceInfo=device, userOptions=options
        )
    else:
        made = popart.InferenceSession(proto, flow, device, userOptions=options)
    made.prepareDevice()
    made.weightsFromHost()
    anchors = made.initAnchorArrays()
    shape = (BATCHES, 4, SIZE) if accumulation == 1 else (BATCHES // accumulation, accumulation, 4, SIZE)
    made.run(popart.PyStepIO({x: np.ones(shape, np.float32)}, anchors))
    return made


@pytest.mark.parametrize("training", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_and_a_batch_are_the_same_work_pipelined_or_not(training: bool) -> None:
    plain, pipelined = (session_of(pipelined=pipelined, training=training) for pipelined in (False, True))
    for session in (plain, pipelined):
        report = session.getReport()
        assert (report.batches_per_run, report.accumulation_factor, report.samples_per_batch) == (
            BATCHES,
            1,
            4,
        )
        assert report.execution.totalCycles.total == session.getCycleCount()
        assert report.cycles == pytest.approx(session.getCycleCount() / BATCHES, abs=1)
        assert report.seconds == pytest.approx(report.cycles / report.clock_hz, rel=1e-3)
        assert math.fsum(report.seconds_by_cause.values()) == pytest.approx(report.seconds)
        assert f"One run ({BATCHES} batches)" in summary(report)
        assert from_json(profile_to_json(report)) == report
    # The pipeline keeps both IPUs busy, so it is the faster by each figure.
    assert pipelined.getCycleCount() < plain.getCycleCount()
    assert pipelined.getReport().execution.totalCycles.total < plain.getReport().execution.totalCycles.total
    assert pipelined.getReport().samples_per_second > plain.getReport().samples_per_second


def test_steps_are_those_of_the_whole_run() -> None:
    plain, pipelined = (session_of(pipelined=pipelined, training=True) for pipelined in (False, True))
    busy = [
        sum(ipu.cycles for step in session.getReport().execution.steps for ipu in step.ipus)
        for session in (plain, pipelined)
    ]
    assert busy[0] == pytest.approx(busy[1], rel=0.05)
    steps = plain.getReport().execution.steps
    once = len(steps) // BATCHES
    assert steps[once].program == steps[0].program
    assert steps[once].start > steps[once - 1].start
    assert steps[-1] == list(steps)[-1]
    assert [step.cycles for step in steps[:once]] == [step.cycles for step in steps[once : 2 * once]]
    with pytest.raises(IndexError, match="there are"):
        steps[len(steps)]


@pytest.mark.slow
def test_an_accumulated_batch_is_one_weight_update() -> None:
    plain, pipelined = (
        session_of(pipelined=pipelined, training=True, accumulation=3) for pipelined in (False, True)
    )
    for session in (plain, pipelined):
        report = session.getReport()
        assert (report.batches_per_run, report.accumulation_factor, report.samples_per_batch) == (2, 3, 12)
        assert report.execution.totalCycles.total == session.getCycleCount() == 2 * report.cycles
    assert pipelined.getCycleCount() < plain.getCycleCount()


@dataclass(frozen=True)
class Work:
    """A way to run four equal layers: micro-batches of four samples."""

    training: bool
    stages: int
    accumulation: int
    replicas: int
    batches: int

    def session(self) -> popart.InferenceSession:
        """The session after one run."""
        builder = popart.Builder()
        x = y = builder.addInputTensor("FLOAT", [4, SIZE])
        for layer in range(4):
            stage = layer * self.stages // 4
            with builder.virtualGraph(stage), builder.pipelineStage(stage):
                y = builder.aiOnnx.matmul(
                    [y, builder.addInitializedInputTensor(np.eye(SIZE, dtype=np.float32))]
                )
                if layer == 3:
                    y = builder.aiGraphcore.l1loss([y], 1.0)
        options = popart.SessionOptions()
        options.instrumentWithHardwareCycleCounter = True
        if self.stages > 1:
            options.virtualGraphMode, options.enablePipelining = popart.VirtualGraphMode.Manual, True
        if self.accumulation > 1:
            options.enableGradientAccumulation, options.accumulationFactor = True, self.accumulation
        if self.replicas > 1:
            options.enableReplicatedGraphs, options.replicatedGraphCount = True, self.replicas
        device = popart.DeviceManager().createIpuModelDevice({"numIPUs": self.stages * self.replicas})
        flow, proto = popart.DataFlow(self.batches, [y]), builder.getModelProto()
        made = (
            popart.TrainingSession(proto, flow, y, popart.ConstSGD(0.1), device, userOptions=options)
            if self.training
            else popart.InferenceSession(proto, flow, device, userOptions=options)
        )
        made.prepareDevice()
        made.weightsFromHost()
        shape = [n for n in (self.batches, self.accumulation, self.replicas) if n > 1]
        made.run(popart.PyStepIO({x: np.ones((*shape, 4, SIZE), np.float32)}, made.initAnchorArrays()))
        return made


WAYS = [
    Work(training, stages, accumulation, replicas, batches)
    for training, stages, accumulation, replicas, batches in itertools.product(
        (True, False), (1, 2, 4), (1, 8), (1, 2), (1, 8)
    )
    if (training or accumulation == 1) and (accumulation if training else 1) * batches >= 2 * stages - 1
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.sample(13)
def test_every_figure_of_a_report_is_of_the_same_work(way: Work) -> None:
    session = way.session()
    report, cycles = session.getReport(), session.getCycleCount()
    samples = 4 * way.accumulation * way.replicas
    assert (report.batches_per_run, report.samples_per_batch) == (way.batches, samples)
    assert report.execution.totalCycles.total == cycles
    assert report.cycles == pytest.approx(cycles / way.batches, abs=1)
    assert report.seconds == pytest.approx(report.cycles / report.clock_hz, rel=1e-3)
    assert report.samples_per_second == pytest.approx(samples / report.seconds)
    assert math.fsum(report.seconds_by_cause.values()) == pytest.approx(report.seconds)
    said = summary(report)
    assert f"{report.cycles:,} cycles" in said
    assert f"{report.samples_per_second:,.0f} samples/s" in said
    if way.batches > 1:
        assert f"One run ({way.batches} batches): " in said
        assert f"{cycles:,} cycles" in said
    assert from_json(profile_to_json(report)) == report


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("training", [True, False])
def test_a_run_is_a_constant_and_so_much_for_each_micro_batch(training: bool, stages: int) -> None:
    """Cycles = a + b n for n micro-batches, where b is that of the slowest stage: with more stages it is less."""
    counts, slopes = (8, 16, 24), {}
    for parts in {1, stages}:
        ways = (Work(training, parts, n, 1, 1) if training else Work(False, parts, 1, 1, n) for n in counts)
        found = [way.session().getCycleCount() for way in ways]
        assert found[2] - found[1] == pytest.approx(found[1] - found[0], abs=16)
        slopes[parts] = (found[1] - found[0]) / 8
    assert slopes[stages] <= slopes[1]
