"""Operations against TensorFlow on the CPU: results and gradients, float32 and float16, from the same values."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from tests.tensorflow.cases import CASES
from tests.tensorflow.more_cases import MORE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]


@pytest.fixture(scope="module")
def strategy() -> Any:
    """A strategy on one IPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TF_USE_LEGACY_KERAS", "1")
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
        from podrun.tensorflow.sdk.ipu_strategy import IPUStrategyV1
        from podrun.tensorflow.sdk.scopes import install_front_end
    install_front_end()
    return IPUStrategyV1()


ALL = CASES | MORE
NO_HALF = {
    "batch_norm", "lgamma", "digamma", "resize", "pow", "local_norm", "cholesky", "inverse", "determinant",
    "log_determinant",
    "solve", "triangular_solve", "qr", "singular_values", "eigenvalues", "whole_numbers", "bits", "bincount", "bitcast",
    "comparisons", "scatter_max", "scatter_min",
}  # fmt: skip
"""Operations that are compared in float32 alone."""


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("name", sorted(ALL))
def test_it_computes_what_tensorflow_does(strategy: Any, name: str, half: bool) -> None:
    import tensorflow as tf

    if half and name in NO_HALF:
        pytest.skip("compared in float32")
    function, arrays = ALL[name]
    dtype = tf.float16 if half else tf.float32
    inputs = [tf.cast(a, dtype) for a in arrays]

    def both(*values: Any) -> Any:
        with tf.GradientTape() as tape:
            for value in values:
                tape.watch(value)
            result = function(*values)
            total = tf.reduce_sum(tf.cast(result, tf.float32) ** 2)
        return result, *(g for g in tape.gradient(total, values) if g is not None)

    expected = tf.function(both)(*(tf.cast(v, tf.float32) for v in inputs))
    actual = strategy.run(tf.function(both), args=inputs)
    assert len(actual) == len(expected)
    for mine, theirs in zip(actual, expected, strict=True):
        want = np.asarray(tf.convert_to_tensor(theirs), np.float32)
        scale = np.abs(want).max() + 1e-3
        tolerance = 1e-2 if half else 1e-4
        np.testing.assert_allclose(np.asarray(mine, np.float32), want, rtol=tolerance, atol=tolerance * scale)
