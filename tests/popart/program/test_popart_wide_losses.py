"""ensureFp32LossScaleTensor: losses of halves whose scaling is greater than a half, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import podrun.popart as popart
from tests.popart.popart_sessions import options, replicated, weights

ROWS, INPUTS, CLASSES = 8, 4, 3
SCALE = 2.0**20


def half(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) / 4).astype(np.float16)


def model(kind: str) -> tuple[bytes, str, str, str, str, np.ndarray]:
    """``y = x @ w`` and its loss: proto, x, w, y, loss, and the first w."""
    builder = popart.Builder()
    x, start = builder.addInputTensor("FLOAT16", [ROWS, INPUTS], "x"), half((INPUTS, CLASSES), 0)
    w = builder.addInitializedInputTensor(start, "w")
    y = builder.aiOnnx.matmul([x, w])
    none, total = popart.ReductionType.NoReduction, popart.ReductionType.Sum
    if kind == "l1":
        loss = builder.aiGraphcore.l1loss([y], 2.0**-12, reduction=total)
    elif kind == "nll":
        label = builder.addInputTensor("INT32", [ROWS], "label")
        loss = builder.aiGraphcore.nllloss([builder.aiOnnx.softmax([y], axis=1), label], ignoreIndex=2)
    elif (
        kind == "passing"
    ):  # a mean over the l1 losses of all elements, and half of another loss, both scaled down
        each = builder.aiGraphcore.l1loss([y], 1.0, reduction=none)
        mean = builder.aiOnnx.reducemean([builder.aiOnnx.reshape([each, shape_of(builder)])], keepdims=0)
        more = builder.aiGraphcore.scale([builder.aiGraphcore.l1loss([y], 1.0, reduction=total)], 2.0**-10)
        loss = builder.aiGraphcore.scale([builder.aiOnnx.add([mean, more])], 2.0**-8)
    else:  # the first operator that needs more than a gradient is none of the loss operators
        square = builder.aiOnnx.mul([y, y])
        loss = builder.aiGraphcore.scale(
            [builder.aiGraphcore.identityloss([square], reduction=total)], 2.0**-16
        )
    return builder.getModelProto(), x, w, y, loss, start


def shape_of(builder: Any) -> str:
    return builder.aiOnnx.constant(np.array([ROWS * CLASSES], np.int64))


def gradient(kind: str, y: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """d loss / d y, float64."""
    if kind == "l1":
        return 2.0**-12 * np.sign(y)
    if kind == "passing":
        return 2.0**-8 * np.sign(y) * (1 / y.size + 2.0**-10)
    if kind == "mul":
        return 2.0**-16 * 2 * y
    p = np.exp(y) / np.exp(y).sum(1, keepdims=True)
    hot = np.eye(CLASSES)[labels]
    keep = labels != 2
    return (p - hot) * keep[:, None] / max(1, keep.sum())


def run(kind: str, wide: bool, scale: tuple[float, bool], replicas: int = 1, **more: Any) -> dict[str, Any]:
    proto, x, w, y, loss, start = model(kind)
    opts = replicated(replicas, ensureFp32LossScaleTensor=wide, **more)
    every = popart.AnchorReturnType("All")
    wanted = dict.fromkeys([loss, y, f"Gradient___{y}"], every)
    optimizer = popart.SGD({"defaultLearningRate": (0.125, True), "lossScaling": scale})
    labels = np.random.default_rng(3).integers(0, CLASSES, (replicas, ROWS)).astype(np.int32)
    data = half((replicas, ROWS, INPUTS), 1)
    with popart.DeviceManager().acquireAvailableDevice(replicas) as device:
        session = popart.TrainingSession(
            proto, popart.DataFlow(1, wanted), loss, optimizer, device, userOptions=opts
        )
        session.prepareDevice()
        session.weightsFromHost()
        anchors = session.initAnchorArrays()
        inputs = {x: data} | ({"label": labels} if kind == "nll" else {})
        session.run(popart.PyStepIO(inputs, anchors))
        after = weights(session, w)[0]
    values = {
        "loss": anchors[loss],
        "gradient": anchors[f"Gradient___{y}"].reshape(replicas, ROWS, CLASSES),
        "y": anchors[y].reshape(replicas, ROWS, CLASSES),
    }
    return values | {"after": after, "start": start, "data": data, "labels": labels}


@pytest.mark.parametrize(
    ("kind", "scale", "replicas"),
    [
        ("passing", (SCALE, True), 2),
        pytest.param("nll", (SCALE / 8, False), 1, marks=pytest.mark.slow),
        pytest.param("l1", (SCALE, False), 1, marks=pytest.mark.slow),
        pytest.param("mul", (SCALE, True), 1, marks=pytest.mark.slow),
    ],
)
def test_a_scaling_greater_than_a_half(kind: str, scale: tuple[float, bool], replicas: int) -> None:
    found = run(kind, True, scale, replicas)
    wanted = scale[0] * np.stack(
        [gradient(kind, y.astype(np.float64), n) for y, n in zip(found["y"], found["labels"], strict=True)]
    )
    assert found["gradient"].dtype == np.float16
    np.testing.assert_allclose(found["gradient"], wanted, rtol=2e-3, atol=1e-2)
    change = sum(
        x.astype(np.float64).T @ g.astype(np.float64)
        for x, g in zip(found["data"], found["gradient"], strict=True)
    )
    np.testing.assert_allclose(
        found["after"], found["start"] - 0.125 / scale[0] * change, rtol=2e-3, atol=1e-3
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("kind", ["passing", "nll"])
def test_without_it_such_a_scaling_overflows_and_losses_are_the_same(kind: str) -> None:
    plain, wide = (run(kind, on, (SCALE, True)) for on in (False, True))
    assert not np.isfinite(plain["after"]).all()
    np.testing.assert_array_equal(plain["loss"], wide["loss"])
    assert plain["loss"].dtype == np.float16


@pytest.mark.slow
@pytest.mark.parametrize("automatic", [False, True])
def test_pipelines_and_sharded_replicas_agree(automatic: bool) -> None:
    """To the bit; the loss in a stage of its own, whose operators run twice there."""
    found = []
    for pipelined in (False, True):
        builder = popart.Builder()
        x = y = builder.addInputTensor("FLOAT16", [ROWS, INPUTS])
        for stage in range(2):
            with builder.virtualGraph(stage), builder.pipelineStage(stage):
                w = builder.addInitializedInputTensor(half((INPUTS, INPUTS), stage), f"w{stage}")
                y = builder.aiOnnx.tanh([builder.aiOnnx.matmul([y, w])])
        with builder.virtualGraph(1), builder.pipelineStage(1):
            each = builder.aiGraphcore.l1loss([y], 1.0, reduction=popart.ReductionType.NoReduction)
            loss = builder.aiOnnx.reducemean([each], keepdims=0)
        opts = replicated(
            2,
            4,
            ensureFp32LossScaleTensor=True,
            virtualGraphMode=popart.VirtualGraphMode.Manual,
            enablePipelining=pipelined,
            enableStochasticRounding=True,
        )
        opts.automaticLossScalingSettings.enabled = automatic
        optimizer = popart.SGD({"defaultLearningRate": (0.125, True), "lossScaling": (SCALE / 8, False)})
        with popart.DeviceManager().acquireAvailableDevice(4) as device:
            flow = popart.DataFlow(2, {loss: popart.AnchorReturnType("All")})
            session = popart.TrainingSession(
                builder.getModelProto(), flow, loss, optimizer, device, userOptions=opts
            )
            session.prepareDevice()
            session.weightsFromHost()
            session.setRandomSeed(1)
            anchors = session.initAnchorArrays()
            session.run(popart.PyStepIO({x: half((2, 4, 2, ROWS, INPUTS), 5)}, anchors))
            found.append([anchors[loss], *weights(session, "w0", "w1")])
    for one, other in zip(*found, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)


def test_gradients_on_the_way_are_not_there(device: Any) -> None:
    proto, *_, loss, _ = model("passing")
    opts = options(ensureFp32LossScaleTensor=True)
    flow = popart.DataFlow(1, [f"Gradient___{loss}"])
    with pytest.raises(popart.popart_exception, match="on the way of the loss scaling") as caught:
        popart.TrainingSession(proto, flow, loss, popart.ConstSGD(0.1), device, userOptions=opts)
    assert "Leave out that anchor" in str(caught.value.hint)


def test_a_loss_cast_to_halves_is_refused_as_popart_does(device: Any) -> None:
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [ROWS, INPUTS])
    w = builder.addInitializedInputTensor(half((INPUTS, CLASSES), 0).astype(np.float32))
    loss = builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([x, w])], 1.0)
    cast = builder.aiOnnx.cast([loss], "FLOAT16")
    opts = options(ensureFp32LossScaleTensor=True)
    arguments = popart.DataFlow(1, [cast]), cast, popart.ConstSGD(0.1), device
    with pytest.raises(popart.popart_exception, match=r"EnsureFp32LossScale: .* not of data type fp16"):
        popart.TrainingSession(builder.getModelProto(), *arguments, userOptions=opts)
