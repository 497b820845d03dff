"""Memory order on processors that reorder stores: a fence, or a refusal; and the protocols use the fence."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import pytest
from collective_ranks import on_all, ranks

from podrun.collectives import Communicator, Group, linux
from podrun.core.errors import UnsupportedError


def test_processors_that_reorder_stores_get_the_kernels_fence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert linux.fence_for("x86_64") is None
    requested: list[str] = []
    monkeypatch.setattr(linux, "kernel_fence", lambda machine: requested.append(machine) or linux.no_fence)
    monkeypatch.setattr(linux, "c_module", None)
    assert linux.fence_for("aarch64") is linux.no_fence
    assert requested == ["aarch64"]


@pytest.mark.skipif(linux.c_module is None, reason="podrun was installed without its C module")
def test_the_module_gives_a_fence() -> None:
    made = linux.fence_for("aarch64")
    assert made is linux.c_module.fence
    assert made() is None  # type: ignore[func-returns-value]


def test_without_module_and_kernel_it_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="mips need podrun's C module"):
        linux.kernel_fence("mips")


def test_ranks_that_need_fences_use_them_and_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python path with the kernel's fences, as on aarch64 without a compiler."""
    try:
        kernel_fence = linux.kernel_fence(platform.machine())
    except UnsupportedError as error:
        pytest.skip(str(error))
    fences: list[None] = []

    def counting() -> None:
        fences.append(kernel_fence())  # type: ignore[func-returns-value]

    monkeypatch.setattr(linux, "fence_here", lambda: counting)
    monkeypatch.setattr(linux, "c_module", None)

    def work(group: Group) -> None:
        comm = Communicator(group)
        for size in (3, 5_000, 60_000):
            mine = np.full(size, group.rank + 1.0, np.float32)
            assert np.array_equal(comm.all_reduce(mine), np.full(size, 3.0, np.float32))
            other = np.empty_like(mine)
            if group.rank:
                comm.receive(other, 0)
                comm.send(mine, 0)
            else:
                comm.send(mine, 1)
                comm.receive(other, 1)
            assert other[-1] == 2.0 - group.rank

    with ranks(2) as groups:
        done: list[Any] = on_all(groups, work)
        assert done == [None, None]
        met = sum(group._board.barriers.count for group in groups)
        assert len(fences) > 3 * met > 0
