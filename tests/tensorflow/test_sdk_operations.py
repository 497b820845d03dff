"""Operations of the SDK against NumPy, TensorFlow on the CPU and the rules of the reference (6, 7 and 10).

One IPU device of two replicas; every operation runs in ``IPUStrategy.run``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from podrun.core.errors import NotFoundError, UsageError
from podrun.runtime.user_operators import register_user_operator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
X = np.arange(8, dtype=np.float32).reshape(2, 4)
Run = Callable[..., list[np.ndarray]]


def configured(ipu: Any, ipus: int = 1, **behaviour: Any) -> Run:
    """A function that runs functions on a device of so many IPUs."""
    import tensorflow as tf

    config = ipu.config.IPUConfig()
    config.auto_select_ipus = ipus
    for name, value in behaviour.items():
        setattr(config.floating_point_behaviour, name, value)
    config.configure_ipu_system()
    strategy = ipu.ipu_strategy.IPUStrategyV1()

    def run(function: Callable[..., Any], *args: Any) -> list[np.ndarray]:
        program = tf.function(function, autograph=False)
        results = strategy.run(program, args=[tf.constant(a) for a in args])
        return [np.asarray(r) for r in tf.nest.flatten(results)]

    return run


@pytest.fixture
def run(ipu: Any) -> Run:
    """Functions on two replicas."""
    return configured(ipu, 2)


def test_collectives_between_replicas(ipu: Any, run: Run) -> None:
    import tensorflow as tf
    from tensorflow.compiler.plugin.poplar.ops import gen_ipu_ops

    def collectives(x: Any) -> Any:
        value = x + 10 * tf.cast(ipu.replication_ops.replication_index(), tf.float32)
        return (
            ipu.all_to_all_op.all_gather(value, 2),
            ipu.all_to_all_op.all_to_all(value, 1, 0, 2),
            ipu.reduce_scatter_op.reduce_scatter(tf.reshape(value, [-1])[:5], 2),
            ipu.cross_replica_ops.cross_replica_mean(value),
            gen_ipu_ops.ipu_replication_normalise(value),
        )

    gathered, exchanged, scattered, mean, normalised = run(collectives, X)
    np.testing.assert_array_equal(gathered, [X, X + 10])
    np.testing.assert_array_equal(exchanged, np.concatenate([X[:, :2], X[:, :2] + 10]))
    np.testing.assert_array_equal(scattered, [10, 12, 14])
    np.testing.assert_array_equal(mean, X + 5)
    np.testing.assert_array_equal(normalised, X / 2)


def test_collectives_stay_within_groups_of_neighbouring_replicas(ipu: Any) -> None:
    import tensorflow as tf

    def collectives(x: Any) -> Any:
        value = x + 10 * tf.cast(ipu.replication_ops.replication_index(), tf.float32)
        row = tf.reshape(value, [-1])[:3]
        gathered = [ipu.all_to_all_op.all_gather(row, size) for size in (1, 2)]
        scattered = [ipu.reduce_scatter_op.reduce_scatter(row, size) for size in (1, 2)]
        return [ipu.all_to_all_op.all_gather(part, 4) for part in (*gathered, *scattered)]

    rows = X.reshape(-1)[:3] + 10 * np.arange(4, dtype=np.float32)[:, None]
    alone, in_pairs, own, halves = configured(ipu, 4)(collectives, X)
    np.testing.assert_array_equal(alone, rows[:, None])
    np.testing.assert_array_equal(in_pairs, [rows[:2], rows[:2], rows[2:], rows[2:]])
    np.testing.assert_array_equal(own, rows)
    sums = np.pad(rows.reshape(2, 2, 3).sum(1), [(0, 0), (0, 1)])
    np.testing.assert_array_equal(halves, sums.reshape(4, 2))


def test_replicas_exchange_parts_with_all_others(ipu: Any) -> None:
    import tensorflow as tf

    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"factor \(got 2\) is not the total .* \(got 4\)"
    ):
        configured(ipu, 4)(lambda x: ipu.all_to_all_op.all_to_all(x, 0, 1, 2), rows)


def test_one_tensor_in_a_structure_is_scattered_as_a_tensor(ipu: Any, run: Run) -> None:
    import tensorflow as tf

    def scattered(x: Any) -> Any:
        alone = ipu.reduce_scatter_op.reduce_scatter([x], 2)
        several = ipu.reduce_scatter_op.reduce_scatter({"a": x, "b": [x, x]}, 2)
        assert isinstance(alone, tf.Tensor)
        assert isinstance(several, list)
        return alone, several

    results = run(scattered, np.arange(4, dtype=np.float32))
    np.testing.assert_array_equal(results, [[0, 2]] * 4)


def test_rows_are_copied_between_tensors(ipu: Any, run: Run) -> None:
    import tensorflow as tf

    ops = ipu.slicing_ops
    source = np.arange(12, dtype=np.float32).reshape(6, 2)
    target = -np.ones((5, 2), np.float32)
    counts, starts, places = [2, 3], [4, 0], [3, 1]

    def sliced(dst: Any, src: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([dst, src])
            result = ops.sequence_slice(dst, src, counts, starts, places, False)
        return result, tape.gradient(result, [dst, src])

    result, of_target, of_source = run(sliced, target, source)
    np.testing.assert_array_equal(result, [[-1, -1], *source[:3], source[5]])  # The later slice stays.
    np.testing.assert_array_equal(of_target[:, 0], [1, 0, 0, 0, 0])
    np.testing.assert_array_equal(of_source[:, 0], [1, 1, 1, 0, 0, 1])
    (unpacked,) = run(lambda s: ops.sequence_slice_unpack(s, counts, starts, 6), source)
    np.testing.assert_array_equal(unpacked, [*source[4:], *source[:3], [0, 0]])
    (packed,) = run(lambda d, s: ops.sequence_slice_pack(d, s[:4], [1, 2], [4, 0], True), target, source)
    np.testing.assert_array_equal(packed, [*source[1:3], [0, 0], [0, 0], source[0]])
    (kept,) = run(lambda d, s: ops.sequence_slice_pack(d, s, [1, 2], [4, 0], False), target, source)
    np.testing.assert_array_equal(kept, [*source[1:3], [-1, -1], [-1, -1], source[0]])


def test_rows_that_cannot_be_copied_are_refused_in_the_sdks_words(ipu: Any) -> None:
    import tensorflow as tf

    ops, rows, narrow = ipu.slicing_ops, tf.zeros([3, 4]), tf.zeros([3, 2])
    with pytest.raises(
        ValueError, match="num_elems, src_offsets and dst_offsets must have matching, nonzero shapes"
    ):
        ops.sequence_slice(rows, rows, [1, 1], [0], [0, 1], False)
    with pytest.raises(
        ValueError, match="num_elems and src_offsets must have matching, nonzero shapes of rank 1"
    ):
        ops.sequence_slice_unpack(rows, [1, 1], [0], 2)
    with pytest.raises(
        ValueError, match="num_elems and dst_offsets must have matching, nonzero shapes of rank 1"
    ):
        ops.sequence_slice_pack(rows, rows, [], [], False)
    with pytest.raises(ValueError, match="src and dst inner shapes must match"):
        ops.sequence_slice(narrow, rows, [1], [0], [0], False)


def test_histograms_count_between_levels(ipu: Any, run: Run) -> None:
    ops = ipu.statistics_ops
    values, levels = np.array([0, -1, 2, 2.5, 9], np.float32), np.array([1, 2], np.float32)
    (counts,) = run(ops.histogram, values, levels)
    np.testing.assert_array_equal(counts, [2, 0, 3])
    (absolute,) = run(lambda v, at: ops.histogram(v, at, absolute_of_input=True), values, levels)
    np.testing.assert_array_equal(absolute, [1, 1, 3])
    with pytest.raises(ValueError, match="rank-1"):
        run(ops.histogram, values[None], levels)


def test_connectionist_losses_are_tensorflows(ipu: Any, run: Run) -> None:
    import tensorflow as tf

    logits = np.random.RandomState(0).randn(6, 2, 5).astype(np.float32)
    labels, lengths, times = [[1, 2, 3], [2, 2, 0]], [3, 2], [6, 5]
    (loss,) = run(
        lambda z: ipu.nn_ops.ctc_loss_v2(tf.constant(labels), z, tf.constant(lengths), tf.constant(times), 0),
        logits,
    )
    want = tf.nn.ctc_loss(
        tf.constant(labels), logits, tf.constant(lengths), tf.constant(times), blank_index=0
    )
    np.testing.assert_allclose(loss, want, rtol=1e-5)


def test_user_operators_are_functions_of_python(ipu: Any, run: Run) -> None:
    import tensorflow as tf

    register_user_operator("libcube.so", lambda x, *, scale=1.0: scale * x**3)

    def cube(x: Any) -> Any:
        outs = {"output_types": [tf.float32], "output_shapes": [x.shape]}
        with tf.GradientTape() as tape:
            tape.watch(x)
            (y,) = ipu.custom_ops.precompiled_user_op(
                [x], "/folder/libcube.so", outs=outs, attributes='{"scale": 2}'
            )
            total = tf.reduce_sum(y)
        return y, tape.gradient(total, x)

    y, gradient = run(cube, X)
    np.testing.assert_allclose(y, 2 * X**3)
    np.testing.assert_allclose(gradient, 6 * X**2)
    with pytest.raises(NotFoundError, match="cannot be loaded"):
        ipu.custom_ops.precompiled_user_op([X], "libother.so")


def test_operators_of_the_host_are_those_of_the_device(ipu: Any, run: Run) -> None:
    """``Build`` stands for the SDK's ``Callback`` where only that is registered."""
    import tensorflow as tf

    register_user_operator("libshift.so", lambda x, *, by: x + by)
    register_user_operator("libshift.so", lambda x, *, by: x - by, op_name="Back")
    outs = {"output_types": [tf.float32], "output_shapes": [X.shape]}

    def shift(x: Any) -> Any:
        call = partial(
            ipu.custom_ops.cpu_user_operation, [x], "libshift.so", outs=outs, attributes='{"by": 3}'
        )
        return call(), call(op_name="Back")

    forth, back = run(shift, X)
    np.testing.assert_array_equal(forth, X + 3)
    np.testing.assert_array_equal(back, X - 3)
    with pytest.raises(NotFoundError, match="cannot be loaded"):
        ipu.custom_ops.cpu_user_operation([X], "libnothing.so")


def test_a_host_embedding_is_looked_up_and_descends(ipu: Any, run: Run) -> None:
    import tensorflow as tf

    start = np.arange(12, dtype=np.float32).reshape(6, 2)
    spec = ipu.embedding_ops.HostEmbeddingOptimizerSpec(0.5)
    embedding = ipu.embedding_ops.create_host_embedding(
        "table", [6, 2], tf.float32, optimizer_spec=spec, initializer=tf.constant_initializer(start)
    )

    def train() -> Any:
        rows = embedding.lookup(tf.constant([1, 4, 1]))
        return rows, tf.gradients(tf.reduce_sum(rows**2), rows)

    with embedding.register() as registered:
        assert registered is embedding
        rows, _ = run(train)
    np.testing.assert_array_equal(rows, start[[1, 4, 1]])
    expected = start.copy()
    expected[1] -= 0.5 * 2 * 2 * start[1]  # It is looked up twice.
    expected[4] -= 0.5 * 2 * start[4]
    np.testing.assert_array_equal(embedding.get_embedding_tensor().numpy(), expected)
    with tf.Graph().as_default(), pytest.raises(ValueError, match="requires a session"):
        embedding.register()
    with pytest.raises(UsageError, match="outside of a program"):
        embedding.lookup(tf.constant([1]))


def test_xla_compile_on_an_ipu_is_a_program(ipu: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk import ipu_compiler

    compiled: list[Any] = []
    own = ipu_compiler.compile
    monkeypatch.setattr(ipu_compiler, "compile", lambda *a: compiled.append(a) or own(*a))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, X.shape)
        with ipu.scopes.ipu_scope("/device:IPU:0"):
            (result,) = tf.xla.experimental.compile(lambda v: v * v + 1.0, [x])
        np.testing.assert_array_equal(session.run(result, {x: X}), X * X + 1)
    assert len(compiled) == 1


def test_gradients_are_captured_on_their_way(ipu: Any, run: Run) -> None:
    import tensorflow as tf

    def capture(x: Any) -> Any:
        with ipu.eager.backprop.GradientCaptureTape() as tape:
            tape.watch(x)
            hidden = ipu.grad_util_ops.capture_upstream_gradients(2 * x, tag="hidden")
            total = tf.reduce_sum(hidden**2)
        gradient = tape.gradient(total, x)
        return gradient, tape.captured_gradients["hidden"]

    gradient, captured = run(capture, X)
    np.testing.assert_allclose(gradient, 8 * X)
    np.testing.assert_allclose(captured, 4 * X)
    with pytest.raises(RuntimeError, match="GradientCapture"):
        ipu.grad_util_ops.capture_upstream_gradients(tf.constant(X))


def test_shards_of_a_replica_exchange_values(ipu: Any, run: Run) -> None:
    import tensorflow as tf

    def shards() -> Any:
        values = [tf.constant([1.0, 2.0, 3.0]), tf.constant([1.0, 1.0])]
        ops = ipu.within_replica_ops
        return (
            ops.reduce_scatter(values, "COLLECTIVE_OP_ADD"),
            ops.all_gather(values),
            ops.all_reduce(values, "COLLECTIVE_OP_MAX"),
        )

    first, second, *rest = run(shards)
    np.testing.assert_array_equal(first, [2, 3])
    np.testing.assert_array_equal(second, [3, 0])
    np.testing.assert_array_equal(rest[0], [1, 2, 3, 1, 1])
    np.testing.assert_array_equal(rest[2], [1, 2, 3])


def test_a_delay_line_and_the_iteration(ipu: Any, run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    import tensorflow as tf

    def body(total: Any) -> Any:
        step = tf.cast(ipu.internal_ops.get_current_iteration_counter(), tf.float32)
        return total + ipu.internal_ops.print_tensor(ipu.internal_ops.fifo(step + 1, 2), "late")

    (total,) = run(lambda: ipu.loops.repeat(5, body, [tf.constant(0.0)]))
    assert total == 1 + 2 + 3
    assert capfd.readouterr().err.count("late:") == 5


def test_floating_point_behaviour(ipu: Any) -> None:
    import tensorflow as tf

    large = np.array([10000, 1], np.float16)
    square, divided, whole = configured(ipu)(
        lambda v: (v * v, v / (v - v), tf.cast(v / (v - v), tf.int32)), large
    )
    np.testing.assert_array_equal(square, [65504, 1])
    assert np.isnan(divided).all()
    np.testing.assert_array_equal(whole, [-(2**31)] * 2)
    (square,) = configured(ipu, nanoo=True)(lambda v: v * v, large)
    assert np.isnan(square[0])
    with pytest.raises(tf.errors.InternalError, match="Tiles in excepted state"):
        configured(ipu, div0=True)(lambda v: v / (v - v), np.ones(1, np.float32))
    rounding = ipu.config.StochasticRoundingBehaviour
    value = np.full(64, 1.0003, np.float32)
    (random,) = configured(ipu, esr=rounding.ON)(lambda v: tf.cast(v, tf.float16), value)
    (nearest,) = configured(ipu, esr=rounding.OFF)(lambda v: tf.cast(v, tf.float16), value)
    assert set(random.tolist()) == {1.0, 1.0009765625}
    assert set(nearest.tolist()) == {1.0}


def test_a_seed_repeats_the_stream(ipu: Any) -> None:
    import tensorflow as tf

    run = configured(ipu)
    drawn = []
    for seed in (1, None, 1, None, 2):
        if seed is not None:
            ipu.utils.reset_ipu_seed(seed)
        drawn.append(run(_uniform)[0].tolist())
    assert drawn[:2] == drawn[2:4]
    assert drawn[0] != drawn[1] != drawn[4]
    assert tf.executing_eagerly()


def _uniform() -> Any:
    import tensorflow as tf

    return tf.random.uniform([3])


def test_connection_types_compile_without_running(ipu: Any, tmp_path: Any) -> None:
    import tensorflow as tf

    kinds = ipu.config.DeviceConnectionType
    strategy = ipu.ipu_strategy.IPUStrategyV1()
    function = tf.function(lambda: tf.constant([1.0]) + 1.0)
    for kind in (kinds.NEVER, kinds.PRE_COMPILE):
        config = ipu.config.IPUConfig()
        config.device_connection.type, config.device_connection.version = kind, "ipu2"
        config.serialization_output_folder = str(tmp_path)
        config.configure_ipu_system()
        if kind is kinds.NEVER:
            with pytest.raises(tf.errors.InvalidArgumentError, match="configured for compilation only"):
                strategy.run(function)
        else:
            np.testing.assert_array_equal(strategy.run(function), [0.0])
    assert len(list(tmp_path.glob("*.poplar_exec"))) == 1


def test_gradients_of_what_depends_on_another_source(run: Run) -> None:
    import tensorflow as tf

    def both(x: Any) -> Any:
        hidden = x * x
        kept = tf.tanh(hidden)
        total = tf.reduce_sum(kept * hidden + x)
        return (*tf.gradients(total, [x, hidden, kept]), hidden)

    values = [np.asarray(v) for v in tf.function(both)(tf.constant(X))]
    for got, want in zip(run(both, X), values, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
