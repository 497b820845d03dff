"""Names of the SDK's libraries in programs of version 1, and the words in which wrong arguments are refused."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
_LIBRARIES = "tensorflow.compiler.plugin.poplar.ops."


def computed(ipu: Any, function: Callable[..., Any], *arrays: np.ndarray) -> list[Any]:
    """The results of a compiled program of version 1, whose variables nothing initialises."""
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default(), tf.Session() as session:
        inputs = [tf.placeholder(a.dtype, a.shape) for a in arrays]
        with ipu.scopes.ipu_scope("/device:IPU:0"):
            results = ipu.ipu_compiler.compile(function, inputs)
        return list(session.run(results, dict(zip(inputs, arrays, strict=True))))


@pytest.mark.parametrize("several", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_masks_come_with_their_seeds(ipu: Any, several: bool) -> None:
    """The rate of these operations is what is kept, other than that of ``rand_ops.dropout``."""
    dropout = importlib.import_module(_LIBRARIES + "gen_poprand_ops")
    x = np.linspace(1, 2, 400).astype(np.float32).reshape(20, 20)

    def drop(x: Any) -> Any:
        dropped, seed, _ = dropout.ipu_dropout(x, rate=0.75, scale=3.0)
        again, same, _ = dropout.ipu_dropout_with_seed(x, seed, rate=0.75, scale=3.0)
        if not several:
            return dropped, seed, again, same
        rows, _, _ = dropout.ipu_dropout_with_seed(x, [1, 2], rate=0.75, scale=1.0, noise_shape=[20, 1])
        whole, _, _ = dropout.ipu_dropout(x, rate=1.0, scale=0.5)
        reference = ipu.rand_ops.dropout(x, rate=0.9, seed=[3, 4])
        alike, _, _ = dropout.ipu_dropout_with_seed(x, [3, 4], rate=1 - 0.9, scale=1 / (1 - 0.9))
        return dropped, seed, again, same, rows, whole, reference, alike

    dropped, seed, again, same, *others = computed(ipu, drop, x)
    kept = dropped != 0
    assert 0.6 < kept.mean() < 0.9  # Six standard deviations of the mean are 0.13.
    np.testing.assert_allclose(dropped[kept], 3 * x[kept], rtol=1e-6)
    np.testing.assert_array_equal(again, dropped)
    np.testing.assert_array_equal(same, seed)
    assert len(others) == (4 if several else 0)
    if several:
        rows, whole, reference, alike = others
        assert set(np.count_nonzero(rows, 1)) == {0, 20}
        np.testing.assert_array_equal(whole, 0.5 * x)
        np.testing.assert_allclose(alike, reference, rtol=1e-6)


@pytest.mark.slow
def test_seeded_candidates_are_the_same_in_each_run_and_others_on_each_replica(ipu: Any) -> None:
    import tensorflow.compat.v1 as tf

    def sample(unique: bool = False) -> Any:
        true = tf.zeros([1, 1], tf.int64)
        return tf.random.uniform_candidate_sampler(true, 1, 30, unique, 10 if unique else 100000, seed=5)[0]

    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 2
    try:
        config.configure_ipu_system()
        with tf.Graph().as_default(), tf.Session() as session:
            tf.set_random_seed(7)
            outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
            with ipu.scopes.ipu_scope("/device:IPU:0"):
                loop = ipu.ipu_compiler.compile(
                    lambda: ipu.loops.repeat(1, lambda: outfeed.enqueue(sample()))
                )
                too_many = ipu.ipu_compiler.compile(lambda: sample(unique=True))
            taken, runs = outfeed.dequeue(), []
            for _ in range(2):
                session.run(loop)
                runs.append(np.ravel(session.run(taken)).reshape(2, 30))
            with pytest.raises(
                tf.errors.InvalidArgumentError, match=r"num_sampled \(\[30\]\) unique samples"
            ):
                session.run(too_many)
    finally:
        config.auto_select_ipus = 1
        config.configure_ipu_system()
    np.testing.assert_array_equal(runs[0], runs[1])
    assert (runs[0][0] != runs[0][1]).any()


def test_rows_outside_of_a_table_are_zeros(ipu: Any) -> None:
    libraries = importlib.import_module(_LIBRARIES + "gen_popops_ops")
    table, ids = np.arange(12, dtype=np.float16).reshape(4, 3), np.array([-3, 3, 4, 0], np.int32)

    def look_up(table: Any, ids: Any) -> Any:
        rows = ipu.embedding_ops.embedding_lookup(table, ids, serialization_factor=2)
        return rows, libraries.ipu_multi_update_add(table, updates=rows, indices=[1, 1, 2, 0], scale=2.0)

    rows, added = computed(ipu, look_up, table, ids)
    np.testing.assert_array_equal(rows, [[0] * 3, table[3], [0] * 3, table[0]])
    expected = table.copy()
    np.add.at(expected, [1, 1, 2, 0], 2 * rows)
    np.testing.assert_array_equal(added, expected)


def test_an_expression_is_computed_for_each_element(ipu: Any) -> None:
    x, y = np.arange(-3, 3, dtype=np.float32)[:, None], np.array([[2, 5]], np.float32)

    def express(x: Any, y: Any) -> Any:
        operation = ipu.custom_ops.codelet_expression_op
        return operation(lambda a, b: a * a + b, x, y), operation(abs, x)

    both, alone = computed(ipu, express, x, y)
    np.testing.assert_array_equal(both, x * x + y)
    np.testing.assert_array_equal(alone, abs(x))


def test_wrong_arguments_are_refused_in_the_words_of_the_sdk(ipu: Any) -> None:
    import tensorflow as tf

    x = tf.zeros([4, 2, 3])
    with pytest.raises(ValueError, match=r"must equal the rank of x\."):
        ipu.rand_ops.dropout(x, noise_shape=[1])
    with pytest.raises(ValueError, match="Dimension mismatch"):
        ipu.rand_ops.dropout(x, noise_shape=[4, 1, 2])
    with pytest.raises(
        ValueError, match=r"serialization_factor \(3\) must divide the size of the 0th dimension"
    ):
        ipu.embedding_ops.embedding_lookup(x, tf.zeros([1], tf.int32), serialization_factor=3)
    for method in (None, "mode", 7):
        with pytest.raises(ValueError, match="reduction_method must be set to SUM, MEAN or RUNNING_MEAN"):
            ipu.gradient_accumulation.GradientAccumulationReductionMethod.parse(method)


def test_a_buffered_dataset_has_whole_buffers(ipu: Any) -> None:
    import tensorflow as tf

    buffered = ipu.data.ops.dataset_ops.BufferDataset(tf.data.Dataset.range(5), 2)
    assert [int(x) for x in buffered] == [0, 1, 2, 3]


def test_state_of_the_device_is_none_of_the_programs_variables(ipu: Any) -> None:
    """Delay lines and accumulators need no initialiser, start at zero in each session, and are in no checkpoint."""
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default():
        weight = tf.get_variable("weight", initializer=np.float32(1.0), use_resource=True)

        def body(x: Any) -> Any:
            optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(
                tf.train.GradientDescentOptimizer(0.5), 2
            )
            train = optimizer.minimize(weight * x)
            return ipu.internal_ops.fifo(x, 2), train

        x = tf.placeholder(tf.float32, [])
        with ipu.scopes.ipu_scope("/device:IPU:0"):
            (delayed,) = ipu.ipu_compiler.compile(lambda x: ipu.loops.repeat(2, body, [x]), [x])
        assert tf.global_variables() == [weight]
        for _ in range(2):
            with tf.Session() as session:
                session.run(weight.initializer)
                assert session.run(delayed, {x: 3.0}) == 0.0
                assert session.run(weight) == 1.0 - 0.5 * (3.0 + 0.0)
                assert session.run(delayed, {x: 5.0}) == 0.0


def test_a_branch_gives_to_an_outfeed_where_it_is_reached(ipu: Any) -> None:
    """In the iterations that take the branch, also where an optimizer gives gradients once for an update."""
    import tensorflow.compat.v1 as tf

    queues = ipu.ipu_outfeed_queue
    every, last = queues.IPUOutfeedQueue(), queues.IPUOutfeedQueue(queues.IPUOutfeedMode.LAST)
    summed = queues.IPUOutfeedQueue()

    class Recording(tf.train.GradientDescentOptimizer):  # type: ignore[misc]
        def apply_gradients(self, pairs: Any, *args: Any, **kwargs: Any) -> Any:
            given = summed.enqueue([gradient for gradient, _ in pairs])
            return tf.group(given, super().apply_gradients(pairs, *args, **kwargs))

    def body(i: Any) -> Any:
        def give() -> Any:
            return tf.group(every.enqueue((i, 10 * i)), last.enqueue({"i": i}))

        given = tf.cond(tf.equal(tf.math.floormod(i, 2.0), 1.0), give, tf.no_op)
        weight = tf.get_variable("weight", initializer=np.float32(1.0), use_resource=True)
        optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(Recording(0.0), 3)
        return i + 1, given.op, optimizer.minimize(weight * i)

    with tf.Graph().as_default(), tf.Session() as session:
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.from_tensors(np.float32(0)).repeat())
        with ipu.scopes.ipu_scope("/device:IPU:0"):
            looped = ipu.ipu_compiler.compile(
                lambda: ipu.loops.repeat(6, lambda i, _: body(i), [tf.constant(0.0)], infeed)
            )
        session.run([infeed.initializer, tf.global_variables_initializer()])
        session.run(looped)
        numbers, tens = session.run(every.dequeue())
        np.testing.assert_array_equal(numbers, [1, 3, 5])
        np.testing.assert_array_equal(tens, [10, 30, 50])
        assert session.run(last.dequeue())["i"] == 5
        np.testing.assert_array_equal(session.run(summed.dequeue())[0], [0 + 1 + 2, 3 + 4 + 5])


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("keras.ipu", "SequentialPipelineModel", "use keras.Model"),
        ("tensorflow.python.ipu.keras", "PipelineSequential", "use keras.Model"),
        ("tensorflow.python.ipu.keras.pipeline", "SequentialPipelineModel", "use keras.Model"),
        ("keras.ipu.pipeline", "PipelineModel", "use keras.Model"),
        *(
            (f"ipu_tensorflow_addons.keras.experimental.auto_pipeline.prediction{module}", name, instead)
            for module, name, instead in (
                (".partition", "parse_layer_profile", "use podrun profile"),
                (".partition", "create_model_profile", "use podrun profile"),
                ("", "partition_evaluate", "use podrun profile"),
                ("", "max_throughput", "use podrun estimate --scan"),
            )
        ),
    ],
)
def test_names_that_podrun_does_not_have_are_refused_with_what_to_use(
    module: str, name: str, instead: str
) -> None:
    from podrun.compat._keras_names import own_module

    with pytest.raises(NotImplementedError, match=f"does not have {module}.{name}: .*{instead}"):
        getattr(own_module(module), name)


def test_helpers_of_profiles_have_their_published_names() -> None:
    from podrun.compat._keras_names import own_module
    from podrun.tensorflow.keras import stage_partition

    utils = "ipu_tensorflow_addons.keras.experimental.auto_pipeline.utils"
    helpers = own_module(f"{utils}.keras_utils")
    assert helpers is not None
    assert (helpers.prepend_batchsize, helpers.tf_tensor_size) == (
        stage_partition.with_batch_size,
        stage_partition.tensor_bytes,
    )
    types = own_module(f"{utils}.types_utils")
    assert types is not None
    assert types.compare_pipelined_model_profile is stage_partition.print_profile_differences


def test_a_strategy_takes_where_variables_are(ipu: Any) -> None:
    strategy = ipu.horovod.ipu_horovod_strategy.IPUHorovodStrategy("/device:IPU:0", variables_on_host=True)
    assert strategy.variables_on_host
    assert strategy.adds_reductions
