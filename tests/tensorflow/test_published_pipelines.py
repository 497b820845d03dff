"""What programs and tests written for the SDK rely on of its pipelines, its plugin's operations and its messages."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest

from tests.tensorflow.test_published_cases import configured

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
PLUGIN = "tensorflow.compiler.plugin.poplar."


def inferred(ipu: Any, **options: Any) -> Any:
    """What the outfeed of a pipeline of two stages gives for four elements: 2, 3, 4, 5."""
    tf = configured(ipu, 2)
    with tf.Graph().as_default(), tf.Session() as session:
        dataset = tf.data.Dataset.from_tensor_slices(np.arange(4, dtype=np.float32)).repeat()
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset)
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
        with ipu.scopes.ipu_scope("/device:IPU:0"):
            run = ipu.ipu_compiler.compile(
                lambda: ipu.pipelining_ops.pipeline(
                    [lambda x: x + 1.0, lambda x: x + 1.0],
                    4,
                    infeed_queue=infeed,
                    outfeed_queue=outfeed,
                    **options,
                )
            )
        session.run(infeed.initializer)
        dequeued = outfeed.dequeue()
        session.run(run)
        return session.run(dequeued)


def test_one_tensor_leaves_a_pipeline_by_itself(ipu: Any) -> None:
    """Also where TensorFlow behaves as version 1. A sum leaves in a list, in a type that may be a class."""
    np.testing.assert_array_equal(inferred(ipu), [2.0, 3.0, 4.0, 5.0])
    summed = inferred(ipu, accumulate_outfeed=True, accumulate_outfeed_dtype=np.float32)
    assert isinstance(summed, list)
    np.testing.assert_array_equal(summed, [[14.0]])


def trained(ipu: Any, loss: Any, *, queue: bool = True, **options: Any) -> tuple[Any, Any]:
    """What the outfeed gives, and a weight of 2 after one update of four mini-batches."""
    tf = configured(ipu, 2)
    ops = ipu.pipelining_ops
    with tf.Graph().as_default(), tf.Session() as session:
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

        def first() -> Any:
            return tf.get_variable("w", initializer=2.0) * 3.0

        def net() -> Any:
            return ops.pipeline(
                [first, loss],
                4,
                outfeed_queue=outfeed if queue else None,
                optimizer_function=lambda value: ops.OptimizerFunctionOutput(
                    tf.train.GradientDescentOptimizer(0.5), value
                ),
                reduction_method="sum",
                **options,
            )

        with tf.device("/device:IPU:0"):
            run = ipu.ipu_compiler.compile(net)
        (weight,) = tf.global_variables()
        assert weight.__class__.__name__ == "ResourceVariable"
        session.run(tf.global_variables_initializer())
        dequeued = outfeed.dequeue()
        session.run(run)
        return session.run([dequeued, weight])


@pytest.mark.parametrize("dtype", [None, np.float32])
def test_types_of_accumulators_are_classes_or_functions(ipu: Any, dtype: Any) -> None:
    """Four gradients of 3 at rate 0.5. Variables of programs are resources without being asked for."""
    losses, weight = trained(ipu, lambda x: x, gradient_accumulation_dtype=dtype)
    np.testing.assert_array_equal(np.ravel(losses), [6.0] * 4)
    assert weight == 2.0 - 0.5 * 12.0


def test_a_loss_may_depend_on_no_weights(ipu: Any) -> None:
    """All gradients are zero then, with a warning; nothing that leaves is refused without a queue for it."""
    tf = configured(ipu, 2)
    with pytest.warns(UserWarning, match="The loss '.*' of the pipeline depends on no weight"):
        losses, weight = trained(ipu, lambda _: tf.constant(1.0))
    np.testing.assert_array_equal(np.ravel(losses), [1.0] * 4)
    assert weight == 2.0
    with pytest.raises(ValueError, match="no outfeed_queue has been provided"):
        trained(ipu, lambda x: x, queue=False)


def test_outfeeds_by_the_name_of_their_stream(ipu: Any) -> None:
    """Operations of the plugin; what is taken is a list."""
    tf = configured(ipu, 1)
    plugin = importlib.import_module(PLUGIN + "ops.gen_pop_datastream_ops")
    with tf.Graph().as_default(), tf.Session() as session:
        for mode, shape in (("all", (2, 2)), ("get_last", (2,))):
            told = {"feed_id": mode, "outfeed_mode": mode, "output_shapes": [[2]]}
            value = tf.placeholder(tf.float32, [2])
            with tf.device("/device:IPU:0"):
                enqueued = plugin.pop_datastream_outfeed_enqueue([value + 1.0], **told)
            dequeued = plugin.pop_datastream_outfeed_dequeue(output_types=[np.float32], **told)
            for number in (1.0, 2.0):
                session.run(enqueued, {value: [number, number]})
            (result,) = session.run(dequeued)
            assert result.shape == shape
            np.testing.assert_array_equal(np.reshape(result, [-1, 2])[-1], [3.0, 3.0])


def test_groups_must_divide_the_replicas(ipu: Any) -> None:
    """The SDK's error and words."""
    tf = configured(ipu, 4)
    with tf.Graph().as_default(), tf.Session() as session:
        with ipu.scopes.ipu_scope("/device:IPU:0"):
            total = ipu.ipu_compiler.compile(
                lambda x: ipu.loops.repeat(1, lambda y: ipu.cross_replica_ops.cross_replica_sum(y, 3), [x]),
                [1.0],
            )
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"group size \(got 3\) does not evenly"):
            session.run(total)


def test_operations_that_no_cpu_has_run_on_the_first_device(ipu: Any) -> None:
    """Without a scope around them; channels count from the end, too. Wrong ones are refused in the SDK's words."""
    tf = configured(ipu, 1)
    norms = importlib.import_module("tensorflow.python.ipu.normalization_ops")
    with tf.Graph().as_default(), tf.Session() as session:
        numbers = np.random.RandomState(0).rand(2, 4, 3, 5).astype(np.float32)
        first = norms.group_norm(tf.constant(numbers), 2, channels_axis=-3, scope="both")
        again = norms.group_norm(tf.constant(numbers), 2, channels_axis=1, scope="both", reuse=True)
        session.run(tf.global_variables_initializer())
        values = session.run([first, again])
        np.testing.assert_array_equal(*values)
        assert abs(np.mean(values[0])) < 1e-5
        for norm in (norms.group_norm, norms.layer_norm, norms.instance_norm):
            with pytest.raises(ValueError, match="Axis is out of bounds"):
                norm(tf.constant(numbers), channels_axis=5)
            with pytest.raises(ValueError, match="undefined rank"):
                norm(tf.placeholder(tf.float32))
            with pytest.raises(ValueError, match="undefined channel dimension"):
                norm(tf.placeholder(tf.float32, [1, 3, None]))


def test_seeds_of_devices(ipu: Any) -> None:
    """Two devices draw different numbers from the start; a seed starts a device again at once."""
    tf = configured(ipu, [1, 1])
    drawn = []
    with tf.Graph().as_default(), tf.Session() as session:
        for device in ("/device:IPU:0", "/device:IPU:1"):
            with ipu.scopes.ipu_scope(device):
                drawn += ipu.ipu_compiler.compile(lambda: tf.random.uniform([100]))
        assert np.any(np.subtract(*session.run(drawn)))
        for device in ("/device:IPU:0", "/device:IPU:1"):
            assert ipu.utils.reset_ipu_seed(7, device) is None
        one, two = session.run(drawn[0]), session.run(drawn[0])
        assert np.any(one != two)
        ipu.utils.reset_ipu_seed(7)
        np.testing.assert_array_equal(session.run(drawn[0]), one)
