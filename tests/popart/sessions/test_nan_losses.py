"""A loss that becomes NaN is told once, with its batch."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import podrun.popart as popart
from podrun.runtime.runner import LossWatch

TYPES = ["All", "Final", "EveryN", "Sum"]


@pytest.mark.parametrize("kind", TYPES)
def test_the_batch_of_a_nan_loss_is_told_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [4, 2]))
    w = builder.addInitializedInputTensor(np.ones((2, 2), np.float32))
    loss = builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([x, w])], 0.1)
    art = popart.AnchorReturnType(*(["EveryN", 2] if kind == "EveryN" else [kind]))
    session = popart.TrainingSession(
        builder.getModelProto(),
        popart.DataFlow(4, {loss: art}),
        loss,
        popart.ConstSGD(0.01),
        deviceInfo=popart.DeviceManager().createIpuModelDevice({}),
    )
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    session.weightsFromHost()
    data = np.ones((4, 4, 2), np.float32)
    with caplog.at_level(logging.WARNING):
        session.run(popart.PyStepIO({x: data}, anchors))
        assert caplog.messages == []
        data[1] = np.nan
        for _ in range(2):
            session.run(popart.PyStepIO({x: data}, anchors))
    batch = 5 if kind in ("All", "EveryN") else 7
    (message,) = caplog.messages
    assert message.startswith(f"the loss is NaN in batch {batch} (from 0, since the program was loaded)")


def test_other_anchors_may_be_nan(caplog: pytest.LogCaptureFixture) -> None:
    watch = LossWatch(["loss"])
    watch.look("logits", np.full((2, 3), np.nan), 2, 2)
    watch.look("loss", np.array([np.inf, 1.0]), 2, 2)
    assert caplog.messages == []
    watch.look("loss", np.array([1.0, np.nan]), 2, 12)
    assert "in batch 11 " in caplog.messages[0]
