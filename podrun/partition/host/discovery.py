"""Where podrun's services run on this host: one directory for each user, one small file for each service.

A service publishes its host, port and process when it starts, so that `gc-monitor` in another terminal finds it. An
entry belongs to a process, identified by its number and start time. `Registry.sweep` removes entries whose process has
ended, and ends the processes and removes the directories that such an entry lists. Every command that starts something
sweeps first, so that nothing outlives a ``kill -9`` for longer than that.

The directory is `podrun.core.environment.runtime_directory`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from podrun.core.documents import parse_json, read_text
from podrun.core.environment import runtime_directory
from podrun.core.errors import ConfigError, NotFoundError, ServiceError, UsageError, present
from podrun.core.identity import connect_tcp
from podrun.core.quick_dataclass import dataclass
from podrun.partition.host.guardian import SCRATCH_PREFIX, end_writers, marked_processes, remove_tree

VIPU_SERVER = "vipu-server"
"""Kind of an entry: a service that stays (`vipu-server`)."""
DEFAULT_PORT = 8090
"""Default port of a V-IPU controller."""
POD = "vipu-pod"
"""Kind of an entry: the keeper of a POD's machines while servers come and go (`podrun.partition.machines.keeper`)."""
LAUNCHER = "podrun"
"""Kind of an entry: the service inside one `podrun`."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, identified by its number and its start time in clock ticks since boot (Linux)."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this number now, or None. A zombie counts as ended."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        # The command's name is in parentheses and may itself hold blanks and parentheses.
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        """True iff this process, and no later one of its number, runs."""
        return ProcessId.of(self.pid) == self


@dataclass(frozen=True, slots=True)
class ServiceEntry:
    """A published service. ``processes`` end and ``directories`` are removed once ``owner`` has ended."""

    kind: str
    host: str
    port: int
    owner: ProcessId
    cluster: str = ""
    partition: str = ""
    processes: tuple[ProcessId, ...] = ()
    directories: tuple[str, ...] = ()
    mark: str = ""
    """``NAME=VALUE`` in the environment of further processes that must end with the owner; may be empty."""
    pod: str = ""
    """The id of the state that a server owns, or whose machines a keeper keeps."""
    address: str = ""
    """Address of a keeper's Ray; empty until it is up."""
    token_file: str = ""
    """Where the token of a keeper's Ray is; empty if the environment names one."""
    last_port: int = 0
    """Port of the last server that used a keeper's machines."""
    protocol: int = 0
    """What a keeper's machines and their servers say to each other (`podrun.partition.machines.keeper.PROTOCOL`)."""


class Registry:
    """The entries in a runtime directory."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = runtime_directory() if directory is None else directory

    def publish(self, entry: ServiceEntry) -> Publication:
        """Write an entry; it stays until `Publication.withdraw`, or until a sweep after its owner has ended."""
        publication = Publication(self.directory / f"{entry.kind}-{entry.owner.pid}-{entry.port}.json", entry)
        publication.update()
        return publication

    def entries(self) -> list[ServiceEntry]:
        """Entries whose owner runs, best first: kind `VIPU_SERVER` before others, `DEFAULT_PORT` before others,
        then the youngest."""
        alive = [entry for _, entry in self._read() if entry.owner.alive]
        return sorted(
            alive, key=lambda e: (e.kind != VIPU_SERVER, e.port != DEFAULT_PORT, -e.owner.start_ticks)
        )

    def find(self, *, partition: str | None = None) -> ServiceEntry | None:
        """The service to use by default: one whose entry names ``partition``, else the first; None without entries."""
        listening = [entry for entry in self.entries() if entry.port]
        for entry in listening:
            if partition is not None and entry.partition == partition:
                return entry
        return listening[0] if listening else None

    def sweep(self, kill: Callable[[int, int], None] = os.kill) -> list[ServiceEntry]:
        """Remove entries whose owner has ended, with their processes and directories. Returns them."""
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

    def _read(self) -> Iterable[tuple[Path, ServiceEntry]]:
        for path in sorted(self.directory.glob("*.json")):
            try:
                entry = _from_json(parse_json(read_text(path), str(path)))
            except NotFoundError:
                continue
            except (ConfigError, ValueError, KeyError, TypeError):
                # Another program or release has written it: it cannot be used.
                path.unlink(missing_ok=True)
                continue
            yield path, entry


class Publication:
    """An entry that this process has published."""

    def __init__(self, path: Path, entry: ServiceEntry) -> None:
        self.path, self.entry = path, entry

    def update(self, **changes: object) -> None:
        """Publish again with other fields; readers see the old entry or the new one, never a part."""
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
        """Remove the entry by which clients of this host find the server. Idempotent."""
        self.path.unlink(missing_ok=True)


LEAST_SCRATCH_BYTES = 64 << 20
"""Free bytes that a directory for temporary files must have: Ray's logs and sockets, and what programs write."""


def scratch_parent(longest: int = sys.maxsize) -> Path:
    """The directory for temporary files, or another if it is full or its path has more than ``longest`` letters.
    Raises ServiceError if there is none.
    """
    full = ""
    for parent in (Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev/shm")):
        if len(str(parent)) <= longest and os.access(parent, os.W_OK):
            if shutil.disk_usage(parent).free >= LEAST_SCRATCH_BYTES:
                return parent
            full = full or str(parent)
    if full:
        raise ServiceError(
            f"the directory for temporary files is full: {full} has less than {LEAST_SCRATCH_BYTES >> 20} MiB free",
            hint=f"Make room in it (df -h {full}), or name another with a short path: export TMPDIR=/DIR",
        )
    raise ServiceError(
        f"no directory for temporary files has a path short enough for sockets: {tempfile.gettempdir()}",
        hint="export TMPDIR=/tmp",
    )


def scratch_directory(announce: Callable[[str], None], parent: Path | None = None) -> Path:
    """A new directory that `Registry.sweep` may remove once an entry lists it.

    ``announce`` gets its path before it exists, so that it is removed even if this process is killed right after.
    Raises UsageError if it cannot be made, ServiceError if there is no room.
    """
    path = (parent or scratch_parent()) / f"{SCRATCH_PREFIX}{secrets.token_hex(4)}"
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
    """Remove a scratch directory of this user and end processes that write there; other directories stay."""
    if path.name.startswith(SCRATCH_PREFIX) and path.is_dir() and path.lstat().st_uid == os.getuid():
        end_writers(str(path))
        remove_tree(str(path))


def own_process_id() -> ProcessId:
    """The calling process, as a `ProcessId` identifies it."""
    return present(ProcessId.of(os.getpid()), "the calling process runs")


def _from_json(data: Mapping[str, object]) -> ServiceEntry:
    def process(value: object) -> ProcessId:
        if not isinstance(value, dict):
            raise ValueError("a process is an object")
        return ProcessId(int(value["pid"]), int(value["start_ticks"]))

    # A newer build may say more of what it runs. What is known here suffices to find it and to end it.
    plain = {name: data[name] for name in ServiceEntry.__dataclass_fields__ if name in data}
    plain["owner"] = process(plain["owner"])
    plain["processes"] = tuple(process(item) for item in plain.get("processes", ()))  # type: ignore[attr-defined]
    plain["directories"] = tuple(str(item) for item in plain.get("directories", ()))  # type: ignore[attr-defined]
    return ServiceEntry(**plain)  # type: ignore[arg-type]


def listens(endpoint: str, timeout: float = 1.0) -> bool:
    """True iff a process accepts connections at host:port."""
    connection = connect_to(endpoint, timeout)
    if connection is None:
        return False
    connection.close()
    return True


def connect_to(endpoint: str, timeout: float = 1.0) -> socket.socket | None:
    """A connection to ``HOST:PORT``, or None if nobody takes it within ``timeout`` seconds."""
    host, _, port = endpoint.rpartition(":")
    try:
        connection = connect_tcp(host.strip("[]"), int(port), timeout)
    except OSError:
        return None
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setblocking(False)
    return connection
