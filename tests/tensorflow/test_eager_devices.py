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
    np.testing.assert_array_equal(squared, [65504, -65504, 4])
    np.testing.assert_array_equal(divided, [np.nan, -300, np.nan])
    np.testing.assert_array_equal(parts, [[65504], [1]])
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

    @tf.function
    def square(x: Any) -> Any:
        return x * x

    @tf.function
    def on_the_host(x: Any) -> Any:
        return tf.strings.length(tf.strings.as_string(x))

    with tf.device(IPU):
        np.testing.assert_array_equal(square(tf.constant([300.0, 2.0], tf.float16)), [65504, 4])
        assert square(tf.constant(3.0)).device == IPU_NAME
        assert on_the_host(tf.constant(3)).numpy() == 1


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
