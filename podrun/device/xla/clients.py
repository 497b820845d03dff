"""XLA's clients of this process: one thread computes small pieces, two compute large ones.

XLA divides some sums by the number of its threads, so that number must not come from the host. Most pieces take less
time than waking a second thread does, and run in the thread that asks for them. From `WORTH_SHARING` on a piece has a
client of its own whose two threads share it, on every host alike, a host with one core too: a piece's bits depend on
the piece alone.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from podrun.device.xla.heap import keep_freed_memory

WORTH_SHARING = 1 << 30
"""Floating point operations of a piece from which on two threads compute it. A step of a 784-512-512-10 network on
four replicas has half as many and is slower on two threads than on one."""
SHARED_BY = 2
"""Threads that compute a large piece."""
_starting = threading.Lock()


def large(lowered: Any) -> bool:
    """Whether two threads compute a ``jax.stages.Lowered``, as it is before anything is rewritten."""
    analysis = lowered.cost_analysis() or {}
    return float(analysis.get("flops", 0.0)) >= WORTH_SHARING


def two_threads() -> Any:
    """The ``jax.Device`` of the client whose pieces two threads compute. What these free the process keeps."""
    keep_freed_memory()
    return device_with(SHARED_BY)


@functools.cache
def device_with(threads: int) -> Any:
    """The ``jax.Device`` of a client of so many threads that starts what it runs in the thread that asks for it."""
    client: Any = importlib.import_module("jaxlib.xla_client")
    with _starting, _threads(threads), _all_cores():
        return client.make_cpu_client(asynchronous=False).local_devices()[0]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """``NPROC``, which XLA reads when a client starts."""
    before = os.environ.get("NPROC")
    os.environ["NPROC"] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ["NPROC"]
        else:
            os.environ["NPROC"] = before


@contextmanager
def _all_cores() -> Iterator[None]:
    """Threads started inside may use the process's cores, not only the one that this thread keeps to."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def called_from_outside(call: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
    """A piece of another client as one that takes and gives arrays of JAX's own, whose memory both read in place."""
    import jax

    home = jax.devices("cpu")[0]

    def run(*operands: Any) -> list[Any]:
        results = call(*[np.asarray(operand) for operand in operands])
        return [jax.device_put(np.asarray(result), home) for result in results]

    return run
