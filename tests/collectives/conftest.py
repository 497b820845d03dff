"""No test of this folder may leave shared memory, a watched process or a socket behind."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

import pytest


def _held() -> list[str]:
    """What this process holds open of the kinds that groups use."""
    gc.collect()
    held = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the directory's own descriptor
            held.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(x for x in held if "memfd:podrun" in x or "pidfd" in x or x.startswith("socket:"))


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Every test gives back what it opened."""
    before = _held()
    yield
    assert _held() == before
