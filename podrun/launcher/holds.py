"""What a launch holds: its IPUs of a partition that several launches share, and the partition that it made."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from podrun.core.errors import PodrunError

SIGN_SECONDS = 10.0
"""Between two signs of life that a launch gives of itself to the server of its partition."""


class PlaceInPartition:
    """A launch's choice of IPUs in a partition that several launches share: a lock on bytes of a file, one for each
    IPU.

    The kernel releases it when the launch ends, however it ends. So launches that start at the same moment choose
    different IPUs; machines refuse a second process in any case. The last launch to release its place removes the file.
    """

    def __init__(self, path: Path, file: int) -> None:
        self._path, self._file = path, file

    @classmethod
    def take(cls, directory: Path, name: str, first: int, size: int) -> PlaceInPartition | None:
        """The place, or None if another launch of this user on this host holds a part of it."""
        path = directory / f"{name}.ipus"
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, size, first)
            except (BlockingIOError, PermissionError):
                os.close(file)
                return None
            if os.fstat(file).st_nlink:
                return cls(path, file)
            os.close(file)  # Another launch has removed it since it was opened: others lock the next one.

    def release(self) -> None:
        """Release the place. Idempotent."""
        file, self._file = self._file, -1
        if file < 0:
            return
        with contextlib.suppress(OSError):  # Another launch holds a part of it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                self._path.unlink(missing_ok=True)
        os.close(file)


class HoldOnPartition:
    """A launch's bond with the partition that it made: a thread tells the server that the launch lives, for a server
    that cannot see this process (`podrun.partition.host.holders`). ``say``: makes that call.
    """

    def __init__(self, say: Callable[[], None]) -> None:
        from podrun.partition.machines.endpoint_watch import Rounds

        def sign() -> None:
            # The server may be starting again; a client that was closed has a ValueError.
            with contextlib.suppress(PodrunError, ValueError):
                say()

        self._rounds = Rounds("podrun-hold", SIGN_SECONDS, sign)
        self._rounds.start()

    def release(self) -> None:
        """Give no more signs; call it once the client is closed. Idempotent."""
        self._rounds.stop()
