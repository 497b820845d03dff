"""Gradient clipping by a norm over several weights, for each optimizer that has it, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import podrun.popart as popart
from tests.popart.optimizers.optimizer_references import clipped
from tests.popart.popart_sessions import replicated, weights

STEPS, RATE, SCALE = 4, 0.1, 4.0
SHAPES = {"a": (3, 2), "b": (3, 5), "c": (3, 1)}


def build():
    """The gradient of each weight is the sum of x's rows, scaled differently: known, and constant in w."""
    random = np.random.default_rng(0)
    start = {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [2, 3])
    losses = []
    for index, (name, value) in enumerate(start.items()):
        w = builder.addInitializedInputTensor(value, name)
        y = builder.aiGraphcore.scale([builder.aiOnnx.matmul([x, w])], float(index + 1))
        losses.append(builder.aiGraphcore.identityloss([y], popart.ReductionType.Sum))
    loss = builder.aiOnnx.sum(losses)
    return builder.getModelProto(), x, loss, start


def run(device, optimizer, replicas=1):
    model, x, loss, start = build()
    session = popart.TrainingSession(
        model, popart.DataFlow(1, [loss]), loss, optimizer, device, userOptions=replicated(replicas)
    )
    session.prepareDevice()
    session.weightsFromHost()
    random = np.random.default_rng(1)
    gradients = []
    for _ in range(STEPS):
        data = random.standard_normal((replicas, 2, 3)).astype(np.float32)
        session.run(popart.PyStepIO({x: data}, session.initAnchorArrays()))
        rows = data.astype(np.float64).sum(axis=(0, 1))[:, None]
        gradients.append({n: rows * (i + 1) * np.ones(shape) for i, (n, shape) in enumerate(SHAPES.items())})
    return start, gradients, dict(zip(SHAPES, weights(session, *SHAPES), strict=True))


def groups(bounds):
    """Groups (a, b) and (c), or all."""
    if len(bounds) == 1:
        return [popart.ClipNormSettings.clipAllWeights(bounds[0])], [(list(SHAPES), bounds[0])]
    members = [["a", "b"], ["c"]]
    settings = [popart.ClipNormSettings(names, bound) for names, bound in zip(members, bounds, strict=True)]
    return settings, list(zip(members, bounds, strict=True))


def clip_groups(tensors, parts):
    found = dict(tensors)
    for members, bound in parts:
        found |= clipped({name: tensors[name] for name in members}, bound)
    return found


@pytest.mark.parametrize("bounds", [(3.0,), (5.0, 0.5), (1e6,)], ids=str)
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2, 8])
@pytest.mark.sample(16)
def test_plain_sgd_clips_the_scaled_summed_gradient(device_of, bounds, replicas):
    settings, parts = groups(bounds)
    optimizer = popart.ConstSGD(RATE, 0.01, SCALE, settings)
    start, gradients, got = run(device_of(replicas), optimizer, replicas)
    for name, w in start.items():
        w = w.astype(np.float64)
        for step in gradients:
            g = clip_groups({n: SCALE * value for n, value in step.items()}, parts)[name]
            w = w * (1 - RATE * 0.01) - RATE / SCALE * g
        np.testing.assert_allclose(got[name], w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("combined", [True, False], ids=["combined", "separate"])
@pytest.mark.sample(2)
def test_momentum_clips_the_velocity_that_enters_the_step(device_of, combined):
    settings, parts = groups((3.0,))
    kind = popart.SGDAccumulatorAndMomentum
    optimizer = popart.SGD(
        {"defaultLearningRate": (RATE, True), "defaultMomentum": (0.9, True), "lossScaling": (SCALE, True)},
        settings,
        kind.Combined if combined else kind.Separate,
    )
    start, gradients, got = run(device_of(1), optimizer)
    w = {name: value.astype(np.float64) for name, value in start.items()}
    v = {name: np.zeros_like(value) for name, value in w.items()}
    for step in gradients:
        v = {name: 0.9 * v[name] + step[name] for name in v}
        stepped = clip_groups(v, parts)
        w = {name: w[name] - RATE * stepped[name] for name in w}
    for name in SHAPES:
        np.testing.assert_allclose(got[name], w[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("l2", [False, True])
@pytest.mark.sample(2)
def test_adam_clips_the_unscaled_gradient(device_of, l2):
    settings, parts = groups((2.0, 0.3))
    optimizer = popart.Adam(
        {
            "defaultLearningRate": (RATE, True),
            "defaultWeightDecay": (0.1, True),
            "lossScaling": (SCALE, True),
        },
        weight_decay_mode=popart.WeightDecayMode.L2Regularization if l2 else popart.WeightDecayMode.Decay,
        clip_norm_settings=settings,
    )
    start, gradients, got = run(device_of(1), optimizer)
    w = {name: value.astype(np.float64) for name, value in start.items()}
    m = {name: np.zeros_like(value) for name, value in w.items()}
    v = {name: np.zeros_like(value) for name, value in w.items()}
    for t, step in enumerate(gradients, 1):
        g = clip_groups({n: step[n] + (0.1 * w[n] if l2 else 0) for n in w}, parts)
        for n in w:
            m[n] = 0.9 * m[n] + 0.1 * g[n]
            v[n] = 0.999 * v[n] + 0.001 * g[n] ** 2
            x = m[n] / (1 - 0.9**t) / (np.sqrt(v[n] / (1 - 0.999**t)) + 1e-6)
            w[n] = w[n] - RATE * (x + (0 if l2 else 0.1 * w[n]))
    for name in SHAPES:
        np.testing.assert_allclose(got[name], w[name], rtol=1e-4, atol=1e-5)


def test_weights_that_are_not_trained_cannot_be_clipped(device):
    with pytest.raises(popart.popart_exception, match="could not find a varupdate for 'nothing'"):
        run(device, popart.ConstSGD(0.1, clip_norm_settings=[popart.ClipNormSettings(["nothing"], 1.0)]))
    with pytest.raises(popart.popart_exception, match="maxNorm"):
        popart.ConstSGD(0.1, clip_norm_settings=[popart.ClipNormSettings(["a"], 0.0)])
