"""Groups for tests: every rank is a thread of the test's process, on one host or on several simulated ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from podrun.collectives import Group, create, in_process, join_group


@contextlib.contextmanager
def ranks(size: int, timeout: float = 20.0) -> Iterator[list[Group]]:
    """A group in this process; closed at the end."""
    groups = in_process(size, timeout=timeout)
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


@contextlib.contextmanager
def hosts(names: str, timeout: float = 10.0, absent: tuple[int, ...] = ()) -> Iterator[list[Group]]:
    """A group of ``len(names)`` ranks, rank *r* on the host called ``names[r]``; closed at the end."""
    first, token = create(len(names), address="127.0.0.1", timeout=timeout, host=names[0])
    groups = [first]
    try:
        here = [rank for rank in range(1, len(names)) if rank not in absent]
        groups += [join_group(token, rank, host=names[rank]) for rank in here]
        yield groups
    finally:
        with ThreadPoolExecutor(len(groups)) as pool:  # a rank's last data may need another to take it
            list(pool.map(lambda group: group.close(), reversed(groups)))


def on_all(groups: list[Group], work: Callable[[Group], Any]) -> list[Any]:
    """``work(group)`` on every rank at once; the results, or the exceptions raised, in rank order."""

    def guarded(group: Group) -> Any:
        try:
            return work(group)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(guarded, groups))
