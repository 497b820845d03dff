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

import errno
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import podrun
from podrun.compiler.arenas import plan_memory
from podrun.compiler.checks import check_program
from podrun.compiler.program import Program, layout_of
from podrun.core import executable_file
from podrun.core.documents import OthersFileError, read_bytes, write_whole
from podrun.core.errors import ConfigError, DeadlineError, InternalError, NotFoundError, UsageError
from podrun.core.executable import EXECUTABLE_VERSION, Executable
from podrun.core.kept_files import KeptFolder, kept_folder, library_version, made_by
from podrun.core.quick_dataclass import dataclass
from podrun.core.terminal import report_step
from podrun.device.xla.clients import instruction_set

SUFFIX = ".popef"
MOST_BYTES, MOST_PROGRAMS = 512 << 20, 500
"""Limits of the folder of programs that podrun keeps by itself."""
LARGEST_PART = 4
"""The largest program that podrun keeps by itself, as a part of that: one of all of it would drive out the others."""
_POLL_SECONDS = 0.02
_log = logging.getLogger("podrun.compiler.cache")


@dataclass(frozen=True, slots=True)
class ExecutableCache:
    """A folder of compiled programs, in files whose names end with ``suffix``. ``limits``: of one that podrun keeps by
    itself, None for one that was asked for.

    By itself podrun keeps programs of one version of all that decides them (``made_by``), so many and so large as the
    limits say, and reads this user's files only; what cannot be read or written there is compiled instead, and kept
    in ``instead`` if there is one: where the instances of a launch share programs.
    """

    directory: Path
    limits: KeptFolder | None = None
    made_by: str = ""
    suffix: str = SUFFIX
    instead: ExecutableCache | None = None

    def path(self, digest: str) -> Path:
        """The file of an entry."""
        name = hashlib.sha256(f"{digest} {self.made_by}".encode()).hexdigest() if self.made_by else digest
        return self.directory / f"{name}{self.suffix}"

    def load(self, digest: str, level: int = logging.WARNING) -> Executable | None:
        """The program of an entry, or None; what is wrong with its file is logged at ``level``."""
        path = self.path(digest)
        try:
            if self.limits is None:
                executable = executable_file.read_executable(path)
            else:
                data = read_bytes(path, self.limits.most_bytes, own=True)
                executable = executable_file.loads(data, where=os.fspath(path))
        except (FileNotFoundError, NotFoundError):
            return None
        except ConfigError as error:
            level = min(level, logging.INFO) if isinstance(error, OthersFileError) else level
            _log.log(level, "compiling again: %s", error)
            return None
        if self.limits is not None:
            self.limits.used(path.name)
        _log.info("loaded the compiled program %s from the executable cache", path.name)
        return executable

    def store(self, digest: str, executable: Executable) -> None:
        """Keep a program. Raises OSError."""
        path, data = self.path(digest), executable_file.dumps(executable)
        if self.limits is not None and len(data) > self.limits.most_bytes // LARGEST_PART:
            raise OSError(errno.EFBIG, f"a program of {len(data) >> 20} MiB would drive out others")
        write_whole(data, path)
        _log.info("stored the compiled program %s in the executable cache", path.name)
        if self.limits is not None:
            self.limits.note_written(len(data))


def kept_programs(environ: Mapping[str, str], instead: str = "") -> ExecutableCache | None:
    """The programs that podrun keeps by itself in the user's cache, or in the folder ``instead`` if that cannot be
    written; None if it keeps none.
    """
    folder = kept_folder("programs", environ)
    if folder is None:
        return None
    version, other = made_by(environ), None
    for directory in (Path(instead), folder) if instead else (folder,):
        # A launch's folder goes with it, and takes what is too large to stay.
        most = MOST_BYTES * LARGEST_PART if directory != folder else MOST_BYTES
        limits = KeptFolder(directory, SUFFIX, most, MOST_PROGRAMS)
        other = ExecutableCache(limits.path, limits, version, instead=other)
    return other


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Choices apart from the Program.

    ``chunk_bytes``: budget for the intermediates of the micro-batches that run as one on a machine (bytes). It decides
    the order of sums, so it is part of what makes results repeatable. ``cache``: where compiled programs are kept and
    looked up; None: nowhere. ``program_digest``: the front end's promise that programs with equal digests (and equal
    fields of the Program) have equal forward functions and update rules; with it a cached program is found without
    tracing, and without JAX. ``cache_wait``: seconds to wait for another process that compiles the same program.
    ``on_compile`` is called before compiling, not where the program is found in the cache.
    """

    chunk_bytes: int = 128 << 20
    cache: ExecutableCache | None = None
    program_digest: str | None = None
    cache_wait: float = 600.0
    on_compile: Callable[[], None] | None = None
    report: Callable[[], dict[str, Any]] | None = None
    """Makes the tile report, for a front end that models a program in another form than the one that runs."""


def known_program(program: Program, target: str, options: CompileOptions) -> Executable | None:
    """The compiled program from the cache, found by the front end's digest; None if it is not there. Needs no JAX."""
    if options.cache is None or options.program_digest is None:
        return None
    check_program(program)
    digest = known_digest(program, target, options)
    try:
        return None if digest is None else options.cache.load(digest, logging.DEBUG)
    except OSError:
        return None  # What compiles says what is wrong with the folder.


def cached(
    cache: ExecutableCache, digest: str, compile_now: Callable[[], Executable], wait: float
) -> Executable:
    """The entry for a digest, compiled and stored if it is not there.

    Waits at most ``wait`` seconds for another process that compiles it. For a cache that was asked for it raises
    DeadlineError that names that process, UsageError for a directory that cannot be used.
    """
    with ExitStack() as held:
        try:
            executable = cache.load(digest, logging.DEBUG)
            if executable is None:
                cache.directory.mkdir(
                    parents=True, exist_ok=True, mode=0o777 if cache.limits is None else 0o700
                )
                lock = cache.path(digest).with_name(f".{cache.path(digest).stem}.lock")
                held.enter_context(_locked(lock, wait))
                executable = cache.load(digest)
                if executable is None and cache.instead is not None:
                    executable = cache.instead.load(digest, logging.DEBUG)  # One too large for this folder.
        except OSError as error:
            return _kept_elsewhere(cache, digest, compile_now, wait, error)
        except DeadlineError as error:
            if cache.limits is None:
                raise
            _log.warning("%s; compiling here too", error.message)
            return compile_now()
        if executable is not None:
            return executable
        compiled = compile_now()
        try:
            cache.store(digest, compiled)
        except OSError as error:
            return _kept_elsewhere(cache, digest, lambda: compiled, wait, error)
        return compiled


def _kept_elsewhere(
    cache: ExecutableCache, digest: str, program: Callable[[], Executable], wait: float, error: OSError
) -> Executable:
    """The compiled program, loaded from or kept in the cache in place of a folder that cannot be used (``error``).

    Raises UsageError if the user asked for that folder: podrun's own (``cache.limits``) has a substitute.
    """
    if cache.limits is None:
        raise UsageError(
            f"the executable cache {os.fspath(cache.directory)} cannot be used: {error}",
            hint="Give a directory you can write to, or switch the executable cache off.",
        ) from error
    _log.info("compiled programs cannot be kept in %s: %s", cache.directory, error.strerror or error)
    return program() if cache.instead is None else cached(cache.instead, digest, program, wait)


@contextmanager
def _locked(path: Path, wait: float) -> Iterator[None]:
    """Hold the lock file at ``path``; it is gone afterwards."""
    deadline = time.monotonic() + wait
    handle = _acquire(path)
    if handle is None:
        line = f"waiting for process {_holder(path)}, which compiles the same program"
        report_step(line)
        _log.info("%s", line)
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
        with suppress(OSError):
            path.unlink()
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


def known_digest(program: Program, target: str, options: CompileOptions) -> str | None:
    """The name of a program's entry by the front end's digest; None without one."""
    if options.program_digest is None:
        return None
    return executable_digest(program, target, options, [options.program_digest.encode()])


def executable_digest(
    program: Program, target: str, options: CompileOptions, identity: Iterable[bytes]
) -> str:
    """Hexadecimal SHA-256. ``identity`` identifies the forward function and the update rule."""
    memory = plan_memory(program, layout_of(program), {})
    variables = [_plain(item) for item in memory.variables.values()]
    description = {
        "podrun": podrun.__version__,
        "jax": library_version("jax"),
        "instruction_set": instruction_set(),
        "format": EXECUTABLE_VERSION,
        "target": target,
        "settings": {"chunk_bytes": options.chunk_bytes, "variables": variables},
        "program": {
            item.name: _plain(getattr(program, item.name))
            for item in fields(Program)
            if item.name not in FUNCTIONS_OF_PROGRAM
        },
    }
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    for part in identity:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


FUNCTIONS_OF_PROGRAM = frozenset(("forward", "update"))
"""Fields of a Program that are no data: what identifies them comes from elsewhere."""


def _plain(value: object) -> object:
    """A value as JSON has it, which differs if the value differs."""
    if isinstance(value, Enum):
        return [type(value).__name__, value.name]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=repr)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    raise InternalError(f"a program holds {value!r}, of which no digest can be made")
