"""Automatic loss scaling and running means, against NumPy over many steps."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import podrun.popart as popart
from tests.popart.popart_sessions import INPUTS, MICRO_BATCH, linear, options, replicated, weights

BATCHES = 8


def training(case, optimizer, opts, flow):
    """A prepared session on as many IPUs as it has replicas."""
    device = popart.DeviceManager().createIpuModelDevice(
        {"numIPUs": opts.local_replicas, "tilesPerIPU": 1472}
    )
    session = popart.TrainingSession(
        fnModel=case.model,
        dataFlow=flow,
        loss=case.loss,
        optimizer=optimizer,
        deviceInfo=device,
        userOptions=opts,
    )
    session.prepareDevice()
    session.weightsFromHost()
    return session


def automatic(scale=1024.0, rate=1 / 4096, **kwargs):
    values = {"defaultLearningRate": (rate, True), "lossScaling": (scale, False)}
    return popart.SGD(values | kwargs)


def scaled(made, **settings):
    made.automaticLossScalingSettings.enabled = True
    for name, value in settings.items():
        setattr(made.automaticLossScalingSettings, name, value)
    return made


def inputs(seed, *leading):
    """Small ones, so that sums of scaled gradients stay within halves."""
    drawn = np.random.default_rng(seed).standard_normal((*leading, MICRO_BATCH, INPUTS))
    return (drawn / 16).astype(np.float16)


class Reference:
    """``w -= lr / (ls * factor) * sum of gradients``, float16 gradients, counts over the tracked ones."""

    def __init__(self, case, scale, rate, tracked, threshold, period, edge):
        self.w = case.start.astype(np.float32)
        self.scale, self.rate, self.tracked = np.float32(scale), rate, tracked
        self.threshold, self.period = threshold, period
        self.edge = np.float32(65504) * np.float32(edge)
        self.factor, self.batch = np.float32(1), 0

    def step(self, xs):
        """One batch of micro-batches (and replicas): the scale it ran with."""
        used = self.scale * self.factor
        total, lower, upper = np.zeros_like(self.w), 0, 0
        for x in xs:
            y = (x.astype(np.float32) @ self.w).astype(np.float16)
            seed = np.float16(np.float32(0.5) * used) * np.sign(y)
            g = (x.astype(np.float32).T @ seed.astype(np.float32)).astype(np.float16)
            total += g.astype(np.float32)
            for name, value in (("y", seed), ("w", g)):
                if name in self.tracked:
                    low = int((np.abs(value.astype(np.float32)) < self.edge).sum())
                    lower, upper = lower + low, upper + value.size - low
        self.w = (self.w - np.float32(self.rate) / used * total).astype(np.float16).astype(np.float32)
        if self.batch % self.period == 0:
            self.factor *= np.float32(0.5 if upper > self.threshold / (1 - self.threshold) * lower else 2)
            self.factor = min(self.factor, np.float32(2**15) / self.scale)
        self.batch += 1
        return used


CASES = [
    ({}, "yw"),
    (
        {
            "gradientTensorTrackingMethod": popart.GradientTensorTrackingMethod.ConvAndMatmulGradients,
            "binEdgeLocation": 2**-7,
        },
        "w",
    ),
    ({"updatePeriod": 4}, "yw"),
    ({"thresholdUpperCountProportion": 0.25}, "yw"),
]


LAYOUTS = [(1, 1), (2, 1), (1, 3), (4, 2)]
QUICK = [(0, 3), (1, 0), (2, 2), (3, 1)]
"""Pairs of a case and a layout that run by default; the others are slow."""


@pytest.mark.parametrize(
    ("settings", "tracked", "replicas", "accumulation"),
    [
        pytest.param(*case, *layout, marks=[] if (i, j) in QUICK else pytest.mark.slow)
        for i, case in enumerate(CASES)
        for j, layout in enumerate(LAYOUTS)
    ],
)
@pytest.mark.sample(3)
def test_scale_and_weights_follow_the_formula(settings, tracked, replicas, accumulation):
    case = linear("float16")
    made = scaled(replicated(replicas, accumulation), **settings)
    flow = popart.DataFlow(
        BATCHES, ["finalLossScale", "lossScaleUpdateFactor"], popart.AnchorReturnType("All")
    )
    session = training(case, automatic(), made, flow)
    wanted = Reference(
        case,
        1024.0,
        1 / 4096,
        tracked,
        settings.get("thresholdUpperCountProportion", 1e-7),
        settings.get("updatePeriod", 1),
        settings.get("binEdgeLocation", 0.125),
    )
    for run in range(3):
        data = inputs(run, BATCHES, accumulation, replicas)
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({case.x: data}, anchors))
        scales = anchors["finalLossScale"].reshape(BATCHES, -1)
        for batch in range(BATCHES):
            used = wanted.step(data[batch].reshape(-1, MICRO_BATCH, INPUTS))
            assert set(scales[batch]) == {used}
        (w,) = weights(session, case.w)
        np.testing.assert_allclose(w.astype(np.float32), wanted.w, rtol=4e-3, atol=4e-3)
    assert len(set(scales.ravel())) > 1 or settings == CASES[3][0]


def test_the_factor_goes_into_the_model_and_on_from_there(tmp_path):
    case = linear("float16")
    flow = popart.DataFlow(BATCHES, ["finalLossScale"], popart.AnchorReturnType("Final"))
    first = training(case, automatic(16.0), scaled(options()), flow)
    anchors = first.initAnchorArrays()
    first.run(popart.PyStepIO({case.x: inputs(0, BATCHES)}, anchors))
    assert anchors["finalLossScale"] == 16.0 * 2 ** (BATCHES - 1)
    first.modelToHost(tmp_path / "model.onnx")
    case.model = str(tmp_path / "model.onnx")
    flow = popart.DataFlow(1, ["finalLossScale"], popart.AnchorReturnType("Final"))
    second = training(case, automatic(16.0), scaled(options()), flow)
    anchors = second.initAnchorArrays()
    second.run(popart.PyStepIO({case.x: inputs(1)}, anchors))
    assert anchors["finalLossScale"] == 16.0 * 2**BATCHES


@pytest.mark.parametrize(
    ("optimizer", "product"),
    [
        (automatic(), 1 / 4096),
        pytest.param(automatic(defaultMomentum=(0.5, True)), 1.0, marks=pytest.mark.slow),
        (popart.Adam({"lossScaling": (1024.0, False)}), 1.0),
    ],
    ids=["sgd", "momentum", "adam"],
)
@pytest.mark.sample(3)
def test_the_loss_scaling_under_popart_s_names(optimizer, product):
    """``lossScaling_FLOAT16`` stands still; what updates divide by falls as the scale grows."""
    case = linear("float16")
    names = ["lossScaling_FLOAT16", "lossScaling_FLOAT", "finalLossScale", "finalInverseLossScale_0"]
    session = training(case, optimizer, scaled(options()), popart.DataFlow(4, names))
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({case.x: inputs(0, 4)}, anchors))
    assert anchors["lossScaling_FLOAT16"].dtype == np.float16
    assert set(anchors["lossScaling_FLOAT16"]) == set(anchors["lossScaling_FLOAT"]) == {1024.0}
    assert anchors["finalLossScale"].tolist() == [1024.0, 2048.0, 4096.0, 8192.0]
    np.testing.assert_allclose(
        anchors["finalLossScale"] * anchors["finalInverseLossScale_0"], product, rtol=1e-6
    )
    with pytest.raises(popart.popart_exception, match="finalInverseLossScale_1"):
        training(case, optimizer, scaled(options()), popart.DataFlow(4, ["finalInverseLossScale_1"]))


def test_an_update_period_may_span_runs():
    case = linear("float16")
    flow = popart.DataFlow(1, ["lossScaleUpdateFactor"])
    session = training(case, automatic(), scaled(options(), updatePeriod=3), flow)
    found = []
    for run in range(7):
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({case.x: inputs(run)}, anchors))
        found.append(float(anchors["lossScaleUpdateFactor"]))
    assert found == [1, 2, 2, 2, 4, 4, 4]


def test_a_cast_to_the_same_type_is_not_tracked():
    """The loss's own gradient, 2^14 in the end, would halve the scale; zeros let it grow."""
    builder = popart.Builder()
    w = builder.addInitializedInputTensor(np.zeros(3, np.float16))
    loss = builder.aiOnnx.cast([builder.aiOnnx.reducesumsquare([w], keepdims=0)], "FLOAT16")
    model = SimpleNamespace(model=builder.getModelProto(), loss=loss)
    session = training(model, automatic(1.0), scaled(options()), popart.DataFlow(17, ["finalLossScale"]))
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({}, anchors))
    assert anchors["finalLossScale"].tolist() == [2.0 ** min(i, 15) for i in range(17)]


def test_an_infinite_gradient_halves_the_scale():
    case = linear("float16")
    flow = popart.DataFlow(1, ["lossScaleUpdateFactor"], popart.AnchorReturnType("Final"))
    session = training(case, automatic(2.0**15), scaled(options()), flow)
    factors = []
    for _ in range(3):
        anchors = session.initAnchorArrays()
        data = np.full((MICRO_BATCH, INPUTS), 60000, np.float16) if not factors else inputs(0)
        session.run(popart.PyStepIO({case.x: data}, anchors))
        factors.append(float(anchors["lossScaleUpdateFactor"]))
    assert factors[:2] == [1.0, 0.5]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: popart.SGD({"defaultMomentum": (0.9, True), "lossScaling": (64.0, False)}),
        lambda: popart.Adam({"lossScaling": (64.0, False)}),
        lambda: popart.Adaptive({"lossScaling": (64.0, False)}),
        lambda: popart.SGD(
            {"lossScaling": (64.0, False)},
            clip_norm_settings=[popart.ClipNormSettings.clipAllWeights(1e9)],
        ),
    ],
    ids=["momentum", "adam", "adaptive", "clipped"],
)
@pytest.mark.slow  # By default a scale that moves is compared with a fixed one behind a softmax.
def test_a_scale_that_moves_gives_what_a_fixed_one_gives(optimizer):
    """Powers of two are exact, so as long as nothing overflows the weights are equal to the bit."""
    results = []
    for settings in (options(), scaled(options())):
        case = linear("float16")
        flow = popart.DataFlow(4, ["lossScaling___default___FLOAT"], popart.AnchorReturnType("Final"))
        session = training(case, optimizer(), settings, flow)
        session.run(popart.PyStepIO({case.x: inputs(3, 4)}, session.initAnchorArrays()))
        results.append(weights(session, case.w)[0])
    np.testing.assert_array_equal(*results)
    assert not np.array_equal(results[0], case.start)


def behind_a_softmax(rule, kind, settings, apart, batches=4):
    """The first weights, and those after training behind a softmax and a likelihood. ``apart``: the softmax's gradient
    is an anchor, so that the two are not one.
    """
    draw, dtype = np.random.default_rng(5), np.float16 if kind == "FLOAT16" else np.float32
    start = draw.standard_normal((INPUTS, 3)).astype(np.float16)
    xs = draw.standard_normal((batches, MICRO_BATCH, INPUTS)).astype(np.float16)
    labels = draw.integers(0, 3, (batches, MICRO_BATCH)).astype(np.int32)
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo(kind, [MICRO_BATCH, INPUTS]))
    label = builder.addInputTensor(popart.TensorInfo("INT32", [MICRO_BATCH]))
    w = builder.addInitializedInputTensor(start.astype(dtype))
    p = builder.aiOnnx.softmax([builder.aiOnnx.matmul([x, w])])
    loss = builder.aiGraphcore.nllloss([p, label])
    scaling = {"lossScaling": (8.0, False)}
    optimizer = popart.SGD(scaling | {"defaultLearningRate": (0.5, True)})
    if rule == "adam":
        optimizer = popart.Adam(scaling | {"defaultLearningRate": (0.02, True)})
    session = training(
        SimpleNamespace(model=builder.getModelProto(), loss=loss),
        optimizer,
        settings,
        popart.DataFlow(batches, ["Gradient___" + p] if apart else [], popart.AnchorReturnType("Final")),
    )
    session.run(popart.PyStepIO({x: xs.astype(dtype), label: labels}, session.initAnchorArrays()))
    session.weightsToHost()
    value = np.empty((INPUTS, 3), dtype)
    session.readWeights(popart.PyWeightsIO({w: value}))
    return start.astype(np.float64), value.astype(np.float64)


def test_behind_a_softmax_a_scale_that_moves_rounds_as_a_fixed_one_with_the_two_apart():
    """The least of the cases below."""
    start, fixed = behind_a_softmax("sgd", "FLOAT16", options(), apart=True, batches=1)
    _, moving = behind_a_softmax("sgd", "FLOAT16", scaled(options()), apart=False, batches=1)
    np.testing.assert_array_equal(fixed, moving)
    assert np.abs(moving - start).max() > 0.02


@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.slow
def test_behind_a_softmax_only_the_rounding_of_the_loss_s_gradient_differs(rule):
    """A fixed scaling has Softmax and Nll as one (p - 1, rounded once), an automatic one has them apart (-1/p). Where a
    fixed one has them apart too, every bit is that of the automatic one; and both are as far from float32.
    """
    start, exact = behind_a_softmax(rule, "FLOAT", options(), apart=False)
    (_, fixed), (_, apart), (_, automatic_) = (
        behind_a_softmax(rule, "FLOAT16", settings, apart=is_apart)
        for settings, is_apart in ((options(), False), (options(), True), (scaled(options()), False))
    )
    np.testing.assert_array_equal(apart, automatic_)
    assert np.abs(automatic_ - start).max() > 0.02
    for halves in (fixed, automatic_):
        np.testing.assert_allclose(halves, exact, rtol=0, atol=4e-3)


@pytest.mark.parametrize(
    ("optimizer", "settings", "words"),
    [
        (popart.ConstSGD(0.1), {}, "The optimizer must have non-const loss scaling$"),
        (automatic(), {"binEdgeLocation": 1.5}, "binEdgeLocation"),
        (
            automatic(),
            {"thresholdUpperCountProportion": -0.5},
            "^Out of range value for 'thresholdUpperCountPro",
        ),
        (automatic(), {"updatePeriod": 0}, "updatePeriod"),
        (automatic(), {"toTrackTensors": ["MatMul:0"]}, "GradientsOfUserSpecifiedTensors"),
        (popart.Adam({"lossScaling": (2.0, False)}, scaled_optimizer_state=True), {}, "scaledOptimizerState"),
    ],
)
def test_loss_scaling_with_optimizers_or_settings_that_do_not_fit_is_refused(optimizer, settings, words):
    case = linear("float16")
    with pytest.raises(popart.popart_exception, match=words):
        training(case, optimizer, scaled(options(), **settings), popart.DataFlow(BATCHES, []))


@pytest.mark.parametrize(
    ("names", "words"),
    [(None, "needs toTrackTensors"), (["nothing"], "has no tensor"), (["input"], "no gradient")],
)
def test_named_tensors_are_checked(names, words):
    case = linear("float16")
    method = popart.GradientTensorTrackingMethod.GradientsOfUserSpecifiedTensors
    made = scaled(options(), gradientTensorTrackingMethod=method, toTrackTensors=names)
    with pytest.raises(popart.popart_exception, match=words):
        training(case, automatic(), made, popart.DataFlow(1, []))


def test_without_halves_there_is_nothing_to_track():
    with pytest.raises(
        popart.popart_exception, match=r"No tracked gradient tensors of type fp16 were found\.$"
    ):
        training(linear("float32"), automatic(), scaled(options()), popart.DataFlow(1, []))


def test_named_tensors_alone_count():
    case = linear("float16")
    method = popart.GradientTensorTrackingMethod.GradientsOfUserSpecifiedTensors
    made = scaled(options(), gradientTensorTrackingMethod=method, toTrackTensors=[case.y])
    session = training(case, automatic(), made, popart.DataFlow(1, []))
    assert session.parts.model.built.program.automatic_scaling.tracked == (case.y,)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("replicas", "accumulation"),
    [pytest.param(1, 4, marks=pytest.mark.slow), (2, 3), (4, 1)],
)
@pytest.mark.sample(10)
def test_running_mean_is_the_formula(dtype, replicas, accumulation):
    """``s <- s k / (k + 1) + mean over replicas / (k + 1)``, rounded to the accumulator's type each time."""
    rate = 0.01
    results = {}
    for strategy in (popart.MeanReductionStrategy.Running, popart.MeanReductionStrategy.Post):
        case = linear(dtype)
        made = replicated(replicas, accumulation)
        made.accumulationAndReplicationReductionType = popart.ReductionType.Mean
        made.meanAccumulationAndReplicationReductionStrategy = strategy
        session = training(case, popart.ConstSGD(rate), made, popart.DataFlow(BATCHES, []))
        data = inputs(5, BATCHES, accumulation, replicas).astype(dtype)
        session.run(popart.PyStepIO({case.x: data}, {}))
        results[strategy] = weights(session, case.w)[0].astype(np.float32)
    w = case.start.astype(np.float32)
    for batch in data:
        mean = np.zeros_like(w)
        for k, micro_batch in enumerate(batch):
            each = []
            for x in micro_batch.astype(np.float32):
                y = (x @ w).astype(dtype)
                each.append(x.T @ (0.5 * np.sign(y)).astype(np.float32))
            g = np.sum(each, axis=0).astype(dtype).astype(np.float32) / replicas
            mean = (mean * np.float32(k / (k + 1)) + g / np.float32(k + 1)).astype(dtype).astype(np.float32)
        w = (w - np.float32(rate) * mean).astype(dtype).astype(np.float32)
    tolerance = {"float32": 1e-6, "float16": 2e-3}[dtype]
    np.testing.assert_allclose(
        results[popart.MeanReductionStrategy.Running], w, rtol=tolerance, atol=tolerance
    )
    np.testing.assert_allclose(
        *results.values(), rtol=4 * tolerance, atol=4 * tolerance, err_msg="running against post"
    )


def test_a_running_mean_of_halves_does_not_overflow_where_the_sum_does():
    case = linear("float16")
    flow = popart.DataFlow(1, {f"Accum___{case.w}": popart.AnchorReturnType("All")})
    data = np.full((4, MICRO_BATCH, INPUTS), 0.4 * 65504 / (MICRO_BATCH * 0.5), np.float16)
    seen = {}
    for strategy in (popart.MeanReductionStrategy.Running, popart.MeanReductionStrategy.Post):
        made = replicated(1, 4)
        made.accumulationAndReplicationReductionType = popart.ReductionType.Mean
        made.meanAccumulationAndReplicationReductionStrategy = strategy
        session = training(case, popart.ConstSGD(1e-7), made, flow)
        anchors = session.initAnchorArrays()
        with np.errstate(over="ignore"):
            session.run(popart.PyStepIO({case.x: data}, anchors))
        seen[strategy] = np.abs(anchors[f"Accum___{case.w}"]).max()
        finite = np.isfinite(weights(session, case.w)[0]).all()
        assert finite == (strategy is popart.MeanReductionStrategy.Running)
    assert seen[popart.MeanReductionStrategy.Running] < 65504
    assert np.isinf(seen[popart.MeanReductionStrategy.Post])


def two_layers(virtual):
    builder = popart.Builder()
    random = np.random.default_rng(2)
    x = builder.addInputTensor(popart.TensorInfo("FLOAT16", [MICRO_BATCH, INPUTS]))
    w0 = builder.addInitializedInputTensor(random.standard_normal((INPUTS, 4)).astype(np.float16), "w0")
    w1 = builder.addInitializedInputTensor(random.standard_normal((4, 3)).astype(np.float16), "w1")
    with builder.virtualGraph(0):
        h = builder.aiOnnx.relu([builder.aiOnnx.matmul([x, w0])])
    with builder.virtualGraph(virtual):
        y = builder.aiOnnx.matmul([h, w1])
        loss = builder.aiGraphcore.l1loss([y], 0.5, reduction=popart.ReductionType.Sum)
    return x, loss, builder.getModelProto()


@pytest.mark.parametrize("pipelined", [False, True], ids=["sharded", "pipelined"])
@pytest.mark.sample(2)
def test_several_ipus_give_what_one_gives(pipelined):
    seen = []
    for ipus in (1, 2):
        x, loss, model = two_layers(ipus - 1)
        made = scaled(replicated(1, 4))
        made.accumulationAndReplicationReductionType = popart.ReductionType.Mean
        made.meanAccumulationAndReplicationReductionStrategy = popart.MeanReductionStrategy.Running
        if ipus == 2:
            made.virtualGraphMode = popart.VirtualGraphMode.Manual
            made.enablePipelining = pipelined
        session = popart.TrainingSession(
            fnModel=model,
            dataFlow=popart.DataFlow(6, {"finalLossScale": popart.AnchorReturnType("All")}),
            loss=loss,
            optimizer=automatic(2.0**10),
            deviceInfo=popart.DeviceManager().createIpuModelDevice({"numIPUs": ipus, "tilesPerIPU": 1472}),
            userOptions=made,
        )
        session.prepareDevice()
        session.weightsFromHost()
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({x: inputs(4, 6, 4)}, anchors))
        seen.append((*weights(session, "w0", "w1"), anchors["finalLossScale"]))
    for one, two in zip(*seen, strict=True):
        np.testing.assert_array_equal(one, two)
    assert len(set(seen[0][2].ravel())) > 2
