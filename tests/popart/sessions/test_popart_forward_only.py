"""The forward stages of a pipelined training session, run alone between training steps."""

from __future__ import annotations

import numpy as np
import pytest

import podrun.popart as popart
from tests.popart.popart_sessions import replicated, weights
from tests.popart.test_popart_mixed_layouts import Way, spread

BATCHES, ACCUMULATION = 2, 3


def model(dropout=False, norm=False, settings=None):
    """Two stages, the second with dropout or a normalization at its end."""
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
            if dropout and stage == 1:
                (y,) = builder.aiOnnx.dropout([y], 1, 0.5)
            if norm and stage == 1:
                y = normalized(builder, y, settings)
    with builder.virtualGraph(1), builder.pipelineStage(1):
        loss = builder.aiGraphcore.l1loss([y], 0.1)
    return builder.getModelProto(), x, y, loss, names


def normalized(builder, y, settings=None):
    """A batch normalization with running statistics ``mean`` and ``variance`` of four channels. ``settings``: of the
    mean, which has two groups then."""
    shape = builder.aiOnnx.constant(np.array([2, 4, 1], np.int64))
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    values = {"scale": ones, "bias": zeros, "mean": zeros, "variance": ones}
    given = [
        builder.addInitializedInputTensor(value, name) for name, value in values.items() if name != "mean"
    ]
    mean = (values["mean"],) if settings is None else (np.stack([zeros, ones]), settings)
    given.insert(2, builder.addInitializedInputTensor(*mean, debugContext="mean"))
    return builder.aiOnnx.batchnormalization([builder.aiOnnx.reshape([y, shape]), *given], 5, momentum=0.5)[0]


def session_of(proto, y, loss, names, device, forward_only=True, replicas=1, rate=0.1, more=()):
    opts = replicated(
        replicas,
        ACCUMULATION,
        virtualGraphMode=popart.VirtualGraphMode.Manual,
        enablePipelining=True,
        createImplicitPipeliningFwdOnlyProgram=forward_only,
    )
    every = popart.AnchorReturnType("All")
    anchors = {
        y: every,
        loss: popart.AnchorReturnType("Sum"),
        popart.reservedGradientPrefix() + names[0]: every,
        **dict.fromkeys(more, every),
    }
    optimizer = popart.SGD({"defaultLearningRate": (rate, False), "defaultMomentum": (0.9, True)})
    session = popart.TrainingSession(
        proto, popart.DataFlow(BATCHES, anchors), loss, optimizer, device, userOptions=opts
    )
    session.prepareDevice()
    session.weightsFromHost()
    return session


def data(seed, replicas=()):
    shape = (BATCHES, ACCUMULATION, *replicas, 2, 4)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


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
    """Zeros of the last values show the masks, which are new in each step."""
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


@pytest.mark.parametrize(
    ("replicas", "way", "grouped"),
    [
        (4, Way(instances=2, hosts="ab"), True),
        pytest.param(1, Way(), False, marks=pytest.mark.slow),
        pytest.param(2, Way(), False, marks=pytest.mark.slow),
        pytest.param(8, Way(instances=4, hosts="abab"), False, marks=pytest.mark.slow),
        pytest.param(8, Way(), True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_each_replica_s_statistics_move_on_from_its_own(monkeypatch, replicas, way, grouped):
    """Through training and forward runs in turn; weights stand still, so that NumPy knows what is normalised."""
    grouping = popart.VariableSettings(popart.CommGroup(popart.CommGroupType.Orthogonal, replicas // 2))
    settings = grouping if grouped else None
    proto, x, y, loss, names = model(norm=True, settings=settings)
    now = np.tile(np.arange(replicas).reshape(-1, 1) % 2.0 if grouped else np.zeros((replicas, 1)), 4)
    with popart.DeviceManager().acquireAvailableDevice(2 * replicas) as device:
        device.detach()
        spread(monkeypatch, way)
        device.attach()
        session = session_of(proto, y, loss, names, device, replicas=replicas, rate=0.0, more=["mean"])
        first, second = weights(session, *names)
        for seed, handle in enumerate(
            ((), ("implicitPipeliningFwdOnly",), (), *[("implicitPipeliningFwdOnly",)] * 2)
        ):
            given = data(seed, (replicas,))
            anchors = session.initAnchorArrays()
            session.run(*handle, popart.PyStepIO({x: given}, anchors))
            made = np.tanh(np.tanh(given @ first) @ second).reshape(-1, replicas, 2, 4)
            centred = (made - made.mean(2, keepdims=True)) / np.sqrt(made.var(2, keepdims=True) + 1e-5)
            np.testing.assert_allclose(anchors[y].reshape(made.shape), centred, rtol=1e-3, atol=1e-4)
            seen = anchors["mean"].reshape(-1, replicas, 4)
            for micro, before in zip(made, seen, strict=True):
                np.testing.assert_allclose(before, now, rtol=1e-5, atol=1e-6)
                now = 0.5 * now + 0.5 * micro.mean(1)
        session.weightsToHost()
        found = np.empty((2, 4) if grouped else (4,), np.float32)
        session.readWeights(popart.PyWeightsIO({"mean": found}))
        np.testing.assert_allclose(found, now[:2] if grouped else now[0], rtol=1e-5, atol=1e-6)


def test_programs_that_are_unknown_or_not_asked_for_are_refused(device_of):
    proto, x, y, loss, names = model()
    session = session_of(proto, y, loss, names, device_of(2))
    io = popart.PyStepIO({x: data(0)}, session.initAnchorArrays())
    with pytest.raises(popart.popart_runtime_error, match="no custom program 'other'"):
        session.run("other", io)
    session._options.createImplicitPipeliningFwdOnlyProgram = False
    with pytest.raises(popart.popart_runtime_error, match="no custom program"):
        session.run("implicitPipeliningFwdOnly", io)
