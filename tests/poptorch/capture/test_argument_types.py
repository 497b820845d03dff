"""Arguments and results that are dataclasses or outputs of transformers models."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402


@dataclasses.dataclass
class Samples:
    """Tensors, a number, and a field that a constructor does not take."""

    x: Any
    rest: list[Any]
    scale: float = 2.0
    made: int = dataclasses.field(default=3, init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """A value that nobody may change."""

    x: Any
    name: str = "frozen"

    def __post_init__(self) -> None:
        assert isinstance(self.x, torch.Tensor)


class Scaled(torch.nn.Module):
    """Takes and returns dataclasses."""

    def forward(self, batch: Samples, frozen: Frozen) -> Any:
        made = dataclasses.replace(
            batch, x=batch.x * batch.scale * batch.made, rest=[frozen.x - batch.rest[0]]
        )
        return made, Frozen(frozen.x + 1, "result")


def test_dataclasses_go_in_and_come_out() -> None:
    model = poptorch.inferenceModel(Scaled(), poptorch.Options().deviceIterations(2))
    batch, frozen = Samples(torch.ones(4), [torch.full((4,), 3.0)]), Frozen(torch.arange(4.0))
    made, second = model(batch, frozen)
    assert type(made) is Samples
    assert (made.scale, made.made, second.name) == (2.0, 3, "result")
    torch.testing.assert_close(made.x, torch.full((4,), 6.0))
    torch.testing.assert_close(made.rest[0], torch.arange(4.0) - 3)
    torch.testing.assert_close(second.x, torch.arange(4.0) + 1)
    torch.testing.assert_close(batch.x, torch.ones(4))
    made, _ = model(Samples(torch.zeros(4), [torch.zeros(4)]), frozen)
    torch.testing.assert_close(made.rest[0], torch.arange(4.0))


def test_another_number_in_a_dataclass_is_another_call() -> None:
    model = poptorch.inferenceModel(Scaled())
    frozen = Frozen(torch.ones(2))
    model(Samples(torch.ones(2), [torch.ones(2)]), frozen)
    with pytest.raises(poptorch.Error, match=r"batch\.scale"):
        model(Samples(torch.ones(2), [torch.ones(2)], 5.0), frozen)
    with pytest.raises(poptorch.Error, match=r"batch\.x"):
        model(Samples(torch.ones(3), [torch.ones(2)]), frozen)


def test_outputs_of_transformers_models_are_arguments_and_results() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Head(torch.nn.Module):
        def forward(self, given: Any) -> Any:
            states = (given.hidden_states[0], given[0])
            return outputs.BaseModelOutput(
                last_hidden_state=given.last_hidden_state + 1, hidden_states=states
            )

    given = outputs.BaseModelOutput(last_hidden_state=torch.ones(2), hidden_states=(torch.zeros(2),))
    made = poptorch.inferenceModel(Head())(given)
    assert type(made) is outputs.BaseModelOutput
    assert list(made) == ["last_hidden_state", "hidden_states"]
    torch.testing.assert_close(made.last_hidden_state, torch.full((2,), 2.0))
    torch.testing.assert_close(made.hidden_states, (torch.zeros(2), torch.ones(2)))
    assert made.attentions is None


def test_a_forward_that_gets_and_gives_nothing_is_told_so() -> None:
    class Empty(torch.nn.Module):
        def forward(self) -> Any:
            return 3

    with pytest.raises(poptorch.Error, match="computes nothing on the IPU"):
        poptorch.inferenceModel(Empty())()
