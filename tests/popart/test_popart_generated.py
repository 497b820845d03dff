"""Generated training programs compute what NumPy does: a slice of what `generated_training` goes through."""

from __future__ import annotations

import pytest

from tests.popart import generated_training

QUICK = (7,)
"""One program: images through a convolution and a padded maximum, RMSProp in TensorFlow's form, a scaled loss."""
MORE = (4, 16, 19, 35, 40, 43, 50)
"""Clipping with scaled optimizer state, running means, replicas, a pipeline, running statistics."""


@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MORE)])
def test_a_program_computes_what_numpy_does(seed: int) -> None:
    generated_training.check(seed)
