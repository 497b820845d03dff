"""Programs for PopART 1 as its published slides print them: losses as objects, dataFeed, the names of old."""

from __future__ import annotations

import numpy as np
import pytest

import podrun.popart as popart

DATA = np.arange(8, dtype=np.float32).reshape(2, 4) / 8
LABELS = np.array([0, 2], np.int32)


def network() -> tuple[popart.Builder, str, str, str]:
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2, 4]))
    label = builder.addInputTensor(popart.TensorInfo("INT32", [2]))
    w = builder.addInitializedInputTensor(np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3))
    out = builder.aiOnnx.softmax([builder.aiOnnx.matmul([x, w])])
    builder.addOutputTensor(out)
    return builder, x, label, out


def ran(session: popart.TrainingSession, x: str, label: str) -> dict[str, np.ndarray]:
    session.prepareDevice()
    session.weightsFromHost()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({x: DATA, label: LABELS}, anchors))
    return anchors


def test_losses_and_data_feed_train_as_the_operators_do() -> None:
    builder, x, label, out = network()
    anchors = {"loss": popart.AnchorReturnType("ALL"), out: popart.AnchorReturnTypes.ALL}
    with pytest.warns(DeprecationWarning, match=r"aiGraphcore\.nllloss"):
        loss = popart.NllLoss(out, label, "loss")
    assert (loss.output(0), loss.input(1)) == ("loss", label)
    device = popart.DeviceManager().createCpuDevice()
    with pytest.warns(DeprecationWarning, match="dataFlow now") as said:
        session = popart.TrainingSession(
            fnModel=builder.getModelProto(),
            dataFeed=popart.DataFlow(1, anchors),  # type: ignore[call-arg]
            losses=[loss],
            optimizer=popart.ConstSGD(0.1),
            deviceInfo=device,
        )
    assert [str(w.message).split()[0] for w in said] == ["dataFeed", "losses"]
    assert all(w.filename == __file__ for w in said)
    old = ran(session, x, label)
    with pytest.warns(DeprecationWarning, match="updateOptimizerFromHost"):
        session.updateOptimizer(popart.ConstSGD(0.1))
    with pytest.warns(DeprecationWarning, match="sends the values too"):
        session.optimizerFromHost()

    builder, x, label, out = network()
    now = builder.aiGraphcore.nllloss([out, label], popart.ReductionType.Sum)
    new = ran(
        popart.TrainingSession(
            builder.getModelProto(), popart.DataFlow(1, [now, out]), now, popart.ConstSGD(0.1), device
        ),
        x,
        label,
    )
    np.testing.assert_array_equal(old["loss"], new[now])
    np.testing.assert_array_equal(old[out], new[out])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_several_losses_are_summed_by_position_too() -> None:
    builder, x, label, out = network()
    losses = [popart.NllLoss(out, label, "nll"), popart.L1Loss(out, "l1", 0.25)]
    losses[1].virtualGraph(0)
    flow = popart.DataFlow(
        1, {"nll": popart.AnchorReturnType("All"), "l1": popart.AnchorReturnTypes("Final")}
    )
    device = popart.DeviceManager().createCpuDevice()
    session = popart.TrainingSession(builder.getModelProto(), flow, losses, popart.ConstSGD(0.1), device)  # type: ignore[arg-type]
    found = ran(session, x, label)
    np.testing.assert_allclose(found["l1"], 0.25 * 2, rtol=1e-6)  # Softmax rows sum to 1.
    identity = popart.IdentityLoss(out, "id")
    model, total = identity.into(builder.getModelProto(), [identity])
    assert total == "id"
    assert popart.Builder(model).getTensorShape(out) == [2, 3]


def test_everything_comes_with_a_star() -> None:
    names = {
        "Builder",
        "NllLoss",
        "L1Loss",
        "IdentityLoss",
        "AnchorReturnTypes",
        "TrainingSession",
        "TensorInfo",
    }
    assert names <= set(popart.__all__)


@pytest.mark.parametrize("pool", ["averagepool", "maxpool"])
@pytest.mark.parametrize(("how", "size"), [("SAME_UPPER", 5), ("SAME_LOWER", 5), ("VALID", 4)])
@pytest.mark.sample(3)
def test_pools_take_auto_pad_by_name(pool: str, how: str, size: int) -> None:
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [1, 1, 5, 5]))
    more = {} if pool == "averagepool" else {"num_outputs": 1}
    made = getattr(builder.aiOnnx, pool)([x], kernel_shape=[2, 2], auto_pad=how, **more)
    name = made if isinstance(made, str) else made[0]
    assert builder.getTensorShape(name) == [1, 1, size, size]
    builder.addOutputTensor(name)
    device = popart.DeviceManager().createCpuDevice()
    session = popart.InferenceSession(builder.getModelProto(), popart.DataFlow(1, [name]), device)
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    image = np.arange(25, dtype=np.float32).reshape(1, 1, 5, 5)
    session.run(popart.PyStepIO({x: image}, anchors))
    before = int(how == "SAME_LOWER")
    padded = (
        np.pad(image[0, 0], [(before, 1 - before)] * 2, constant_values=np.nan) if size == 5 else image[0, 0]
    )
    windows = np.lib.stride_tricks.sliding_window_view(padded, (2, 2))
    want = np.nanmean(windows, (2, 3)) if pool == "averagepool" else np.nanmax(windows, (2, 3))
    np.testing.assert_allclose(anchors[name][0, 0], want)


def test_batch_normalisation_of_nothing_prepares() -> None:
    """The tile model plans chains of empty tensors."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2, 4, 0, 0]))
    ones = [builder.addInitializedInputTensor(np.ones(4, np.float32)) for _ in range(4)]
    y = builder.aiOnnx.batchnormalization([x, *ones], 5)[0]
    loss = builder.aiGraphcore.l1loss([y], 0.1)
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 1})
    session = popart.TrainingSession(
        builder.getModelProto(), popart.DataFlow(1, [loss]), loss, popart.ConstSGD(0.1), device
    )
    session.prepareDevice()
    assert session.getReport().cycles > 0


def test_a_call_without_outputs_runs() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2, 4]))
    inner = builder.createSubgraphBuilder()
    inner.aiGraphcore.printtensor([inner.addUntypedInputTensor()])
    builder.aiGraphcore.call([x], 0, inner)
    y = builder.aiOnnx.relu([x])
    builder.addOutputTensor(y)
    device = popart.DeviceManager().createCpuDevice()
    session = popart.InferenceSession(builder.getModelProto(), popart.DataFlow(1, [y]), device)
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({x: DATA}, anchors))
    np.testing.assert_array_equal(anchors[y], DATA)
