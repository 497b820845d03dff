"""What a launch holds: its IPUs of a partition that several launches share, and the partition that it made."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from podrun.core.errors import ExhaustedError, NotFoundError, PodrunError, ServiceError
from podrun.core.telemetry import attached_processes

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient
    from podrun.partition.state.values import PartitionInfo

SIGN_SECONDS = 10.0
"""Between two signs of life that a launch gives of itself to the server of its partition."""


class IpuReservation:
    """A launch's choice of IPUs in a partition that several launches share: a lock on bytes of a file, one for each
    IPU.

    The kernel releases it when the launch ends, however it ends. So launches that start at the same moment choose
    different IPUs; machines refuse a second process in any case. The last launch to release its place removes the file.
    """

    def __init__(self, path: Path, file: int, first_ipu: int) -> None:
        self._path, self._file, self.first_ipu = path, file, first_ipu

    @classmethod
    def take(cls, directory: Path, name: str, first: int, size: int) -> IpuReservation | None:
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
                return cls(path, file, first)
            os.close(file)  # Another launch has removed it since it was opened: others lock the next one.

    def release(self) -> None:
        """Give the reserved IPUs up. Idempotent."""
        file, self._file = self._file, -1
        if file < 0:
            return
        with contextlib.suppress(OSError):  # Another launch holds a part of it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                self._path.unlink(missing_ok=True)
        os.close(file)


class PartitionKeepalive:
    """A launch's bond with the partition that it made: a thread tells the server that the launch lives, for a server
    that cannot see this process (`podrun.partition.host.holders`). ``say``: makes that call.
    """

    def __init__(self, say: Callable[[], None]) -> None:
        from podrun.partition.host.holders import Rounds

        def sign() -> None:
            # The server may be starting again; a client that was closed has a ValueError.
            with contextlib.suppress(PodrunError, ValueError):
                say()

        self._rounds = Rounds("podrun-hold", SIGN_SECONDS, sign)
        self._rounds.start()

    def release(self) -> None:
        """Give no more signs; call it once the client is closed. Idempotent."""
        self._rounds.stop()


def reserve_ipus(
    client: VipuClient, info: PartitionInfo, size: int, directory: Path, server: str
) -> IpuReservation:
    """Take ``size`` aligned IPUs that no process holds and no other launch has chosen. ``directory``: of the lock
    files, whose names begin with ``server``. Raises ExhaustedError.
    """
    held = attached_processes(client.machine_reports(info.name))
    for first in range(0, info.size - size + 1, size):
        if held.keys().isdisjoint(range(first, first + size)):
            place = IpuReservation.take(directory, f"{server}-{info.name}", first, size)
            if place is not None:
                return place
    holders = dict.fromkeys(process.in_words for process in held.values())
    users = ", ".join(holders) or "launches that are starting"
    raise ExhaustedError(
        f"partition {info.name} has no {size} aligned IPUs of its {info.size} free; it is in use by {users}",
        hint="Wait until they are done (gc-monitor), use another (--vipu-partition NAME), or a POD of the run's "
        "own: --private yes",
    )


def check_unused(client: VipuClient, info: PartitionInfo) -> None:
    """Refuse a partition that another user's processes use: a reset would take their IPUs away. Raises
    ExhaustedError.
    """
    try:
        reports = client.machine_reports(info.name)
    except (ServiceError, NotFoundError):
        return  # The next request, for the state of the partition, gives a better error.
    for process in attached_processes(reports).values():
        raise ExhaustedError(
            f"partition {info.name} is in use by {process.in_words}",
            hint="Wait until it is done (gc-monitor), use another (--vipu-partition NAME), or a POD of the "
            "run's own: --private yes",
        )
