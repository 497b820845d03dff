"""The forward stages of a pipelined training session, run alone between training steps."""

from __future__ import annotations

import numpy as np
import pytest
from popart_sessions import options, weights

import podrun.popart as popart

BATCHES, ACCUMULATION = 2, 3


def model(dropout=False, norm=False):
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
            if norm and stage == 1:
                y = normalized(builder, y)
    with builder.virtualGraph(1), builder.pipelineStage(1):
        loss = builder.aiGraphcore.l1loss([y], 0.1)
    return builder.getModelProto(), x, y, loss, names


def normalized(builder, y):
    """A batch normalization with running statistics ``mean`` and ``variance`` of four channels."""
    shape = builder.aiOnnx.constant(np.array([2, 4, 1], np.int64))
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    values = {"scale": ones, "bias": zeros, "mean": zeros, "variance": ones}
    given = [builder.addInitializedInputTensor(value, name) for name, value in values.items()]
    return builder.aiOnnx.batchnormalization([builder.aiOnnx.reshape([y, shape]), *given], 5, momentum=0.5)[0]


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


def test_it_drops_out_as_training_does_and_training_draws_on_from_there(device_of):
    """Ones through identities: what is left of them shows the masks, which are new in each step."""
    proto, x, y, loss, names = model(dropout=True)
    session = session_of(proto, y, loss, names, device_of(2))
    session.setRandomSeed(3)
    seen, seeds = [], []
    for handle in ((), ("implicitPipeliningFwdOnly",), ("implicitPipeliningFwdOnly",), ()):
        anchors = session.initAnchorArrays()
        session.run(*handle, popart.PyStepIO({x: np.ones_like(data(0))}, anchors))
        seen.append(anchors[y] == 0)
        seeds.append(session.getRandomSeed())
    assert all(0.2 < mask.mean() < 0.8 for mask in seen)
    assert len({mask.tobytes() for mask in seen}) == len(set(seeds)) == 4
    session.setRandomSeed(3)
    again = session.initAnchorArrays()
    session.run("implicitPipeliningFwdOnly", popart.PyStepIO({x: np.ones_like(data(0))}, again))
    np.testing.assert_array_equal(again[y] == 0, seen[0])


def test_running_statistics_move_on(device_of):
    proto, x, y, loss, names = model(norm=True)
    session = session_of(proto, y, loss, names, device_of(2))
    anchors = session.initAnchorArrays()
    session.run("implicitPipeliningFwdOnly", popart.PyStepIO({x: data(1)}, anchors))
    first, second, mean = weights(session, *names, "mean")
    made = np.tanh(np.tanh(data(1).reshape(-1, 2, 4) @ first) @ second)
    wanted = np.zeros(4)
    for batch in made:
        wanted = 0.5 * wanted + 0.5 * batch.mean(0)
    np.testing.assert_allclose(mean, wanted, rtol=1e-5, atol=1e-6)
    centred = (made - made.mean(1, keepdims=True)) / np.sqrt(made.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(anchors[y].reshape(-1, 2, 4), centred, rtol=1e-3, atol=1e-4)
    session.run(popart.PyStepIO({x: data(2)}, anchors))
    assert not np.array_equal(weights(session, "mean")[0], mean)


def test_what_it_refuses(device_of):
    proto, x, y, loss, names = model()
    session = session_of(proto, y, loss, names, device_of(2))
    io = popart.PyStepIO({x: data(0)}, session.initAnchorArrays())
    with pytest.raises(popart.popart_runtime_error, match="no custom program 'other'"):
        session.run("other", io)
    session._options.createImplicitPipeliningFwdOnlyProgram = False
    with pytest.raises(popart.popart_runtime_error, match="no custom program"):
        session.run("implicitPipeliningFwdOnly", io)
