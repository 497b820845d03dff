"""PyTorch's own operator samples agree with torch, forward and gradient: a ratchet."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.poptorch.opinfo import verdicts

FAST = [
    "add",
    "matmul",
    "nn.functional.layer_norm",
    "nn.functional.cross_entropy",
    "cat",
    "softmax",
    "gather",
]


@pytest.mark.parametrize("name", FAST)
def test_all_samples_of_an_operator_agree(name: str) -> None:
    verdict = verdicts([name])[name]
    assert verdict.agree
    assert not verdict.reasons
