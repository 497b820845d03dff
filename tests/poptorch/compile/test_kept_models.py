"""Models whose traces and programs an earlier one left: the same bits, reports and tensors, and nothing of a user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402
from podrun.poptorch.compile import aten_table  # noqa: E402
from podrun.poptorch.operators.table import all_operators, find  # noqa: E402
from tests.kept_programs import kept as kept  # noqa: E402
from tests.kept_programs import operators_as_before as operators_as_before  # noqa: E402
from tests.kept_programs import traces as traces  # noqa: E402
from tests.poptorch.models import MODELS  # noqa: E402
from tests.poptorch.test_loss_curves import BATCH, on_ipus  # noqa: E402

FAST = ("mlp",)


def seconds_of(model: Any, samples: Any) -> object:
    """The report of a model's program."""
    inference = poptorch.inferenceModel(model.eval(), poptorch.Options())
    inference.compile(*samples)
    profile = inference._compiled.session.parts.reports.profile()
    inference.destroy()
    return profile


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_a_model_has_the_same_bits_and_report(kept: Path, traces: list[Any], name: str) -> None:
    def results() -> tuple[object, ...]:
        torch.manual_seed(0)
        model = MODELS[name]
        network, samples = model.make().train(), model.samples(BATCH)
        losses = on_ipus(network, samples, 1, 1, None, 2)
        values = {key: value.numpy().tobytes() for key, value in network.state_dict().items()}
        return losses, values, seconds_of(network, samples)

    first, count = results(), len(traces)
    again = results()
    assert len(traces) == count > 0
    assert first == again


@pytest.mark.usefixtures("operators_as_before")
def test_custom_operators_are_never_kept(kept: Path) -> None:
    """The same name with another function computes what that does."""
    from podrun.popart import register_op

    class Powered(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return poptorch.custom_op([x], "Power", "kept.poptorch", 1, [x])[0]

    def result() -> list[float]:
        model = poptorch.inferenceModel(Powered())
        values: list[float] = model(torch.tensor([1.0, 3.0])).tolist()
        model.destroy()
        return values

    register_op("kept.poptorch", "Power", 1, lambda x: x**2)
    assert result() == [1, 9]
    register_op("kept.poptorch", "Power", 1, lambda x: x**3)
    assert result() == [1, 27]


def test_noted_operators_are_those_of_the_table(kept: Path) -> None:
    asked = [
        "aten.add.Tensor",
        "aten.add",
        "aten.nonzero.default",
        "podrun.nop.default",
        "other.add",
        *all_operators(),
    ]
    asked += [f"aten.{name}" for name in all_operators()]
    try:
        for _ in range(2):
            aten_table._kinds.cache_clear()
            for name in asked:
                operator = find(name)
                assert aten_table.aten_kind(name) == (None if operator is None else operator.kind), name
    finally:
        aten_table._kinds.cache_clear()
    assert not aten_table.supported("aten.nonzero.default")
