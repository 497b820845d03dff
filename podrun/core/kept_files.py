"""What podrun keeps between runs in folders of the user's cache: by whom it was made, and how much of it stays.

`made_by` says what a kept answer depends on beside its question: podrun's own files and the libraries that compute. It
is part of the names of entries, so that no other version's answer is ever read. `KeptFolder` cuts a folder back to its
limits, the least recently used files first; a reader calls `KeptFolder.used`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import podrun
from podrun.core.environment import BEGAN_NS, PODRUN_PLAN_CACHE, XLA_FLAGS, podrun_cache_directory
from podrun.core.quick_dataclass import dataclass

LIBRARIES = ("jax", "jaxlib", "numpy", "ml_dtypes")
"""Libraries whose versions decide what is computed while a program is prepared."""
OFF = ("", "off")
"""Values of PODRUN_PLAN_CACHE with which nothing of a program is kept that was not asked for by name."""


def kept_folder(name: str, environ: Mapping[str, str]) -> Path | None:
    """The folder ``name`` of the user's cache; None if there is none, or if PODRUN_PLAN_CACHE switches it off."""
    directory = podrun_cache_directory(environ)
    if directory is None or environ.get(PODRUN_PLAN_CACHE, "on") in OFF:
        return None
    return directory / name


def made_by(environ: Mapping[str, str]) -> str:
    """A digest of podrun's files, of the versions of the `LIBRARIES` and of Python, and of what ``environ`` tells
    them. Files count by name, size and time, as for Python's own bytecode.
    """
    told = sorted((n, v) for n, v in environ.items() if n.startswith("JAX_") or n == XLA_FLAGS)
    return hashlib.sha256(repr((_installed(), told)).encode()).hexdigest()


@cache
def _installed() -> str:
    files = sorted(_package_files(Path(podrun.__file__).resolve().parent, ""))
    # A file that changed after this process began may not be what it imported, so its entries are for it alone.
    own = os.urandom(16) if any(changed >= BEGAN_NS for *_, changed in files) else b""
    listed = [about for *about, _ in files]
    return repr((sys.version, [(name, library_version(name)) for name in LIBRARIES], listed, own))


@cache
def library_version(library: str) -> str:
    """The version of an installed library, without importing it; empty if it is not there. A library that no
    distribution of its name brought has the time of its file.
    """
    if named := version_beside(library):
        return named
    spec = find_spec(library)
    if spec is None or spec.origin is None:
        return ""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(library)
    except PackageNotFoundError:
        return str(os.stat(spec.origin).st_mtime_ns)


@cache
def version_beside(library: str) -> str:
    """The version of an installed library as the folder beside it says it, empty if none does: `importlib.metadata`
    takes longer to import than all else here takes.
    """
    spec = find_spec(library)
    if spec is None or spec.origin is None:
        return ""
    start, end = f"{library}-", ".dist-info"
    beside = os.listdir(Path(spec.origin).parent.parent)
    versions = [
        name.removeprefix(start).removesuffix(end)
        for name in beside
        if name.startswith(start) and name.endswith(end)
    ]
    return versions[0] if len(versions) == 1 else ""


def _package_files(folder: Path, inside: str) -> Iterator[tuple[str, int, int, int]]:
    """Name, size, time and when any of it changed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = f"{inside}/{entry.name}"
            if entry.name.startswith(".") or entry.name == "__pycache__":
                continue
            with contextlib.suppress(OSError):  # A link to nothing, or a file that goes meanwhile.
                if entry.name.endswith((".py", ".so")):
                    about = entry.stat()
                    yield name, about.st_size, about.st_mtime_ns, about.st_ctime_ns
                elif entry.is_dir():
                    yield from _package_files(Path(entry.path), name)


@dataclass(frozen=True, slots=True)
class KeptFolder:
    """The files of one kind in a folder, and its limits. ``ending``: of the files' names."""

    path: Path
    ending: str
    most_bytes: int
    most_files: int

    def used(self, name: str) -> None:
        """Note that a file was read, so that others go before it."""
        with contextlib.suppress(OSError):
            os.utime(self.path / name)

    def note_written(self, size: int) -> None:
        """Note that a file of so many bytes was written. The folder is cut back once in a while: it may hold ten
        thousand files, and a large model writes dozens."""
        count, total = _written.get(self.path, (self.most_files, self.most_bytes))
        count, total = count + 1, total + size
        if count * 16 < self.most_files and total * 16 < self.most_bytes:
            _written[self.path] = (count, total)
            return
        _written[self.path] = (0, 0)
        self.cut_back()

    def cut_back(self) -> None:
        """Drop the least recently used files until the rest is few and small enough, and locks that nobody holds."""
        drop_free_locks(self.path)
        entries = []
        for path in self.path.glob(f"*{self.ending}"):
            with contextlib.suppress(OSError):
                about = path.lstat()
                entries.append((about.st_mtime_ns, about.st_size, path))
        left, total = len(entries), sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if left <= self.most_files and total <= self.most_bytes:
                return
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            left, total = left - 1, total - size


def drop_free_locks(folder: Path) -> None:
    """Remove the lock files of processes that were killed (``.NAME.lock``). Whoever opened one meanwhile sees, once it
    has the lock, that the file has no name any more.
    """
    for path in folder.glob(".*.lock"):
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(handle), os.stat(path)):
                    path.unlink()
            finally:
                os.close(handle)


_written: dict[Path, tuple[int, int]] = {}
"""Files and bytes that this process has put into a folder since it last looked through all of it."""
