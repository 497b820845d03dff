"""Who owns a state file: one process at a time, by whatever name it reaches the file.

Two locks, which the kernel releases when the owner's process ends, however it ends. One is on ``FILE.lock`` beside the
file that the name leads to, so that a symbolic link is the same state; it exists before the file does and holds the
owner's name. The other is on the state file itself, and so on its device and inode: a hard link or a bind mount in
another folder is the same state too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

from podrun.core.errors import ConflictError

LOCAL_FILE_SYSTEMS = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
)
"""Where a lock of flock(2) and SQLite's own locks of fcntl(2) on one file leave each other alone. On NFS and its like
they are the same, so that SQLite would wait for its own process."""


def real_path(path: Path) -> Path:
    """The file that a name leads to, through symbolic links; it need not exist."""
    return Path(os.path.realpath(path))


class StateFileLock:
    """Ownership of a state file, whether it exists or not. Raises ConflictError with the owner's name if another
    process, or another store of this one, has it; OSError if its folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._shown, self._real = path, real_path(path)
        self.path = self._real.with_name(f"{self._real.name}.lock")
        self._files = [os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)]
        self._lock(self._files[0])
        with contextlib.suppress(
            OSError
        ):  # On a full disk the owner has the lock, only without its name in the file.
            os.ftruncate(self._files[0], 0)
            os.pwrite(self._files[0], f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def lock_content(self) -> None:
        """Lock the state file itself; call it once the file exists, and before SQLite opens it."""
        if file_system_of(self._real) in LOCAL_FILE_SYSTEMS:
            self._files.append(os.open(self._real, os.O_RDONLY | os.O_CLOEXEC))
            self._lock(self._files[-1])

    def release(self) -> None:
        """Release the file. Idempotent."""
        while self._files:
            os.close(self._files.pop())

    def _lock(self, file: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            # Of a file with two names only the lock file of the other name holds the owner's.
            named = os.read(file, 256).decode(errors="replace").strip() if file == self._files[0] else ""
            self.release()
            raise ConflictError(
                f"the state file {self._shown} is in use by {named or 'a server that has it under another name'}",
                hint="Use that server (vipu --server-version shows where it listens) or stop it. A second server of "
                "the POD needs a state of its own: --state-file FILE or --no-state",
            ) from error
        except (
            OSError
        ):  # A file system without such locks: the epoch in the file still refuses a second owner.
            pass


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system on which a file lies, such as ``ext4``; empty if that is not known."""
    try:
        device = path.stat().st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
            mount, _, rest = line.partition(" - ")
            if mount.split()[2] == wanted:
                return rest.split()[0]
    except (OSError, IndexError):
        pass
    return ""
