"""Starting the process that loads data as a copy of the program: in milliseconds, whatever the program has imported.

The copy has the program's modules, its data set and its ``__main__``, so nothing is imported or pickled again. It has
none of the program's threads. A lock that such a thread held stays locked in the copy, so the copy must not enter what
those threads work in: JAX, XLA and the connections to machines. `prepare_copy` sees to the ways into them that are not
calls of the data set: the collector, which would free arrays of JAX; signal handlers, which would give IPUs back; and
OpenMP, whose threads are gone.
"""

from __future__ import annotations

import gc
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WARNINGS = (r"os\.fork\(\) was called", r"This process .* is multi-threaded")
"""Of JAX and of Python: right about code that goes on using JAX or threads in the copy, which ours does not."""


def ignore_fork_warnings() -> None:
    """Ignore what JAX and Python say of a fork, as `prepare_copy` makes it safe for loading."""
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)


@contextmanager
def forking() -> Iterator[None]:
    """A fork inside the context warns of nothing, and the collector does not run before `prepare_copy` has."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            ignore_fork_warnings()
            yield
    finally:
        if collecting:
            gc.enable()


def prepare_copy() -> None:
    """Make the copy fit for loading data, as its first action."""
    gc.freeze()
    gc.enable()
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    torch.set_num_threads(1)
    ignore_fork_warnings()
