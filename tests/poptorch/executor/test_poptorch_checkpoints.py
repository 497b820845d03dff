"""A PopTorch model that goes on from a checkpoint gives the same bits as one that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402
from podrun.checkpoint import Checkpoints  # noqa: E402
from tests.kept_programs import kept as kept  # noqa: E402

BATCHES, CUT = 6, 3


class Network(torch.nn.Module):
    """Dropout and batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.3))

    def forward(self, x: Any, labels: Any) -> Any:
        logits = self.body(x)
        return logits, torch.nn.functional.cross_entropy(logits, labels)


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = Network().train()
        self.optimizer = poptorch.optim.Adam(self.network.parameters(), lr=0.02)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.model = poptorch.trainingModel(self.network, poptorch.Options().randomSeed(4), self.optimizer)
        self.model.compile(*self.data())
        self.losses: list[float] = []

    def data(self) -> tuple[Any, Any]:
        return torch.randn(8, 8), torch.randint(0, 5, (8,))

    def batch(self) -> None:
        self.losses.append(float(self.model(*self.data())[1].sum()))
        self.schedule.step()
        self.model.setOptimizer(self.optimizer)

    def weights(self) -> dict[str, bytes]:
        state = self.optimizer.state_dict()["ipu_state"]
        return {n: t.numpy().tobytes() for n, t in (self.model.state_dict() | state).items()}


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("of_its_own", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_goes_on_with_the_same_bits(tmp_path: Path, of_its_own: bool) -> None:
    """``of_its_own``: what it is compared with has never been saved."""
    first = Training()
    with Checkpoints(tmp_path) as checkpoints:
        for _ in range(CUT):
            first.batch()
        checkpoints.save(first.model, CUT, {"schedule": {"last_epoch": first.schedule.last_epoch}})
        first.batch()
    whole = Training() if of_its_own else first
    while len(whole.losses) < BATCHES:
        whole.batch()
    second = Training()
    torch.manual_seed(99)
    with Checkpoints(tmp_path) as checkpoints:
        resumed = checkpoints.resume(second.model)
        assert resumed is not None
        second.schedule.load_state_dict(resumed.state["schedule"])
        for _ in range(resumed.batch, BATCHES):
            second.batch()
    assert second.losses == whole.losses[CUT:]
    assert second.weights() == whole.weights()
    for training in (first, whole, second):
        training.model.destroy()


def test_a_model_that_is_not_compiled_says_what_to_do(tmp_path: Path) -> None:
    model = poptorch.inferenceModel(torch.nn.Linear(2, 2))
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(poptorch.Error, match=r"call model\.compile"):
        checkpoints.save(model, 0)
