"""The forward stages of a pipelined training session, run alone between training steps."""

from __future__ import annotations

import numpy as np
import pytest
from popart_sessions import options, weights

import podrun.popart as popart

BATCHES, ACCUMULATION = 2, 3


def model(dropout=False):
    builder = popart.Builder()
    random = np.random.default_rng(0)
    x = builder.addInputTensor("FLOAT", [2, 4], "x")
    names = []
    y = x
    for stage in range(2):
        with builder.virtualGraph(stage), builder.pipelineStage(stage):
            names.append(
                builder.addInitializedInputTensor(
                    random.standard_normal((4, 4)).astype(np.float32), f"w{stage}"
                )
            )
            y = builder.aiOnnx.tanh([builder.aiOnnx.matmul([y, names[-1]])])
            if dropout:
                (y,) = builder.aiOnnx.dropout([y], 1, 0.5)
    with builder.virtualGraph(1), builder.pipelineStage(1):
        loss = builder.aiGraphcore.l1loss([y], 0.1)
    return builder.getModelProto(), x, y, loss, names


def session_of(proto, y, loss, names, device, forward_only=True):
    opts = options(
        virtualGraphMode=popart.VirtualGraphMode.Manual,
        enablePipelining=True,
        enableGradientAccumulation=True,
        accumulationFactor=ACCUMULATION,
        createImplicitPipeliningFwdOnlyProgram=forward_only,
    )
    every = popart.AnchorReturnType("All")
    anchors = {
        y: every,
        loss: popart.AnchorReturnType("Sum"),
        popart.reservedGradientPrefix() + names[0]: every,
    }
    optimizer = popart.SGD({"defaultLearningRate": (0.1, False), "defaultMomentum": (0.9, True)})
    session = popart.TrainingSession(
        proto, popart.DataFlow(BATCHES, anchors), loss, optimizer, device, userOptions=opts
    )
    session.prepareDevice()
    session.weightsFromHost()
    return session


def data(seed):
    return np.random.default_rng(seed).standard_normal((BATCHES, ACCUMULATION, 2, 4)).astype(np.float32)


def test_it_computes_with_the_weights_of_now_and_leaves_training_as_it_was(device_of):
    proto, x, y, loss, names = model()
    with_forward = session_of(proto, y, loss, names, device_of(2))
    plain = session_of(proto, y, loss, names, device_of(2), forward_only=False)
    for step in range(2):
        trained = [session.initAnchorArrays() for session in (with_forward, plain)]
        for session, anchors in zip((with_forward, plain), trained, strict=True):
            session.run(popart.PyStepIO({x: data(step)}, anchors))
        for name in trained[1]:
            np.testing.assert_array_equal(trained[0][name], trained[1][name])
        forward = with_forward.initAnchorArrays()
        gradient = popart.reservedGradientPrefix() + names[0]
        forward[gradient][...] = 7
        with_forward.run("implicitPipeliningFwdOnly", popart.PyStepIO({x: data(step + 10)}, forward))
        first, second = weights(with_forward, *names)
        expected = np.tanh(np.tanh(data(step + 10) @ first) @ second)
        np.testing.assert_allclose(forward[y], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(forward[loss], 0.1 * np.abs(expected).mean((2, 3)).sum(), rtol=1e-5)
        assert np.all(forward[gradient] == 7)


def test_what_it_refuses(device_of):
    proto, x, y, loss, names = model(dropout=True)
    session = session_of(proto, y, loss, names, device_of(2))
    io = popart.PyStepIO({x: data(0)}, session.initAnchorArrays())
    with pytest.raises(popart.popart_exception, match="random numbers"):
        session.run("implicitPipeliningFwdOnly", io)
    with pytest.raises(popart.popart_runtime_error, match="no custom program 'other'"):
        session.run("other", io)
    session._options.createImplicitPipeliningFwdOnlyProgram = False
    with pytest.raises(popart.popart_runtime_error, match="no custom program"):
        session.run("implicitPipeliningFwdOnly", io)
