"""Anchors with one value a batch: gradients as the update sees them, and norms that clip."""

from __future__ import annotations

import numpy as np
import pytest

import podrun.popart as popart
from tests.popart.popart_sessions import INPUTS, MICRO_BATCH, gradient, linear, replicated, training, weights


def data(*leading):
    return np.random.default_rng(3).standard_normal((*leading, MICRO_BATCH, INPUTS)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("replicas", "accumulation"), [pytest.param(1, 1, marks=pytest.mark.slow), (8, 1), (2, 3)]
)
@pytest.mark.sample(10)
def test_reduced_gradients_are_what_the_update_sees(device_of, replicas, accumulation, dtype):
    case = linear(dtype)
    name = popart.reservedFinalReducedGradPrefix() + case.w
    session = training(
        case,
        {name: popart.AnchorReturnType("Final")},
        device_of(replicas),
        optimizer=popart.ConstSGD(0.25, loss_scaling=4.0),
        opts=replicated(replicas, accumulation),
        batches=2,
    )
    x = data(2, accumulation, replicas).astype(dtype)
    anchors = session.initAnchorArrays()
    assert anchors[name].dtype == dtype
    plain = training(
        case, [], device_of(replicas), optimizer=popart.ConstSGD(0.25, loss_scaling=4.0),
        opts=replicated(replicas, accumulation), batches=2,
    )  # fmt: skip
    for one in (plain, session):
        one.run(popart.PyStepIO({case.x: x}, anchors if one is session else {}))
        one.after = weights(one, case.w)[0]
    np.testing.assert_array_equal(session.after, plain.after)
    found = anchors[name].reshape(replicas, *case.start.shape)
    assert all(np.array_equal(found[0], other) for other in found)
    w, last = case.start.astype(np.float64), None
    for batch in x.reshape(2, -1, MICRO_BATCH, INPUTS):
        last = 4.0 * sum(gradient(case, each, w) for each in batch)
        w = (w - 0.25 * last / 4.0).astype(dtype).astype(np.float64)
    tolerance = {"float32": 1e-5, "float16": 2e-2}[dtype]
    np.testing.assert_allclose(found[0], last, rtol=tolerance, atol=tolerance * np.abs(last).max())


@pytest.mark.slow
def test_reduced_gradients_of_each_batch(device_of):
    case = linear()
    name = popart.reservedFinalReducedGradPrefix() + case.w
    session = training(
        case, {name: popart.AnchorReturnType("All"), f"Gradient___{case.w}": popart.AnchorReturnType("All")},
        device_of(4), opts=replicated(4), batches=3,
    )  # fmt: skip
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({case.x: data(3, 4)}, anchors))
    each = anchors[f"Gradient___{case.w}"].astype(np.float64).sum(axis=1)
    for replica in range(4):
        np.testing.assert_allclose(anchors[name][:, replica], each, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("optimizer", [popart.SGD({"defaultMomentum": (0.9, True)}), popart.Adam({})])
def test_only_sgd_without_momentum_has_them(device, optimizer):
    case = linear()
    name = popart.reservedFinalReducedGradPrefix() + case.w
    with pytest.raises(popart.popart_exception, match="not in Ir Tensors"):
        training(case, [name], device, optimizer=optimizer)


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.sample(2)
def test_norms_are_those_that_clip(device_of, replicas):
    case = linear()
    settings = [popart.ClipNormSettings.clipWeights([case.w], 0.5)]
    optimizer = popart.SGD(
        {"defaultLearningRate": (0.1, True), "lossScaling": (2.0, True)}, clip_norm_settings=settings
    )
    name = popart.reservedFinalReducedGradPrefix() + case.w
    final = popart.AnchorReturnType("Final")
    session = training(
        case, {name: final, "GlobalNorm___0": final}, device_of(replicas),
        optimizer=optimizer, opts=replicated(replicas, 2),
    )  # fmt: skip
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({case.x: data(2, replicas)}, anchors))
    reduced = anchors[name].reshape(replicas, -1)[0].astype(np.float64)
    norm = np.sqrt((reduced**2).sum())
    np.testing.assert_allclose(anchors["GlobalNorm___0"].ravel(), [norm] * replicas, rtol=1e-6)
    moved = (case.start.astype(np.float64) - weights(session, case.w)[0]).ravel()
    np.testing.assert_allclose(moved, 0.1 / 2 * reduced * 0.5 / max(norm, 0.5), rtol=1e-4, atol=1e-7)


def test_without_clipping_there_is_no_norm(device):
    with pytest.raises(popart.popart_exception, match="not in Ir Tensors"):
        training(linear(), ["GlobalNorm___0"], device)
