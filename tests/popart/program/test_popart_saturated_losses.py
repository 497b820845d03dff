"""Losses of improbable labels: their gradient neither vanishes nor overflows, as with PopART's default patterns."""

from __future__ import annotations

import numpy as np
import pytest

import podrun.popart as popart
from tests.popart.popart_sessions import options, weights

CLASSES = 4


def step(device, dtype, scores, *, anchored=False, scaling=1.0, axis=-1):
    """Weights (the logits themselves) after a step of rate 1 on label 0, and the loss."""
    builder = popart.Builder()
    labels = builder.addInputTensor("INT32", [1], "labels")
    logits = builder.addInitializedInputTensor(np.array([scores], dtype), "logits")
    p = builder.aiOnnx.softmax([logits], axis=axis)
    loss = builder.aiGraphcore.nllloss([p, labels], reduction=popart.ReductionType.Sum)
    anchors = [loss, popart.reservedGradientPrefix() + p] if anchored else [loss]
    session = popart.TrainingSession(
        builder.getModelProto(),
        popart.DataFlow(1, anchors),
        loss,
        popart.ConstSGD(1.0, loss_scaling=scaling),
        device,
        userOptions=options(),
    )
    session.prepareDevice()
    session.weightsFromHost()
    found = session.initAnchorArrays()
    session.run(popart.PyStepIO({labels: np.zeros(1, np.int32)}, found))
    return weights(session, logits)[0][0], float(found[loss].reshape(()))


@pytest.mark.parametrize(("dtype", "bound", "scaling"), [("float32", 1e-7, 1.0), ("float16", 6.1e-5, 1024.0)])
@pytest.mark.sample(2)
def test_logits_of_an_improbable_label_are_pushed_up(device, dtype, bound, scaling):
    scores = np.array([-30, 0, 0, 0], dtype)
    after, loss = step(device, dtype, scores, scaling=scaling)
    np.testing.assert_allclose(after, [-29, -1 / 3, -1 / 3, -1 / 3], rtol=1e-3)
    assert loss == pytest.approx(-np.log(bound), rel=1e-3)


@pytest.mark.parametrize(("anchored", "axis"), [(False, 1), (True, -1)])
@pytest.mark.sample(2)
def test_probable_labels_are_as_they_were(device, anchored, axis):
    scores = np.array([0.5, -0.25, 0, 1], np.float32)
    p = np.exp(scores) / np.exp(scores).sum()
    after, loss = step(device, "float32", scores, anchored=anchored, axis=axis)
    np.testing.assert_allclose(after, scores - p + [1, 0, 0, 0], rtol=1e-5)
    assert loss == pytest.approx(-np.log(p[0]), rel=1e-5)
