"""Losses of whole models equal torch's: alone, with accumulation, replicas and pipelines, in float32 and in halves."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402
from tests.poptorch.models import MODELS, Model  # noqa: E402

STEPS, BATCH, RATE = 4, 4, 0.05
WAYS = {
    "alone": (1, 1, False),
    "accumulated": (3, 1, False),
    "replicated": (1, 4, False),
    "pipelined": (4, 1, True),
}
"""Accumulation, replicas, two IPUs."""
FAST = [("mlp", "pipelined"), ("cnn", "alone"), ("lstm", "replicated")]


def by_torch(model: Any, samples: Any, parts: int, steps: int) -> list[float]:
    """Losses of the last of ``parts`` micro-batches, whose gradients are averaged."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for part in zip(*(each.chunk(parts) for each in samples), strict=True):
            loss = model(*part)
            (loss / parts).backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def on_ipus(
    model: Any, samples: Any, accumulation: int, replicas: int, second: str | None, steps: int
) -> list[float]:
    """The same on IPUs; ``second``: the module at which IPU 1 begins."""
    options = poptorch.Options().replicationFactor(replicas).broadcastBuffers(False)
    options.Training.gradientAccumulation(accumulation)
    if second:
        poptorch.BeginBlock(model.get_submodule(second), ipu_id=1)
    training = poptorch.trainingModel(
        model, options, torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    )
    losses = [float(training(*samples).reshape(-1)[-1]) for _ in range(steps)]
    training.destroy()
    return losses


def compare(model: Model, way: str, steps: int = STEPS) -> None:
    """Losses and what is trained, buffers too where one replica sees all samples."""
    accumulation, replicas, pipelined = WAYS[way]
    parts = accumulation * replicas
    torch.manual_seed(0)
    trained = model.make().train()
    reference = copy.deepcopy(trained)
    samples = model.samples(BATCH * parts)
    expected = by_torch(reference, samples, parts, steps)
    losses = on_ipus(trained, samples, accumulation, replicas, model.second if pipelined else None, steps)
    assert losses == pytest.approx(expected, rel=2e-4, abs=2e-5)
    values = dict(trained.named_parameters()) | (dict(trained.named_buffers()) if replicas == 1 else {})
    for name, value in (dict(reference.named_parameters()) | dict(reference.named_buffers())).items():
        if name in values and value.is_floating_point():
            torch.testing.assert_close(values[name].detach(), value.detach(), rtol=2e-3, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), FAST)
@pytest.mark.sample(4)
def test_losses_and_weights_of_some_models_are_torchs(name: str, way: str) -> None:
    compare(MODELS[name], way)


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", list(MODELS))
def test_losses_and_weights_of_all_models_are_torchs(name: str, way: str) -> None:
    # Small batches through many normalisations multiply roundings, so ResNet is followed for fewer steps.
    compare(MODELS[name], way, steps=5 if name == "resnet18" else 10)


@pytest.mark.slow
def test_a_half_model_learns_as_torch_does_and_keeps_its_types() -> None:
    torch.manual_seed(0)
    model = MODELS["cnn"].make().train()
    reference = copy.deepcopy(model)
    x, labels = MODELS["cnn"].samples(BATCH)
    expected = by_torch(reference, (x.half().float(), labels), 1, STEPS)
    half = model.half()
    options = poptorch.Options()
    training = poptorch.trainingModel(
        half, options, poptorch.optim.SGD(half.parameters(), lr=RATE, momentum=0.9, loss_scaling=16.0)
    )
    losses = []
    for _ in range(STEPS):
        loss = training(x.half(), labels)
        losses.append(float(loss))
    assert loss.dtype == torch.float16
    assert losses == pytest.approx(expected, rel=2e-2)
    assert {value.dtype for value in half.state_dict().values()} == {torch.float16, torch.int64}


def test_a_half_input_and_float_weights_compute_in_float() -> None:
    model = torch.nn.Linear(4, 3)
    made = poptorch.inferenceModel(model)(torch.ones(2, 4).half())
    assert made.dtype == torch.float32
    torch.testing.assert_close(made, model(torch.ones(2, 4)))


def test_an_operator_after_the_last_block_needs_a_block() -> None:
    class Ends(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            with poptorch.Block("whole", ipu_id=0):
                x = self.layer(x)
            return torch.relu(x)

    with pytest.raises(poptorch.Error, match=r"No active Block"):
        poptorch.inferenceModel(Ends())(torch.ones(1, 3))
