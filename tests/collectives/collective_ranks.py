"""Groups for tests: every rank a thread of the test's process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from podrun.collectives import Group, in_process


@contextlib.contextmanager
def ranks(size: int, timeout: float = 20.0) -> Iterator[list[Group]]:
    """A group in this process; closed at the end."""
    groups = in_process(size, timeout=timeout)
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


def on_all(groups: list[Group], work: Callable[[Group], Any]) -> list[Any]:
    """``work(group)`` on every rank at once; the results, or the exceptions raised, in rank order."""

    def guarded(group: Group) -> Any:
        try:
            return work(group)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(guarded, groups))
