"""No test of this folder may leave shared memory, a watched process or a socket behind."""

from __future__ import annotations

import contextlib
import gc
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from podrun.collectives import arithmetic, linux
from podrun.collectives.board import GroupBoard


def _held() -> Counter[str]:
    """The objects of the kinds that groups use which this process holds open, and how often."""
    held = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the directory's own descriptor
            held.append(os.readlink(f"/proc/self/fd/{name}"))
    return Counter(x for x in held if "memfd:podrun" in x or "pidfd" in x or x.startswith("socket:"))


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Check that every test closes what it opened, or leaves it to the garbage collection.

    That takes tenths of a second beside JAX and torch: it is for tests alone that seem to leave something.
    """
    before = _held()
    yield
    if _held() - before:
        gc.collect()
        assert not _held() - before


@pytest.fixture(params=["native", "python", "mixed"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Collectives by the C module, in Python, and by ranks that differ in it: odd ranks are Python's."""
    kind: str = request.param
    if kind == "python":
        monkeypatch.setattr(arithmetic, "kernel", lambda dtype, reduction: None)
    if kind != "python" and linux.c_module is None:
        pytest.skip("podrun was installed without its C module")
    join = GroupBoard.join

    def choose(board: GroupBoard, rank: int, timeout: float) -> None:
        join(board, rank, timeout)
        if kind == "python" or (kind == "mixed" and rank % 2):
            board.barriers.native = None

    monkeypatch.setattr(GroupBoard, "join", choose)
    return kind
