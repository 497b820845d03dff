"""Which predictions rest on a formula that no program of a user reaches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

USED: set[str] = set()
"""Names of such formulas that were used since this was last cleared."""


def benchmark_only(formula: Callable[P, R]) -> Callable[P, R]:
    """Mark a formula that stands in the benchmark because nothing in podrun uses it: its uses are noted in `USED`."""
    name = f"{formula.__module__.rpartition('.')[2]}.{formula.__name__.lstrip('_')}"

    @functools.wraps(formula)
    def noted(*args: P.args, **kwargs: P.kwargs) -> R:
        USED.add(name)
        return formula(*args, **kwargs)

    return noted
