"""XLA's clients of this process: one thread computes small pieces, two compute large ones.

XLA divides some sums by the number of its threads, so that number must not come from the host. Most pieces take less
time than waking a second thread does, and run in the thread that asks for them. From `WORTH_SHARING` or
`WORTH_READING_TOGETHER` on a piece has a client of its own whose two threads share it, on every host alike, a host with
one core too: a piece's bits depend on the piece alone.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from podrun.device.xla.heap import keep_freed_memory

WORTH_SHARING = 1 << 30
"""Floating point operations of a piece from which on two threads compute it. A step of a 784-512-512-10 network on
four replicas has half as many and is slower on two threads than on one."""
WORTH_READING_TOGETHER = 1 << 26
"""Bytes of a piece's operands and results from which on two threads compute it, however little it computes: an update
of large weights takes as long as memory does, and one core cannot ask for all that memory gives."""
SHARED_BY = 2
"""Threads that compute a large piece."""
_starting = threading.Lock()


def large(lowered: Any) -> bool:
    """Whether two threads compute a ``jax.stages.Lowered``, as it is before anything is rewritten."""
    analysis = lowered.cost_analysis() or {}
    if float(analysis.get("flops", 0.0)) >= WORTH_SHARING:
        return True
    tree: Any = importlib.import_module("jax.tree")
    arrays = [*tree.leaves(lowered.in_avals), *tree.leaves(lowered.out_info)]
    size = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    return bool(size >= WORTH_READING_TOGETHER)


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


def home() -> Any:
    """The ``jax.Device`` of JAX's own client."""
    import jax

    return jax.devices("cpu")[0]


def called_from_outside(
    call: Callable[..., Sequence[Any]], in_place: Mapping[int, int] | None = None
) -> Callable[..., list[Any]]:
    """A piece of another client as one that takes and gives arrays of JAX's own, whose memory both read in place.

    ``in_place``: positions of operands, and of the results written over them, that stay with the piece's client.
    """
    import jax

    here = home()
    taken, given = set(in_place or {}), set((in_place or {}).values())

    def run(*operands: Any) -> list[Any]:
        results = call(*[o if at in taken else np.asarray(o) for at, o in enumerate(operands)])
        return [r if at in given else jax.device_put(np.asarray(r), here) for at, r in enumerate(results)]

    return run
