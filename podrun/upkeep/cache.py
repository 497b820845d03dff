"""``podrun cache``: what podrun keeps between runs, how large it is, and how it is removed without harm.

All of it is made again when needed: clearing costs time, no results. A file that a running program has open stays
usable, since Linux keeps an open file until it is closed; still, files younger than a minute are left for the process
that may be about to read them.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from podrun.core.environment import (
    PODRUN_PLAN_CACHE,
    POPART_CACHE_DIR,
    POPTORCH_CACHE_DIR,
    POPXL_CACHE_DIR,
    podrun_cache_directory,
)
from podrun.core.errors import NotFoundError, UsageError
from podrun.core.kept_files import drop_free_locks
from podrun.core.quick_dataclass import dataclass

YOUNG_SECONDS = 60.0
KINDS: Mapping[str, str] = {
    "xla": "machine code of pieces, by instruction set",
    "plans": "plans of the tile model, shapes of traced graphs",
    "programs": "compiled programs that launches left",
    "own-pieces": "which pieces podrun has exported itself",
}
"""Folders of the cache directory."""
EXECUTABLES = "executables"
"""Programs that PopART and PopTorch keep in the directory that a variable names."""
VARIABLES = (POPART_CACHE_DIR, POPXL_CACHE_DIR, POPTORCH_CACHE_DIR)
PROGRAM = re.compile(r"[0-9a-f]{32,}\.popef")
"""Files that podrun names itself in the folder of such a variable; a user's own files there have other names."""


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache: its name, what it holds, where, and its files that podrun wrote."""

    name: str
    meaning: str
    path: Path
    files: tuple[Path, ...]

    @property
    def size_bytes(self) -> int:
        """How many bytes all files of the cache take."""
        return sum(_size(file) for file in self.files)


def caches(environ: Mapping[str, str]) -> list[Cache]:
    """The caches of this user, also those that are still empty. Empty if no variable names a directory."""
    return [
        Cache(
            name,
            meaning,
            path,
            tuple(file for file in _files(path) if name != EXECUTABLES or PROGRAM.fullmatch(file.name)),
        )
        for name, meaning, path in _places(environ)
    ]


def cache_names(environ: Mapping[str, str]) -> list[str]:
    """The names of those caches, each once, without a look at their files: there are thousands."""
    return list(dict.fromkeys(name for name, _, _ in _places(environ)))


def _places(environ: Mapping[str, str]) -> Iterator[tuple[str, str, Path]]:
    """Name, meaning and folder of each cache."""
    base = podrun_cache_directory(environ)
    if base is not None:
        for name, meaning in KINDS.items():
            path = base / name
            if name == "plans" and (named := environ.get(PODRUN_PLAN_CACHE)):
                if named == "off":
                    continue
                path = Path(named).expanduser()
            yield name, meaning, path
    for variable in VARIABLES:
        if named := environ.get(variable):
            yield EXECUTABLES, f"compiled programs ({variable})", Path(named).expanduser()


def chosen(present: Sequence[Cache], names: Sequence[str]) -> list[Cache]:
    """The caches of these names; all caches without names. Raises UsageError for a name that no cache has."""
    known = sorted({cache.name for cache in present})
    for name in names:
        if name not in known:
            raise UsageError(f"there is no cache {name}", hint=f"Caches: {', '.join(known)}.")
    return [cache for cache in present if not names or cache.name in names]


def clear(selected: Sequence[Cache], now: float | None = None, *, dry_run: bool = False) -> tuple[int, int]:
    """Remove the files of caches, and folders that are empty then. Returns files and bytes that were removed, with
    ``dry_run`` those that would be.

    Raises NotFoundError if a file cannot be removed, after all others have been.
    """
    before = (time.time() if now is None else now) - YOUNG_SECONDS
    files = size = 0
    failed: list[str] = []
    for cache in selected:
        for file in cache.files:
            with contextlib.suppress(FileNotFoundError):
                status = file.lstat()
                if status.st_mtime > before:
                    continue
                try:
                    if not dry_run:
                        file.unlink()
                except OSError as error:
                    failed.append(f"{file}: {error.strerror}")
                    continue
                files, size = files + 1, size + status.st_size
        if cache.name == "programs" and not dry_run:
            drop_free_locks(cache.path)
        if cache.name != EXECUTABLES and not dry_run:
            _remove_empty(cache.path)
    if failed:
        raise NotFoundError(
            f"{len(failed)} files cannot be removed, the first is {failed[0]}",
            hint=f"Look who owns it: ls -l {Path(failed[0].rpartition(': ')[0]).parent}",
        )
    return files, size


def _files(path: Path) -> Iterator[Path]:
    """Files below a folder, without locks; links are not followed."""
    if path.is_symlink() or not path.is_dir():
        return
    for entry in sorted(path.rglob("*")):
        if entry.suffix != ".lock" and entry.is_file() and not entry.is_symlink():
            yield entry


def _size(file: Path) -> int:
    try:
        return file.lstat().st_size
    except OSError:
        return 0  # Another process has removed it.


def _remove_empty(path: Path) -> None:
    for folder in sorted((p for p in path.rglob("*") if p.is_dir() and not p.is_symlink()), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()
