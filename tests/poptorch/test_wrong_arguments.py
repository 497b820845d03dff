"""Arguments of a wrong kind are refused by name, where they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402

WEIGHTS = [torch.nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: poptorch.optim.SGD(WEIGHTS, lr="a"), "lr is a number, not 'a'"),
        (lambda: poptorch.optim.AdamW(WEIGHTS, lr=0.1, betas=3), "betas is a pair of numbers, not 3"),
        (lambda: poptorch.optim.LAMB(WEIGHTS, betas=(0.9,)), "betas is a pair of numbers"),
        (lambda: poptorch.optim.RMSprop(WEIGHTS, lr=0.1, eps="x"), "eps is a number, not 'x'"),
        (lambda: poptorch.optim.SGD(3, lr=0.1), "params is an iterable of tensors or of groups.* not 3"),
        (lambda: poptorch.optim.LAMB(WEIGHTS[0], lr=0.1), "params is an iterable of tensors or of groups"),
        (lambda: poptorch.optim.Adam([{"lr": 1}], lr=0.1), "groups with .params."),
        (lambda: poptorch.optim.Adam([3], lr=0.1), "params holds tensors, or groups with .params., not 3"),
        (
            lambda: poptorch.DataLoader(poptorch.Options(), [1, 2], num_workers="a"),
            "num_workers is a number of processes, not 'a'",
        ),
        (lambda: poptorch.set_available_memory(WEIGHTS[0], "a"), "proportion is a number, not 'a'"),
        (lambda: poptorch.inferenceModel(3), "a model is a torch.nn.Module, not 3"),
        (
            lambda: poptorch.DataLoader(poptorch.Options(), [1, 2], batch_size="a"),
            "batch_size is a number of samples, not 'a'",
        ),
        (
            lambda: poptorch.custom_op(3, "a", "b", 1, example_outputs=[]),
            "inputs is a list of tensors, not 3",
        ),
        (
            lambda: poptorch.custom_op([], "a", "b", 1, example_outputs=None),
            "example_outputs is a list of tensors, not None",
        ),
    ],
)
def test_it_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_whole_numbers_and_tensors_are_numbers() -> None:
    poptorch.optim.SGD(WEIGHTS, lr=1, momentum=0)
    poptorch.optim.AdamW(WEIGHTS, lr=torch.tensor(0.1), betas=[0.9, 0.99])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: poptorch.Options()._Popart.setPatterns("a"), "patterns are True or False by name, not 'a'"),
        (lambda: poptorch.Options()._Popart.set([], 1), "a PopART option has a name"),
        (
            lambda: poptorch.SerialPhasedExecution(3),
            "a phase is a poptorch.Phase, stages or block ids, not 3",
        ),
    ],
)
def test_what_options_assert_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        call()
