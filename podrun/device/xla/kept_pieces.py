"""Compiled pieces on disk: XLA's persistent cache in podrun's cache directory, shared by the machines of a host.

A marker beside XLA's entries says that a piece is there whole, with the digests of its entries; their names say how
many threads compute the piece. So a process that finds a marker need not analyse the piece again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

from podrun.core.documents import write_whole
from podrun.core.environment import podrun_cache_directory
from podrun.device.xla.clients import SHARED_BY, instruction_set
from podrun.device.xla.ready_calls import CallNote, code_file, read_note, remove_notes, write_note
from podrun.private_apis.jax import noted_entries
from podrun.private_apis.xla_executables import is_whole_entry, reduced_entry

_log = logging.getLogger(__name__)
_NAMED = 32
"""Digits of a piece's key in its name."""
WAIT_FOR_COMPILE = 300.0
"""Seconds to wait for another process's compile before compiling here too."""


_PROBE_BYTES = 1 << 16


def writable_cache(environ: Mapping[str, str]) -> Path | None:
    """The cache directory; None if there is none (no HOME) or it cannot be written (a read-only home, a full disk).
    Without it every process compiles for itself.
    """
    directory = podrun_cache_directory(environ)
    if directory is None:
        _log.warning("compiled programs cannot be kept: HOME is not set (export PODRUN_CACHE_DIR=DIRECTORY)")
        return None
    try:
        (directory / "xla").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory / "xla") as file:
            file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        _log.warning(
            "compiled programs cannot be kept in %s: %s (export PODRUN_CACHE_DIR=DIRECTORY)",
            directory,
            error.strerror,
        )
        return None
    return directory


def piece_name(threads: int, key: str) -> str:
    """The name of a piece's function. The keys of XLA's cache know programs by their text alone, and the names of its
    entries begin with this."""
    return f"piece_by_{threads}_{instruction_set()}_{key[:_NAMED]}"


class KeptPieces:
    """Where pieces are kept; ``directory``: None if nowhere."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self._refused: set[str] = set()
        """Keys of pieces whose noted code jaxlib did not load."""

    def threads(self, key: str) -> int | None:
        """How many threads compute a piece, as the names of its entries say; None if it has none."""
        place = self._place
        entries = None if place is None else _whole_entries(place / f"{key}.done")
        known = (n for n in (1, SHARED_BY) for name in entries or () if f"_{piece_name(n, key)}-" in name)
        return next(known, None)

    def ready(self, key: str) -> tuple[CallNote, bytes] | None:
        """The note of a piece, with its entry (`podrun.device.xla.ready_calls`); None if it has none."""
        return None if self._place is None else read_note(self._place, key)

    def refuse(self, key: str) -> None:
        """Say that the code of a piece's note cannot be loaded: its next note names XLA's own entry."""
        self._refused.add(key)

    def note(self, key: str, note: CallNote, entry: str = "") -> None:
        """Keep the note of a piece that has just been compiled or loaded, unless another machine did: that of the file
        ``entry``, if it is here, whole and not in another cache. A large one has its code in a file of its own, which
        is read faster (`reduced_entry`)."""
        directory = self._place
        if directory is not None and note.dense:
            with _if_possible(directory):
                directory.mkdir(parents=True, exist_ok=True)
                write_note(directory, key, note)
            return
        if directory is None or not (directory / entry).is_file():
            return
        with _if_possible(directory):
            kept, refused = self.ready(key), key in self._refused
            if kept is not None and kept[0].library == note.library and not refused:
                return
            code = (directory / entry).read_bytes()
            if not is_whole_entry(code):
                (directory / entry).unlink(missing_ok=True)
                return
            remove_notes(directory, key)
            smaller = None if refused else reduced_entry(code)
            if smaller is not None:
                code, entry = smaller, code_file(key)
                write_whole(code, directory / entry)
            digest = hashlib.sha256(code).hexdigest()
            write_note(directory, key, replace(note, entry=entry, digest=digest))

    @property
    def _place(self) -> Path | None:
        """Where machine code for this instruction set is kept: another processor's would end the process."""
        return None if self.directory is None else self.directory / "xla" / instruction_set()

    @contextlib.contextmanager
    def first_on_host(self, key: str) -> Iterator[list[str]]:
        """Hold back while another process compiles the same piece. Its marker says that it is in the cache, and with
        which digest: an entry that differs is removed and compiled again. Gives the list of the file names of what is
        compiled meanwhile (`noted_entries`).
        """
        directory = self._place
        if directory is None:
            with noted_entries() as names:
                yield names
            return
        marker, lock = directory / f"{key}.done", None
        with _if_possible(directory):
            directory.mkdir(parents=True, exist_ok=True)
            _use_xla_cache(directory)
            if _whole_entries(marker) is None:
                marker.unlink(missing_ok=True)
                lock = (directory / f"{key}.lock").open("ab", buffering=0)
        if lock is None:
            with noted_entries() as names:
                yield names
            return
        with lock:
            _wait_for_lock(lock.fileno(), marker)
            with _if_possible(directory):
                if (
                    _begun(lock) and _whole_entries(marker) is None
                ):  # One that was killed may have left a part.
                    for entry in _entries(directory, key):
                        entry.unlink(missing_ok=True)
            with noted_entries() as names:
                yield names
            with _if_possible(directory):
                entries = [directory / name for name in names] or _entries(directory, key)
                for entry in entries:
                    if entry.is_file() and not is_whole_entry(entry.read_bytes()):
                        entry.unlink(missing_ok=True)
                whole = {e.name: _digest(e) for e in entries if e.is_file()}
                marker.write_text(json.dumps(whole))


@contextlib.contextmanager
def _if_possible(directory: Path) -> Iterator[None]:
    """Keep something in the cache; a disk that has filled up, or a home that went away, ends no program."""
    try:
        yield
    except OSError as error:
        _log.warning("compiled programs cannot be kept in %s: %s", directory, error.strerror)


def _begun(lock: FileIO) -> bool:
    """Whether a process began to compile a piece before, as its lock says; from now on one did. Else the piece has no
    entries, and the directory, which may have many of others, need not be looked through.
    """
    begun = os.fstat(lock.fileno()).st_size > 0
    if not begun:
        lock.write(b"begun")
    return begun


def _entries(directory: Path, key: str) -> list[Path]:
    """A piece's entries in XLA's cache: their names begin with the function's (`piece_name`)."""
    return [*directory.glob(f"*_{key[:_NAMED]}-*-cache")]


def _digest(entry: Path) -> str:
    return hashlib.sha256(entry.read_bytes()).hexdigest()


def _whole_entries(marker: Path) -> Mapping[str, str] | None:
    """The entries that a marker names, with their digests; None unless all are as they were written."""
    try:
        digests: dict[str, str] = json.loads(marker.read_bytes())
        whole = all(_digest(marker.with_name(name)) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return None
    return digests if whole else None


def _wait_for_lock(fd: int, marker: Path) -> None:
    end = time.monotonic() + WAIT_FOR_COMPILE
    while not marker.exists() and time.monotonic() < end:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.02)


def _use_xla_cache(directory: Path) -> None:
    """Point JAX at the cache, unless this process (a script with machines inside it) has set one of its own.

    Only pieces are written (`written_to_cache`): what a script computes with JAX has other threads, which the cache's
    keys do not tell apart.
    """
    import jax

    config: Any = jax.config
    if config.jax_compilation_cache_dir is None:
        config.update("jax_compilation_cache_dir", str(directory))
        config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
        config.update("jax_persistent_cache_min_entry_size_bytes", -1)
