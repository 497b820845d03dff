"""Step data: layouts that fit, sizes, names and types that do not, callbacks."""

from __future__ import annotations

import numpy as np
import pytest

import podrun.popart as popart
from tests.popart.popart_sessions import INPUTS, MICRO_BATCH, linear, replicated, training

pytestmark = pytest.mark.usefixtures("programs_compile_once")


@pytest.fixture
def session(device):
    return training(linear(), {linear().y: popart.AnchorReturnType("All")}, device, batches=2)


def data(*leading):
    return np.random.default_rng(1).standard_normal((*leading, MICRO_BATCH, INPUTS)).astype(np.float32)


def test_any_shape_with_the_right_elements_will_do(device):
    case = linear()
    session = training(
        case, [case.y], device, batches=2, optimizer=popart.SGD({"defaultLearningRate": (0.0, False)})
    )
    x = data(2)
    results = []
    for given in (x, x.reshape(-1), x.reshape(2 * MICRO_BATCH, INPUTS)):
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({case.x: given}, anchors))
        results.append(anchors[case.y])
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_arrays_are_referenced_so_a_stepio_can_be_run_again(device):
    case = linear()
    session = training(
        case, [case.y], device, batches=2, optimizer=popart.SGD({"defaultLearningRate": (0.0, False)})
    )
    x, anchors = data(2), session.initAnchorArrays()
    io = popart.PyStepIO({case.x: x}, anchors)
    session.run(io)
    first = anchors[case.y].copy()
    x *= 2
    session.run(io)
    np.testing.assert_array_equal(anchors[case.y], 2 * first)


def test_arrays_must_be_contiguous():
    strided = np.zeros((4, 4), np.float32)[:, ::2]
    with pytest.raises(popart.popart_exception, match="contiguous"):
        popart.PyStepIO({"x": strided}, {})
    with pytest.raises(popart.popart_exception, match="contiguous"):
        popart.PyStepIO({}, {"y": strided})


@pytest.mark.parametrize("elements", [1, 12, 25, 48])
def test_wrong_sizes_name_tensor_and_numbers(session, elements):
    case = linear()
    io = popart.PyStepIO({case.x: np.zeros(elements, np.float32)}, session.initAnchorArrays())
    with pytest.raises(popart.popart_runtime_error, match=rf"'{case.x}'.*expected 24, received {elements}\b"):
        session.run(io)


def test_anchor_arrays_of_a_wrong_size_are_refused(session):
    case = linear()
    with pytest.raises(popart.popart_runtime_error, match=rf"'{case.y}'.*expected 12, received 3\b"):
        session.run(popart.PyStepIO({case.x: data(2)}, {case.y: np.zeros(3, np.float32)}))


def test_without_runtime_asserts_data_are_read_again_from_the_start(session):
    case = linear()
    x, anchors = data(1), session.initAnchorArrays()
    io = popart.PyStepIO({case.x: x}, anchors)
    io.enableRuntimeAsserts(False)
    session.run(io)
    np.testing.assert_allclose(anchors[case.y][0], x[0] @ case.start, rtol=1e-5)


def test_names_that_are_missing_or_wrong(session):
    case = linear()
    anchors = session.initAnchorArrays()
    with pytest.raises(popart.popart_runtime_error, match=f"No data for input '{case.x}'"):
        session.run(popart.PyStepIO({}, anchors))
    with pytest.raises(popart.popart_runtime_error, match="No array for anchor"):
        session.run(popart.PyStepIO({case.x: data(2)}, {}))
    with pytest.raises(popart.popart_runtime_error, match="not an anchor"):
        session.run(popart.PyStepIO({case.x: data(2)}, {**anchors, "more": np.zeros(1, np.float32)}))
    with pytest.raises(popart.popart_runtime_error, match=r"'more' has been provided .*not in the model"):
        session.run(popart.PyStepIO({case.x: data(2), "more": np.zeros(1, np.float32)}, anchors))
    with pytest.raises(
        popart.popart_runtime_error, match=f"^The tensor '{case.y}' has been provided .*not an input"
    ):
        session.run(popart.PyStepIO({case.x: data(2), case.y: np.zeros(1, np.float32)}, anchors))


def test_data_for_a_weight_are_not_used(session):
    case = linear()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({case.x: data(2), case.w: np.zeros_like(case.start)}, anchors))
    np.testing.assert_allclose(anchors[case.y][0], data(2)[0] @ case.start, rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.float16])
def test_types_are_not_cast(session, dtype):
    io = popart.PyStepIO({linear().x: np.zeros((2, MICRO_BATCH, INPUTS), dtype)}, session.initAnchorArrays())
    with pytest.raises(popart.popart_runtime_error, match="Type discrepancy"):
        session.run(io)


def test_int64_becomes_int32_if_it_fits(device):
    builder = popart.Builder()
    x = builder.addInputTensor("INT32", [2])
    y = builder.aiOnnx.add([x, x])
    session = popart.InferenceSession(builder.getModelProto(), popart.DataFlow(1, [y]), device)
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({x: np.array([1, -2], np.int64)}, anchors))
    np.testing.assert_array_equal(anchors[y], [2, -4])
    with pytest.raises(popart.popart_runtime_error, match="do not fit"):
        session.run(popart.PyStepIO({x: np.array([1, 2**40], np.int64)}, anchors))


def test_callbacks_come_once_for_each_micro_batch_and_replica(device_of):
    case = linear()
    session = training(case, [case.y], device_of(2), batches=2, opts=replicated(2, 3))
    x = data(2, 3, 2).reshape(-1, MICRO_BATCH, INPUTS)
    calls, outputs = [], []

    def give(name, prefetch):
        assert not prefetch
        calls.append(("in", name))
        return x[sum(call == ("in", name) for call in calls) - 1]

    def take(name):
        outputs.append(np.empty((MICRO_BATCH, 2), np.float32))
        return outputs[-1]

    io = popart.PyStepIOCallback(
        give,
        lambda name: calls.append(("in done", name)),
        take,
        lambda name: calls.append(("out done", name)),
    )
    session.run(io)
    assert calls.count(("in", case.x)) == calls.count(("in done", case.x)) == 12
    assert len(outputs) == calls.count(("out done", case.y)) == 12
    for mine, piece in zip(outputs[:6], x[:6], strict=True):
        np.testing.assert_allclose(mine, piece @ case.start, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (None, "None"),
        (np.zeros(3, np.float32), "3 elements"),
        (np.zeros(MICRO_BATCH * INPUTS, np.float64), "Type discrepancy"),
    ],
)
def test_callbacks_that_give_wrong_arrays_are_refused(session, given, word):
    io = popart.PyStepIOCallback(
        lambda *_: given, lambda _: None, lambda _: np.zeros(6, np.float32), lambda _: None
    )
    with pytest.raises(popart.popart_runtime_error, match=word):
        session.run(io)


def test_broadcast_inputs_have_no_replica_axis(device_of):
    builder = popart.Builder()
    mode = popart.InputSettings(popart.ReplicatedStreamMode.Broadcast)
    a = builder.addInputTensor(popart.TensorInfo("FLOAT", [2]), settings=mode)
    b = builder.addInputTensor(popart.TensorInfo("FLOAT", [2]))
    y = builder.aiOnnx.add([a, b])
    session = popart.InferenceSession(
        builder.getModelProto(), popart.DataFlow(3, [y]), device_of(2), userOptions=replicated(2)
    )
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    one, two = np.arange(6, dtype=np.float32).reshape(3, 2), np.ones((3, 2, 2), np.float32)
    session.run(popart.PyStepIO({a: one, b: two}, anchors))
    np.testing.assert_array_equal(anchors[y], one[:, None] + two)


@pytest.mark.parametrize("mode", ["Zeros", "RandomNormal", "RandomUniform"])
def test_synthetic_data_leave_the_buffers_alone(device, mode):
    case = linear()
    session = training(
        case, [case.y], device, opts=replicated(1, syntheticDataMode=popart.SyntheticDataMode[mode])
    )
    anchors = {case.y: np.full((MICRO_BATCH, 2), 7, np.float32)}
    session.run(popart.PyStepIO({}, anchors))
    np.testing.assert_array_equal(anchors[case.y], 7)
    assert not session.initAnchorArrays()[
        case.y
    ].any()  # What programs print then is at least the same each time.


def test_arrays_that_are_not_contiguous_are_refused_where_they_are_given(device):
    """They would be copied, and the copy filled or read instead."""
    turned = np.zeros((2, 3), np.float32).T
    with pytest.raises(popart.popart_exception, match="it is not c-contiguous"):
        popart.PyWeightsIO({"w": turned})
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [3, 2])
    y = builder.aiOnnx.neg([x])
    session = popart.InferenceSession(builder.getModelProto(), popart.DataFlow(1, [y]), device)
    session.prepareDevice()
    straight = np.zeros((3, 2), np.float32)
    for given, taken in ((turned, straight), (straight, turned)):
        io = popart.PyStepIOCallback(
            lambda name, prefetch, array=given: array,
            lambda name: None,
            lambda name, array=taken: array,
            lambda name: None,
        )
        with pytest.raises(popart.popart_runtime_error, match="not C-contiguous"):
            session.run(io)


def test_anchors_that_cannot_be_filled_are_refused():
    fine = np.zeros(8, np.float32)
    fixed = np.zeros(8, np.float32)
    fixed.flags.writeable = False
    with pytest.raises(popart.popart_exception, match=r"output 'y' is read-only: pass array.copy\(\)"):
        popart.PyStepIO({}, {"y": fixed})
    for first, second in ((fine, fine), (fine[:6], fine[4:]), (fine, fine.reshape(2, 4))):
        with pytest.raises(
            popart.popart_exception, match=r"'y' and 'z' share memory|'z' and 'y' share memory"
        ):
            popart.PyStepIO({}, {"y": first, "z": second})
    popart.PyStepIO({}, {"y": fine[:4], "z": fine[4:], "none": np.zeros(0, np.float32)})
    popart.PyStepIO({"x": fine, "same": fine}, {})


def test_data_of_a_wrong_size_are_named_with_types_and_shapes() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [4, 2]), "pixels")
    y = builder.aiOnnx.relu([x])
    session = popart.InferenceSession(
        builder.getModelProto(), popart.DataFlow(3, [y]), popart.DeviceManager().createIpuModelDevice({})
    )
    session.prepareDevice()
    wrong = np.ones((3, 4), np.float16)
    with pytest.raises(
        popart.popart_exception,
        match=r"'pixels'.*expected 24, received 12 .array of float16, shape .3, 4.*FLOAT, .4, 2",
    ):
        session.run(popart.PyStepIO({x: wrong}, session.initAnchorArrays()))
