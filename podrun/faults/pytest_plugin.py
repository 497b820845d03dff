"""The pytest fixture ``podrun_faults``: faults of the programs that a test runs in its own process.

    def test_my_recovery(podrun_faults):
        podrun_faults("ipu:5@batch=17:tile-parity", Path("plan.yaml"))
        train()

The test fails unless every fault that it planned struck (or ends in ``:optional``). pytest finds the fixture by itself
where podrun is installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podrun.core.errors import PodrunError
from podrun.core.fault_forms import parse_fault
from podrun.core.fault_spec import FaultSpec
from podrun.faults.plan_file import ProcessPlan, plan_in_process, read_plan, report_unstruck

FRONT_ENDS = ("popart", "poptorch", "popdist")


@pytest.hookimpl(tryfirst=True)
def pytest_exception_interact(
    node: pytest.Item | pytest.Collector,
    call: pytest.CallInfo[object],
    report: pytest.CollectReport | pytest.TestReport,
) -> None:
    """Say under a test that cannot import a front end how pytest finds podrun's."""
    missing = getattr(getattr(call.excinfo, "value", None), "__cause__", None) or getattr(
        call.excinfo, "value", None
    )
    if is_missing_front_end(missing) or is_missing_front_end(getattr(missing, "__context__", None)):
        report.sections.append(
            ("podrun", "podrun adds nothing to site-packages. Type: python -m podrun.compat -m pytest tests")
        )


def is_missing_front_end(error: BaseException | None) -> bool:
    """True iff an import of a front end failed because Python does not find it."""
    return isinstance(error, ModuleNotFoundError) and error.name in FRONT_ENDS


PlanFaults = Callable[..., None]
"""``plan(*faults)``: short forms, or paths of plans. May be called once in a test, before a device is opened."""


@pytest.fixture
def podrun_faults() -> Iterator[PlanFaults]:
    """Plan faults of the programs that a test runs in its own process; the test fails unless they strike."""
    plans: list[ProcessPlan] = []
    with contextlib.ExitStack() as stack:

        def plan(*faults: str | Path) -> None:
            __tracebackhide__ = True  # What the test wrote is shown, not how podrun read it.
            if plans:
                pytest.fail("podrun_faults: name all faults of a test in one call")
            specs: list[FaultSpec] = []
            refused: PodrunError | None = None
            try:
                for fault in faults:
                    specs += read_plan(fault) if isinstance(fault, Path) else [parse_fault(fault)]
            except PodrunError as error:
                refused = error.with_traceback(None)
            if refused is not None:
                refused.add_note(f"hint: {refused.hint}")
                raise refused
            plans.append(stack.enter_context(plan_in_process(specs)))

        yield plan
    missed = report_unstruck(spec for process_plan in plans for spec in process_plan.planned)
    if missed:
        pytest.fail(missed)
