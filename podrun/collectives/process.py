"""Is a peer still alive? By PID and start time, so that a PID used again is not taken for the peer."""

from __future__ import annotations

import os
import select
from pathlib import Path

from podrun.collectives.errors import HostLimitError, within_limits


def start_time(pid: int) -> int:
    """When the process started, in clock ticks after boot (field 22 of ``/proc/<pid>/stat``); 0 if there is
    none. Raises HostLimitError if that cannot be read.
    """
    with within_limits(f"file to look at process {pid} by"):
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1")
        except (FileNotFoundError, ProcessLookupError):
            return 0
    return int(text.rpartition(")")[2].split()[19])


def host_identity() -> str:
    """Equal for two processes iff they count as one host: same boot, same PID and same network namespace.

    Without the same PID namespace they cannot share memory through /proc; network namespaces with addresses of
    their own are how several hosts are tried out on one.
    """
    with within_limits("file to know this host by"):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="latin-1").strip()
    return "/".join([boot, os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net")])


class Watch:
    """An eye on one process: a pidfd, which tells of the process's end even before its parent has noticed.

    Where this process may open no further file it asks for the PID alone, which a process in its end still has.
    """

    def __init__(self, pid: int, started: int) -> None:
        self.fd = -1
        self._pid = pid
        self._gone = False
        try:
            with within_limits("pidfd"):
                self.fd = os.pidfd_open(pid)
            self._gone = start_time(pid) != started
        except ProcessLookupError:
            self._gone = True
        except HostLimitError:
            pass

    def alive(self) -> bool:
        """True iff the process that was named at the start still runs."""
        if self._gone:
            return False
        if self.fd < 0:
            return Path(f"/proc/{self._pid}").exists()
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Let go of the pidfd. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
