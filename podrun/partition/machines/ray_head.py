"""Watches the head of a Ray cluster that podrun uses, because Ray does not say when it is gone.

Ray waits a minute for a head that has ended, without a word, and then ends the process that waits; a head that hangs
is waited for without an end. The watch asks the head now and then. Once it has missed `PATIENCE_SECONDS` the cluster
counts as lost: one line says so, calls that wait for Ray end with an error, and Ray is asked nothing more. Machines
that run go on until their node ends them. The head of podrun's own Ray is a process of this host, which the watch looks
at: it is lost as soon as it has ended.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from types import ModuleType
from typing import TypeVar

from podrun.core.errors import ServiceError
from podrun.core.stop_signals import in_daemon_thread
from podrun.core.terminal import end_at_once
from podrun.partition.host.discovery import ProcessId

log = logging.getLogger("podrun.partition")

T = TypeVar("T")

ASK_SECONDS = 5.0
"""Seconds between two questions, and the longest wait for an answer."""
PATIENCE_SECONDS = 20.0
"""A head that has answered nothing for so long is lost. Busy hosts answer within a few seconds."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at the processes of podrun's own Ray."""
RECONNECT_SECONDS = 7 * 24 * 3600
"""For how long Ray itself looks for its head, instead of a minute: what ends then is podrun's to decide."""
_STEP_SECONDS = 0.2


def leave_without_ray(ray: ModuleType) -> None:
    """Let this process end without Ray, whose head is lost: disconnecting would wait for the head, and Ray's library
    crashes while it is unloaded (a segmentation fault, in the place of the command's own exit code).
    """
    atexit.unregister(ray.shutdown)
    end_at_once()


def own_head(core: Sequence[ProcessId]) -> HeadWatch:
    """The watch over podrun's own Ray, whose core runs in these processes of this host."""
    return HeadWatch("", lambda *_: "" if all(p.alive for p in core) else "it ended", own=True)


class HeadWatch:
    """Whether the head of the cluster at ``address`` is there. ``ask``: an empty text if it answered within so many
    seconds. ``own``: the cluster is podrun's own, and ``ask`` certain. Raises nothing; `check` does.
    """

    def __init__(
        self,
        address: str,
        ask: Callable[[str, float], str],
        clock: Callable[[], float] = time.monotonic,
        *,
        own: bool = False,
    ) -> None:
        self._address, self._ask, self._clock, self._own = address, ask, clock, own
        self._heard = clock()
        self._lost, self._closed = threading.Event(), threading.Event()
        self._watches = False

    def start(self) -> None:
        """Watch in a thread of its own, until `close`."""
        self._watches = True
        threading.Thread(target=self._watch, name="podrun-ray-head", daemon=True).start()

    def close(self) -> None:
        """Stop watching the head."""
        self._closed.set()

    @property
    def lost(self) -> bool:
        """True once the head has been silent for too long. It stays true: a head that comes back is a new cluster."""
        return self._lost.is_set()

    def look(self) -> None:
        """Ask the head once, and note what that says."""
        if not self._ask(self._address, ASK_SECONDS):
            self._heard = self._clock()
        elif self._clock() - self._heard >= self._patience and not self._closed.is_set() and not self.lost:
            self._lost.set()
            log.error(
                "%s: no machine can be started or ended there, and those that run end with their node",
                self._what,
            )

    def check(self) -> None:
        """Raises ServiceError once the head is lost."""
        if self.lost:
            again = "" if self._own else "Start it again (ray start --head), and then what used it: "
            raise ServiceError(
                self._what, hint=f"{again or 'Start again what used it: '}vipu-server, or the launch."
            )

    @property
    def _patience(self) -> float:
        return 0.0 if self._own else PATIENCE_SECONDS

    @property
    def _what(self) -> str:
        if self._own:
            return "podrun's own Ray has ended: something killed its core process, gcs_server"
        return f"the Ray cluster at {self._address} does not answer any more"

    def call(self, function: Callable[[], T]) -> T:
        """What a function that asks Ray returns or raises. Raises ServiceError if the head is lost before it does.
        Without a watch, as where a program had started Ray before, the function is simply called.
        """
        self.check()
        if not self._watches:
            return function()
        answer = in_daemon_thread(function, "podrun-ask-ray")
        while wait([answer], _STEP_SECONDS).not_done:
            self.check()
        return answer.result()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS if self._own else ASK_SECONDS) and not self.lost:
            self.look()
