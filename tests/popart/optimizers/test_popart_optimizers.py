"""Optimizers: the update rules against float64 NumPy over many steps, their checks, and their place in a
session.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import podrun.popart as popart
from podrun.core.executable import TensorSpec, numpy_dtype
from podrun.runtime.optimizers.hyperparameters import UpdateContext
from tests.popart.optimizers import optimizer_references as reference
from tests.popart.popart_sessions import INPUTS, MICRO_BATCH, gradient, linear, replicated, training, weights

STEPS = 15
SHAPE = (5, 3)
TOLERANCE = {"float32": 2e-5, "float16": 2e-2}


def drive(optimizer, dtype="float32", context=None, scale=1.0):
    """Weights after each step of a rule fed with gradients that are ``scale`` times what `gradients`
    gives."""
    rule = optimizer.rule(context or UpdateContext())
    spec = TensorSpec("w", dtype, SHAPE)
    start = first_weight().astype(dtype)
    state = {p: jnp.full(s.shape, v, numpy_dtype(s.dtype)) for p, (s, v) in rule.state(spec).items()}
    state |= {p: jnp.asarray(v) for p, v in rule.initial_state(spec, start).items()}
    w = jnp.asarray(start)
    for g in gradients():
        scalars = {name: jnp.float32(value) for name, value in rule.scalars("w").items()}
        w, state = rule.apply(
            "w", w, jnp.asarray((g * scale).astype(rule.gradient_dtype(spec))), state, scalars
        )
        yield np.asarray(w, np.float64)


def first_weight():
    return np.random.default_rng(0).standard_normal(SHAPE)


def gradients():
    random = np.random.default_rng(1)
    return [random.standard_normal(SHAPE) for _ in range(STEPS)]


def compare(ours, theirs, dtype):
    for step, (mine, wanted) in enumerate(zip(ours, theirs, strict=True)):
        np.testing.assert_allclose(
            mine, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], err_msg=f"step {step}"
        )


SGD_CASES = [
    {},
    {"wd": 0.1},
    {"mm": 0.9},
    {"mm": 0.9, "wd": 0.05, "dm": 0.3},
    {"mm": 0.5, "vs": 4.0, "wd": 0.01},
    {"mm": 0.9, "nesterov": True, "wd": 0.02},
    {"mm": 0.9, "nesterov": True, "vs": 2.0},
]


def sgd_of(case, const, combined=True, loss_scaling=1.0, **kwargs):
    names = {"wd": "WeightDecay", "mm": "Momentum", "dm": "Dampening", "vs": "VelocityScaling"}
    values = {f"default{names[key]}": (value, const) for key, value in case.items() if key in names}
    values["defaultLearningRate"] = (0.05, const)
    values["lossScaling"] = (loss_scaling, const)
    values["nesterov"] = (float(case.get("nesterov", False)), True)
    kind = popart.SGDAccumulatorAndMomentum
    return popart.SGD(values, accumulatorAndMomentum=kind.Combined if combined else kind.Separate, **kwargs)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("const", [True, False], ids=["const", "streamed"])
@pytest.mark.parametrize("combined", [True, False], ids=["combined", "separate"])
@pytest.mark.parametrize("case", SGD_CASES, ids=str)
@pytest.mark.sample(5)
def test_sgd_updates_weights_as_its_formula_says(case, combined, const, dtype):
    compare(
        drive(sgd_of(case, const, combined), dtype),
        reference.sgd(first_weight().astype(dtype).astype(np.float64), gradients(), lr=0.05, **case),
        dtype,
    )


@pytest.mark.parametrize("case", SGD_CASES, ids=str)
def test_streamed_and_constant_values_give_the_same_bits(case):
    for constant, streamed in zip(drive(sgd_of(case, True)), drive(sgd_of(case, False)), strict=True):
        np.testing.assert_array_equal(constant, streamed)


@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize(
    "optimizer",
    [
        sgd_of({"wd": 0.1}, True, loss_scaling=16),
        sgd_of({"mm": 0.9, "wd": 0.1}, False, loss_scaling=16),
        sgd_of({"mm": 0.9}, False, combined=False, loss_scaling=16),
        popart.Adam({"lossScaling": (16, True)}),
        popart.Adam({"lossScaling": (16, False)}, scaled_optimizer_state=True),
        popart.Adaptive({"lossScaling": (16, False)}),
    ],
    ids=["sgd0", "sgd1", "sgd2", "adam", "adam-scaled-state", "adaptive"],
)
@pytest.mark.sample(3)
def test_gradients_are_unscaled_and_averaged(optimizer, mean):
    """A gradient 16 times too large (and 6 times, summed over replicas and micro-batches) moves the same
    way.
    """
    plain = type(optimizer)(
        {**_constructor_values(optimizer), "lossScaling": (1.0, optimizer.lossScaling.isConst())},
        **_modes(optimizer),
    )
    context = UpdateContext(replicas=2, accumulation=3, mean=mean)
    scaled = drive(optimizer, context=context, scale=16 * (6 if mean else 1))
    compare(scaled, drive(plain), "float32")


def _constructor_values(optimizer):
    keys = optimizer._constructor_keys()
    held = {name: values.default for name, values in optimizer._maps.items()}
    return {key: (held[name].val(), held[name].isConst()) for key, name in keys.items() if name in held}


def _modes(optimizer):
    if isinstance(optimizer, popart.SGD):
        return {"accumulatorAndMomentum": optimizer.accumulatorAndMomentum}
    return {"mode": optimizer.mode}


ADAM = {"lr": 0.02, "b1": 0.8, "b2": 0.95, "eps": 1e-4}
ADAM_CASES = {
    "adam": (popart.AdamMode.Adam, {}),
    "adam-nobias": (popart.AdamMode.AdamNoBias, {"bias": False}),
    "adamax": (popart.AdamMode.AdaMax, {"adamax": True}),
    "lamb": (popart.AdamMode.Lamb, {"lamb": 2.5}),
    "lamb-nobias": (popart.AdamMode.LambNoBias, {"lamb": 2.5, "bias": False}),
    "lamb-unbounded": (popart.AdamMode.Lamb, {"lamb": 0.0}),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain-state", "scaled-state"])
@pytest.mark.parametrize("decay", ["none", "decay", "l2"])
@pytest.mark.parametrize("case", ADAM_CASES)
@pytest.mark.sample(5)
def test_adam_updates_weights_as_its_formula_says(case, decay, scaled, dtype):
    mode, extra = ADAM_CASES[case]
    wd = 0.0 if decay == "none" else 0.1
    l2 = decay == "l2"
    optimizer = popart.Adam(
        {
            "defaultLearningRate": (ADAM["lr"], False),
            "defaultBeta1": (ADAM["b1"], True),
            "defaultBeta2": (ADAM["b2"], False),
            "defaultEps": (ADAM["eps"], True),
            "defaultWeightDecay": (wd, True),
            "defaultMaxWeightNorm": (extra.get("lamb", 10.0), True),
            "lossScaling": (4.0, False),
        },
        mode=mode,
        weight_decay_mode=popart.WeightDecayMode.L2Regularization if l2 else popart.WeightDecayMode.Decay,
        scaled_optimizer_state=scaled,
    )
    start = first_weight().astype(dtype).astype(np.float64)
    expected = reference.adam(start, gradients(), **ADAM, wd=wd, l2=l2, **extra)
    compare(drive(optimizer, dtype, scale=4.0), expected, dtype)


ADAPTIVE_CASES = [
    pytest.param(mode, momentum, tf, id=f"{mode}-{momentum}{'-tf' if tf else ''}")
    for mode in ("AdaGrad", "RMSProp", "CenteredRMSProp", "AdaDelta")
    for momentum in (0.0, 0.7)
    for tf in ((False, True) if "RMSProp" in mode else (False,))
]


@pytest.mark.parametrize("l2", [False, True], ids=["decay", "l2"])
@pytest.mark.parametrize(("mode", "momentum", "tf"), ADAPTIVE_CASES)
def test_adaptive_optimizers_update_weights_as_their_formulas_say(mode, momentum, tf, l2):
    values = {"lr": 0.01, "alpha": 0.9, "eps": 1e-3}
    optimizer = popart.Adaptive(
        {
            "defaultLearningRate": (values["lr"], True),
            "defaultAlpha": (values["alpha"], False),
            "defaultEps": (values["eps"], True),
            "defaultMomentum": (momentum, True),
            "defaultWeightDecay": (0.1, True),
            "lossScaling": (2.0, True),
        },
        mode=popart.AdaptiveMode[mode],
        weight_decay_mode=popart.WeightDecayMode.L2Regularization if l2 else popart.WeightDecayMode.Decay,
        rmsprop_tf_variant=tf,
    )
    expected = reference.adaptive(
        first_weight(), gradients(), mode=mode, momentum=momentum, wd=0.1, l2=l2, tf=tf, **values
    )
    compare(drive(optimizer, scale=2.0), expected, "float32")


# --- Checks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: popart.SGD({"learningRate": (0.1, True)}), "Invalid SGD key"),
        (lambda: popart.Adam({"beta1": (0.1, True)}), "Invalid Adam key"),
        (lambda: popart.Adaptive({"defaultBeta1": (0.1, True)}), "Invalid Adaptive key"),
        (lambda: popart.SGD({"defaultLearningRate": 0.1}), "pair"),
        (
            lambda: popart.SGD({"defaultLearningRate": (-0.1, False)}),
            r"^Negative learning rate \(-0.1\) in SGD",
        ),
        (lambda: popart.SGD({"defaultLearningRate": (0.0, True)}), "^Constant, zero learning rate in SGD"),
        (lambda: popart.SGD({"defaultVelocityScaling": (0.0, True)}), "^Non-positive velocity scaling"),
        (lambda: popart.SGD({"lossScaling": (0.0, True)}), "^Loss scaling cannot be 0"),
        (lambda: popart.SGD({"defaultDampening": (0.1, True), "nesterov": (1.0, True)}), "nesterov"),
        (lambda: popart.Adam({"defaultEps": (0.0, True)}), "eps"),
        (lambda: popart.Adaptive({}, mode=popart.AdaptiveMode.AdaGrad, rmsprop_tf_variant=True), "RMSProp"),
        (
            lambda: popart.SGD(
                {}, [popart.ClipNormSettings.clipAllWeights(1.0), popart.ClipNormSettings(["w"], 1.0)]
            ),
            "only group",
        ),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(make, word):
    with pytest.raises(popart.popart_exception, match=word):
        make()


def test_accessors_give_defaults_and_values_of_single_weights():
    sgd = popart.ConstSGD(0.5, 0.1, 8)
    assert sgd.learningRates().getDefault() == popart.OptimizerValue(0.5, True)
    assert sgd.getLossScalingVal() == 8
    assert popart.SGD({}).learningRates().getDefault().val() == 0.1
    adam = popart.Adam({})
    assert (adam.beta1s().getDefault().val(), adam.beta2s().getDefault().val()) == (0.9, 0.999)
    assert adam.maxWeightNorms().getDefault().val() == 10
    assert popart.Adaptive({}).alphas().getDefault().val() == 0.99
    assert popart.Adam({"maxWeightNorm": (3, True)}).maxWeightNorms().getDefault().val() == 3


# --- In a session -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        pytest.param(
            popart.SGD({"defaultMomentum": (0.9, True), "defaultWeightDecay": (0.1, True)}),
            ["Accl___"],
            marks=pytest.mark.slow,
        ),
        pytest.param(sgd_of({"mm": 0.9}, False, combined=False), ["Accl1___"], marks=pytest.mark.slow),
        (popart.Adam({}), ["Accl1___", "Accl2___", "Step___"]),
        (popart.Adam({}, mode=popart.AdamMode.Lamb), ["Accl1___", "Accl2___", "Step___"]),
        pytest.param(
            popart.Adaptive({"defaultMomentum": (0.5, True)}),
            ["Accl1___", "Accl3___"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["sgd1", "sgd2", "adam", "lamb", "adaptive"],
)
@pytest.mark.usefixtures("programs_compile_once")
@pytest.mark.sample(6)
def test_training_goes_on_from_a_saved_model_as_if_it_had_not_stopped(device_of, tmp_path, optimizer, states):
    """Two steps, save, load, two steps: the same bits as four steps, weights and state."""
    case = linear()
    x = np.random.default_rng(5).standard_normal((4, 2, MICRO_BATCH, INPUTS)).astype(np.float32)

    def steps(session, data):
        for item in data:
            session.run(popart.PyStepIO({case.x: item}, session.initAnchorArrays()))
        return weights(session, case.w, *(prefix + case.w for prefix in states))

    whole = steps(training(case, [case.loss], device_of(2), optimizer=optimizer, opts=replicated(2)), x)
    first = training(case, [case.loss], device_of(2), optimizer=optimizer, opts=replicated(2))
    steps(first, x[:2])
    path = str(tmp_path / "half.onnx")
    first.modelToHost(path)
    with open(path, "rb") as file:
        saved = file.read()
    second = training(case, [case.loss], device_of(2), optimizer=optimizer, opts=replicated(2), model=saved)
    for expected, got in zip(whole, steps(second, x[2:]), strict=True):
        np.testing.assert_array_equal(expected, got)


def test_specific_values_and_updates_from_the_host(device):
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [MICRO_BATCH, 2])
    w0 = np.ones((2, 2), np.float32)
    a, b = (builder.addInitializedInputTensor(w0 * (k + 1), name) for k, name in enumerate(("a", "b")))
    y = builder.aiOnnx.add([builder.aiOnnx.matmul([x, a]), builder.aiOnnx.matmul([x, b])])
    loss = builder.aiGraphcore.identityloss([y], popart.ReductionType.Sum)

    def optimizer(rate, special):
        made = popart.SGD({"defaultLearningRate": (rate, False)})
        made.insertSpecific(b, {"learningRate": (special, False)})
        return made

    session = popart.TrainingSession(
        builder.getModelProto(), popart.DataFlow(1, [loss]), loss, optimizer(0.1, 0.2), device
    )
    session.prepareDevice()
    session.weightsFromHost()
    data = np.random.default_rng(6).standard_normal((MICRO_BATCH, 2)).astype(np.float32)
    g = data.sum(axis=0)[:, None] * np.ones((1, 2))
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({x: data}, anchors))
    session.updateOptimizerFromHost(optimizer(0.01, 0.02))
    session.run(popart.PyStepIO({x: data}, anchors))
    got_a, got_b = weights(session, a, b)
    np.testing.assert_allclose(got_a, w0 - 0.11 * g, rtol=1e-5)
    np.testing.assert_allclose(got_b, 2 * w0 - 0.22 * g, rtol=1e-5)


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (
            popart.SGD({"defaultLearningRate": (0.1, True)}),
            "^Can not replace a non constant value with a constant",
        ),
        (popart.Adam({}), "cannot replace"),
        (
            popart.SGD({"defaultLearningRate": (0.1, False), "defaultWeightDecay": (0.5, True)}),
            "^Values are constant but do not match",
        ),
        (
            popart.SGD({"defaultLearningRate": (0.1, False)}, accl1Type=popart.DataType.FLOAT16),
            "modes and types",
        ),
    ],
)
def test_invalid_optimizer_updates(device, other, word):
    case = linear()
    optimizer = popart.SGD({"defaultLearningRate": (0.1, False)})
    session = training(case, [case.loss], device, optimizer=optimizer)
    with pytest.raises(popart.popart_exception, match=word):
        session.updateOptimizerFromHost(other)


def test_later_changes_of_an_optimizer_do_not_reach_the_session(device):
    case = linear()
    optimizer = popart.SGD({"defaultLearningRate": (0.1, False)})
    session = training(case, [case.loss], device, optimizer=optimizer)
    optimizer.insertSpecific(case.w, {"learningRate": (5.0, False)})
    x = np.random.default_rng(7).standard_normal((MICRO_BATCH, INPUTS)).astype(np.float32)
    session.run(popart.PyStepIO({case.x: x}, session.initAnchorArrays()))
    expected = case.start - 0.1 * gradient(case, x, case.start)
    np.testing.assert_allclose(weights(session, case.w)[0], expected, rtol=1e-5)
