"""Generated layouts of sessions on emulated machines: schedules to the bit, splits of a batch but for rounding."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import podrun.popart as popart
from tests.popart.popart_sessions import options

WIDTH, SAMPLES, BATCHES = 6, 24, 2
SCHEDULES = list(popart.PipelineSchedule.__members__.values())


@dataclass(frozen=True)
class Layout:
    """Stages spread over the IPUs of a replica, replicas, and micro-batches in a batch of `SAMPLES`."""

    stages: int
    ipus: int
    replicas: int
    accumulation: int

    @property
    def micro_batch(self) -> int:
        return SAMPLES // self.replicas // self.accumulation


def fits(layout: Layout) -> bool:
    """Machines of four IPUs are filled evenly, the batch divides, and the pipeline is deep enough."""
    total = layout.replicas * layout.ipus
    divides = SAMPLES % (layout.replicas * layout.accumulation) == 0
    return divides and (total <= 4 or total % 4 == 0) and layout.accumulation >= 2 * layout.stages - 1


LAYOUTS = st.builds(
    lambda ipus, spare, replicas, accumulation: Layout(max(2, ipus - spare), ipus, replicas, accumulation),
    st.sampled_from([2, 4, 8]),
    st.integers(0, 6),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([3, 4, 6, 8, 12, 24]),
).filter(fits)


def model(layout: Layout) -> tuple[bytes, str, str, list[str]]:
    """Layers with tanh, one for each stage, and the sum of squares as loss."""
    builder = popart.Builder()
    x = y = builder.addInputTensor("FLOAT", [layout.micro_batch, WIDTH])
    random, weights = np.random.default_rng(0), []
    for stage in range(layout.stages):
        with builder.virtualGraph(stage * layout.ipus // layout.stages), builder.pipelineStage(stage):
            start = random.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 2
            weights.append(builder.addInitializedInputTensor(start, f"w{stage}"))
            y = builder.aiOnnx.tanh([builder.aiOnnx.matmul([y, weights[-1]])])
            if stage == layout.stages - 1:
                loss = builder.aiGraphcore.l1loss([y], 1.0, reduction=popart.ReductionType.Sum)
    return builder.getModelProto(), x, loss, weights


def trained(layout: Layout, **values: object) -> dict[str, np.ndarray]:
    """Losses of the micro-batches in order of samples, and weights, after two batches."""
    proto, x, loss, weights = model(layout)
    opts = options(virtualGraphMode=popart.VirtualGraphMode.Manual, **values)
    opts.enableGradientAccumulation, opts.accumulationFactor = True, layout.accumulation
    if layout.replicas > 1:
        opts.enableReplicatedGraphs, opts.replicatedGraphCount = True, layout.replicas
    optimizer = popart.SGD({"defaultLearningRate": (0.02, True), "defaultMomentum": (0.5, True)})
    flow = popart.DataFlow(BATCHES, {loss: popart.AnchorReturnType("All")})
    with popart.DeviceManager().acquireAvailableDevice(layout.replicas * layout.ipus) as device:
        session = popart.TrainingSession(proto, flow, loss, optimizer, device, userOptions=opts)
        session.prepareDevice()
        session.weightsFromHost()
        anchors = session.initAnchorArrays()
        data = np.random.default_rng(1).standard_normal((BATCHES, SAMPLES, WIDTH)).astype(np.float32)
        session.run(popart.PyStepIO({x: data}, anchors))
        session.weightsToHost()
        arrays = {name: np.empty((WIDTH, WIDTH), np.float32) for name in weights}
        session.readWeights(popart.PyWeightsIO(arrays))
    return {"loss": anchors[loss].ravel(), **arrays}


def reference(layout: Layout) -> dict[str, np.ndarray]:
    """Weights by NumPy in float64, the batch as a whole."""
    random = np.random.default_rng(0)
    weights = [random.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 2 for _ in range(layout.stages)]
    now = [w.astype(np.float64) for w in weights]
    velocity = [np.zeros_like(w) for w in now]
    data = np.random.default_rng(1).standard_normal((BATCHES, SAMPLES, WIDTH)).astype(np.float32)
    for batch in data.astype(np.float64):
        made = [batch]
        for w in now:
            made.append(np.tanh(made[-1] @ w))
        wanted = np.sign(made[-1])
        for stage in reversed(range(layout.stages)):
            z = wanted * (1 - made[stage + 1] ** 2)
            wanted = z @ now[stage].T
            velocity[stage] = 0.5 * velocity[stage] + made[stage].T @ z
            now[stage] = now[stage] - 0.02 * velocity[stage]
    return {f"w{stage}": w for stage, w in enumerate(now)}


def check(layout: Layout) -> None:
    sharded = trained(layout)
    for schedule in SCHEDULES:
        found = trained(layout, enablePipelining=True, pipelineSchedule=schedule)
        for name, value in sharded.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{schedule} {name}")
    for name, value in reference(layout).items():
        np.testing.assert_allclose(sharded[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


QUICK = settings(
    max_examples=2,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.slow
@QUICK
@given(LAYOUTS)
def test_generated_layouts_train_like_one_replica(layout: Layout) -> None:
    check(layout)


@pytest.mark.slow
@settings(QUICK, max_examples=25, derandomize=False, phases=[Phase.generate, Phase.shrink])
@given(LAYOUTS)
def test_many_generated_layouts_train_like_one_replica(layout: Layout) -> None:
    check(layout)


@pytest.mark.slow
def test_replicas_of_eight_ipus() -> None:
    check(Layout(stages=4, ipus=8, replicas=2, accumulation=12))


def pieces(
    places: tuple[int, ...],
    *,
    named: bool = True,
    labelled: bool = False,
    meets: bool = False,
    ahead: bool = False,
    **values: object,
) -> dict[str, tuple[object, ...]]:
    """What a session computes, by piece: a layer for each place, the last one without a weight but with a constant.

    ``labelled``: the last stage alone reads labels. ``meets``: replicas meet in the first one. ``named``: stages are.
    ``ahead``: the program names work of the last stage first, on an input and a value that the first stage reads too.
    """
    builder, random = popart.Builder(), np.random.default_rng(0)
    onnx, graphcore = builder.aiOnnx, builder.aiGraphcore
    y = builder.addInputTensor("FLOAT", [2, WIDTH])
    labels = builder.addInputTensor("INT32", [2]) if labelled else ""
    with builder.virtualGraph(places[-1]), builder.pipelineStage(len(places) - 1):
        seen = onnx.relu([y]) if ahead else ""
    for stage, place in enumerate(places):
        scopes = [builder.virtualGraph(place), *([builder.pipelineStage(stage)] if named else [])]
        with contextlib.ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(scope)
            if meets and stage == 0:
                y = graphcore.replicatedallreduce([y])
            weight = builder.addInitializedInputTensor(
                random.standard_normal((WIDTH, WIDTH)).astype(np.float32)
            )
            # A weight's tanh waits for nothing: an IPU that works twice must not do it the first time.
            y = onnx.tanh([onnx.matmul([y, weight if labelled else onnx.tanh([weight])])])
            if ahead and stage == 0:
                with builder.virtualGraph(places[-1]), builder.pipelineStage(len(places) - 1):
                    seen = onnx.add([seen, onnx.tanh([y])])
                y = onnx.add([onnx.tanh([y]), onnx.sigmoid([y])])
            if stage == len(places) - 1:
                y = onnx.add([y, seen]) if ahead else y
                y = onnx.mul([y, onnx.constant(np.full(WIDTH, 0.75, np.float32))])
                mean = popart.ReductionType.Mean
                loss = (
                    graphcore.nllloss([onnx.softmax([y]), labels], mean)
                    if labelled
                    else graphcore.l1loss([y], 1.0)
                )
    opts = options(virtualGraphMode=popart.VirtualGraphMode.Manual, **values)
    opts.enableGradientAccumulation, opts.accumulationFactor = True, 5
    opts.enableReplicatedGraphs, opts.replicatedGraphCount = True, 2
    flow = popart.DataFlow(1, {loss: popart.AnchorReturnType("All")})
    with popart.DeviceManager().acquireAvailableDevice(2 << (max(places)).bit_length()) as device:
        session = popart.TrainingSession(
            builder.getModelProto(), flow, loss, popart.ConstSGD(0.1), device, userOptions=opts
        )
        session.prepareDevice()
        found = session.parts.program.executable.computations
    return {name: (piece.stablehlo, *piece.inputs, "->", *piece.outputs) for name, piece in found.items()}


@pytest.mark.parametrize(
    "case",
    [
        {"places": (0, 1, 0)},
        pytest.param({"places": (0, 2, 1), "ahead": True}, marks=pytest.mark.slow),
        {"places": (1, 2), "labelled": True, "meets": True},
        {"places": (0, 1), "labelled": True, "meets": True, "named": False},
    ],
    ids=str,
)
@pytest.mark.sample(4)
def test_a_sharded_model_is_cut_like_a_pipeline(case: dict[str, Any]) -> None:
    """The same pieces to the byte: what XLA fuses, hence the last bit, does not depend on what overlaps."""
    assert pieces(**case) == pieces(**case, enablePipelining=True)


def test_stages_that_are_none_do_not_matter_without_pipelining() -> None:
    """A stage before the one that it reads: a pipeline refuses it, sharding does not look."""
    builder = popart.Builder()
    y = builder.addInputTensor("FLOAT", [2, WIDTH])
    for place, stage in ((0, 1), (1, 0)):
        with builder.virtualGraph(place), builder.pipelineStage(stage):
            y = builder.aiOnnx.tanh([y])
    flow = popart.DataFlow(1, {y: popart.AnchorReturnType("All")})
    opts = options(virtualGraphMode=popart.VirtualGraphMode.Manual)
    with popart.DeviceManager().acquireAvailableDevice(2) as device:
        session = popart.InferenceSession(builder.getModelProto(), flow, device, userOptions=opts)
        session.prepareDevice()
        assert {"segment.0", "segment.1"} <= set(session.parts.program.executable.computations)
