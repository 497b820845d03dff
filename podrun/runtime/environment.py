"""The environment variables that the runtime reads, and an import of JAX that leaves no trace in the user's process.

Variables are read here, at the moment that they count. Everything else is given a mapping: a device keeps the one it
was made with, and `ours` returns the process's own.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from podrun.core.environment import (
    PODRUN_CHECK_REPLICAS,
    PODRUN_OWN_CACHE,
    PODRUN_PROGRESS,
    PODRUN_PROGRESS_FILE,
    POPART_CACHE_DIR,
    POPDIST_EXECUTABLE_CACHE_PATH,
    POPDIST_REPLICA_INDEX_OFFSET,
    POPXL_CACHE_DIR,
    environment,
)
from podrun.core.errors import UsageError
from podrun.core.garbage import without_full_collections, without_garbage_collection
from podrun.core.terminal import reporting

CACHE_DIRECTORIES = (POPART_CACHE_DIR, POPXL_CACHE_DIR)
"""Variables that name a cache directory and so switch the executable cache on."""

DRAWINGS = "POPART_DOT_CHECKS"
"""Variable with the points at which the graph is drawn, with colons between them."""


def ours(environ: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """``environ``, or the environment of this process if it is None."""
    return environment(environ)


def shared_cache(environ: Mapping[str, str] | None = None) -> str:
    """The directory that ``podrun`` gives all instances of a launch, or empty."""
    return ours(environ).get(POPDIST_EXECUTABLE_CACHE_PATH, "")


def shared_cache_stays(environ: Mapping[str, str] | None = None) -> bool:
    """Whether that directory was asked for; else it goes with the launch."""
    return ours(environ).get(PODRUN_OWN_CACHE) != "1"


def cache_directory(environ: Mapping[str, str] | None = None) -> str:
    """The directory of the executable cache that the user's variables name, or empty."""
    variables = ours(environ)
    return next((variables[name] for name in CACHE_DIRECTORIES if variables.get(name)), "")


def dot_checks(environ: Mapping[str, str] | None = None) -> list[str]:
    """The points at which the graph is to be drawn."""
    return [name for name in ours(environ).get(DRAWINGS, "").split(":") if name]


def check_replicas(environ: Mapping[str, str] | None = None) -> int:
    """Batches after which replicas compare their weights: PODRUN_CHECK_REPLICAS; 0 for never. UsageError for an
    invalid number.
    """
    text = ours(environ).get(PODRUN_CHECK_REPLICAS, "") or "0"
    if not text.isdecimal() or len(text) > 12:
        raise UsageError(f"{PODRUN_CHECK_REPLICAS} must be a number of batches, not {text!r}.")
    return int(text)


@contextmanager
def preparing(what: str, environ: Mapping[str, str] | None = None) -> Iterator[None]:
    """Report on standard error how far ``what`` is, if it takes long (`podrun.core.terminal`): in the first instance
    of a program only, and not at all if PODRUN_PROGRESS is ``off``. Meanwhile only young objects are searched for
    garbage.
    """
    variables = ours(environ)
    first = variables.get(POPDIST_REPLICA_INDEX_OFFSET, "0") == "0"
    quiet = not first or variables.get(PODRUN_PROGRESS) == "off" or sys.stderr is None
    file = variables.get(PODRUN_PROGRESS_FILE)
    report = nullcontext() if quiet else reporting(what, sys.stderr, file=Path(file) if file else None)
    with without_full_collections(), report:
        yield


def import_jax() -> None:
    """Import JAX as podrun needs it, without a trace in the program that imports podrun. No-op if JAX is imported.

    The import draws from NumPy's global generator, often between a program's ``np.random.seed`` and its data, so the
    generator is put back into its state. From then on JAX warns of every fork; the warning is silenced for forks of
    ``multiprocessing`` and of data loaders, whose children compute nothing with JAX.
    """
    if "jax" in sys.modules:
        return
    import numpy as np

    state = np.random.get_state()
    for name in ("jax", "jaxlib"):
        log = logging.getLogger(name)
        if log.level == logging.NOTSET:  # A program that logs at INFO or DEBUG need not hear what JAX does.
            log.setLevel(logging.WARNING)
    try:
        with without_garbage_collection():
            importlib.import_module("jax")
    finally:
        np.random.set_state(state)
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
