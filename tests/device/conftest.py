"""Shared fixtures for the device room: a cache of compiled pieces, and host processes played by threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from podrun.core.executable import Executable
from podrun.core.layout import IpuRange
from podrun.device.connection import AttachRequest
from podrun.device.host.client import PortConnection
from podrun.device.xla.pieces import PieceCache

T = TypeVar("T")


@pytest.fixture(scope="session")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> PieceCache:
    """Compiled pieces, once for all tests."""
    return PieceCache(Path(tmp_path_factory.mktemp("pieces")))


@pytest.fixture
def no_cache_of_jax() -> Iterator[None]:
    """JAX without a cache, so that podrun chooses one; afterwards the one that was there."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture
def no_threads_left() -> Iterator[None]:
    """Fails if a test leaves threads of ours behind."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("podrun"):
            thread.join(60)
    left = [t.name for t in threading.enumerate() if t not in before and t.name.startswith("podrun")]
    assert not left


def request(job: IpuRange, owned: IpuRange | None = None, *, pid: int | None = None) -> AttachRequest:
    """An attach request of this process."""
    return AttachRequest(job, owned or job, pid or os.getpid(), "tester", "train.py")


def together(works: Sequence[Callable[[], T]], timeout: float = 60.0) -> list[T | BaseException]:
    """Run each function in its own thread; returns results, or raised errors, in order."""
    results: list[Any] = [None] * len(works)

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except BaseException as error:
            results[index] = error

    threads = [
        threading.Thread(target=run, args=(i,), name=f"owner-{i}", daemon=True) for i in range(len(works))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), "an owner hangs"
    return results


def load_all(
    connections: Sequence[tuple[PortConnection, IpuRange]], executable: Executable, deadline: float
) -> None:
    """Let all owners load a program, and then wait for each other for ``deadline`` seconds; on a busy host, longer."""
    results: list[Any] = []
    for patience in (deadline, 10 * deadline, 100 * deadline):
        for connection, _ in connections:
            connection.host_sync_timeout = patience
        results = together([partial(c.load, executable) for c, _ in connections], timeout=1000 * deadline)
        if results == [None] * len(connections):
            return
    raise AssertionError(results)


def owners(
    connect: Callable[[], PortConnection], total: int, count: int
) -> list[tuple[PortConnection, IpuRange]]:
    """``count`` connections that share ``total`` IPUs evenly, attached."""
    share = total // count
    found = []
    for index in range(count):
        connection, owned = connect(), IpuRange(index * share, share)
        assert connection.try_attach(request(IpuRange(0, total), owned)) is None
        found.append((connection, owned))
    return found
