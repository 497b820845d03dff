"""Values of variables between TensorFlow and the device: what is sent again, and whose memory TensorFlow gets."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([0.0, 1, 2], [0.0, 1, 2], True),
        ([0.0, 1, 2], [-0.0, 1, 2], False),
        ([np.nan, 1, 2], [np.nan, 1, 2], True),
        ([0.0, 1, 2], [0.0, 1, 3], False),
        ([], [], True),
        (5.0, 5.0, True),
    ],
)
def test_values_are_compared_bit_by_bit(one: object, other: object, same: bool) -> None:
    from podrun.tensorflow.execution.step_values import same_bits

    for dtype in (np.float32, np.float16):
        assert same_bits(np.array(one, dtype), np.array(other, dtype)) is same
    truth = np.array([True, False, True])
    assert same_bits(truth, truth.copy())
    assert not same_bits(truth, ~truth)


def test_results_without_elements_have_a_row_for_each_replica() -> None:
    from podrun.tensorflow.execution.step_values import rows_of_replicas

    assert rows_of_replicas(np.zeros(0), 2, (0, 3)).shape == (2, 0, 3)
    assert rows_of_replicas(np.zeros((2, 1, 3)), 2, (1, 3)).shape == (2, 1, 3)


def test_tensorflow_gets_no_memory_that_it_would_write_to() -> None:
    from podrun.tensorflow.execution.step_values import not_taken_over

    whole = np.zeros(64, np.float32)
    first = -(whole.ctypes.data // 4) % 16  # The first element at a multiple of 64 bytes.
    aligned, other = whole[first : first + 8], whole[first + 1 : first + 9]
    assert aligned.ctypes.data % 64 == 0
    assert not np.shares_memory(not_taken_over(aligned), aligned)
    assert np.shares_memory(not_taken_over(other), other)
