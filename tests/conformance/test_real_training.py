"""Real-model architectures train."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.conformance import real_training


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rate"), [("test_resnet50", 0.01), ("test_bvlc_alexnet", 0.001)])
def test_losses_fall(name: str, rate: float) -> None:
    losses = real_training.training(name, rate).losses(4)
    assert all(after < before for before, after in pairwise(losses)), losses
