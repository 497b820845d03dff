"""Operations of eager mode in the scope of an IPU: values and devices as an IPU has them, and what it refuses."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
IPU, IPU_NAME = "/device:IPU:0", "/job:localhost/replica:0/task:0/device:IPU:0"


def test_halves_overflow_as_on_an_ipu(ipu: Any) -> None:
    import tensorflow as tf

    large = tf.constant([300.0, -300.0, 2.0], tf.float16)
    with tf.device(IPU):
        squared, divided = large * tf.abs(large), large / tf.constant([0.0, 1.0, 0.0], tf.float16)
        with tf.device("/device:CPU:0"):
            on_host = large * large
        parts = tf.split(tf.cast(tf.constant([1e6, 1.0]), tf.float16), 2)
        bits = tf.bitcast(tf.constant([0x7C00, 0x3C00], tf.uint16), tf.float16)
    np.testing.assert_array_equal(squared, [65504, -65504, 4])
    np.testing.assert_array_equal(divided, [np.nan, -300, np.nan])
    np.testing.assert_array_equal(parts, [[65504], [1]])
    np.testing.assert_array_equal(bits, [np.inf, 1])  # Nothing is computed.
    assert np.isinf(on_host.numpy()[:2]).all()
    assert squared.device == IPU_NAME
    assert on_host.device != IPU_NAME
    assert np.isinf((large * large).numpy()[:2]).all()
    config = ipu.config.IPUConfig()
    config.floating_point_behaviour.nanoo = True
    config.configure_ipu_system()
    with ipu.scopes.ipu_scope(IPU):
        np.testing.assert_array_equal(large * large, [np.nan, np.nan, 4])


def test_variables_and_gradients_are_the_ipus(ipu: Any) -> None:
    import tensorflow as tf

    with tf.device(IPU):
        weight = tf.Variable(tf.constant([300.0, 1.0], tf.float16) * 300.0)
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(weight * weight)
        gradient = tape.gradient(total, weight)
    assert weight.device == IPU_NAME
    np.testing.assert_array_equal(weight, [65504, 300])
    assert total.numpy() == 65504
    np.testing.assert_array_equal(gradient, [65504, 600])


def test_a_function_in_the_scope_is_a_program(ipu: Any) -> None:
    import tensorflow as tf

    @tf.function(autograph=False)
    def square(x: Any) -> Any:
        return x * x

    @tf.function(autograph=False)
    def on_the_host(x: Any) -> Any:
        return tf.strings.length(tf.strings.as_string(x))

    with tf.device(IPU):
        np.testing.assert_array_equal(square(tf.constant([300.0, 2.0], tf.float16)), [65504, 4])
        assert square(tf.constant(3.0)).device == IPU_NAME
        assert on_the_host(tf.constant(3)).numpy() == 1


def test_a_function_without_autograph_is_not_converted(ipu: Any) -> None:
    """On an IPU as on the host: Python cannot branch on a tensor."""
    import tensorflow as tf

    @tf.function(autograph=False)
    def chosen(x: Any) -> Any:
        return x * 2.0 if x > 0.0 else x

    strategy = ipu.ipu_strategy.IPUStrategyV1()
    with strategy.scope(), pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        strategy.run(chosen, args=[tf.constant(3.0)])
    with tf.device(IPU), pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        chosen(tf.constant(3.0))


def test_float64_stays_on_the_host_unless_placing_is_strict(ipu: Any) -> None:
    import tensorflow as tf

    wide = tf.constant([1e300, 2.0], tf.float64)
    with tf.device(IPU):
        np.testing.assert_array_equal(wide * 2, [2e300, 4.0])
        assert (wide * 2).device != IPU_NAME
        before = tf.config.get_soft_device_placement()
        tf.config.set_soft_device_placement(False)
        try:
            with pytest.raises(tf.errors.InvalidArgumentError, match="no supported kernel for IPU devices"):
                wide * 2
        finally:
            tf.config.set_soft_device_placement(before)


def test_no_operation_is_looked_at_outside_of_scopes(ipu: Any) -> None:
    import tensorflow as tf

    entries = importlib.import_module("tensorflow.python.pywrap_tfe")
    before = entries.TFE_Py_FastPathExecute
    with tf.device(IPU), tf.device(IPU):
        assert entries.TFE_Py_FastPathExecute != before
    assert entries.TFE_Py_FastPathExecute == before


@pytest.mark.slow
def test_gradients_pass_through_functions_in_the_scope(ipu: Any) -> None:
    import tensorflow as tf

    weight = tf.Variable([2.0])
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones")])
    model.build((None, 2))
    cube, called = tf.function(lambda x: tf.reduce_sum(weight * x * x)), tf.function(model)
    with tf.device(IPU):
        x = tf.constant([3.0])
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = cube(x)
        np.testing.assert_array_equal(tape.gradient(total, [x, weight]), [[12.0], [9.0]])
        with tf.GradientTape() as tape:
            mean = tf.reduce_mean(called(tf.constant([[1.0, 2.0], [3.0, 5.0]])))
        kernel, bias = tape.gradient(mean, model.trainable_variables)
        with tf.autodiff.ForwardAccumulator(x, tf.ones([1])) as forward:
            total = cube(x)
        assert forward.jvp(total).numpy() == 12.0
        assert cube(x).device == IPU_NAME
    np.testing.assert_array_equal(kernel, [[2.0], [3.5]])
    np.testing.assert_array_equal(bias, [1.0])


def test_a_function_under_a_tape_is_a_program_with_gradients(ipu: Any) -> None:
    import tensorflow as tf

    weight, count = tf.Variable([2.0, 1.0]), tf.Variable(0)

    @tf.function
    def power(x: Any, exponent: int) -> Any:
        count.assign_add(1)
        result = x
        for _ in range(exponent - 1):
            result = result * x
        if tf.reduce_sum(x) > 100.0:
            result = result + 1.0
        return {"power": weight * result, "half": tf.cast(x, tf.float16) * 300.0, "place": tf.argmax(x)}

    with tf.device(IPU):
        x = tf.constant([3.0, -1.0])
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                results = power(x, 3)
                total = tf.reduce_sum(results["power"])
            weight.assign([7.0, 7.0])  # Gradients are those of the values before.
            first = tape.gradient(total, x)
            by_weight = tape.gradient(total, weight)
            halves = tape.gradient(results["half"], x)
        second = outer.gradient(first, [x, weight])
        with tf.GradientTape() as tape:
            drawn = tf.function(lambda: weight * tf.random.uniform([2]), autograph=False)()
    assert results["power"].device == IPU_NAME
    np.testing.assert_array_equal(results["place"], 0)
    np.testing.assert_array_equal(results["half"], [900, -300])
    np.testing.assert_allclose(first, [2 * 27, 3])
    np.testing.assert_allclose(by_weight, [27, -1])
    np.testing.assert_array_equal(halves, [300, 300])
    np.testing.assert_allclose(second[0], [2 * 18, -6])
    np.testing.assert_allclose(second[1], [27, 3])
    assert count.numpy() == 1
    np.testing.assert_allclose(
        tape.gradient(drawn, weight) * 7.0, drawn
    )  # By the host, with the same numbers.


def test_functions_that_no_program_can_be_run_on_the_host(ipu: Any) -> None:
    import tensorflow as tf

    numbers = tf.data.Dataset.range(4)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1, 2], [3, 4]), -1)

    @tf.function
    def added(dataset: Any) -> Any:
        total = tf.constant(0, tf.int64)
        for number in dataset:
            total += number
        return total

    @tf.function(autograph=False)
    def named(x: Any, word: str) -> Any:
        return 2 * x, None, word, {"count": 3}

    with tf.device(IPU):
        assert added(numbers).numpy() == 6
        assert tf.function(lambda: added(numbers))().numpy() == 6
        np.testing.assert_array_equal(
            tf.function(table.lookup, autograph=False)(tf.constant([1, 5])), [3, -1]
        )
        positive = tf.function(lambda x: tf.boolean_mask(x, x > 0), autograph=False)(tf.constant([1.0, -2.0]))
        assert (
            tf.function(tf.reduce_sum, autograph=False)(tf.ragged.constant([[1.0, 2.0], [3.0]])).numpy() == 6
        )
        wide = tf.function(lambda x: 2 * x, autograph=False)(tf.constant(1e300, tf.float64))
        doubled, nothing, word, count = named(np.ones(2, np.float32), "feed")
    assert wide.numpy() == 2e300
    np.testing.assert_array_equal(positive, [1])
    np.testing.assert_array_equal(doubled, [2, 2])
    assert (nothing, word.numpy(), word.dtype, count["count"].numpy()) == (None, b"feed", tf.string, 3)


def test_a_function_runs_once_whether_or_not_it_is_a_program(ipu: Any) -> None:
    import tensorflow as tf

    traced: list[str] = []
    count = tf.Variable(0.0)

    @tf.function
    def wrong(x: Any) -> Any:
        traced.append("wrong")
        raise TypeError("the program's own")

    @tf.function(autograph=False)
    def on_the_host(x: Any) -> Any:
        traced.append("host")
        count.assign_add(1.0)
        return tf.strings.length(tf.strings.as_string(x))

    with tf.device(IPU):
        with pytest.raises(TypeError, match="the program's own"):
            wrong(tf.ones([2]))
        assert traced == ["wrong"]
        on_the_host(tf.constant(3))
        traces = len(traced)
        for _ in range(2):
            on_the_host(tf.constant(3))
    assert len(traced) == traces
    assert count.numpy() == 3


def test_keras_trains_and_predicts_in_the_scope(ipu: Any) -> None:
    import tensorflow as tf

    x = np.array([[1.0, 2.0], [3.0, 5.0]], np.float32)
    with tf.device(IPU):
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(tf.keras.optimizers.legacy.SGD(0.5), "mse")
        before = model.predict(x, verbose=0)
        losses = model.fit(x, np.zeros([2, 1], np.float32), batch_size=2, epochs=1, verbose=0).history["loss"]
    np.testing.assert_allclose(before, [[3], [8]])
    np.testing.assert_allclose(losses, [(9 + 64) / 2])
    expected = 1 - 0.5 * np.mean(2 * x * before, 0)
    np.testing.assert_allclose(model.get_weights()[0][:, 0], expected, rtol=1e-5)


def test_a_step_with_an_optimizer_of_keras_is_a_program(ipu: Any) -> None:
    import tensorflow as tf

    model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)])
    model.build((None, 2))
    optimizer, mean = tf.keras.optimizers.legacy.SGD(0.25, momentum=0.5), tf.keras.metrics.Mean()

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.weights), model.weights, strict=True))
        mean.update_state(loss)
        return loss

    with tf.device(IPU):
        losses = [step(tf.constant([[1.0, 2.0]])) for _ in range(2)]
    assert [loss.device for loss in losses] == [IPU_NAME] * 2
    np.testing.assert_array_equal(losses, [3, 3 - 0.25 * 5])
    assert mean.result().numpy() == (3 + 1.75) / 2
    np.testing.assert_array_equal(model.weights[0][:, 0], 1 - np.array([1, 2]) * (0.25 + 0.375))


def test_floating_point_exceptions_end_an_operation(ipu: Any) -> None:
    import tensorflow as tf

    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    config.floating_point_behaviour.div0 = True
    config.configure_ipu_system()
    one, infinite = tf.constant([1.0, 2.0]), tf.constant([np.inf, 1.0])
    with tf.device(IPU):
        np.testing.assert_array_equal(infinite + 1.0, [np.inf, 2])
        with pytest.raises(
            tf.errors.InternalError, match=r"state: IPU 0: .* RealDiv has values that are inf"
        ):
            tf.math.divide(one, one - one)
        with pytest.raises(tf.errors.InternalError, match="Log1p has values that are no numbers"):
            tf.math.log1p(-3.0 * one)
        moved, bits = tf.Variable([1.0, np.inf]), tf.constant(0x7F800000, tf.int32)
        moved.assign([2.0, np.inf])
        for value in (moved.read_value(), tf.identity(moved), tf.gather(moved, [0, 1])):
            np.testing.assert_array_equal(value, [2, np.inf])
        assert np.isinf(tf.bitcast(bits, tf.float32))
        part = tf.bitcast(tf.bitcast(tf.constant(0x3F807F80, tf.int32), tf.float32), tf.bfloat16)
        np.testing.assert_array_equal(part.numpy().astype(np.float32), [np.inf, 1])
        assert np.isneginf(tf.reduce_max(tf.zeros([0])))
        with pytest.raises(tf.errors.InternalError, match="Reciprocal has values that are inf"):
            tf.math.reciprocal(moved[:1] - 2.0)
    assert np.isinf(tf.math.divide(one, 0.0)).all()
