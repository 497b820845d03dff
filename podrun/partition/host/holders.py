"""With whom a partition ends: the process that asked for it, and whether that process lives.

A partition that ``podrun`` makes belongs to the launch, a request in the queue to the client that waits. Such a record
carries its *holder*, which is stored with it, so that a server that starts can tell as well as the one before whose
holder is gone. A server on the holder's host looks at the process: its number and its start time. For a holder that it
cannot see, on another host or in another container, it counts the seconds since the last sign of life. `Rounds` are the
threads that look, and that give such signs, every so often.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from podrun.core.quick_dataclass import dataclass
from podrun.partition.host.discovery import ProcessId, own_process_id

_TEXT = re.compile(r"[^:\s]{1,255}:[0-9a-f-]{0,36}:[0-9]{0,20}:[0-9]{1,10}:[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Holder:
    """A process anywhere: its host, that host's boot, its process id namespace, its number there, its start time in
    clock ticks since boot. `str` gives the text that travels and is stored.
    """

    host: str
    boot: str
    namespace: str
    process: ProcessId

    def __str__(self) -> str:
        where = f"{self.host}:{self.boot}:{self.namespace}"
        return f"{where}:{self.process.pid}:{self.process.start_ticks}"

    @property
    def place(self) -> tuple[str, str, str]:
        """Where the process's number means something."""
        return self.host, self.boot, self.namespace

    @property
    def in_words(self) -> str:
        """The process as messages name it."""
        return f"process {self.process.pid} on {self.host}"


def this_holder() -> Holder:
    """The calling process as the holder of a partition."""
    return Holder(*here(), own_process_id())


@cache
def here() -> tuple[str, str, str]:
    """This host, its boot, and this process's namespace of process numbers; empty where the kernel does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    try:
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        namespace = ""
    return socket.gethostname().replace(":", "_") or "localhost", boot, namespace


def parse_holder(text: str) -> Holder:
    """The holder of a text. Raises ValueError if it is none."""
    if not _TEXT.fullmatch(text):
        raise ValueError(f"{text[:80]!r} names no process, as HOST:BOOT:PID-NAMESPACE:PID:START-TICKS does")
    host, boot, namespace, pid, ticks = text.split(":")
    return Holder(host, boot, namespace, ProcessId(int(pid), int(ticks)))


def lives(text: str) -> bool | None:
    """Whether a holder's process runs; None if it cannot be seen from here."""
    holder = parse_holder(text)
    if holder.place != here():
        return None
    process = ProcessId.of(holder.process.pid)
    if process is not None or os.path.exists(f"/proc/{holder.process.pid}"):
        return process == holder.process  # Not so for a zombie, or a later process of its number.
    try:
        os.kill(holder.process.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # Another user's, and /proc hides what is others'.
    return None


log = logging.getLogger("podrun.partition")
ROUND_S = 1.0
"""Seconds between two rounds."""
HEARTBEAT_S = 5.0
"""Seconds between two questions to every machine in use."""


def steady_clock(
    wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Seconds since 1970 at the call, and steady from then on, so that setting the clock ends no partitions or
    reservations.
    """
    base = wall() - monotonic()
    return lambda: base + monotonic()


class Rounds:
    """A thread that calls ``work`` every ``seconds`` until it is stopped. An error is logged and ends one call only."""

    def __init__(self, name: str, seconds: float, work: Callable[[], None]) -> None:
        self._seconds, self._work = seconds, work
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin with the rounds."""
        self._thread.start()

    def stop(self) -> None:
        """End; waits for a call that is under way. Idempotent."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(10.0)

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            try:
                self._work()
            except Exception:
                log.exception("%s failed", self._thread.name)
