"""Imports what a machine's process needs for programs, started when a host process attaches.

JAX takes half a second of a core to import. A host process compiles between attaching and loading, on one core, while
other cores are idle. A machine to which nothing attaches imports none of this and stays small. Where machines are
copies of a process that has imported it (`podrun.private_apis.ray_worker`), nothing is left to import.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence

from podrun.core.garbage import without_garbage_collection
from podrun.private_apis.jax import MLIR_MODULES, without_gpu_plugins

log = logging.getLogger("podrun.device")

MODULES = (
    "jax",
    "jax.export",
    "jax.experimental.compilation_cache.compilation_cache",
    *MLIR_MODULES,
)
TEMPLATE_MODULES = (
    *MODULES,
    *("asyncio", "google.protobuf.internal.builder", "google.protobuf.json_format", "psutil", "yaml"),
    *("jax.experimental.multihost_utils", "podrun.collectives.communicator"),
    *("podrun.device.service.server", "podrun.device.service.servicer"),
)
"""What the template of machines' processes imports before it knows Ray's environment."""
_NICE = 5
"""Niceness of the importing thread. On a busy core the host process goes first; but a load waits for the imports, so
they must not take much longer."""


def import_for_copies() -> None:
    """Import `TEMPLATE_MODULES`. For a process that has one thread, whose copies compute on the CPU alone."""
    with without_gpu_plugins():
        for name in TEMPLATE_MODULES:
            importlib.import_module(name)


class Preload:
    """Imports in a separate thread. ``import_module`` is for tests."""

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
        """Wait until the imports are done, if they were started: concurrent imports of modules that import each other
        can fail.
        """
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        if all(name in sys.modules for name in self._modules):
            return  # A copy. To look at the garbage collector's objects takes it 0.02 s.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + _NICE)
        with without_garbage_collection():
            for name in self._modules:
                try:
                    self._import(name)
                except ImportError as error:  # A load that needs the module reports it.
                    log.info("%s was not imported ahead: %s", name, error)
