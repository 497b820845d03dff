"""Groups for tests: every rank is a thread of the test's process, on one host or on several simulated ones."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from podrun.collectives import Group, board, create, in_process, join_group
from tests.conftest import wait_until

PATIENCE = 60.0
"""Seconds for what takes milliseconds on an idle host."""


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
def hosts(names: str, timeout: float = PATIENCE, absent: tuple[int, ...] = ()) -> Iterator[list[Group]]:
    """A group of ``len(names)`` ranks, rank *r* on the host called ``names[r]``; closed at the end.

    ``timeout`` counts from when each rank knows which others are ``absent``: until then the host may be busy.
    """
    first, token = create(len(names), address="127.0.0.1", timeout=PATIENCE, host=names[0])
    groups = [first]
    try:
        here = [rank for rank in range(1, len(names)) if rank not in absent]
        groups += [join_group(token, rank, host=names[rank]) for rank in here]
        if absent:
            clients = [group._client for group in groups]  # type: ignore[attr-defined]
            wait_until(
                lambda: all(client._received.get("missing") == [*absent] for client in clients),
                PATIENCE,
                "every rank knows who is absent",
            )
        set_deadlines(groups, timeout)
        yield groups
    finally:
        with ThreadPoolExecutor(len(groups)) as pool:  # a rank's last data may need another to take it
            list(pool.map(lambda group: group.close(), reversed(groups)))


def set_deadlines(groups: Sequence[Group], seconds: float) -> None:
    """From here on the collectives of groups over several hosts wait for so long."""
    for group in groups:
        for part in (group, group._mesh, group._local):  # type: ignore[attr-defined]
            if part is not None:
                part._timeout = seconds


def hold_clock(monkeypatch: pytest.MonkeyPatch, waiting: int, seconds: float) -> None:
    """Let the ranks of one host wait without time until so many of them do; then ``seconds`` have passed at once.

    So it is certain who has come by the deadline, however busy the host is.
    """
    sleepers: set[int] = set()
    begins = threading.local()
    sleep_until = board.GroupBoard.sleep_until

    def counted(self: board.GroupBoard, *arguments: Any) -> None:
        begins.now = True
        sleepers.add(self.rank)
        sleep_until(self, *arguments)

    def monotonic() -> float:
        if getattr(begins, "now", False):
            begins.now = False
            return 0.0
        return seconds if len(sleepers) >= waiting else 0.0

    monkeypatch.setattr(board.GroupBoard, "sleep_until", counted)
    monkeypatch.setattr(board, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))


def on_all(groups: list[Group], work: Callable[[Group], Any]) -> list[Any]:
    """``work(group)`` on every rank at once; the results, or the exceptions raised, in rank order."""

    def guarded(group: Group) -> Any:
        try:
            return work(group)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(guarded, groups))
