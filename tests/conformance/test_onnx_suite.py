"""The conformance suite of the onnx wheel through our backend: a spread of cases by default, all of them
when slow.

``record.json`` lists every case that does not pass, with its reason; the slow test asserts that it is exact.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.backend.test.case import node

import podrun.onnx_backend as backend
from tests.conformance import onnx_suite

FILES = 5
"""One file of operators in so many has cases that run by default."""
SPREAD = 13, 40
"""One case in so many runs by default, of operators of those files and of other models."""
LEAST_PASSING = 1900
RECORD = json.loads(Path(__file__).with_name("record.json").read_text())
REASONS: dict[str, str] = {name: reason for reason, names in RECORD["not_passing"].items() for name in names}

pytestmark = pytest.mark.filterwarnings("ignore")


def _outcome(case: object) -> onnx_suite.Outcome:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return onnx_suite.run_case(case, onnx_suite.prepare_podrun)  # type: ignore[arg-type]


def test_a_spread_of_cases_passes() -> None:
    operators, others = onnx_suite.some_node_cases(FILES), onnx_suite.cases(onnx_suite.KINDS[1:])
    spread = [*operators[:: SPREAD[0]], *others[:: SPREAD[1]]]
    outcomes = [_outcome(c) for c in spread]
    assert [o for o in outcomes if o.result != "pass" and o.name not in REASONS] == []
    assert len(outcomes) > 22


def test_which_cases_run_does_not_depend_on_what_the_process_has_imported() -> None:
    """Neither do cases made here decide on what others find that list them all."""
    listed = list(node._NodeTestCases)
    first, again = ([case.name for case in onnx_suite.some_node_cases(60)] for _ in range(2))
    assert first == again
    assert 4 < len(first) < 100
    assert node._NodeTestCases == listed


@pytest.mark.slow
def test_the_record_is_of_this_onnx() -> None:
    if onnx.__version__ != RECORD["onnx"]:
        pytest.skip(f"the record was made with onnx {RECORD['onnx']}")
    assert RECORD["cases"] == len(onnx_suite.cases())
    assert RECORD["passing"] == RECORD["cases"] - len(REASONS) >= LEAST_PASSING


@pytest.mark.slow
def test_all_cases_are_as_recorded() -> None:
    """Every case passes or is on the list; no case on the list passes; none that runs is wrong."""
    if onnx.__version__ != RECORD["onnx"]:
        pytest.skip(f"the record was made with onnx {RECORD['onnx']}")
    outcomes = {o.name: o for o in map(_outcome, onnx_suite.cases())}
    failing = {name: o.reason for name, o in outcomes.items() if o.result != "pass"}
    assert {n: r for n, r in failing.items() if n not in REASONS} == {}
    assert sorted(n for n in REASONS if n not in failing) == []
    assert [n for n, o in outcomes.items() if o.result == "wrong"] == []


@pytest.mark.slow
@pytest.mark.parametrize("case", onnx_suite.cases(("real",)), ids=lambda c: c.name)
def test_real_architectures_equal_onnxruntime(case: object) -> None:
    """The nine real-model architectures in the wheel give what onnxruntime gives, within 1e-4."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model = onnx_suite.light_model(case)  # type: ignore[arg-type]
    inputs = onnx_suite.random_inputs(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, inputs)
    got = backend.prepare(model).run(inputs)
    for want, have in zip(expected, got, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4 * max(1.0, float(np.abs(want).max())))


@pytest.mark.slow
def test_windows_pooled_at_once_are_those_of_onnxs_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pooling of the suite, on the arguments that the suite itself passes."""
    from onnx.backend.test.case.node import averagepool, lppool, maxpool
    from onnx.reference.ops import op_pool_common

    pooled = []

    def both(*arguments: object, **named: object) -> np.ndarray:
        want = loops(*arguments, **named)
        np.testing.assert_allclose(onnx_suite.quick_pool(*arguments, **named), want, rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]
        pooled.append(want.dtype)
        return want

    monkeypatch.setattr(node, "_existing_names", {})  # The cases are made once more.
    monkeypatch.setattr(node, "_NodeTestCases", [])
    loops = op_pool_common.pool
    for module in (averagepool, lppool, maxpool):
        monkeypatch.setattr(module, "pool", both)
    for kind in (averagepool.AveragePool, lppool.LpPool, maxpool.MaxPool):
        for name, export in vars(kind).items():
            if name.startswith("export"):
                export.__func__()
    assert len(pooled) > 25
