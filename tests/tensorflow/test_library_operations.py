"""Operations by the names of the SDK's libraries: tensors sent to the host, tables of the host, group norms."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.tensorflow.test_sdk_operations import Run, X, configured

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
DEVICE = "/device:IPU:0"
LIBRARIES = "tensorflow.compiler.plugin.poplar.ops."


@pytest.fixture
def tf(ipu: Any) -> Iterator[Any]:
    """TensorFlow 1 with a graph of its own and one IPU."""
    import tensorflow.compat.v1 as module

    ipu.config.IPUConfig().configure_ipu_system()
    with module.Graph().as_default():
        yield module


def test_sent_tensors_wait_for_the_host_in_their_graph_and_session_alone(tf: Any, ipu: Any) -> None:
    operations = importlib.import_module(LIBRARIES + "gen_sendrecv_ops")

    def sender(x: Any) -> Any:
        return operations.ipu_send_to_host(x, tensor_name="t", send_device=DEVICE)

    for value in (1.0, 2.0):
        with tf.Graph().as_default():
            x = tf.placeholder(tf.float32, [])
            with ipu.scopes.ipu_scope(DEVICE):
                sent = ipu.ipu_compiler.compile(sender, [x])
            received = operations.ipu_recv_at_host(T=tf.float32, tensor_name="t")
            with tf.Session() as session:
                assert session.run([sent, received], {x: value})[1] == value
                session.run(sent, {x: 7.0})
            with tf.Session() as session:
                assert session.run([sent, received], {x: value + 1})[1] == value + 1
                session.run(sent, {x: 8.0})


def test_programs_send_tensors_to_the_host(tf: Any, ipu: Any) -> None:
    """Also those whose operations the program does not return, and again at every run."""
    operations = importlib.import_module(LIBRARIES + "gen_sendrecv_ops")

    def net(x: Any) -> Any:
        for number in range(3):
            x = x @ x
            if number < 2:
                operations.ipu_send_to_host(x, tensor_name=f"x_{number}", send_device=DEVICE)
        return x

    def sender(x: Any) -> Any:
        return operations.ipu_send_to_host(x, tensor_name="whole", send_device=DEVICE)

    x, y = tf.placeholder(tf.float32, [2, 2]), tf.placeholder(tf.int32, [])
    with ipu.scopes.ipu_scope(DEVICE):
        (result,) = ipu.ipu_compiler.compile(net, [x])
        send = ipu.ipu_compiler.compile(sender, [y])
    with tf.device("/device:CPU:0"):
        received = [operations.ipu_recv_at_host(T=tf.float32, tensor_name=f"x_{n}") for n in range(2)]
        whole = operations.ipu_recv_at_host(T=tf.int32, tensor_name="whole")
        unsent = operations.ipu_recv_at_host(T=tf.int32, tensor_name="never sent")
    with tf.Session() as session:
        for _ in range(2):
            own = session.run([*received, result], {x: np.ones((2, 2))})
            assert [r.tolist() for r in own] == [[[value] * 2] * 2 for value in (2.0, 8.0, 128.0)]
        for value in (1, 2):
            nothing, got = session.run([send, whole], {y: value})
            assert nothing is None
            assert (got, got.dtype) == (value, np.int32)
        with pytest.raises(tf.errors.FailedPreconditionError, match="sent the tensor 'never sent'"):
            session.run(unsent)


def test_tables_of_the_host_are_looked_up_and_updated(tf: Any, ipu: Any) -> None:
    operations = importlib.import_module(LIBRARIES + "gen_pop_datastream_ops")
    table = np.arange(20, dtype=np.float32).reshape(10, 2)

    def net(indices: Any) -> Any:
        place = {"embedding_id": "host_table", "embedding_shape": [10, 2]}
        rows = operations.ipu_device_embedding_lookup(indices, dtype=tf.float32, **place)
        operations.ipu_device_embedding_update_add(rows, rows, indices, **place)
        operations.ipu_device_embedding_notify(embedding_id="host_table")
        return rows

    with tf.device("cpu"):
        indices = tf.placeholder(tf.int32, [3])
        weight = tf.get_variable("w", initializer=table, use_resource=False)
    with ipu.scopes.ipu_scope(DEVICE):
        (rows,) = ipu.ipu_compiler.compile(net, [indices])
    register = operations.ipu_host_embedding_register(weight, "host_table", optimizer="SGD+GA")
    back = operations.ipu_host_embedding_deregister(weight, "host_table")
    with tf.Session() as session:
        session.run(weight.initializer)
        session.run(register)
        np.testing.assert_array_equal(session.run(rows, {indices: [3, 0, 3]}), table[[3, 0, 3]])
        session.run(back)
        expected = table.copy()
        np.add.at(expected, [3, 0, 3], table[[3, 0, 3]])
        np.testing.assert_array_equal(session.run(weight), expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
@pytest.mark.parametrize("strided", [True, False])
def test_group_norms_give_their_statistics(tf: Any, data_format: str, strided: bool) -> None:
    operations = importlib.import_module(LIBRARIES + "gen_popnn_ops")
    random = np.random.RandomState(1)
    x = random.rand(2, 3, 5, 8).astype(np.float32)
    gamma, beta = random.rand(8).astype(np.float32), random.rand(8).astype(np.float32)
    options = {
        "data_format": data_format,
        "epsilon": 0.01,
        "num_groups": 4,
        "strided_channel_grouping": strided,
    }
    fed = x if data_format == "NHWC" else x.transpose(0, 3, 1, 2)
    with tf.device(DEVICE):
        inputs = tf.placeholder(tf.float32, fed.shape)
        trained = operations.popnn_group_norm_training(inputs, gamma, beta, **options)
        mean, inverse = operations.popnn_group_norm_statistics(inputs, **options)
        again = operations.popnn_group_norm_inference(inputs, gamma, beta, mean, inverse, **options)
    with tf.Session() as session:
        own = session.run([*trained, mean, inverse, again], {inputs: fed})
    members = [[c for c in range(8) if (c % 4 if strided else c // 2) == group] for group in range(4)]
    want, means, inverses = x.astype(np.float64), [], []
    for sample in range(2):
        for channels in members:
            part = want[sample][..., channels]
            means.append(part.mean())
            inverses.append(1 / np.sqrt(part.var() + 0.01))
            want[sample][..., channels] = (part - means[-1]) * inverses[-1]
    want = want * gamma + beta
    want = want if data_format == "NHWC" else want.transpose(0, 3, 1, 2)
    for got, value in zip(own, [want, means, inverses, means, inverses, want], strict=True):
        np.testing.assert_allclose(got, value, rtol=2e-4, atol=1e-5)


def test_operations_have_the_names_of_the_sdks_libraries(ipu: Any) -> None:
    import tensorflow as tf
    from tensorflow.compiler.plugin.poplar.ops import (
        gen_popnn_ops,
        gen_popops_ops,
        gen_poprand_ops,
        gen_poputil_ops,
    )

    run: Run = configured(ipu, 2)
    places = np.array([[3], [0], [3]], np.int32)

    def rows(table: Any) -> Any:
        updates = tf.ones([3, 2])
        return (
            gen_popops_ops.ipu_multi_slice(table, places[:, 0]),
            gen_popops_ops.ipu_multi_update(table, places[:2], updates[:2]),
            gen_popops_ops.ipu_multi_update_add(table, updates=updates, indices=places, scale=2),
            gen_popops_ops.ipu_sequence_slice_unpack(table, [1, 2], [3, 0], [0, 1], total_elements=3),
        )

    def between(x: Any) -> Any:
        row = tf.reshape(x, [-1])[:4] + tf.cast(gen_poputil_ops.ipu_replication_index(), tf.float32)
        (scattered,) = gen_popops_ops.ipu_reduce_scatter([row], replication_factor=2)
        exchanged = gen_popops_ops.ipu_all_to_all(row, 0, 0, number_of_replicas=2)
        masked, seed, reference = gen_poprand_ops.ipu_dropout(row + 1, rate=0.5, scale=2.0)
        again, _ = gen_poprand_ops.ipu_dropout_with_seed_and_reference(
            row + 1, seed, reference, rate=0.5, scale=2.0
        )
        gathered = gen_popops_ops.ipu_all_gather([scattered, exchanged], replication_factor=2)
        return *gathered, masked, again, gen_popnn_ops.ipu_softmax(row)

    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    read, written, added, unpacked, *others = run(lambda t, x: (*rows(t), *between(x)), table, X)
    np.testing.assert_array_equal(read, table[places[:, 0]])
    np.testing.assert_array_equal(written, [[1, 1], *table[1:3], [1, 1]])
    np.testing.assert_array_equal(added, table + np.array([[2], [0], [0], [4]]))
    np.testing.assert_array_equal(unpacked, table[[3, 0, 1]])
    scattered, exchanged, masked, again, soft = others
    row = X.reshape(-1)[:4]
    np.testing.assert_array_equal(scattered, (2 * row + 1).reshape(2, 2))
    np.testing.assert_array_equal(exchanged, [[*row[:2], *row[:2] + 1], [*row[2:], *row[2:] + 1]])
    np.testing.assert_array_equal(masked, again)
    np.testing.assert_allclose(soft, np.exp(row) / np.exp(row).sum(), rtol=1e-5)


@pytest.mark.parametrize("drawn_here", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_losses_over_sampled_classes_keep_those_that_are_true_and_take_given_ones(
    ipu: Any, drawn_here: bool
) -> None:
    """As the SDK's ``nn_ops``, which removes no accidental hits. Compared with the losses' formulas in float64."""
    import tensorflow as tf

    rng = np.random.default_rng(3)
    table, bias, x = (rng.normal(size=s).astype(np.float32) for s in ((7, 4), (7,), (3, 4)))
    labels, drawn = np.array([[0, 1], [2, 3], [6, 0]], np.int32), [1, 0, 5]
    often, rarely = np.full((3, 2), 0.5, np.float32), np.array([0.25, 0.5, 0.75], np.float32)
    logits = x.astype(np.float64) @ table.T + bias
    wanted = np.concatenate(
        [np.take_along_axis(logits, labels, 1) - np.log(often), logits[:, drawn] - np.log(rarely)], 1
    )
    targets = np.array([[0.5, 0.5, 0.0, 0.0, 0.0]] * 3)
    softmax = np.log(np.exp(wanted).sum(1)) - (targets * wanted).sum(1)
    noise = (np.log1p(np.exp(wanted)) - targets * wanted).sum(1)

    @tf.function(autograph=False, jit_compile=True)
    def losses(inputs: tf.Tensor) -> Any:
        options = {"num_sampled": 3, "num_classes": 7, "num_true": 2}
        given = ([table], bias, labels, inputs)
        values = (drawn, often, rarely)
        of_given = (
            ipu.nn_ops.sampled_softmax_loss(*given, sampled_values=values, **options),
            ipu.nn_ops.nce_loss(*given, sampled_values=values, **options),
        )
        if not drawn_here:
            return of_given
        return (
            *of_given,
            ipu.nn_ops._compute_sampled_logits(*given, **options, subtract_log_q=False, seed=1)[0],
            ipu.nn_ops.sampled_softmax_loss(*given, **options),
        )

    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:
        first, second, *drawn_ones = strategy.run(losses, args=[tf.constant(x)])
    np.testing.assert_allclose(first, softmax, rtol=1e-5)
    np.testing.assert_allclose(second, noise, rtol=1e-5)
    for plain, own in [drawn_ones] if drawn_here else []:
        np.testing.assert_allclose(plain[:, :2], np.take_along_axis(logits, labels, 1), rtol=1e-4, atol=1e-5)
        assert np.isfinite(own).all()
    with pytest.raises(ValueError, match="out_dtype cannot be float16 when dtype of logits is float32"):
        ipu.nn_ops.ctc_loss_v2(labels, tf.zeros([4, 3, 7]), [1, 1, 1], [4, 4, 4], 0, tf.float16)


def test_fused_batch_norms_take_scales_and_statistics_in_halves(ipu: Any) -> None:
    import tensorflow as tf
    from tensorflow.python.ops import gen_nn_ops, nn

    rng = np.random.default_rng(5)
    x = rng.normal(size=(2, 3, 3, 2)).astype(np.float16)
    scale, offset = np.array([0.5, 2.0], np.float16), np.array([1.0, -1.0], np.float16)

    @tf.function(autograph=False, jit_compile=True)
    def step(inputs: tf.Tensor) -> Any:
        y, mean, variance = nn.fused_batch_norm(inputs, scale, offset, epsilon=0.01)
        slopes = gen_nn_ops.fused_batch_norm_grad_v2(
            tf.ones_like(inputs), inputs, scale, mean, variance, epsilon=0.01, is_training=True
        )
        kept, *_ = nn.fused_batch_norm(inputs, scale, offset, mean, variance, epsilon=0.01, is_training=False)
        return y, mean, variance, slopes[2], kept

    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:
        y, mean, variance, of_offset, kept = strategy.run(step, args=[tf.constant(x)])
    wide = x.astype(np.float64).reshape(-1, 2)
    assert {t.dtype for t in (y, mean, variance, of_offset, kept)} == {tf.float16}
    np.testing.assert_allclose(mean, wide.mean(0), rtol=2e-3, atol=1e-3)
    np.testing.assert_allclose(variance, wide.var(0, ddof=1), rtol=2e-3)
    for values, spread in ((y, wide.var(0)), (kept, wide.var(0, ddof=1))):
        expected = (wide - wide.mean(0)) / np.sqrt(spread + 0.01) * scale + offset
        np.testing.assert_allclose(np.reshape(values, (-1, 2)), expected, rtol=1e-2, atol=1e-2)
    np.testing.assert_array_equal(of_offset, [18.0, 18.0])
