"""Models train on IPUs as torch trains them on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402


class Classifier(torch.nn.Module):
    """Two layers with batch normalisation between them, on one IPU or two."""

    def __init__(self, normalised: bool = True) -> None:
        super().__init__()
        self.first = poptorch.BeginBlock(torch.nn.Linear(16, 32), ipu_id=0)
        self.norm = torch.nn.BatchNorm1d(32) if normalised else torch.nn.Identity()
        self.second = torch.nn.Linear(32, 5)

    def forward(self, x: Any, labels: Any = None) -> Any:
        logits = self.second(self.norm(torch.relu(self.first(x))))
        if labels is None:
            return logits
        return logits, torch.nn.functional.cross_entropy(logits, labels)


def examples(count: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 16, generator=generator), torch.randint(0, 5, (count,), generator=generator)


def trained_by_torch(
    model: Any, optimizer: Any, batches: int, parts: int, data: tuple[Any, Any]
) -> list[float]:
    """Losses of torch on the same samples, gradients averaged over ``parts`` micro-batches."""
    losses = []
    for _ in range(batches):
        optimizer.zero_grad()
        for x, labels in zip(*(each.chunk(parts) for each in data), strict=True):
            loss = model(x, labels)[1] / parts
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()) * parts)
    return losses


@pytest.mark.parametrize(
    ("accumulation", "replicas", "two_ipus"),
    [(1, 1, False), (4, 2, False), pytest.param(4, 1, True, marks=pytest.mark.slow)],
)
def test_losses_and_weights_are_torchs(accumulation: int, replicas: int, two_ipus: bool) -> None:
    torch.manual_seed(0)
    model = Classifier(normalised=replicas == 1)
    reference = copy.deepcopy(poptorch.removeBlocks(model) or model)
    poptorch.BeginBlock(model.first, ipu_id=0)
    if two_ipus:
        poptorch.BeginBlock(model.second, ipu_id=1)
    options = poptorch.Options().replicationFactor(replicas)
    options.Training.gradientAccumulation(accumulation)
    training = poptorch.trainingModel(
        model, options, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    data = examples(8 * accumulation * replicas)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    expected = trained_by_torch(reference, optimizer, 3, accumulation * replicas, data)
    losses = [training(*data)[1].reshape(-1)[-1].item() for _ in range(3)]
    assert losses == pytest.approx(expected, abs=1e-5)
    trained = model.state_dict()
    for name, value in reference.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-6)
    training.destroy()
    assert type(model.first.weight) is torch.nn.Parameter


def test_inference_has_the_weights_that_training_left() -> None:
    torch.manual_seed(0)
    model = Classifier(normalised=False)
    training = poptorch.trainingModel(model)
    inference = poptorch.inferenceModel(model, poptorch.Options().deviceIterations(2))
    x, labels = examples(8)
    for _ in range(2):
        training(x, labels)
        torch.testing.assert_close(inference(x), model(x), rtol=1e-5, atol=1e-6)


def test_a_model_without_a_loss_is_refused() -> None:
    training = poptorch.trainingModel(torch.nn.Linear(4, 4))
    with pytest.raises(poptorch.Error, match="Couldn't find a loss"):
        training(torch.ones(2, 4))


def test_labels_that_are_no_class_and_indices_of_no_row_are_said() -> None:
    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(7, 3)

        def forward(self, words: Any, labels: Any) -> Any:
            return torch.nn.functional.cross_entropy(
                self.table(words.long()), labels.view(-1), ignore_index=8
            )

    model = poptorch.inferenceModel(Words())
    words, labels = torch.tensor([1, 2, 7]), torch.tensor([[0, 9, 8]])
    with pytest.warns(UserWarning, match=r"label 9, but there are 3 classes") as caught:
        model(words, labels)
    assert [str(w.message).partition(",")[0] for w in caught if w.category is UserWarning] == [
        "Input 'input:0' has the index 7",
        "Input 'input:1' has the label 9",
    ]
    assert {w.filename for w in caught if w.category is UserWarning} == {__file__}
    model.destroy()
