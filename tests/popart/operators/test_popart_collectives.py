"""ai.graphcore's collectives through sessions: values on every replica, gradients, layouts, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import podrun.popart as popart
from podrun.popart import CommGroup, CommGroupType
from tests.popart.popart_sessions import replicated

SHAPE = [2, 3]


def infer(
    replicas: int, device: Any, add: Any, x: np.ndarray, inputs: str = "FLOAT", check: bool = True
) -> np.ndarray:
    """``add(builder, tensor)`` on every replica."""
    builder = popart.Builder(opsets={"ai.onnx": 10, "ai.graphcore": 1})
    data = builder.addInputTensor(popart.TensorInfo(inputs, SHAPE))
    y = add(builder, data)
    session = popart.InferenceSession(
        builder.getModelProto(),
        popart.DataFlow(1, {y: popart.AnchorReturnType("All")}),
        device,
        userOptions=replicated(replicas),
    )
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({data: x}, anchors))
    return anchors[y].reshape(replicas, -1)


def values(replicas: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(replicas, *SHAPE)).astype(np.float32)


@pytest.mark.parametrize("replicas", [4, 8])
@pytest.mark.parametrize(
    ("group", "members"),
    [
        (None, lambda r, n: range(n)),
        (CommGroup(CommGroupType.Consecutive, 2), lambda r, n: range(r // 2 * 2, r // 2 * 2 + 2)),
        (CommGroup(CommGroupType.Orthogonal, 2), lambda r, n: range(r % (n // 2), n, n // 2)),
        (CommGroup(CommGroupType.Ungrouped, 0), lambda r, n: [r]),
    ],
    ids=["all", "consecutive", "orthogonal", "ungrouped"],
)
@pytest.mark.sample(3)
def test_all_reduce_adds_up_the_replicas_of_each_group(
    replicas: int, group: Any, members: Any, device_of: Any
) -> None:
    x = values(replicas)
    more = {} if group is None else {"commGroup": group}
    found = infer(
        replicas, device_of(replicas), lambda b, t: b.aiGraphcore.replicatedallreduce([t], **more), x
    )
    for r in range(replicas):
        expected = np.add.accumulate(x[list(members(r, replicas))])[-1]
        np.testing.assert_array_equal(found[r], expected.reshape(-1))


def test_operators_by_number_and_groups_by_scope(device_of: Any) -> None:
    x = values(4)

    def largest(builder: Any, t: str) -> str:
        with builder.commGroup(CommGroupType.Consecutive, 2):
            y = str(builder.aiGraphcore.replicatedallreduce([t], collectiveOperator=4))
        # The names that nodes have in models of the SDK.
        assert builder.getInt64VectorNodeAttribute("__collectiveCommGroup", {y}) == [1, 2]
        assert builder.getInt64NodeAttribute("__collectiveOperator", {y}) == 4
        return y

    found = infer(4, device_of(4), largest, x)
    np.testing.assert_array_equal(found[1], np.maximum(x[0], x[1]).reshape(-1))
    np.testing.assert_array_equal(found[2], np.maximum(x[2], x[3]).reshape(-1))


def test_reduce_scatter_and_all_gather(device_of: Any) -> None:
    x = values(4)
    total = np.append(np.add.accumulate(x)[-1].reshape(-1), [0, 0]).astype(np.float32)
    scattered = infer(4, device_of(4), lambda b, t: b.aiGraphcore.replicatedreducescatter([t]), x)
    np.testing.assert_array_equal(scattered, total.reshape(4, 2))

    def there_and_back(builder: Any, t: str) -> str:
        part = builder.aiGraphcore.replicatedreducescatter([t])
        return str(builder.customOp("ReplicatedAllGather", 1, "ai.graphcore", [part], {})[0])

    found = infer(4, device_of(4), there_and_back, x)
    np.testing.assert_array_equal(found, np.broadcast_to(total, (4, 8)))


def test_all_reduce_in_place_gives_the_same(device_of: Any) -> None:
    x = values(4)

    def in_place(builder: Any, t: str) -> str:
        return str(builder.customOp("ReplicatedAllReduceInplace", 1, "ai.graphcore", [t], {})[0])

    np.testing.assert_array_equal(
        infer(4, device_of(4), in_place, x)[3], np.add.accumulate(x)[-1].reshape(-1)
    )


def test_one_replica_is_a_group_by_itself(device: Any) -> None:
    x = values(1)
    found = infer(1, device, lambda b, t: b.aiGraphcore.replicatedallreduce([t]), x)
    np.testing.assert_array_equal(found[0], x.reshape(-1))


@pytest.mark.parametrize(("replicas", "accumulation"), [(4, 1), (8, 2)])
@pytest.mark.sample(2)
def test_training_through_an_all_reduce(replicas: int, accumulation: int, device_of: Any) -> None:
    """``loss = 0.5 sum |s @ w|`` with ``s`` the sum of all replicas' ``x @ v``."""
    generator = np.random.default_rng(3)
    v, w = (generator.normal(size=(3, 3)).astype(np.float32) for _ in range(2))
    builder = popart.Builder()
    data = builder.addInputTensor(popart.TensorInfo("FLOAT", SHAPE))
    first, second = builder.addInitializedInputTensor(v), builder.addInitializedInputTensor(w)
    h = builder.aiOnnx.matmul([data, first])
    s = builder.aiGraphcore.replicatedallreduce([h])
    loss = builder.aiGraphcore.l1loss(
        [builder.aiOnnx.matmul([s, second])], 0.5, reduction=popart.ReductionType.Sum
    )
    session = popart.TrainingSession(
        builder.getModelProto(),
        popart.DataFlow(
            1, {loss: popart.AnchorReturnType("All"), f"Gradient___{h}": popart.AnchorReturnType("All")}
        ),
        loss,
        popart.ConstSGD(0.125),
        device_of(replicas),
        userOptions=replicated(replicas, accumulation),
    )
    session.prepareDevice()
    session.weightsFromHost()
    x = generator.normal(size=(accumulation, replicas, *SHAPE)).astype(np.float32)
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({data: x}, anchors))
    session.weightsToHost()
    read = {first: np.empty_like(v), second: np.empty_like(w)}
    session.readWeights(popart.PyWeightsIO(read))
    gradient_v, gradient_w = np.zeros((3, 3)), np.zeros((3, 3))
    for k in range(accumulation):
        total = (x[k].astype(np.float64) @ v).sum(0)
        sign = 0.5 * np.sign(total @ w)
        back = replicas * sign @ w.T  # each replica's loss sees every replica's h
        gradient_w += replicas * total.T @ sign
        gradient_v += sum(x[k, r].T @ back for r in range(replicas))
        each = anchors[f"Gradient___{h}"].reshape(accumulation, replicas, *SHAPE)[k]
        np.testing.assert_allclose(each, np.broadcast_to(back, each.shape), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(read[first], v - 0.125 * gradient_v, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(read[second], w - 0.125 * gradient_w, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"collectiveOperator": 17}, "no collective operator 17"),
        (
            {"commGroup": CommGroup(CommGroupType.Consecutive, 3)},
            "4 replicas do not fall into consecutive groups of 3",
        ),
        ({"commGroup": [9, 2]}, r"\[9, 2\] is no group of replicas"),
    ],
)
def test_groups_that_do_not_fit_the_replicas_are_refused(attributes: Any, match: str, device_of: Any) -> None:
    with pytest.raises(popart.popart_exception, match=match):
        infer(4, device_of(4), lambda b, t: b.aiGraphcore.replicatedallreduce([t], **attributes), values(4))


def test_mean_of_integers_is_refused(device_of: Any) -> None:
    with pytest.raises(popart.popart_exception, match="cannot combine values of type int32 with MEAN"):
        infer(
            4,
            device_of(4),
            lambda b, t: b.aiGraphcore.replicatedallreduce([t], collectiveOperator=1),
            np.zeros((4, *SHAPE), np.int32),
            "INT32",
        )


def test_collectives_work_in_a_loop(device_of: Any) -> None:
    """``x <- mean over replicas of x, plus x``, three times."""
    x = values(8)

    def loop(builder: Any, t: str) -> str:
        body = builder.createSubgraphBuilder()
        body.addInputTensor(popart.TensorInfo("INT32", []))
        going = body.addInputTensor(popart.TensorInfo("BOOL", []))
        carried = body.addUntypedInputTensor(t)
        met = body.aiGraphcore.replicatedallreduce([carried], collectiveOperator=1)
        body.addOutputTensor(going)
        body.addOutputTensor(body.aiOnnx.add([met, carried]))
        count = builder.aiOnnx.constant(np.array(3, np.int32))
        on = builder.aiOnnx.constant(np.array(True))
        return str(builder.aiOnnx.loop([count, on, t], 1, body)[0])

    found = infer(8, device_of(8), loop, x)
    expected = x
    for _ in range(3):
        expected = expected + expected.mean(0)
    np.testing.assert_allclose(found, expected.reshape(8, -1), rtol=1e-5, atol=1e-5)
