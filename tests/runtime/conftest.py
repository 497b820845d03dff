"""What every test of the runtime starts from: IPUs that nobody holds."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def _free_ipus() -> None:
    """Collect sessions that earlier tests have left in reference cycles, as tracebacks make them: they hold IPUs."""
    gc.collect()
