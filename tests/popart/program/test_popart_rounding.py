"""Stochastic rounding of weights and state, and the RNG state."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import podrun.popart as popart
from podrun.compiler.extra_state import stochastic_half
from tests.popart.popart_sessions import INPUTS, MICRO_BATCH, linear, options, replicated, training, weights

pytestmark = pytest.mark.usefixtures("programs_compile_once")

STEPS = 64
ROUNDED = jax.jit(stochastic_half)


def draw(value, count=4096, seed=0):
    state = jax.random.key_data(jax.random.key(seed))
    return np.asarray(ROUNDED(np.full(count, value, np.float32), state))


@pytest.mark.parametrize("value", [1.0001, -1.0001, 1000.3, 3.3e-6, -5e-8, 6.1e-5, 40000.3, 0.1])
def test_a_value_becomes_one_of_its_neighbours_and_itself_on_average(value):
    found = draw(value)
    ulp = np.float64(np.spacing(np.abs(np.float16(value * 0.9999))))
    assert np.abs(found.astype(np.float64) - value).max() < abs(ulp) * 1.001
    assert len(np.unique(found)) == 2
    # The mean of n draws has a standard deviation of at most ulp / (2 sqrt(n)); five of them are far out.
    assert abs(found.astype(np.float64).mean() - value) < 5 * abs(ulp) / (2 * np.sqrt(len(found)))


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 65504.0, 2.0**-24, np.inf, -np.inf, np.nan])
def test_halves_stay_what_they_are(value):
    np.testing.assert_array_equal(draw(value, 64), np.float16(value))


def session_of(device, case, **values):
    optimizer = popart.ConstSGD(2.0**-14)
    replicas = device.numIpus
    made = replicated(replicas, enableStochasticRounding=True, enableLoadAndOffloadRNGState=True, **values)
    return training(case, [], device, optimizer=optimizer, opts=made, batches=STEPS)


def steps(replicas):
    data = np.abs(np.random.default_rng(0).standard_normal((STEPS, replicas, MICRO_BATCH, INPUTS)))
    return (data / replicas / MICRO_BATCH).astype(np.float16)


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.sample(2)
def test_steps_too_small_for_the_last_place_are_not_lost(device_of, replicas):
    """Rounded to nearest the weights stand still; stochastically they move as float32 weights do."""
    case = linear("float16")
    plain = training(
        case, [], device_of(replicas), optimizer=popart.ConstSGD(2.0**-14), opts=replicated(replicas), batches=STEPS
    )  # fmt: skip
    data = steps(replicas)
    plain.run(popart.PyStepIO({case.x: data}, {}))
    before = plain.parts.model.built.weights[case.w].astype(np.float64)
    still = np.abs(weights(plain, case.w)[0] - before).mean()
    rounded = session_of(device_of(replicas), case)
    rounded.run(popart.PyStepIO({case.x: data}, {}))
    moved = weights(rounded, case.w)[0] - before
    want = np.zeros_like(before)
    for x in data.astype(np.float64).reshape(STEPS, -1, INPUTS):
        want -= 2.0**-14 * 0.5 * x.T @ np.sign(x @ before)
    ulp = 2.0**-10
    assert still < np.abs(want).mean() / 4
    assert np.abs(moved - want).max() < 6 * ulp * np.sqrt(STEPS) / 2
    assert abs((moved - want).mean()) < 5 * ulp * np.sqrt(STEPS) / 2 / np.sqrt(moved.size)


def test_the_same_seed_rounds_alike_and_another_does_not(device_of):
    case, found = linear("float16"), []
    for seed in (7, 7, 8):
        session = session_of(device_of(1), case)
        session.setRandomSeed(seed)
        session.run(popart.PyStepIO({case.x: steps(1)}, {}))
        found.append(weights(session, case.w)[0])
    np.testing.assert_array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])


def test_a_state_that_was_read_goes_on_where_it_was(device_of):
    case, data = linear("float16"), steps(1)
    session = session_of(device_of(1), case)
    session.setRandomSeed(3)
    session.run(popart.PyStepIO({case.x: data}, {}))
    state, middle = session.getRNGState(), weights(session, case.w)[0]
    session.run(popart.PyStepIO({case.x: data}, {}))
    end = weights(session, case.w)[0]
    assert session.getRNGState() != state
    other = session_of(device_of(1), case)
    other.writeWeights(popart.PyWeightsIO({case.w: middle}))
    other.weightsFromHost()
    other.setRNGState(state)
    other.run(popart.PyStepIO({case.x: data}, {}))
    np.testing.assert_array_equal(weights(other, case.w)[0], end)


def test_a_state_repeats_what_operators_round_with_too(device_of):
    """In one session: without the seed the second pass rounds the operators' results otherwise."""
    case, data = linear("float16"), steps(1)
    session = session_of(device_of(1), case)
    session.setRandomSeed(3)
    session.run(popart.PyStepIO({case.x: data}, {}))
    state, middle = session.getRNGState(), weights(session, case.w)[0]
    assert len(state) == 4
    found = []
    for _ in range(2):
        session.writeWeights(popart.PyWeightsIO({case.w: middle}))
        session.weightsFromHost()
        session.setRNGState(state)
        assert session.getRNGState() == state
        session.run(popart.PyStepIO({case.x: data}, {}))
        found.append((weights(session, case.w)[0], session.getRNGState()))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] != state


def test_with_synthetic_data_the_state_is_empty(device_of):
    opts = options(enableStochasticRounding=True, enableLoadAndOffloadRNGState=True)
    opts.syntheticDataMode = popart.SyntheticDataMode.Zeros
    session = training(linear("float16"), [], device_of(1), opts=opts)
    assert session.getRNGState() == []
    session.setRNGState([])
    with pytest.raises(popart.popart_runtime_error, match="expecting size 0"):
        session.setRNGState([1, 2])


@pytest.mark.slow
def test_sharded_programs_round_and_move_on(device_of):
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT16", [2, 4]))
    made = options(enableStochasticRounding=True, enableLoadAndOffloadRNGState=True)
    made.virtualGraphMode = popart.VirtualGraphMode.Manual
    h = x
    for ipu in range(2):
        w = builder.addInitializedInputTensor(np.ones((4, 4), np.float16))
        with builder.virtualGraph(ipu):
            h = builder.aiOnnx.matmul([h, w])
    with builder.virtualGraph(1):
        loss = builder.aiGraphcore.l1loss([h], 0.1)
    session = popart.TrainingSession(
        builder.getModelProto(), popart.DataFlow(2, []), loss, popart.Adam({}), device_of(2), userOptions=made
    )
    session.prepareDevice()
    session.weightsFromHost()
    first = session.getRNGState()
    session.run(popart.PyStepIO({x: np.ones((2, 2, 4), np.float16)}, {}))
    assert session.getRNGState() != first


def test_random_state_is_refused_without_its_option_and_with_a_wrong_size(device):
    session = training(linear("float16"), [], device, opts=options(enableStochasticRounding=True))
    with pytest.raises(popart.popart_exception, match="enableLoadAndOffloadRNGState"):
        session.getRNGState()
    session = session_of(device, linear("float16"))
    for state in ([1], [1, 2, 3], [1, -1, 1, 1]):
        with pytest.raises(popart.popart_runtime_error, match="received rngState of size"):
            session.setRNGState(state)


def test_without_rounding_the_state_is_kept_and_changes_nothing(device):
    session = training(linear(), [], device, opts=options(enableLoadAndOffloadRNGState=True))
    session.setRNGState([5, 6])
    assert session.getRNGState() == [5, 6]


def in_flight(ipus, second, pipelined=True):
    """Two layers of 1.5, the second on IPU ``second``, whose weights lose a quarter of a last place in each of `STEPS`
    batches on average: their values, and the RNG state afterwards."""
    builder = popart.Builder()
    x = y = builder.addInputTensor("FLOAT16", [4, 8])
    names = []
    for stage, ipu in enumerate((0, second)):
        with builder.virtualGraph(ipu), builder.pipelineStage(stage):
            names.append(builder.addInitializedInputTensor(np.full((8, 8), 1.5, np.float16), f"w{stage}"))
            y = builder.aiOnnx.matmul([y, names[-1]])
            if stage:
                loss = builder.aiGraphcore.l1loss([y], 1.0, reduction=popart.ReductionType.Sum)
    made = replicated(
        2,
        virtualGraphMode=popart.VirtualGraphMode.Manual,
        enablePipelining=pipelined,
        enableStochasticRounding=True,
        enableLoadAndOffloadRNGState=True,
    )
    # Both gradients are 8 samples * 12/64: x is 1/64, so that x @ w0 is 12/64; and w1 sums to 12, times x.
    rate = 2.0**-12 / (8 * 12 / 64)
    with popart.DeviceManager().acquireAvailableDevice(2 * ipus) as device:
        session = popart.TrainingSession(
            builder.getModelProto(),
            popart.DataFlow(STEPS, []),
            loss,
            popart.ConstSGD(rate),
            device,
            userOptions=made,
        )
        session.prepareDevice()
        session.weightsFromHost()
        session.setRandomSeed(3)
        session.run(popart.PyStepIO({x: np.full((STEPS, 2, 4, 8), 1 / 64, np.float16)}, {}))
        return [*weights(session, *names), session.getRNGState()]


@pytest.mark.slow
def test_updates_in_flight_round_in_turns():
    """Each with bits of its own: with the same bits each time a weight would go no place or as many as steps."""
    for values in in_flight(2, 1)[:2]:
        places = (1.5 - values.astype(np.float64)) * 2**10
        assert len(np.unique(places)) > 4
        deviation = np.sqrt(STEPS * 3 / 16 / places.size)
        assert abs(places.mean() - STEPS / 4) < 5 * deviation


@pytest.mark.slow
def test_turns_are_the_same_on_two_machines_and_the_state_moves_on_by_all():
    found = in_flight(2, 1)
    for first, second in zip(found, in_flight(8, 4), strict=True):
        np.testing.assert_array_equal(first, second)
    assert in_flight(2, 1, pipelined=False)[2] == found[2]


@pytest.mark.slow
def test_results_and_gradients_of_operators_are_rounded_by_seed_replica_and_micro_batch(device_of):
    case = linear("float16")
    gradient = popart.reservedGradientPrefix() + case.w
    made = replicated(2, enableStochasticRounding=True)
    session = training(case, [case.y, gradient], device_of(2), opts=made, batches=3)
    x = np.tile(np.linspace(-1, 1, MICRO_BATCH * INPUTS).reshape(MICRO_BATCH, INPUTS), (3, 2, 1, 1)).astype(
        np.float16
    )

    def run(seed):
        session.setRandomSeed(seed)
        session.weightsFromHost()
        arrays = session.initAnchorArrays()
        session.run(popart.PyStepIO({case.x: x}, arrays))
        return {name: array.copy() for name, array in arrays.items()}

    first, again, other = run(3), run(3), run(4)
    exact = x[0, 0].astype(np.float64) @ case.start.astype(np.float64)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first[case.y], other[case.y])
    assert not np.array_equal(first[case.y][0, 0], first[case.y][0, 1])
    step = np.spacing(np.abs(exact).astype(np.float16)).astype(np.float64)
    assert (np.abs(first[case.y][0].astype(np.float64) - exact) < step).all()
    assert first[gradient].dtype == np.float16


def halves_on_two_ipus(mode, scaled):
    """What a model of halves gives with all anchored: a norm on IPU 0 and a product on IPU 1, which also reads
    the input, and twice what the norm made."""
    builder = popart.Builder()
    o, g = builder.aiOnnx, builder.aiGraphcore
    x = builder.addInputTensor(popart.TensorInfo("FLOAT16", [4, 8]))
    generator = np.random.default_rng(4)

    def weight(name, *shape):
        return builder.addInitializedInputTensor(generator.standard_normal(shape).astype(np.float16), name)

    with builder.virtualGraph(0), builder.pipelineStage(0):
        y = g.groupnormalization([x, weight("scale", 8), weight("shift", 8)], 2)[0]
    with builder.virtualGraph(1), builder.pipelineStage(1):
        z = o.add([o.add([o.matmul([y, weight("dense", 8, 8)]), y]), x])
        loss = g.l1loss([z], 0.1)
    made = options(enableStochasticRounding=True, virtualGraphMode=popart.VirtualGraphMode.Manual)
    if mode != "sharded":
        made.enablePipelining, made.pipelineSchedule = True, getattr(popart.PipelineSchedule, mode)
    made.enableGradientAccumulation, made.accumulationFactor = True, 4
    made.automaticLossScalingSettings.enabled = scaled
    every = popart.AnchorReturnType("All")
    flow = popart.DataFlow(2, dict.fromkeys([y, z, f"Gradient___{x}", f"Gradient___{y}"], every))
    with popart.DeviceManager().acquireAvailableDevice(2) as device:
        session = popart.TrainingSession(
            builder.getModelProto(),
            flow,
            loss,
            popart.SGD({"defaultLearningRate": (0.1, False), "lossScaling": (8.0, False)}),
            device,
            userOptions=made,
        )
        session.prepareDevice()
        session.weightsFromHost()
        session.setRandomSeed(5)
        arrays = session.initAnchorArrays()
        data = generator.standard_normal((2, 4, 4, 8)).astype(np.float16)
        session.run(popart.PyStepIO({x: data}, arrays))
        trained = weights(session, "scale", "shift", "dense")
        return [*(array.copy() for array in arrays.values()), *trained]


@pytest.mark.parametrize(
    ("mode", "scaled"),
    [
        ("Grouped", True),
        pytest.param("Grouped", False, marks=pytest.mark.slow),
        pytest.param("Interleaved", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_pipelines_round_as_sharded_programs_do(mode, scaled):
    """Bits belong to operators and micro-batches: it does not matter when and where their stages run."""
    for found, wanted in zip(
        halves_on_two_ipus(mode, scaled), halves_on_two_ipus("sharded", scaled), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
