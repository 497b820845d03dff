"""Anchors: shapes and values of all return types, over batches, accumulation and replicas."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import podrun.popart as popart
from tests.popart.popart_sessions import (
    INPUTS,
    MICRO_BATCH,
    OUTPUTS,
    gradient,
    linear,
    options,
    replicated,
    training,
    weights,
)

LAYOUTS = [
    pytest.param(batches, accumulation, replicas, id=f"{batches}x{accumulation}x{replicas}")
    for batches, accumulation, replicas in product((1, 4), (1, 3), (1, 2))
]


@pytest.mark.parametrize(("batches", "accumulation", "replicas"), LAYOUTS)
@pytest.mark.parametrize("kind", ["All", "Final", "Sum", "EveryN"])
@pytest.mark.sample(12)
def test_values_and_shapes_in_training(device_of, batches, accumulation, replicas, kind):
    """y, its gradient and the weight's, against NumPy that follows the weight through the batches."""
    case = linear()
    x = np.random.default_rng(1).standard_normal((batches, accumulation, replicas, MICRO_BATCH, INPUTS))
    x = x.astype(np.float32)
    ys, dys, dws = _numpy_run(case, x)
    art = popart.AnchorReturnType(*(["EveryN", batches] if kind == "EveryN" else [kind]))
    prefix = popart.reservedGradientPrefix()
    expected = {case.y: ys, prefix + case.y: dys, prefix + case.w: dws}
    session = training(
        case,
        dict.fromkeys(expected, art),
        device_of(replicas),
        batches=batches,
        opts=replicated(replicas, accumulation),
    )
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({case.x: x}, anchors))
    for tensor, values in expected.items():
        wanted = _returned(values, kind, batches)
        leading = [dim for dim in wanted.shape[: wanted.ndim - 2] if dim != 1]
        assert anchors[tensor].shape == (*leading, *wanted.shape[-2:])
        np.testing.assert_allclose(anchors[tensor], wanted.reshape(anchors[tensor].shape), 2e-5, 1e-6)


def _numpy_run(case, x):
    """Values of y, dy and dw for every batch, micro-batch and replica; the weight moves after each batch."""
    w = case.start.astype(np.float64)
    ys = np.einsum("barmi,io->barmo", x, w)
    dys, dws = np.zeros_like(ys), np.zeros((*x.shape[:3], INPUTS, OUTPUTS))
    for batch in range(len(x)):
        total = np.zeros_like(w)
        for micro, replica in product(range(x.shape[1]), range(x.shape[2])):
            piece = x[batch, micro, replica]
            ys[batch, micro, replica] = piece @ w
            dys[batch, micro, replica] = 0.5 * np.sign(piece @ w)
            dws[batch, micro, replica] = gradient(case, piece, w)
            total += dws[batch, micro, replica]
        w = w - 0.1 * total
    return ys, dys, dws


def _returned(values, kind, batches):
    flat = values.reshape(-1, *values.shape[2:])
    if kind == "All":
        return values
    if kind == "Final":
        return flat[-1]
    if kind == "Sum":
        return flat.sum(axis=0)
    # The period counts micro-batches, so as many come back as batches / period times the accumulation factor.
    return flat[batches - 1 :: batches].reshape(1, -1, *flat.shape[1:])


def test_every_n_counts_micro_batches(device):
    """With two batches of two micro-batches and N = 2, micro-batches 2 and 4 come back (PopART's
    anchorreturntype_test).
    """
    case = linear()
    session = training(
        case,
        {case.y: popart.AnchorReturnType("EveryN", 2)},
        device,
        batches=2,
        opts=replicated(1, 2),
        optimizer=popart.SGD({"defaultLearningRate": (0.0, False)}),
    )
    x = np.random.default_rng(2).standard_normal((4, MICRO_BATCH, INPUTS)).astype(np.float32)
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({case.x: x}, anchors))
    np.testing.assert_allclose(anchors[case.y], x[1::2] @ case.start, rtol=1e-5)


@pytest.mark.sample(9)
@pytest.mark.parametrize("kind", [("All",), ("Final",), ("Sum",), ("EveryN", 3)], ids=str)
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_anchored_weight_is_the_one_after_its_update(device_of, kind, replicas):
    """Without gradient accumulation the update is part of the backward pass, and weights are copied behind it."""
    case = linear()
    updated = popart.reservedUpdatedVarPrefix() + case.w
    wanted = {case.w: popart.AnchorReturnType(*kind), updated: popart.AnchorReturnType("All")}
    session = training(case, wanted, device_of(replicas), batches=3, opts=replicated(replicas, 1))
    x = np.random.default_rng(3).standard_normal((3, replicas, MICRO_BATCH, INPUTS)).astype(np.float32)
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({case.x: x}, anchors))
    w, after = case.start.astype(np.float64), []
    for batch in range(3):
        w = w - 0.1 * sum(gradient(case, x[batch, r], w) for r in range(replicas))
        after.append([w] * replicas)
    after = np.array(after).reshape(anchors[updated].shape)
    np.testing.assert_allclose(anchors[updated], after, rtol=1e-5)
    expected = {"All": after, "Sum": after.sum(axis=0)}.get(kind[0], after[-1])
    np.testing.assert_allclose(anchors[case.w], expected.reshape(anchors[case.w].shape), rtol=1e-5)


def test_where_gradients_accumulate_an_anchored_weight_is_the_one_used_and_at_the_end_the_last(device):
    """The update comes behind the micro-batches; Final is copied when the step is done."""
    case = linear()
    x = np.random.default_rng(3).standard_normal((2, 3, MICRO_BATCH, INPUTS)).astype(np.float32)
    found = {}
    for kind in ("All", "Final"):
        wanted = {case.w: popart.AnchorReturnType(kind)}
        session = training(case, wanted, device, batches=2, opts=replicated(1, 3))
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({case.x: x}, anchors))
        found[kind] = anchors[case.w]
    ws, w = [], case.start.astype(np.float64)
    for batch in range(2):
        ws.append(w)
        w = w - 0.1 * sum(gradient(case, part, w) for part in x[batch])
    np.testing.assert_allclose(found["All"], np.repeat(np.array(ws)[:, None], 3, axis=1), rtol=1e-5)
    np.testing.assert_allclose(found["Final"], w, rtol=1e-5)


def test_gradients_are_scaled_by_the_loss_scaling_and_not_averaged(device_of):
    case = linear()
    name = popart.reservedGradientPrefix() + case.w
    opts = replicated(2, accumulationAndReplicationReductionType=popart.ReductionType.Mean)
    session = training(case, [name], device_of(2), optimizer=popart.ConstSGD(0.1, 0.0, 8.0), opts=opts)
    x = np.random.default_rng(4).standard_normal((2, MICRO_BATCH, INPUTS)).astype(np.float32)
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({case.x: x}, anchors))
    for replica in range(2):
        np.testing.assert_allclose(
            anchors[name][replica], 8 * gradient(case, x[replica], case.start), rtol=1e-5
        )


def test_inference_anchors_come_in_lexicographic_order_and_keep_dims_of_one(device):
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [1, 5])
    b = builder.aiOnnx.relu([x])
    a = builder.aiOnnx.abs([b])
    session = popart.InferenceSession(
        builder.getModelProto(),
        popart.DataFlow(1, [b, a], popart.AnchorReturnType("Final")),
        device,
        userOptions=options(),
    )
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    assert list(anchors) == sorted([a, b])
    assert anchors[a].shape == (1, 5)
    session.run(popart.PyStepIO({x: np.arange(-2, 3, dtype=np.float32)}, anchors))
    np.testing.assert_array_equal(anchors[a], [[0, 0, 0, 1, 2]])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("EveryN",), "period"),
        (("All", 2), "should not be supplied"),
        (("EveryN", 0), "greater than zero"),
        (("EveryN", -1), "greater than zero"),
        (("Some",), "^Invalid anchor return type ID supplied: Some$"),
    ],
)
def test_wrong_return_types_are_refused(arguments, word):
    with pytest.raises(popart.popart_exception, match=word):
        popart.AnchorReturnType(*arguments)


def test_return_types_in_any_case_and_their_accessors():
    assert popart.AnchorReturnType("aLL").id() is popart.AnchorReturnTypeId.All
    assert popart.AnchorReturnType("everyn", 3).rp() == 3
    with pytest.raises(popart.popart_exception, match="EveryN"):
        popart.AnchorReturnType("Final").rp()


def test_data_flows_with_wrong_batches_or_periods_are_refused():
    art = popart.AnchorReturnType("EveryN", 2)
    with pytest.raises(popart.popart_exception, match="positive"):
        popart.DataFlow(0, [])
    with pytest.raises(popart.popart_exception, match="divide"):
        popart.DataFlow(3, {"a": art})
    with pytest.raises(popart.popart_exception, match="divide"):
        popart.DataFlow(1, {"a": art})
    with pytest.raises(TypeError, match="incompatible function arguments"):
        popart.DataFlow(1, "abc")
    assert popart.DataFlow(4, ["b", "a", "b"]).anchors() == ["a", "b"]


def test_unknown_anchors_say_why(device):
    case = linear()

    def session(anchor):
        return training(case, [anchor], device)

    with pytest.raises(popart.popart_exception, match="not in Ir Tensors"):
        session("nothing")
    with pytest.raises(popart.popart_exception, match=r"not in Ir Tensors.*no tensor|No gradient path"):
        session("Gradient___nothing")


def test_inference_without_anchors_is_refused(device):
    case = linear()
    with pytest.raises(popart.popart_exception, match="anchor"):
        popart.InferenceSession(case.model, popart.DataFlow(1, {}), device)


def test_inputs_and_streamed_scalars_can_be_anchored(device):
    case = linear()
    optimizer = popart.SGD({"defaultLearningRate": (0.25, False), "lossScaling": (2.0, False)})
    names = {
        case.x: None,
        popart.reservedGradientPrefix() + case.x: None,
        "scaledLearningRate0___default___FLOAT": 0.125,
        "lossScaling___default___FLOAT": 2.0,
        popart.reservedGradientPrefix() + case.loss: 2.0,
    }
    session = training(case, list(names), device, optimizer=optimizer)
    x = np.random.default_rng(8).standard_normal((MICRO_BATCH, INPUTS)).astype(np.float32)
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({case.x: x}, anchors))
    np.testing.assert_array_equal(anchors[case.x], x)
    for name, value in names.items():
        if value is not None:
            assert anchors[name].item() == value


@pytest.mark.sample(9)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", [("All",), ("Final",), ("Sum",), ("EveryN", 2)], ids=str)
def test_accumulators_hold_the_sum_so_far_of_each_replica(device_of, replicas, kind):
    case = linear()
    accum, gradient_name = popart.reservedAccumPrefix() + case.w, popart.reservedGradientPrefix() + case.w
    anchors = {
        accum: popart.AnchorReturnType(*kind),
        gradient_name: popart.AnchorReturnType("Final"),
        case.loss: popart.AnchorReturnType("Final"),
    }
    optimizer = popart.ConstSGD(0.1, 0.0, 2.0)
    opts = replicated(replicas, 3)
    session = training(case, anchors, device_of(replicas), batches=2, optimizer=optimizer, opts=opts)
    x = np.random.default_rng(9).standard_normal((2, 3, replicas, MICRO_BATCH, INPUTS)).astype(np.float32)
    arrays = session.initAnchorArrays()
    session.run(popart.PyStepIO({case.x: x}, arrays))
    _, _, dws = _numpy_run(case, x)
    sums = np.cumsum(2 * dws, axis=1)
    wanted = {"All": sums, "Final": sums[-1, -1], "Sum": sums.sum(axis=(0, 1))}.get(
        kind[0], sums.reshape(6, *sums.shape[2:])[1::2]
    )
    np.testing.assert_allclose(arrays[accum], wanted.reshape(arrays[accum].shape), 1e-5, 1e-5)
    np.testing.assert_allclose(
        arrays[gradient_name], 2 * dws[-1, -1].reshape(arrays[gradient_name].shape), 1e-5, 1e-5
    )


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.sample(2)
@pytest.mark.slow
def test_the_velocity_of_combined_sgd_leads_from_one_weight_to_the_next(device, accumulation):
    """w[b, last] - rate * Accl[b, last] = w[b + 1]; without accumulation w[b] is the weight after the update of b."""
    case = linear()
    accl = popart.reservedAcclPrefix() + case.w
    optimizer = popart.SGD(
        {
            "defaultLearningRate": (0.1, False),
            "defaultMomentum": (0.9, True),
            "defaultWeightDecay": (0.1, True),
            "lossScaling": (4.0, True),
        }
    )
    session = training(
        case, [case.w, accl], device, batches=4, optimizer=optimizer, opts=replicated(1, accumulation)
    )
    x = np.random.default_rng(10).standard_normal((4, accumulation, MICRO_BATCH, INPUTS)).astype(np.float32)
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({case.x: x}, anchors))
    w = anchors[case.w].reshape(4, accumulation, INPUTS, OUTPUTS)[:, -1]
    v = anchors[accl].reshape(4, accumulation, INPUTS, OUTPUTS)[:, -1]
    if accumulation == 1:
        w = np.concatenate([case.start[None], w])
        v = np.concatenate([v, v[-1:]])
    np.testing.assert_allclose(w[:-1] - 0.1 * v[:-1], w[1:], rtol=1e-5, atol=1e-6)


def test_accumulators_that_are_not_there(device_of):
    case = linear()
    accum = popart.reservedAccumPrefix() + case.w
    with pytest.raises(popart.popart_exception, match="not in Ir Tensors"):
        training(case, [accum], device_of(1))
    momentum = popart.SGD({"defaultMomentum": (0.9, True)})
    with pytest.raises(popart.popart_exception, match="not in Ir Tensors"):
        training(case, [accum], device_of(1), optimizer=momentum, opts=replicated(1, 2))


@pytest.mark.parametrize(("replicas", "accumulation"), [(2, 1), (8, 1), (4, 3), (8, 2)])
@pytest.mark.sample(4)
def test_the_velocities_of_replicas_are_the_velocity_on_average(device_of, replicas, accumulation):
    """Without accumulation all replicas show it; with it each shows its own part, times their number."""
    case = linear()
    accl = popart.reservedAcclPrefix() + case.w
    values = {
        "defaultLearningRate": (0.1, False),
        "defaultMomentum": (0.9, True),
        "defaultWeightDecay": (0.1, True),
        "lossScaling": (4.0, True),
    }
    opts = replicated(replicas, accumulation)
    names = [case.w, accl, f"Gradient___{case.w}"]
    session = training(case, names, device_of(replicas), batches=3, optimizer=popart.SGD(values), opts=opts)
    x = np.random.default_rng(10).standard_normal((3, accumulation, replicas, MICRO_BATCH, INPUTS))
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({case.x: x.astype(np.float32)}, anchors))
    w, v, g = (anchors[n].reshape(3, accumulation, replicas, INPUTS, OUTPUTS) for n in names)
    last = v[:, -1]
    used = w if accumulation > 1 else np.concatenate([np.broadcast_to(case.start, w[:1].shape), w[:-1]])
    np.testing.assert_allclose(
        used[:-1, -1, 0] - 0.1 * last[:-1].mean(axis=1), used[1:, 0, 0], rtol=1e-5, atol=1e-6
    )
    if accumulation == 1:
        assert all(np.array_equal(last[:, 0], last[:, r]) for r in range(replicas))
    else:
        own = np.diff(v, axis=1)
        np.testing.assert_allclose(own, replicas * g[:, 1:] / 4, rtol=1e-4, atol=1e-5)


def test_an_anchor_that_is_no_tensor_is_named_where_nothing_else_is_wanted(device):
    case = linear()
    with pytest.raises(
        popart.popart_exception, match=r"`MatMul:1' not in Ir Tensors\. Did you mean 'MatMul:0'"
    ):
        popart.InferenceSession(case.model, popart.DataFlow(1, ["MatMul:1"]), device)


@pytest.mark.parametrize(
    ("mode", "accumulation", "replicas", "clips"),
    [
        pytest.param("Adam", 1, 2, False, marks=pytest.mark.slow),
        ("Lamb", 3, 2, True),
        ("LambNoBias", 1, 1, True),
        ("AdaMax", 2, 1, False),
    ],
)
@pytest.mark.sample(6)
def test_the_step_of_adam_and_the_norms_of_lamb_are_those_of_the_update(
    device_of, mode, accumulation, replicas, clips
):
    """``w - lr r AdamUpdater___w`` is the new weight, with LAMB's ratio r of the roots of the squared norms."""
    case = linear()
    settings = [popart.ClipNormSettings.clipAllWeights(0.05)] if clips else []
    optimizer = popart.Adam(
        {
            "defaultLearningRate": (0.125, False),
            "defaultWeightDecay": (0.1, True),
            "lossScaling": (8.0, True),
        },
        mode=popart.AdamMode[mode],
        clip_norm_settings=settings,
    )
    names = ["AdamUpdater___" + case.w]
    if mode.startswith("Lamb"):
        names += ["LambR1Sq___" + case.w, "LambR2Sq___" + case.w]
    kind = popart.AnchorReturnType("Final" if accumulation > 1 else "All")
    opts = replicated(replicas, accumulation)
    anchors = dict.fromkeys(names, kind)
    session = training(case, anchors, device_of(replicas), optimizer=optimizer, opts=opts)
    assert session.getInfo(names[0]).shape() == [INPUTS, OUTPUTS]
    random, before = np.random.default_rng(1), case.start
    for _ in range(3):
        x = random.standard_normal((accumulation, replicas, MICRO_BATCH, INPUTS)).astype(np.float32)
        arrays = session.initAnchorArrays()
        session.run(popart.PyStepIO({case.x: x}, arrays))
        step, *norms = (arrays[name].reshape(replicas, -1)[-1] for name in names)
        ratio = 1.0
        if norms:
            np.testing.assert_allclose(norms[0], np.sum(before**2), rtol=1e-5)
            np.testing.assert_allclose(norms[1], np.sum(step**2), rtol=1e-5)
            ratio = min(np.linalg.norm(before), 10.0) / np.linalg.norm(step)
        (after,) = weights(session, case.w)
        wanted = before - 0.125 * ratio * step.reshape(before.shape)
        np.testing.assert_allclose(after, wanted, rtol=1e-5, atol=1e-6)
        before = after


def test_steps_of_updates_come_once_a_batch(device):
    case = linear()
    for anchor, optimizer, words in [
        ("AdamUpdater___" + case.w, popart.Adam({}), "changes once a batch"),
        ("LambR1Sq___" + case.w, popart.Adam({}), "not in Ir"),
        ("AdamUpdater___" + case.w, popart.ConstSGD(0.1), "not in Ir"),
    ]:
        with pytest.raises(popart.popart_exception, match=words):
            training(case, [anchor], device, optimizer=optimizer, opts=replicated(1, 2))
