"""Programs of version 1 that train, and that replicas and shards share, rule by rule (reference: sections 5 and 6 of
the semantics; the others: `test_version_1`).

| rule | test |
|---|---|
| 5 accumulation | `test_an_accumulating_optimizer_updates_by_its_reduction`,
`test_the_first_accumulating_optimizer_adds`, `test_accumulation_needs_a_loop_of_whole_counts` |
| 5 other optimizers | `test_wrapped_optimizers` |
| 6.1 shards | `test_shards_divide_the_ipus` |
| 6.5 groups | `test_groups_of_replicas` |
| 6.9 distributed batch norm | `test_batch_normalization_takes_statistics_over_neighbouring_replicas` |
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.tensorflow.version_1_programs import VALUES, Program
from tests.tensorflow.version_1_programs import program as program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]


def _descended(program: Program, wrap: Callable[[Any], Any], steps: int = 4) -> np.ndarray:
    """The weight after descents along elements: gradients are the elements, the rate is 1."""
    tf, infeed = program.tf, program.infeed()

    def body(x: Any) -> Any:
        weight = tf.get_variable("weight", initializer=0.0)
        return wrap(tf.train.GradientDescentOptimizer(1.0)).minimize(weight * x)

    run = program.looped(steps, body, infeed)
    with program.session(infeed) as session:
        session.run(run)
        return session.run(next(v for v in tf.global_variables() if v.op.name == "weight"))


@pytest.mark.parametrize(("method", "expected"), [("sum", -6.0), ("MEAN", -3.0), ("running_mean", -3.0)])
def test_an_accumulating_optimizer_updates_by_its_reduction(
    program: Program, method: str, expected: float
) -> None:
    kind = program.ipu.optimizers.GradientAccumulationOptimizerV2
    assert _descended(program, lambda o: kind(o, 2, reduction_method=method)) == expected


def test_the_first_accumulating_optimizer_adds(program: Program) -> None:
    optimizers = program.ipu.optimizers
    assert _descended(program, lambda o: optimizers.GradientAccumulationOptimizer(o, 4)) == -6.0
    with pytest.raises(ValueError, match="Only GradientDescentOptimizer and MomentumOptimizer"):
        optimizers.GradientAccumulationOptimizer(program.tf.train.AdamOptimizer(), 4)


def test_accumulation_needs_a_loop_of_whole_counts(program: Program) -> None:
    tf, kind = program.tf, program.ipu.optimizers.GradientAccumulationOptimizerV2
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="Detected a gradient accumulation operation with"
    ):
        _descended(program, lambda o: kind(o, 3))
    with pytest.raises(tf.errors.FailedPreconditionError, match="training loop"):
        program.compiled(lambda: kind(tf.train.GradientDescentOptimizer(1.0), 2).minimize(
            tf.get_variable("v", initializer=0.0)))  # fmt: skip
    with pytest.raises(ValueError, match="positive"):
        kind(tf.train.GradientDescentOptimizer(1.0), 0)


def test_wrapped_optimizers(program: Program) -> None:
    optimizers = program.ipu.optimizers
    doubled = _descended(program, lambda o: optimizers.MapGradientOptimizer(o, lambda g, v: 2 * g))
    assert doubled == -12.0
    from tensorflow import keras

    with pytest.raises(ValueError, match=r"keras\.ipu\.optimizers"):
        optimizers.CrossReplicaOptimizer(keras.optimizers.SGD(0.1))


def test_shards_divide_the_ipus(ipu: Any) -> None:
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default():
        program = Program(ipu, 1)

        def net() -> Any:
            with ipu.scopes.ipu_shard(0):
                first = tf.constant([1.0]) * tf.random_uniform([1])
            with ipu.scopes.ipu_shard(1):
                return first * 0 + 3

        run = program.compiled(net)
        with (
            program.session() as session,
            pytest.raises(tf.errors.InternalError, match="number of shards needs to divide"),
        ):
            session.run(run)
        Program(ipu, 2)
        with program.session() as session:
            assert session.run(run)[0] == 3


def test_groups_of_replicas(ipu: Any) -> None:
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default():
        program = Program(ipu, 4)
        infeed, out = program.infeed(VALUES[:4]), program.outfeed()
        cross = ipu.cross_replica_ops

        def body(x: Any) -> Any:
            pair = cross.cross_replica_sum(x, replica_group_size=2)
            return out.enqueue([pair, cross.cross_replica_mean(x)])

        run = program.looped(1, body, infeed)
        with program.session(infeed) as session:
            session.run(run)
            pairs, means = session.run(out.dequeue())
        np.testing.assert_array_equal(pairs, [[1, 1, 5, 5]])
        np.testing.assert_array_equal(means, [[1.5] * 4])


def test_batch_normalization_takes_statistics_over_neighbouring_replicas(ipu: Any) -> None:
    import tensorflow.compat.v1 as tf

    random = np.random.RandomState(3)
    images, weights = (random.rand(4 * 2, 3, 3, 2).astype(np.float32) for _ in range(2))

    def normalized(x: Any, c: Any) -> tuple[Any, ...]:
        scale, offset = tf.constant([1.5, 0.5]), tf.constant([0.1, -0.2])
        y, mean, variance = tf.nn.fused_batch_norm(x, scale, offset)
        return y, mean, variance, *tf.gradients(tf.reduce_sum(y * c), [x])

    with tf.Graph().as_default():
        program = Program(ipu, 4)
        config = ipu.config.IPUConfig()
        config.auto_select_ipus = 4
        config.norms.experimental.distributed_batch_norm_replica_group_size = 2
        config.configure_ipu_system()
        batches = tf.data.Dataset.from_tensor_slices((images, weights)).batch(2, drop_remainder=True)
        infeed, out = ipu.ipu_infeed_queue.IPUInfeedQueue(batches), program.outfeed()
        run = program.looped(1, lambda x, c: out.enqueue(normalized(x, c)), infeed)
        with program.session(infeed) as session:
            session.run(run)
            y, mean, variance, gradient = (value[0] for value in session.run(out.dequeue()))
    for pair in range(2):
        rows, replicas = slice(4 * pair, 4 * pair + 4), slice(2 * pair, 2 * pair + 2)
        with tf.Graph().as_default(), tf.Session() as session:
            whole = session.run(normalized(tf.constant(images[rows]), tf.constant(weights[rows])))
        np.testing.assert_allclose(y[replicas].reshape(4, 3, 3, 2), whole[0], atol=1e-5)
        np.testing.assert_allclose(mean[replicas], [whole[1]] * 2, atol=1e-6)
        np.testing.assert_allclose(variance[replicas], [whole[2]] * 2, atol=1e-6)
        np.testing.assert_allclose(gradient[replicas].reshape(4, 3, 3, 2), whole[3], atol=1e-5)


@pytest.mark.parametrize(("keeps", "largest"), [(True, 1.0), (True, 6e4), (False, 6e4)])
def test_losses_are_scaled_by_what_gradients_of_halves_do(
    program: Program, keeps: bool, largest: float
) -> None:
    """The factor and the counts of two steps, of which the second changes the factor."""
    tf, ipu = program.tf, program.ipu
    kind = importlib.import_module(
        "tensorflow.python.ipu.optimizers.automatic_loss_scaling_optimizer"
    ).AutomaticLossScalingOptimizer
    with ipu.scopes.ipu_scope("/device:IPU:0"):
        optimizer = kind(
            tf.train.GradientDescentOptimizer(2.0**-10),
            initial_loss_scaling_factor=4.0,
            update_frequency=2,
            increase_factor=3.0,
            accumulate_statistics_over_update_period=keeps,
        )

        def step() -> Any:
            small = tf.get_variable("small", initializer=tf.constant([1.0, 2.0], tf.float16))
            weight = tf.get_variable("weight", initializer=1.0)
            loss = tf.reduce_sum(tf.cast(small, tf.float32) * [largest, 1.0])
            return optimizer.minimize(loss + weight)

        run = ipu.ipu_compiler.compile(step)
    expected = [4.0, 4.0 * (0.5 if largest > 1 else 3.0)]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        counts, factors = [], []
        for _ in range(2):
            session.run(run)
            counts.append(session.run(optimizer.histogram).tolist())
            factors.append(session.run(optimizer.loss_scaling_factor))
        weight = next(v for v in tf.global_variables() if v.op.name == "weight")
        assert session.run(weight) == 1 - 2 * 2.0**-10
    assert counts == [([1.0, 1.0] if largest > 1 else [2.0, 0.0]) if keeps else [0.0, 0.0], [0.0, 0.0]]
    assert factors == expected
    for options, said in (
        ({"update_frequency": 0}, "update_frequency must be nonzero and positive"),
        ({"increase_factor": 0.5}, "increase_factor must be greater than decrease_factor"),
        ({"max_loss_scaling_factor": 2.0}, "x increase_factor must be less than max_loss_scaling_factor"),
        ({"ratio_threshold": 1.0}, "ratio_threshold must be greater than zero and less than one"),
    ):
        with pytest.raises(ValueError, match=said):
            kind(tf.train.GradientDescentOptimizer(1.0), **options)
