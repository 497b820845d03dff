"""Where podrun's services run on this host: one directory for each user, one small file for each service.

A service publishes host, port and process when it starts, so that `gc-monitor` in another terminal finds it.
An entry belongs to a process, told apart from later processes of the same number by its start time. `sweep`
removes entries whose process is gone and ends what such a process left behind: the processes and directories
its entry lists. Every command that starts anything sweeps first, so that even ``kill -9`` leaves nothing for
longer than that.

The directory is ``$PODRUN_RUNTIME_DIR``, else ``$XDG_RUNTIME_DIR/podrun``, else ``podrun-UID`` in the
directory for temporary files; mode 0700, and refused if it belongs to somebody else.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from podrun.errors import UsageError
from podrun.partition.guardian import SCRATCH_PREFIX, end_writers, marked_processes, remove_tree

VIPU_SERVER = "vipu-server"
"""Kind of an entry: a partition service that stays (`vipu-server`)."""
DEFAULT_PORT = 8090
"""Where a V-IPU controller listens unless told otherwise."""
LAUNCHER = "podrun"
"""Kind of an entry: the partition service inside one `podrun`."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, unmistakably: its number and its start time in clock ticks since boot (Linux)."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has that number now, or None. A zombie counts as gone."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        # The command's name is in parentheses and may itself hold blanks and parentheses.
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        """True iff that very process still runs."""
        return ProcessId.of(self.pid) == self


@dataclass(frozen=True, slots=True)
class Entry:
    """A published service. ``processes`` and ``directories`` are what must go when ``owner`` is gone."""

    kind: str
    host: str
    port: int
    owner: ProcessId
    cluster: str = ""
    partition: str = ""
    processes: tuple[ProcessId, ...] = ()
    directories: tuple[str, ...] = ()
    mark: str = ""
    """``NAME=VALUE`` that the environment of every process of the owner's holds which must go, too; or empty.
    """


def runtime_directory(environ: Mapping[str, str] | None = None) -> Path:
    """The directory, made if need be. Raises UsageError if it is not ours alone."""
    env = os.environ if environ is None else environ
    if env.get("PODRUN_RUNTIME_DIR"):
        path = Path(env["PODRUN_RUNTIME_DIR"])
    elif env.get("XDG_RUNTIME_DIR") and os.access(env["XDG_RUNTIME_DIR"], os.W_OK):
        path = Path(env["XDG_RUNTIME_DIR"]) / "podrun"
    else:
        path = Path(tempfile.gettempdir()) / f"podrun-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise UsageError(
            f"the runtime directory {path} cannot be used: {error.strerror}",
            hint="Name another: export PODRUN_RUNTIME_DIR=DIRECTORY",
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UsageError(
            f"the runtime directory {path} belongs to somebody else",
            hint="Name another: export PODRUN_RUNTIME_DIR=DIRECTORY",
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(0o700)
    return path


class Registry:
    """The entries in a runtime directory."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = runtime_directory() if directory is None else directory

    def publish(self, entry: Entry) -> Publication:
        """Write an entry; it stands until `Publication.withdraw` or until a sweep finds its owner gone."""
        publication = Publication(self.directory / f"{entry.kind}-{entry.owner.pid}-{entry.port}.json", entry)
        publication.update()
        return publication

    def entries(self) -> list[Entry]:
        """Entries whose owner runs: those that stay (`VIPU_SERVER`) first, of these the one at the port that users
        expect, then the youngest first.
        """
        found = [entry for _, entry in self._read() if entry.owner.alive]
        return sorted(
            found, key=lambda e: (e.kind != VIPU_SERVER, e.port != DEFAULT_PORT, -e.owner.start_ticks)
        )

    def find(self, *, partition: str | None = None) -> Entry | None:
        """The service to talk to by default: that of ``partition`` if one says it has it, else the first."""
        found = [entry for entry in self.entries() if entry.port]
        for entry in found:
            if partition is not None and entry.partition == partition:
                return entry
        return found[0] if found else None

    def sweep(self, kill: Callable[[int, int], None] = os.kill) -> list[Entry]:
        """Remove entries of dead owners and end what they left behind. Returns those entries."""
        swept = []
        for path, entry in self._read():
            if entry.owner.alive:
                continue
            for process in entry.processes:
                if process.alive:
                    with contextlib.suppress(ProcessLookupError):
                        kill(process.pid, signal.SIGKILL)
            for pid in marked_processes(entry.mark) if entry.mark else ():
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
            for directory in entry.directories:
                remove_scratch(Path(directory))
            path.unlink(missing_ok=True)
            swept.append(entry)
        return swept

    def _read(self) -> Iterable[tuple[Path, Entry]]:
        for path in sorted(self.directory.glob("*.json")):
            try:
                entry = _from_json(json.loads(path.read_text(encoding="utf-8")))
            except FileNotFoundError:
                continue
            except (ValueError, KeyError, TypeError):
                # Not written by us, or by another release: nothing we could act on, and nothing of ours to
                # keep.
                path.unlink(missing_ok=True)
                continue
            yield path, entry


class Publication:
    """An entry that this process has published."""

    def __init__(self, path: Path, entry: Entry) -> None:
        self.path, self.entry = path, entry

    def update(self, **changes: object) -> None:
        """Publish again with other fields: readers see the old entry or the new one, never a half."""
        self.entry = replace(self.entry, **changes)  # type: ignore[arg-type]
        temporary = self.path.with_suffix(f".{os.getpid()}.new")
        try:
            temporary.write_text(json.dumps(asdict(self.entry)), encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise UsageError(
                f"the runtime directory {self.path.parent} cannot be written: {error.strerror}",
                hint="Make room there, or name another: export PODRUN_RUNTIME_DIR=DIRECTORY",
            ) from error

    def withdraw(self) -> None:
        """Remove the entry. Idempotent."""
        self.path.unlink(missing_ok=True)


def scratch_directory(announce: Callable[[str], None], parent: Path | None = None) -> Path:
    """A new directory that `sweep` may remove once an entry lists it.

    ``announce`` is told its path before it exists, so that it goes even if this process is killed right after. Raises
    UsageError where none can be made.
    """
    path = Path(parent or tempfile.gettempdir()) / f"{SCRATCH_PREFIX}{secrets.token_hex(4)}"
    announce(str(path))
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        raise UsageError(
            f"no directory for temporary files can be made in {path.parent}: {error.strerror}",
            hint="Make room there, or name another: export TMPDIR=DIRECTORY",
        ) from error
    return path


def remove_scratch(path: Path) -> None:
    """Remove a scratch directory of ours, and end what still writes there; anything else is left alone."""
    if path.name.startswith(SCRATCH_PREFIX) and path.is_dir() and path.lstat().st_uid == os.getuid():
        end_writers(str(path))
        remove_tree(str(path))


def this_process() -> ProcessId:
    """The calling process."""
    found = ProcessId.of(os.getpid())
    assert found is not None, "the calling process runs"
    return found


def _from_json(data: Mapping[str, object]) -> Entry:
    def process(value: object) -> ProcessId:
        assert isinstance(value, dict)
        return ProcessId(int(value["pid"]), int(value["start_ticks"]))

    try:
        plain = dict(data)
        plain["owner"] = process(plain["owner"])
        plain["processes"] = tuple(process(item) for item in plain.get("processes", ()))  # type: ignore[attr-defined]
        plain["directories"] = tuple(str(item) for item in plain.get("directories", ()))  # type: ignore[attr-defined]
        return Entry(**plain)  # type: ignore[arg-type]
    except AssertionError as error:
        raise ValueError("a process is an object") from error
