"""Sessions: order of calls, weights in and out, several sessions on a device, seeds, replication."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import podrun.popart as popart
from tests.popart.popart_sessions import (
    INPUTS,
    MICRO_BATCH,
    gradient,
    linear,
    options,
    replicated,
    training,
    weights,
)
from tests.runtime.handovers import way_to_the_machine


def data(*leading, seed=1):
    return np.random.default_rng(seed).standard_normal((*leading, MICRO_BATCH, INPUTS)).astype(np.float32)


def unprepared(device, **kwargs):
    case = linear()
    return popart.TrainingSession(
        case.model, popart.DataFlow(1, [case.y]), case.loss, popart.ConstSGD(0.1), device, **kwargs
    )


# --- Order of calls -----------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["weightsFromHost", "weightsToHost", "getRandomSeed"])
def test_calls_before_prepare_device(device, call):
    with pytest.raises(popart.popart_exception, match=r"prepare\(\) must be called"):
        getattr(unprepared(device), call)()


def test_run_before_prepare_device_and_before_weights(device):
    case, session = linear(), unprepared(device)
    io = popart.PyStepIO({case.x: data()}, session.initAnchorArrays())
    with pytest.raises(popart.popart_exception, match="prepare"):
        session.run(io)
    session.prepareDevice()
    with pytest.raises(popart.popart_runtime_error, match="Must call weightsFromHost before run"):
        session.run(io)
    session.weightsFromHost()
    session.run(io)


def test_preparing_again_leaves_weights_on_the_device(device):
    case = linear()
    session = training(case, [case.y], device)
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    x = np.ones((MICRO_BATCH, INPUTS), np.float32)
    session.run(popart.PyStepIO({case.x: x}, anchors))
    np.testing.assert_allclose(anchors[case.y], x @ case.start, rtol=1e-5)


def test_model_to_host_before_prepare_device(device, tmp_path):
    with pytest.raises(popart.popart_exception, match=r"prepare\(\)"):
        unprepared(device).modelToHost(str(tmp_path / "m.onnx"))
    assert not (tmp_path / "m.onnx").exists()


# --- Replication --------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (2, 1), (1, 3), (2, 3), (8, 1)])
@pytest.mark.sample(6)
def test_a_step_sums_or_averages_over_replicas_and_micro_batches(device_of, replicas, accumulation, mean):
    case = linear()
    kind = popart.ReductionType.Mean if mean else popart.ReductionType.Sum
    opts = replicated(replicas, accumulation, accumulationAndReplicationReductionType=kind)
    session = training(case, [case.loss], device_of(replicas), opts=opts, batches=2)
    x = data(2, accumulation, replicas)
    session.run(popart.PyStepIO({case.x: x}, session.initAnchorArrays()))
    w = case.start.astype(np.float64)
    for batch in x.reshape(2, -1, MICRO_BATCH, INPUTS):
        total = sum(gradient(case, piece, w) for piece in batch)
        w = w - 0.1 * total / (len(batch) if mean else 1)
    np.testing.assert_allclose(weights(session, case.w)[0], w, rtol=1e-5, atol=1e-6)


def test_repeats_give_the_same_bits(device_of):
    case = linear()
    x = data(3, 2, 4)
    results = []
    for _ in range(2):
        session = training(case, [case.loss], device_of(4), opts=replicated(4, 2), batches=3)
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({case.x: x}, anchors))
        results.append((weights(session, case.w)[0], anchors[case.loss]))
        session.parts.program.device.detach()
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_steps_may_be_cut_differently_with_the_same_bits(device):
    """Four batches in one run, or four runs of one batch."""
    case = linear()
    x = data(4)
    whole = training(case, [case.loss], device, batches=4)
    whole.run(popart.PyStepIO({case.x: x}, whole.initAnchorArrays()))
    expected = weights(whole, case.w)[0]
    single = training(case, [case.loss], device)
    for piece in x:
        single.run(popart.PyStepIO({case.x: piece}, single.initAnchorArrays()))
    np.testing.assert_array_equal(weights(single, case.w)[0], expected)


def test_float16_models_train(device_of):
    case = linear("float16")
    session = training(case, [case.y], device_of(2), opts=replicated(2))
    x = data(2).astype(np.float16)
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({case.x: x}, anchors))
    assert anchors[case.y].dtype == np.float16
    expected = case.start - 0.1 * sum(gradient(case, piece, case.start) for piece in x)
    np.testing.assert_allclose(weights(session, case.w)[0], expected, rtol=5e-3, atol=5e-3)


# --- Weights ------------------------------------------------------------------------------------


def test_model_to_host_writes_a_model_that_onnx_checks_and_inference_takes(device, tmp_path):
    case = linear()
    momentum = popart.SGD({"defaultMomentum": (0.9, True)})
    session = training(case, [case.loss], device, optimizer=momentum)
    session.run(popart.PyStepIO({case.x: data()}, session.initAnchorArrays()))
    path = str(tmp_path / "trained.onnx")
    session.modelToHost(path)
    onnx.checker.check_model(onnx.load(path))
    trained = weights(session, case.w)[0]
    inference = popart.InferenceSession(path, popart.DataFlow(1, [case.y]), device)
    inference.prepareDevice()
    anchors = inference.initAnchorArrays()
    inference.run(popart.PyStepIO({case.x: data()}, anchors))
    np.testing.assert_allclose(anchors[case.y], data() @ trained, rtol=1e-5)


def test_optimizer_state_is_left_out_if_asked(device, tmp_path):
    case = linear()
    momentum = popart.SGD({"defaultMomentum": (0.9, True)})
    opts = options(disableOptimizerStateTensorStreams=True)
    session = training(case, [case.loss], device, optimizer=momentum, opts=opts)
    session.modelToHost(str(tmp_path / "m.onnx"))
    assert [t.name for t in onnx.load(str(tmp_path / "m.onnx")).graph.initializer] == [case.w]


def test_constant_weights_cannot_be_changed(device):
    case = linear()
    session = popart.InferenceSession(case.model, popart.DataFlow(1, [case.y]), device)
    session.prepareDevice()
    with pytest.raises(popart.popart_exception, match="constantWeights"):
        session.resetHostWeights(case.model)
    with pytest.raises(popart.popart_exception, match="constantWeights"):
        session.writeWeights(popart.PyWeightsIO({case.w: case.start}))


def test_weights_of_an_inference_session_can_be_replaced(device):
    case, other = linear(seed=0), linear(seed=9)
    session = popart.InferenceSession(
        case.model, popart.DataFlow(1, [case.y]), device, userOptions=options(constantWeights=False)
    )
    session.prepareDevice()
    session.weightsFromHost()

    def result():
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({case.x: data()}, anchors))
        return anchors[case.y]

    np.testing.assert_allclose(result(), data() @ case.start, rtol=1e-5)
    session.resetHostWeights(other.model)
    session.weightsFromHost()
    np.testing.assert_allclose(result(), data() @ other.start, rtol=1e-5)
    session.writeWeights(popart.PyWeightsIO({case.w: case.start * 2}))
    session.weightsFromHost()
    np.testing.assert_allclose(result(), data() @ case.start * 2, rtol=1e-5)


def test_reset_host_weights_must_be_sent_before_the_next_run(device):
    case = linear()
    session = training(case, [case.loss], device)
    session.resetHostWeights(linear(seed=4).model)
    io = popart.PyStepIO({case.x: data()}, session.initAnchorArrays())
    with pytest.raises(popart.popart_runtime_error, match="weightsFromHost"):
        session.run(io)


def test_reset_host_weights_refuses_strangers(device):
    case = linear()
    session = training(case, [case.loss], device)
    builder = popart.Builder()
    builder.addInitializedInputTensor(np.zeros(3, np.float32), "stranger")
    with pytest.raises(popart.popart_exception, match="'stranger'"):
        session.resetHostWeights(builder.getModelProto())
    session.resetHostWeights(builder.getModelProto(), True)
    builder = popart.Builder()
    builder.addInitializedInputTensor(np.zeros((4, 3), np.float32))
    with pytest.raises(popart.popart_exception, match="init_input"):
        session.resetHostWeights(builder.getModelProto())


def test_read_weights_checks_sizes_and_leaves_unknown_names_alone(device):
    case = linear()
    session = training(case, [case.loss], device)
    stranger = np.ones(2)
    session.readWeights(popart.PyWeightsIO({"stranger": stranger}))
    np.testing.assert_array_equal(stranger, 1)
    with pytest.raises(popart.popart_runtime_error, match="Differing sizes"):
        session.readWeights(popart.PyWeightsIO({case.w: np.zeros(3, np.float32)}))


def test_sessions_share_a_device_and_the_evicted_one_needs_its_weights_again(device):
    case = linear()
    first = training(case, [case.loss], device)
    first.run(popart.PyStepIO({case.x: data()}, first.initAnchorArrays()))
    first.weightsToHost()
    trained = weights(first, case.w)[0]
    second = training(case, [case.loss], device)
    second.run(popart.PyStepIO({case.x: data()}, second.initAnchorArrays()))
    io = popart.PyStepIO({case.x: data()}, first.initAnchorArrays())
    with pytest.raises(popart.popart_runtime_error, match="weightsFromHost"):
        first.run(io)
    first.weightsFromHost()
    np.testing.assert_array_equal(weights(first, case.w)[0], trained)
    first.run(io)


# --- Random numbers -----------------------------------------------------------------------------


def dropout_session(device, replicas=1):
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [64])
    (y,) = builder.aiOnnx.dropout([x], 1, 0.5)
    loss = builder.aiGraphcore.identityloss([y])
    session = popart.TrainingSession(
        builder.getModelProto(),
        popart.DataFlow(1, [y, popart.reservedGradientPrefix() + x]),
        loss,
        popart.ConstSGD(0.1),
        device,
        userOptions=replicated(replicas),
    )
    session.prepareDevice()
    session.weightsFromHost()

    def run():
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({x: np.ones((replicas, 64), np.float32)}, anchors))
        return anchors[y], anchors[popart.reservedGradientPrefix() + x]

    return session, run


def test_seeds_repeat_a_sequence_and_can_be_read_to_continue_it(device):
    session, run = dropout_session(device)
    session.setRandomSeed(7)
    first, _ = run()
    middle = session.getRandomSeed()
    second, _ = run()
    assert not np.array_equal(first, second)
    session.setRandomSeed(7)
    np.testing.assert_array_equal(run()[0], first)
    session.setRandomSeed(middle)
    np.testing.assert_array_equal(run()[0], second)
    session.setRandomSeed(8)
    assert not np.array_equal(run()[0], first)


@pytest.mark.slow  # By default `tests/compiler/test_random.py` compares the masks of replicas, and their training.
def test_replicas_draw_their_own_numbers_and_backward_uses_the_forward_mask(device_of):
    _, run = dropout_session(device_of(2), 2)
    y, dy = run()
    assert not np.array_equal(y[0], y[1])
    np.testing.assert_array_equal(y != 0, dy != 0)
    assert set(np.unique(y)) == {0, 2}


def test_programs_without_randomness_have_no_seed(device):
    session = training(linear(), [linear().loss], device)
    session.setRandomSeed(3)
    assert session.getRandomSeed() == 0
    with pytest.raises(popart.popart_exception, match=r"prepare\(\)"):
        unprepared(device).setRandomSeed(1)


# --- Errors while a session is made -------------------------------------------------------------


def test_losses_that_are_unknown_or_no_scalars_are_refused(device):
    case = linear()
    with pytest.raises(popart.popart_exception, match=f"^Loss tensor, '{case.y}', must be a scalar tensor$"):
        popart.TrainingSession(case.model, popart.DataFlow(1, [case.y]), case.y, popart.ConstSGD(0.1), device)
    with pytest.raises(popart.popart_exception, match="'nothing'"):
        popart.TrainingSession(
            case.model, popart.DataFlow(1, [case.y]), "nothing", popart.ConstSGD(0.1), device
        )


def test_reports_and_cycles_come_after_a_run_and_with_their_option(device):
    case = linear()
    session = training(case, [case.loss], device, opts=options(instrumentWithHardwareCycleCounter=True))
    with pytest.raises(popart.popart_exception, match=r"^Must call run before getCycleCount"):
        session.getCycleCount()
    session.run(popart.PyStepIO({case.x: data()}, session.initAnchorArrays()))
    assert session.getCycleCount() > 0
    with pytest.raises(popart.popart_exception, match="no cycle counter"):
        session.getCycleCount("inner_ipu_0")
    assert "cycles" in session.getSummaryReport()
    assert '"MatMul"' in session._serializeIr(popart.IrSerializationFormat.JSON)
    with pytest.raises(popart.popart_exception, match="must have been prepared"):
        unprepared(device).getSummaryReport()
    with pytest.raises(popart.popart_exception, match="instrumentWithHardwareCycleCounter"):
        training(case, [case.loss], device).getCycleCount()


# --- Executables --------------------------------------------------------------------------------


def test_executables_are_exported_and_loaded(device, tmp_path):
    case = linear()
    offline = popart.DeviceManager({}).createOfflineIPUDevice({"numIPUs": 1})
    maker = popart.InferenceSession(case.model, popart.DataFlow(1, [case.y]), offline)
    maker.compileAndExport(str(tmp_path))
    with pytest.raises(popart.popart_exception, match="offline device"):
        maker.run(popart.PyStepIO({case.x: data()}, maker.initAnchorArrays()))
    session = popart.InferenceSession(case.model, popart.DataFlow(1, [case.y]), device)
    session.loadExecutable(str(tmp_path))
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({case.x: data()}, anchors))
    np.testing.assert_allclose(anchors[case.y], data() @ case.start, rtol=1e-5)


def test_executables_of_other_programs_and_damaged_files_are_refused(device, tmp_path):
    case = linear()
    session = training(case, [case.loss], device)
    session.saveExecutable(str(tmp_path / "training.popef"))
    other = popart.InferenceSession(case.model, popart.DataFlow(1, [case.y]), device)
    with pytest.raises(popart.popart_exception, match="not the program of this session"):
        other.loadExecutable(str(tmp_path / "training.popef"))
    (tmp_path / "bad.popef").write_bytes(b"PODRUNEX" + bytes(100))
    with pytest.raises(popart.popart_exception):
        other.loadExecutable(str(tmp_path / "bad.popef"))
    with pytest.raises(popart.popart_exception, match="no executable"):
        other.loadExecutable(str(tmp_path / "none.popef"))
    model = popart.DeviceManager({}).createCpuDevice()
    cpu = popart.InferenceSession(case.model, popart.DataFlow(1, [case.y]), model)
    with pytest.raises(popart.popart_exception, match="device type cpu cannot be saved"):
        cpu.compileAndExport(str(tmp_path / "cpu.popef"))


def test_a_cached_program_is_found_and_gives_the_same_bits(device, tmp_path, monkeypatch):
    from podrun.compiler import compile as compiler

    case = linear()
    opts = options(enableEngineCaching=True, cachePath=str(tmp_path / "cache"))

    def result():
        session = training(case, [case.loss], device, opts=opts)
        session.run(popart.PyStepIO({case.x: data()}, session.initAnchorArrays()))
        return weights(session, case.w)[0]

    first = result()
    assert len(list((tmp_path / "cache").glob("*.popef"))) == 1
    monkeypatch.setattr(compiler, "trace_forward", lambda *_: pytest.fail("compiled again"))
    np.testing.assert_array_equal(result(), first)


def test_what_a_program_sets_for_jax_changes_nothing() -> None:
    """Settings that change bits, or have JAX refuse something, for the rest of the process."""
    settings = {
        "jax_disable_jit": True,
        "jax_disable_most_optimizations": True,
        "jax_enable_checks": True,
        "jax_enable_x64": True,
        "jax_numpy_rank_promotion": "raise",
        "jax_softmax_custom_jvp": True,
        "jax_transfer_guard": "disallow",
    }
    import jax

    expected = _softmax_weights()
    before = {name: getattr(jax.config, name, False) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        assert _softmax_weights() == expected
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def _softmax_weights() -> bytes:
    """What two steps make of the weights of a product, a softmax and another product."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [3, 16]))
    start = np.random.default_rng(5).standard_normal((16, 16)).astype(np.float32)
    names = [builder.addInitializedInputTensor(start * scale) for scale in (1, 2)]
    chosen = builder.aiOnnx.softmax([builder.aiOnnx.matmul([x, names[0]])], axis=1)
    loss = builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([chosen, names[1]])], 0.5)
    session = popart.TrainingSession(
        fnModel=builder.getModelProto(),
        dataFlow=popart.DataFlow(1, [loss]),
        loss=loss,
        optimizer=popart.ConstSGD(0.1),
        deviceInfo=popart.DeviceManager().createIpuModelDevice({}),
    )
    session.prepareDevice()
    session.weightsFromHost()
    for _ in range(2):
        session.run(popart.PyStepIO({x: start[:3]}, session.initAnchorArrays()))
    return b"".join(array.tobytes() for array in weights(session, *names))


def test_a_run_passes_four_functions_on_its_way_to_the_machine(device):
    case = linear()
    session = training(case, [case.y], device)
    io = popart.PyStepIO({case.x: data()}, session.initAnchorArrays())
    assert way_to_the_machine(lambda: session.run(io)) == [
        "_translating.<locals>.call",  # Errors leave as PopART's.
        "Session.run",
        "BatchRunner.run",
        "StepRunner.run",
        "PortConnection.start",
        "LocalPort.run",
    ]
