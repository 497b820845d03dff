"""What a machine's process imports for programs, as soon as one is likely to come: when a host process attaches.

JAX takes half a second of a core, in every machine's process. A host process that attaches compiles before it loads,
on one core; the others are idle then. An idle machine imports nothing of this, and stays small.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence

log = logging.getLogger("podrun.device")

MODULES = (
    "jax",
    "jax.export",
    "jax.experimental.compilation_cache.compilation_cache",
    "jaxlib.mlir.dialects.mhlo",
    "jaxlib.mlir.dialects.stablehlo",
)
_NICE = 5
"""How much less of a busy core the imports get: the host process is what everybody waits for. Not much less, since who
loads waits for them."""


class Preload:
    """Imports in a thread of its own. ``import_module`` is for tests."""

    def __init__(
        self,
        modules: Sequence[str] = MODULES,
        import_module: Callable[[str], object] = importlib.import_module,
    ) -> None:
        self._modules = modules
        self._import = import_module
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start, unless that was done before."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="podrun-preload", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Until it is done, if it was started: two threads that import what imports each other get halves."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + _NICE)
        with uncollected():
            for name in self._modules:
                try:
                    self._import(name)
                except ImportError as error:  # A load that needs it says so.
                    log.info("%s was not imported ahead: %s", name, error)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage while large libraries are imported: there is next to none, and looking takes a tenth of the
    time (JAX 0.07 s, Ray 0.07 s)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect_from_now_on() -> None:
    """Look for garbage, but not in what has been imported so far: it stays."""
    gc.freeze()
    gc.enable()
