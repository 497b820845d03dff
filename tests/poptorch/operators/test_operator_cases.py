"""Every form of the table of operators computes what torch computes, forward and gradient, in both float types."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from podrun.poptorch.operators.table import all_operators  # noqa: E402
from tests.poptorch.operators.cases import Case  # noqa: E402
from tests.poptorch.operators.operator_cases import FAMILIES, WITHOUT_CASES, cases  # noqa: E402
from tests.poptorch.operators.opinfo import compare, compare_case  # noqa: E402

EVERY = 40
"""One case of so many is compared by default."""
ALL = [(family, case) for family in FAMILIES for case in cases(family)]


def test_every_form_of_the_table_has_a_case() -> None:
    tried = {case.form for _, case in ALL} | set(" ".join(WITHOUT_CASES.values()).split())
    tried |= {form.partition(".")[0] for form in tried}
    forms = {name for name in all_operators() if not name.startswith("podrun.")}
    assert not {form for form in forms if form not in tried and form.partition(".")[0] not in tried}


@pytest.mark.parametrize("case", [pytest.param(c, id=c.label) for _, c in ALL[::EVERY]])
@pytest.mark.sample(4)
def test_a_sample_of_cases_agrees_with_torch(case: Case) -> None:
    compare_case(case, torch.float32)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.label) for f, c in ALL[7 :: 2 * EVERY] if f != "linear_algebra"]
)
@pytest.mark.sample(4)
def test_a_sample_of_cases_agrees_with_torch_in_halves(case: Case) -> None:
    compare_case(case, torch.float16)


@pytest.mark.sample(2)
@pytest.mark.parametrize("bias", [True, False])
def test_an_lstm_takes_a_projection(bias: bool) -> None:
    layer = torch.nn.LSTM(3, 5, num_layers=2, bidirectional=True, proj_size=2, bias=bias)
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.standard_normal((4, 2, 3)).astype(np.float32)).requires_grad_()
    state = (torch.zeros(4, 2, 2), torch.zeros(4, 2, 5))
    parameters = [p.detach() for p in layer.parameters()]
    assert compare(torch.ops.aten.lstm.input, (x, state, parameters, bias, 2, 0.0, False, True, False), {})


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_all_cases_agree_with_torch(family: str) -> None:
    differing = []
    for case in cases(family):
        for dtype in (torch.float32,) if family == "linear_algebra" else (torch.float32, torch.float16):
            try:
                compare_case(case, dtype)
            except Exception as error:  # All cases are tried; the test names those that differ.
                differing.append(f"{case.label} {dtype}: {error}")
    assert not differing
