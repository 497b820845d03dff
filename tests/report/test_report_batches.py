"""A batch in every report is one weight update (in inference one pass), pipelined or not; totals are a whole run's."""

from __future__ import annotations

import math

import numpy as np
import pytest

import podrun.popart as popart
from podrun.report.document import from_json, to_json
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


@pytest.mark.parametrize("training", [False, True])
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
        assert from_json(to_json(report)) == report
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


def test_an_accumulated_batch_is_one_weight_update() -> None:
    plain, pipelined = (
        session_of(pipelined=pipelined, training=True, accumulation=3) for pipelined in (False, True)
    )
    for session in (plain, pipelined):
        report = session.getReport()
        assert (report.batches_per_run, report.accumulation_factor, report.samples_per_batch) == (2, 3, 12)
        assert report.execution.totalCycles.total == session.getCycleCount() == 2 * report.cycles
    assert pipelined.getCycleCount() < plain.getCycleCount()
