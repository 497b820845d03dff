"""What servers leave behind that were killed: processes of instances, shared memory, the folder of backends.

Triton's Python backend has a process and a region of shared memory for each instance. A server that is killed removes
neither. So the processes watch the server (`end_with_server`), which notices its end also where nobody reaps it, and
`remove_leftovers` removes what is left of dead servers when `podrun serve` starts and ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
REGION_PREFIX = "triton_poplar"
"""Names of the regions that Triton makes for instances of the backend ``poplar`` begin so."""
FOLDER_PREFIX = "podrun-serve-"
YOUNG_SECONDS = 5.0
"""What is younger may be of a server that is just starting: made, and not in use as yet."""


def end_with_server(server: int, region: Path) -> None:
    """End this process by SIGKILL when process ``server`` has ended, also as a zombie, and remove a region of shared
    memory.
    """
    try:
        watched = os.pidfd_open(server)
    except ProcessLookupError:
        _end(region)
        return
    except OSError:  # No file descriptors, or an old kernel: the region is removed when a server starts.
        return

    def wait() -> None:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.poll()
        _end(region)

    threading.Thread(target=wait, name="podrun-server-watch", daemon=True).start()


def end_with_tritonserver() -> None:
    """`end_with_server` for an instance's process, whose command names region and server: stub, model, region, size,
    growth, server's process id.
    """
    words = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    if len(words) > 5 and words[5].isdigit():
        end_with_server(int(words[5]), SHARED_MEMORY / os.fsdecode(words[2]).lstrip("/"))


def _end(region: Path) -> None:
    with contextlib.suppress(OSError):
        region.unlink()
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def server_folder() -> Iterator[Path]:
    """A folder for one server, locked as long as this process lives; it goes at the end."""
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(folder)
        finally:
            os.close(lock)


def remove_leftovers(
    shared: Path = SHARED_MEMORY, folders: Path | None = None, young_seconds: float = YOUNG_SECONDS
) -> list[Path]:
    """Remove regions that no process maps and folders that no process locks, of this user and older than
    ``young_seconds``; which they were.
    """
    before = time.time() - young_seconds
    regions = [path for path in _own(shared, REGION_PREFIX, before) if path.is_file()]
    mapped = _mapped_files() if regions else set()
    removed = []
    for region in regions:
        if str(region) not in mapped:
            with contextlib.suppress(OSError):
                region.unlink()
                removed.append(region)
    for folder in _own(folders or Path(tempfile.gettempdir()), FOLDER_PREFIX, before):
        if folder.is_dir() and not _locked(folder):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def _own(place: Path, prefix: str, before: float) -> list[Path]:
    """Entries of a folder that are this user's and were changed last before a time."""
    entries = []
    with contextlib.suppress(OSError), os.scandir(place) as scanned:
        for entry in scanned:
            with contextlib.suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                if (
                    entry.name.startswith(prefix)
                    and facts.st_uid == os.geteuid()
                    and facts.st_ctime <= before
                ):
                    entries.append(Path(entry.path))
    return sorted(entries)


def _mapped_files() -> set[str]:
    """Paths of regions that processes of this user map."""
    mapped = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                if REGION_PREFIX in line:
                    mapped.add(line.split(maxsplit=5)[5].removesuffix(" (deleted)"))
    return mapped


def _locked(folder: Path) -> bool:
    """True iff a process holds the lock of `server_folder`, or nobody can tell."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False
