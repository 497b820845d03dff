"""Queues that a program makes outside of a strategy's scope, counters of pipelines, captured gradients."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from podrun.core.errors import UnsupportedError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]


@pytest.fixture
def strategy(ipu: Any) -> Any:
    """A strategy on two IPUs."""
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 2
    config.configure_ipu_system()
    return ipu.ipu_strategy.IPUStrategyV1()


@pytest.mark.parametrize("scoped", [True, False])
def test_a_pipeline_counts_the_mini_batches_of_an_update(ipu: Any, strategy: Any, scoped: bool) -> None:
    import contextlib

    import tensorflow as tf

    counter = ipu.internal_ops.get_current_iteration_counter
    dataset = tf.data.Dataset.from_tensor_slices(np.arange(12, dtype=np.int32)).batch(1, drop_remainder=True)
    with strategy.scope() if scoped else contextlib.nullcontext():
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset)
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

        def run() -> None:
            ipu.pipelining_ops.pipeline(
                [lambda x: (x, counter()), lambda x, first: (x, first, counter())],
                gradient_accumulation_count=4,
                repeat_count=3,
                infeed_queue=infeed,
                outfeed_queue=outfeed,
            )

        strategy.run(tf.function(run))
    values, first, second = (np.ravel(v) for v in outfeed.dequeue())
    np.testing.assert_array_equal(values, np.arange(12))
    np.testing.assert_array_equal(first, np.tile(np.arange(4), 3))
    np.testing.assert_array_equal(second, first)


@pytest.mark.parametrize("by_tape", [True, False])
def test_a_pipeline_gives_captured_gradients_to_their_outfeed(ipu: Any, strategy: Any, by_tape: bool) -> None:
    import tensorflow as tf
    import tf_keras

    capture, backprop = ipu.grad_util_ops.capture_upstream_gradients, ipu.eager.backprop
    outfeed, captured = (ipu.ipu_outfeed_queue.IPUOutfeedQueue() for _ in range(2))
    with strategy.scope():
        weight = tf.Variable(0.7)
        optimizer = tf_keras.optimizers.legacy.SGD()

    def run() -> None:
        context = backprop.GradientCaptureTape() if by_tape else backprop.GradientCaptureContext()
        where = {"tape": context} if by_tape else {"variables": [weight], "gradient_capture_context": context}
        with context:
            ipu.pipelining_ops.pipeline(
                [lambda: tf.tanh(capture(weight, tag="a")), lambda y: tf.tanh(capture(y, tag="b"))],
                4,
                inputs=[],
                outfeed_queue=outfeed,
                optimizer_function=lambda loss: ipu.pipelining_ops.OptimizerFunctionOutput(
                    optimizer, loss, captured_gradient_outfeed=captured, **where
                ),
            )

    strategy.run(tf.function(run))
    inner = np.tanh(0.7)
    outer = 1 - np.tanh(inner) ** 2
    gradients = captured.dequeue()
    np.testing.assert_allclose(np.squeeze(gradients["b"]), 4 * outer, rtol=1e-5)
    np.testing.assert_allclose(np.squeeze(gradients["a"]), 4 * outer * (1 - inner**2), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "reduced"),
    [
        ({}, np.sum),
        ({"gradient_accumulation_reduction_method": "mean"}, np.mean),
        ({"gradient_accumulation_for_captured_grads": False}, lambda losses: losses[-1]),
        (None, np.sum),
    ],
    ids=["sum", "mean", "last", "alone"],
)
def test_captured_gradients_of_keras_accumulate(
    ipu: Any, strategy: Any, options: dict[str, Any] | None, reduced: Any
) -> None:
    """In a pipeline, and without one, where the loop of steps accumulates."""
    import tensorflow as tf
    import tf_keras

    from podrun.tensorflow.addons.capturing import CaptureUpstreamGradients

    class Capturing(tf_keras.optimizers.legacy.SGD):  # type: ignore[misc]
        supports_captured_grads = True

        def apply_gradients(self, pairs: Any, captured_grads: Any = None, name: str | None = None) -> Any:
            self.place.assign_add(1)
            self.totals.assign(tf.tensor_scatter_nd_add(
                self.totals, [[self.place - 1]], [tf.reduce_sum(captured_grads["t"])]
            ))  # fmt: skip
            return super().apply_gradients(pairs)

    points = np.random.RandomState(0).rand(16, 3).astype(np.float32)
    with strategy.scope():
        layers = tf_keras.layers
        model = tf_keras.Sequential([
            layers.Dense(2, kernel_initializer="ones", input_shape=(3,)),
            CaptureUpstreamGradients(layers.Dense(1, kernel_initializer="ones"), tag="t"),
        ])  # fmt: skip
        if options is None:
            ipu.config.IPUConfig().configure_ipu_system()
            model.set_gradient_accumulation_options(4)
        else:
            model.set_pipeline_stage_assignment([0, 1])
            model.set_pipelining_options(4, **options)
        optimizer = Capturing(0.0)
        optimizer.place, optimizer.totals = tf.Variable(0), tf.Variable(tf.zeros(2))
        model.compile(optimizer, "mse", steps_per_execution=8)
        model.fit(points, np.zeros((16, 1), np.float32), batch_size=2, shuffle=False, verbose=0)
    # The gradient of a mini-batch's mean of squares for its two results, added up.
    sums = (2 * 2 * points.astype(np.float64).sum(1) / 2).reshape(2, 4, 2).sum(2)
    assert int(optimizer.place.numpy()) == 2
    np.testing.assert_allclose(optimizer.totals.numpy(), [reduced(s) for s in sums], rtol=1e-5)


@pytest.mark.parametrize("sums", [True, False])
def test_loss_scaling_sees_what_a_pipeline_captured(strategy: Any, sums: bool) -> None:
    """Each mini-batch's captured gradient is below the edge of 4, their sum above it."""
    import tf_keras

    from podrun.tensorflow.addons.capturing import CaptureUpstreamGradients
    from podrun.tensorflow.addons.loss_scaling import ALSOptimizer

    layers = tf_keras.layers
    with strategy.scope():
        model = tf_keras.Sequential([
            layers.Dense(2, kernel_initializer="ones", input_shape=(1,)),
            CaptureUpstreamGradients(
                layers.Dense(1, kernel_initializer="ones", dtype="float16"), tag="t"
            ),
        ])  # fmt: skip
        model.set_pipeline_stage_assignment([0, 1])
        model.set_pipelining_options(4, gradient_accumulation_for_captured_grads=sums)
        scaling = ALSOptimizer(
            tf_keras.optimizers.legacy.SGD(0.0), captured_grads_only=True, histogram_bin_edge=4.0
        )
        model.compile(scaling, "mse", steps_per_execution=4)
        model.fit(np.ones((8, 1), np.float32), np.zeros((8, 1)), batch_size=2, shuffle=False, verbose=0)
    # Two values of 2 * 2 / 2 in each of four mini-batches.
    assert scaling.histogram.numpy().tolist() == ([0, 2] if sums else [2, 0])


def test_gradients_are_captured_in_a_context_alone(strategy: Any, ipu: Any) -> None:
    import tensorflow as tf

    captured = tf.function(ipu.grad_util_ops.capture_upstream_gradients)
    with pytest.raises(RuntimeError, match="may only be used within the context of "):
        strategy.run(captured, args=[np.ones(4, np.float32)])


def test_types_that_the_device_lacks_are_named(strategy: Any) -> None:
    import tensorflow as tf

    with pytest.raises(TypeError, match="Unsupported data type for input: float64"):
        strategy.run(tf.function(lambda x: x), args=[np.float64(1)])
    with pytest.raises(TypeError, match="Unsupported data type for output: float64"):
        strategy.run(tf.function(lambda x: tf.cast(x, tf.float64)), args=[np.float32(1)])


def test_rounding_is_that_of_the_configuration(strategy: Any, ipu: Any) -> None:
    import tensorflow as tf

    with ipu.scopes.stochastic_rounding(False):
        pass

    @tf.autograph.experimental.do_not_convert
    def rounded(x: Any) -> Any:
        with ipu.scopes.stochastic_rounding(True):
            return x + 1

    with pytest.raises(UnsupportedError, match=r"floating_point_behaviour\.esr"):
        strategy.run(tf.function(rounded), args=[np.float32(1)])


def test_shards_are_read_back(strategy: Any, ipu: Any) -> None:
    import tensorflow as tf

    seen: list[Any] = []

    def run(x: Any) -> Any:
        with ipu.scopes.ipu_shard(1):
            y = x + 1
        seen.append((ipu.sharding.get_sharding(y.op), ipu.sharding.get_sharding((y * 2).op)))
        return y

    strategy.run(tf.function(run), args=[np.float32(1)])
    assert seen == [([1], None)]
    with tf.Graph().as_default():
        one = tf.constant(1.0)
        with ipu.scopes.ipu_shard([1, 2]):
            two = one + 1.0
        assert ipu.sharding.get_sharding(two.op) == [1, 2]
        assert ipu.sharding.has_attr(two.op, "_XlaSharding")
        assert one.op in ipu.sharding.dependencies([two])


def test_identical_random_numbers_are_not_promised(strategy: Any, ipu: Any) -> None:
    with pytest.warns(UserWarning, match="experimental_identical_replicas"):
        ipu.utils.reset_ipu_seed(3, experimental_identical_replicas=True)


def test_a_layer_gives_to_a_queue_unless_it_did(ipu: Any, strategy: Any) -> None:
    """Keras traces a layer for its shapes when a model is made: what it gives there is nothing, and does not count in
    the program.
    """
    import tensorflow as tf
    import tf_keras

    class Shown(tf_keras.layers.Layer):  # type: ignore[misc]
        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            if not queue.enqueued:
                queue.enqueue({self.name: inputs})
            return inputs

    with strategy.scope():
        queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
        assert not queue.enqueued
        entry = tf_keras.Input((3,), batch_size=2)
        model = tf_keras.Model(entry, tf_keras.layers.Dense(1)(Shown(name="shown")(entry)))
        assert queue.enqueued
        model.compile("sgd", "mse", steps_per_execution=2)
        points = np.arange(24, dtype=np.float32).reshape(8, 3)
        model.fit(points, points[:, :1], batch_size=2, shuffle=False, verbose=0)
    assert queue.enqueued
    np.testing.assert_array_equal(queue.dequeue()["shown"], points.reshape(2, 2, 2, 3))
    with pytest.raises(ValueError, match="only be called in a program"):
        queue.enqueue(tf.constant(1.0))


def test_optimizers_derive_from_the_one_that_scales_losses(ipu: Any, strategy: Any) -> None:
    """Keras 2.6 has one such class, from which BERT's optimizer derives; later ones have another behind the name."""
    import tensorflow as tf
    import tf_keras

    class Static(tf_keras.mixed_precision.LossScaleOptimizer):  # type: ignore[misc]
        def __init__(self, inner: Any, scale: float) -> None:
            super().__init__(inner, dynamic=False, initial_scale=scale, dynamic_growth_steps=None)
            inner.gradient_transformers.insert(0, lambda pairs: [(g / scale, v) for g, v in pairs])

        def get_unscaled_gradients(self, grads: list[tf.Tensor]) -> list[tf.Tensor]:
            return grads

    points = np.arange(24, dtype=np.float32).reshape(8, 3) / 24
    weights = []
    for wrap in (lambda inner: inner, lambda inner: Static(inner, 128.0)):
        with strategy.scope():
            model = tf_keras.Sequential(
                [tf_keras.layers.Dense(1, kernel_initializer="ones", input_shape=(3,))]
            )
            model.compile(wrap(tf_keras.optimizers.SGD(0.1)), "mse", steps_per_execution=2)
            model.fit(points, points[:, :1], batch_size=2, shuffle=False, verbose=0)
        weights.append(model.get_weights()[0])
    np.testing.assert_allclose(weights[1], weights[0], rtol=1e-5)
    scaling = tf_keras.mixed_precision.LossScaleOptimizer
    newer = scaling(tf_keras.optimizers.experimental.SGD(0.1))
    older = scaling(tf_keras.optimizers.SGD(0.1))
    assert type(newer).__name__ == "LossScaleOptimizerV3"
    assert isinstance(newer, scaling)
    assert isinstance(older, scaling)
    assert isinstance(Static(tf_keras.optimizers.SGD(0.1), 2.0), scaling)
    assert not isinstance(tf_keras.optimizers.SGD(0.1), scaling)
    assert not isinstance(newer, Static)
    with strategy.scope():
        model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(3,))])
        model.compile(newer, "mse", steps_per_execution=2)
        model.set_gradient_accumulation_options(2)
        with pytest.raises(
            NotImplementedError, match="does not accumulate gradients for LossScaleOptimizerV3"
        ):
            model.fit(points, points[:, :1], batch_size=2, verbose=0)


def test_the_ordinal_stands_behind_the_name_of_a_queue(ipu: Any) -> None:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensors(np.zeros(2, np.float32))
    assert ipu.ipu_infeed_queue.IPUInfeedQueue(data, "validation", 1)._ordinal == 1
    assert ipu.ipu_infeed_queue.IPUInfeedQueue(data, "training")._ordinal == 0
    named = ipu.ipu_infeed_queue.IPUInfeedQueue(data, "named", prefetch_depth=7)
    assert (named._ordinal, named._depth, named._name) == (0, 7, "named")
    assert ipu.ipu_infeed_queue.IPUInfeedQueue(data, "named", device_ordinal=2)._ordinal == 2
    unnamed = ipu.ipu_infeed_queue.IPUInfeedQueue(data, 1, 5)
    assert (unnamed._ordinal, unnamed._depth) == (1, 5)


@pytest.mark.parametrize("pipelined", [True, False])
def test_optimizers_of_keras_update_weights_of_programs_without_a_strategy(ipu: Any, pipelined: bool) -> None:
    """The reduction of gradients of `tf.distribute` overrides its own gradient, and that one's, without end."""
    import tensorflow.compat.v1 as tf
    from tf_keras.optimizers.legacy import SGD

    from podrun.compat._keras_names import own_module

    wrappers = own_module("tensorflow.python.ipu.keras.optimizers.ipu_wrappers")
    assert wrappers is not None
    ops, wrapping = ipu.pipelining_ops, ipu.gradient_accumulation_optimizer
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 2
    config.configure_ipu_system()
    with tf.Graph().as_default(), tf.Session() as session:
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
        optimizer = SGD(0.5, momentum=0.5)

        def first() -> Any:
            return tf.get_variable("w", initializer=2.0, use_resource=True) * 3.0

        def last(x: Any) -> Any:
            return x - 1.0

        def pipeline() -> Any:
            return ops.pipeline(
                [first, last], 4, outfeed_queue=outfeed, reduction_method="sum",
                optimizer_function=lambda loss: ops.OptimizerFunctionOutput(optimizer, loss, tape=tape),
            )  # fmt: skip

        def step() -> Any:
            adapter = wrappers._KerasOptimizerWrapper(None, optimizer)
            accumulating = wrapping.GradientAccumulationOptimizerV2(adapter, 4, reduction_method="sum")
            loss = last(first())
            with pytest.raises(ValueError, match="var_list must be provided"):
                adapter.compute_gradients(loss)
            pairs = accumulating.compute_gradients(loss, tf.trainable_variables())
            return outfeed.enqueue(loss), accumulating.apply_gradients(pairs)

        with tf.device("/device:IPU:0"), tf.GradientTape() as tape:
            run = ipu.ipu_compiler.compile(pipeline if pipelined else lambda: ipu.loops.repeat(4, step))
        session.run(tf.global_variables_initializer())
        for expected in (2.0 - 6.0, 2.0 - 6.0 - (6.0 + 3.0)):
            session.run(run)
            assert session.run(tf.trainable_variables()) == [expected]
