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

from podrun.faults.plan_file import ProcessPlan, plan_in_process, read_plan, report_unstruck
from podrun.faults.spec import FaultSpec, parse_fault

PlanFaults = Callable[..., None]
"""``plan(*faults)``: short forms, or paths of plans. May be called once in a test, before a device is opened."""


@pytest.fixture
def podrun_faults() -> Iterator[PlanFaults]:
    """See the module docstring."""
    plans: list[ProcessPlan] = []
    with contextlib.ExitStack() as stack:

        def plan(*faults: str | Path) -> None:
            if plans:
                pytest.fail("podrun_faults: name all faults of a test in one call")
            specs: list[FaultSpec] = []
            for fault in faults:
                specs += read_plan(fault) if isinstance(fault, Path) else [parse_fault(fault)]
            plans.append(stack.enter_context(plan_in_process(specs)))

        yield plan
    missed = report_unstruck(spec for each in plans for spec in each.planned)
    if missed:
        pytest.fail(missed)
