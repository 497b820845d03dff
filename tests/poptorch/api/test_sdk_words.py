"""Errors in the SDK's own words, which handlers and published tests of programs look for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from podrun import poptorch

X = torch.ones(2, 3)


class Calling(torch.nn.Module):
    """Any function as forward, and a buffer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def removing(model: Any, x: Any) -> Any:
    del model._buffers["total"]
    return x + 1


def marked(x: Any) -> Any:
    return poptorch.set_overlap_for_output(x, poptorch.OverlapMode.NoOverlap)


def blocks(model: Any, x: Any) -> Any:
    with poptorch.Block(ipu_id=0):
        x = x * 2
    with poptorch.Block(ipu_id=1):
        return x * 3


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (removing, "Buffer total is removed from the model when calling the forward method."),
        (
            lambda m, x: torch.nonzero(x),
            "Operations using aten::nonzero are unsupported because the output shape is",
        ),
        (
            lambda m, x: x[x > 0],
            "aten::nonzero are unsupported because the output shape is determined by the tensor",
        ),
        (
            lambda m, x: torch.nn.functional.one_hot(x.long()),
            "OneHot num classes must be specified and must be const",
        ),
        (
            lambda m, x: poptorch.set_overlap_for_input(x + 1, poptorch.OverlapMode.NoOverlap),
            "poptorch.set_overlap_for_input applied on a node which is not a tensor input to the model.",
        ),
        (
            lambda m, x: marked(x) + 1,
            "set_overlap_for_output applied on a node which is not a tensor output to the",
        ),
        (
            lambda m, x: (marked(x), x),
            "set_overlap_for_output cannot be used with a tensor that is returned twice.",
        ),
        (
            blocks,
            "poptorch.Options().deviceIterations must be greater than or equal to the number of pipeline stages (2)",
        ),
    ],
)
def test_what_forward_does_wrong_is_said_in_the_words_of_the_sdk(function: Any, words: str) -> None:
    with pytest.raises(poptorch.Error, match=re.escape(words)):
        poptorch.inferenceModel(Calling(function)).compile(X)


def test_what_is_marked_as_overlapped_output_may_be_used_elsewhere() -> None:
    def twice(model: Any, x: Any) -> Any:
        y = marked(x * 2)
        return y, y + 1

    y, z = poptorch.inferenceModel(Calling(twice))(X)
    torch.testing.assert_close(z, y + 1)


def test_calls_in_the_wrong_order_are_refused_in_the_words_of_the_sdk() -> None:
    model = poptorch.inferenceModel(Calling(lambda m, x: x + 1))
    result = model(X)
    with pytest.raises(poptorch.Error, match="cannot be called explicitly on outputs of a PopTorch model"):
        result.backward()
    with pytest.raises(poptorch.Error, match="Device is already attached"):
        model.attachToDevice()
    with pytest.raises(poptorch.Error, match="Cycle count logging is disabled"):
        model.cycleCount()
    with pytest.raises(
        poptorch.Error, match="One or more input data types have changed since the first model run"
    ):
        model(X.int())
    model.detachFromDevice()
    with pytest.raises(poptorch.Error, match="Device is not attached"):
        model.detachFromDevice()
    model.destroy()
    with pytest.raises(poptorch.Error, match="Model has not been compiled or has been destroyed"):
        model.detachFromDevice()
