"""What every test of the runtime starts from: IPUs that nobody holds, and programs that are compiled quickly."""

from __future__ import annotations

import gc

import pytest

from podrun.core.layout import IpuRange
from podrun.runtime.device import held_here
from tests.quick_programs import programs_of_tests_compile_quickly as programs_of_tests_compile_quickly


@pytest.fixture(autouse=True)
def _free_ipus() -> None:
    """Collect sessions that earlier tests have left in reference cycles, as tracebacks make them: they hold IPUs.

    It takes tenths of a second: only where IPUs are held.
    """
    if held_here(IpuRange(0, 1 << 10)):
        gc.collect()
