"""What one user's host processes may take of a machine's server, and how long they may be silent.

A session keeps a thread of the server as long as its stream lasts. So sessions are counted, for each user and in all,
and one that attaches to nothing, or stops in the middle of a message, is ended with a line in the log. Before it is
attached, a session may send small requests only, so nothing is buffered for it. What the partition service asks has
threads of its own (`podrun.device.service.servicer`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from podrun.core.identity import Caller, user_name
from podrun.device.service.wire import WHOLE_BYTES

log = logging.getLogger("podrun.device")

SESSIONS = 24
"""Sessions at a time. Each of four IPUs may have an owner, while further processes ask and are refused."""
SESSIONS_OF_OTHERS = 8
"""Of them, those of one user who does not run the machine."""
ATTACH_SECONDS = 10.0
"""Within which a session has to attach."""
PART_SECONDS = 60.0
"""Within which the next part of a message has to come, once it has begun."""
FIRST_BYTES = 64 << 10
"""Most bytes of a request before the session is attached."""
OTHERS_BYTES = 256 << 20
"""Most bytes of a request of a user who does not run the machine: on one host tensors lie in shared memory."""


class SessionLimits:
    """The sessions of a server. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_user: Counter[int] = Counter()

    @contextlib.contextmanager
    def session(self, caller: Caller) -> Iterator[str]:
        """A session of a caller for as long as the context lasts. Gives why there is no room for it, or nothing."""
        refusal = ""
        with self._lock:
            if self._of_user.total() >= SESSIONS:
                refusal = f"this machine has {SESSIONS} sessions already"
            elif not caller.own and self._of_user[caller.uid] >= SESSIONS_OF_OTHERS:
                refusal = f"user {user_name(caller.uid)} has {SESSIONS_OF_OTHERS} sessions with this machine already"
            else:
                self._of_user[caller.uid] += 1
        if refusal:
            log.warning("a session of user %s is refused: %s", user_name(caller.uid), refusal)
        try:
            yield refusal
        finally:
            if not refusal:
                with self._lock:
                    self._of_user[caller.uid] -= 1

    def most_bytes(self, caller: Caller, attached: bool) -> int:
        """The longest request of a session."""
        if not attached:
            return FIRST_BYTES
        return WHOLE_BYTES if caller.own else OTHERS_BYTES


class Patience:
    """Ends a session whose process does not send what it has to in time. ``end``: cancels its stream."""

    def __init__(self, caller: Caller, end: Callable[[], object]) -> None:
        self._caller, self._end = caller, end
        self._timer: threading.Timer | None = None

    def until(self, seconds: float, what: str) -> None:
        """From now on the process has so many seconds for ``what``; replaces what it had before."""
        self.stop()
        self._timer = threading.Timer(seconds, self._late, (seconds, what))
        self._timer.daemon = True
        self._timer.name = "podrun-patience"
        self._timer.start()

    def stop(self) -> None:
        """Nothing is overdue. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self, seconds: float, what: str) -> None:
        log.warning(
            "a session of user %s is ended: no %s within %g s", user_name(self._caller.uid), what, seconds
        )
        self._end()
