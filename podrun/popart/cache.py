"""The executable cache: one file per program, compiled by whoever comes first while others wait (semantics,
16).

The file name is a hash of everything that decides the executable. A corrupt or foreign file is compiled anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from podrun.errors import DeadlineError, PodrunError
from podrun.executable import Executable

_log = logging.getLogger("podrun.popart.session")

DIRECTORY_VARIABLE = "POPDIST_EXECUTABLE_CACHE_PATH"
WAIT_SECONDS = 600.0
"""How long one process waits for another to compile the same program."""

_POLL_SECONDS = 0.05


def directory(enabled: bool, path: str, environ: Mapping[str, str]) -> Path | None:
    """Where executables are kept: the session's own directory if caching is on, else the one ``podrun``
    gives.
    """
    if enabled and path:
        return Path(path).expanduser()
    return Path(environ[DIRECTORY_VARIABLE]) if environ.get(DIRECTORY_VARIABLE) else None


def key(parts: Mapping[str, bytes]) -> str:
    """The hash of what decides an executable."""
    digest = hashlib.sha256()
    for name, data in sorted(parts.items()):
        digest.update(f"{name}:{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()[:32]


def load_or_compile(
    folder: Path, name: str, compile_: Callable[[], Executable], wait: float = WAIT_SECONDS
) -> tuple[Executable, bool]:
    """The executable under ``name``, and whether it came from the cache. DeadlineError if another process
    compiles it for longer than ``wait`` seconds.
    """
    from podrun.executable_file import write

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.popef"
    found = _read(path)
    if found is not None:
        _log.info("Loaded the executable from %s.", path)
        return found, True
    with _lock(folder / f"{name}.lock", wait):
        found = _read(path)
        if found is not None:
            _log.info("Loaded the executable from %s.", path)
            return found, True
        made = compile_()
        write(made, path)
        return made, False


def _read(path: Path) -> Executable | None:
    from podrun.executable_file import loads

    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return loads(data)
    except PodrunError as error:
        _log.warning("The cached executable %s cannot be read (%s): compiling again.", path, error)
        return None


@contextlib.contextmanager
def _lock(path: Path, wait: float) -> Iterator[None]:
    """Hold the file's lock; the kernel lets go of it if the holder dies."""
    deadline = time.monotonic() + wait
    with open(path, "a+b") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"Another process has been compiling the same program for {wait:.0f} s ({path} is "
                        "locked)."
                    ) from None
                time.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
