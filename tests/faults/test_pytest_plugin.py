"""The fixture that plans faults for a test, and fails it unless they strike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from podrun.core.errors import RecoverableRuntimeError, UsageError
from podrun.core.layout import IpuRange
from podrun.device.connection import AttachRequest
from podrun.device.host.connecting import connect
from podrun.faults import process_plan
from podrun.faults.pytest_plugin import PlanFaults, is_missing_front_end, podrun_faults
from tests.device.programs import data, first_weights, linear

__all__ = ["podrun_faults"]


def train(batches: int) -> None:
    connection = connect({}, standalone_ipus=4)
    assert connection.try_attach(AttachRequest(IpuRange(0, 4), IpuRange(0, 4), 1, "tester", "t.py")) is None
    try:
        connection.load(linear(4))
        connection.write_variables(first_weights())
        connection.run(batches, data(linear(4), batches))
    finally:
        connection.close()


def test_a_planned_fault_strikes_the_program_of_the_test(podrun_faults: PlanFaults, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("version: 1\nfaults: ['ipu:1@batch=9:trap:optional']\n")
    podrun_faults("ipu:2@batch=1:tile-parity", plan)
    with pytest.raises(RecoverableRuntimeError, match="IPU 2 in batch 1"):
        train(2)


def test_without_it_nothing_strikes() -> None:
    train(2)
    assert process_plan({}).planned == ()


def test_a_fault_that_did_not_strike_fails_the_test() -> None:
    fixture = podrun_faults.__wrapped__()  # type: ignore[attr-defined]
    next(fixture)("ipu:2@batch=100:tile-parity")
    train(2)
    with pytest.raises(
        pytest.fail.Exception, match="a planned fault did not strike: ipu:2@batch=100:tile-parity"
    ):
        next(fixture, None)
    assert process_plan({}).planned == ()


def test_text_that_is_no_fault_is_refused(podrun_faults: PlanFaults) -> None:
    with pytest.raises(UsageError, match="did you mean") as caught:
        podrun_faults("ipu:2@batch=1:tile-party")
    assert caught.value.hint is not None
    assert len(caught.value.hint) < 120
    assert "podrun faults kinds" in caught.value.hint
    shown = [entry for entry in caught.traceback if not entry.ishidden(caught)]
    assert [Path(entry.path).name for entry in shown] == [Path(__file__).name]


def test_a_missing_front_end_is_told_from_other_packages() -> None:
    assert is_missing_front_end(ModuleNotFoundError("No module named 'popart'", name="popart"))
    assert not is_missing_front_end(ModuleNotFoundError("No module named 'six'", name="six"))
    assert not is_missing_front_end(ImportError("popart", name="popart"))
    assert not is_missing_front_end(None)


def soc(**options: object) -> dict[str, str]:
    return {
        "GCDA_OPTIONS": json.dumps({f"simulateSOCError.{name}": value for name, value in options.items()})
    }


def test_the_sdks_own_hook_plans_soft_errors() -> None:
    (spec,) = process_plan(soc(errorList="IPUSOFTERR", triggerCount="3")).planned
    assert spec.text == "ipu:0@batch=3:soft-error"
    (again,) = process_plan(soc(errorList="IPUSOFTERR", triggerCount=0, rearmOnReset=True)).planned
    assert again.text == "ipu:0@batch=0,repeat=1000000:soft-error:optional"
    assert process_plan({"GCDA_OPTIONS": '{"enableMonitoring": "true"}'}).planned == ()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (soc(errorList="IPUSOFTERR"), "needs simulateSOCError.triggerCount"),
        (soc(errorList="NLCERR", triggerCount=1), "no SoC error NLCERR"),
        ({"GCDA_OPTIONS": "{simulateSOCError."}, "is not JSON"),
    ],
)
def test_a_hook_that_says_too_little_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        process_plan(environ)
