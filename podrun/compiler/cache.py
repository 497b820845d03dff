"""The executable cache: a program is compiled once and loaded by everyone else who has the same one.

One directory, one file per entry, named by a digest of everything that decides the Executable. Processes that want the
same entry at the same time wait for the first, which compiles; a lock on a file beside the entry keeps them apart, and
the kernel drops it if its holder dies. A damaged entry is compiled again.

Equal programs for one target have equal digests on every host of one instruction set, which decides the bits of what is
computed while a program is compiled. A front end that knows what its forward function was made from (the model file,
its options, the optimizer's constants) can give a digest of that, and nothing needs to be traced. Otherwise the
StableHLO of the forward function and of the update rule, which depends only on what they compute, stands for them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

import podrun
from podrun.compiler.program import Program
from podrun.core import executable_file
from podrun.core.errors import ConfigError, DeadlineError, UsageError
from podrun.core.executable import EXECUTABLE_VERSION, Executable
from podrun.device.xla.clients import instruction_set

SUFFIX = ".popef"
_POLL_SECONDS = 0.02
_log = logging.getLogger("podrun.compiler.cache")


def cached(directory: Path, digest: str, compile_now: Callable[[], Executable], wait: float) -> Executable:
    """The entry for ``executable_digest``, compiled and stored if it is not there.

    Waits at most ``wait`` seconds for another process that compiles it. Raises DeadlineError that names that
    process, UsageError for a directory that cannot be used.
    """
    path = directory / f"{digest}{SUFFIX}"
    try:
        executable = _load(path, logging.DEBUG)
        if executable is not None:
            return executable
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / f".{digest}.lock", wait):
            executable = _load(path)
            if executable is None:
                executable = compile_now()
                executable_file.write_executable(executable, path)
                _log.info("stored the compiled program %s in the executable cache", path.name)
            return executable
    except OSError as error:
        raise UsageError(
            f"the executable cache {os.fspath(directory)} cannot be used: {error}",
            hint="Give a directory you can write to, or switch the executable cache off.",
        ) from error


def _load(path: Path, level: int = logging.WARNING) -> Executable | None:
    """The Executable in a file, or None; what is wrong with the file is logged at ``level``."""
    try:
        executable = executable_file.read_executable(path)
    except FileNotFoundError:
        return None
    except ConfigError as error:
        _log.log(level, "compiling again: %s", error)
        return None
    _log.info("loaded the compiled program %s from the executable cache", path.name)
    return executable


@contextmanager
def _locked(path: Path, wait: float) -> Iterator[None]:
    """Hold the lock file at ``path``; it is gone afterwards."""
    deadline = time.monotonic() + wait
    handle = _acquire(path)
    while handle is None:
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"waited {wait:g} s for process {_holder(path)} to compile the same program",
                hint=f"See what it does (`ps -fp {_holder(path)}`), or compile without the executable cache.",
            )
        time.sleep(_POLL_SECONDS)
        handle = _acquire(path)
    try:
        yield
    finally:
        # Unlink while the lock is held: a waiter that opened the old file sees that its name is gone.
        path.unlink(missing_ok=True)
        os.close(handle)


def _acquire(path: Path) -> int | None:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.stat(path)):
            os.truncate(handle, 0)
            os.write(handle, str(os.getpid()).encode())
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass  # Held by another, or its name was just removed by the one who held it.
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None


def _holder(path: Path) -> str:
    try:
        return path.read_text() or "(unknown)"
    except FileNotFoundError:
        return "(gone)"


def executable_digest(
    program: Program, target: str, settings: dict[str, Any], identity: Iterable[bytes]
) -> str:
    """Hexadecimal SHA-256. ``identity`` identifies the forward function and the update rule."""
    description = {
        "podrun": podrun.__version__,
        "jax": jax.__version__,
        "instruction_set": instruction_set(),
        "format": EXECUTABLE_VERSION,
        "target": target,
        "settings": settings,
        "name": program.name,
        "parameters": {name: asdict(item) for name, item in program.parameters.items()},
        "inputs": {name: asdict(item) for name, item in program.inputs.items()},
        "anchors": [[item.name, item.retrieval.value, item.period] for item in program.anchors],
        "layout": [program.replicas, program.ipus_per_replica, program.accumulation_factor],
        "pipelined": [
            program.pipelined,
            program.pipeline_schedule.value,
            program.updates_each_micro_batch,
        ],
        "phases": None if program.phases is None else asdict(program.phases),
        "loss": [program.loss, program.loss_scaling, program.reduction.value],
        "automatic_scaling": None if program.automatic_scaling is None else asdict(program.automatic_scaling),
        "state_updates": dict(program.state_updates),
        "shared_state": sorted(program.shared_state),
        "recompute": [
            program.recompute.rule,
            sorted(program.recompute.scopes),
            sorted(program.recompute.kept),
        ],
        "locations": asdict(program.locations),
        "plans": asdict(program.plans),
        "transfers": None
        if program.transfers is None
        else [program.transfers.io_tiles, sorted((n, b.value) for n, b in program.transfers.beside.items())],
        "metadata": dict(program.metadata),
    }
    if program.unsent:
        description["unsent"] = sorted(program.unsent)
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    for part in identity:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()
