"""Models of transformers train on IPUs with the example's four lines, and lose as they do in torch."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "poptorch" / "transformers_models.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "t5"])
def test_a_model_of_transformers_loses_as_in_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, "poptorch", poptorch)
    spec = importlib.util.spec_from_file_location("transformers_models", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    words = torch.randint(1, example.WORDS, (2, example.LENGTH))
    model, samples = getattr(example, name)(words)
    reference = copy.deepcopy(model.train())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    training = poptorch.trainingModel(model, poptorch.Options(), torch.optim.SGD(model.parameters(), lr=0.05))
    for _ in range(4):
        optimizer.zero_grad()
        expected = reference(**samples).loss
        expected.backward()
        optimizer.step()
        assert float(training(**samples).loss) == pytest.approx(float(expected.detach()), rel=1e-4)
