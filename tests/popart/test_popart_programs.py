"""Behaviour of whole programs that no other test of the front end covers."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

import podrun.popart as popart


@pytest.fixture
def builder():
    return popart.Builder()


def test_a_scope_may_be_kept_and_entered_again(builder):
    scopes = [
        builder.nameScope("kept"),
        builder.virtualGraph(np.int64(1)),
        builder.outlineAttributes({"block": "first"}),
        builder.recomputeOutput(popart.RecomputeType.Checkpoint),
    ]
    x = builder.addInputTensor("FLOAT", [2])
    for _ in range(2):
        with ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(scope)
            with scopes[0]:
                y = builder.aiOnnx.relu([x])
        assert y.startswith("kept/kept/Relu:0")
        assert builder.getVirtualGraph({y}) == 1
    assert builder.getNameScope() == ""
    assert not builder.hasVirtualGraph()


def test_weights_of_a_checkpoint_that_the_session_has_not_are_passed_over(builder, caplog):
    x = builder.addInputTensor("FLOAT", [1, 2])
    w = builder.addInitializedInputTensor(np.ones((2, 2), np.float32), "w")
    loss = builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([x, w])], 0.1)
    device = popart.DeviceManager().createCpuDevice()
    model, flow = builder.getModelProto(), popart.DataFlow(1, [])
    session = popart.TrainingSession(model, flow, loss, popart.ConstSGD(0.1), device)
    kept = {w: np.full((2, 2), 3, np.float32), popart.reservedAccl1Prefix() + w: np.zeros((2, 2), np.float32)}
    with caplog.at_level("WARNING", "podrun.popart.session"):
        session.writeWeights(popart.PyWeightsIO(kept))
    assert "no weight or state Accl1___w: passed over" in caplog.text
    found = {w: np.empty((2, 2), np.float32)}
    session.readWeights(popart.PyWeightsIO(found))
    np.testing.assert_array_equal(found[w], kept[w])
