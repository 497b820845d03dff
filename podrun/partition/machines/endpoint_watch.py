"""Threads that watch whether machines still listen.

`EndpointWatcher` detects at once that a process that listens on a TCP port has ended.

The watcher keeps an idle connection to the port, which the kernel breaks when the process ends. Then it connects again:
if that is refused, the process is gone; if it is accepted, only the connection was closed, as gRPC servers do after two
idle minutes. (A process that is being killed may accept one more connection, which breaks in turn.)
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable

from podrun.core.access import tls_asked_for
from podrun.core.gate import GREETING
from podrun.core.quick_dataclass import dataclass
from podrun.partition.host.discovery import connect_to

CLOSED_AT_ONCE_S = 0.1
"""Least time between two connections to one endpoint."""


def _connect_to_watch(endpoint: str) -> socket.socket | None:
    """A connection that its server leaves open, except with TLS: such a server closes what is silent."""
    connection = connect_to(endpoint)
    if connection is not None and not tls_asked_for():
        with contextlib.suppress(OSError):  # That it is broken is found where connections are watched.
            connection.send(GREETING)
    return connection


@dataclass(eq=False, slots=True)
class _WatchedEndpoint:
    endpoint: str
    gone: Callable[[], None]
    connection: socket.socket | None = None
    since: float = 0.0


class EndpointWatcher:
    """Watches any number of endpoints with one thread, which ends with the last of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: set[_WatchedEndpoint] = set()
        self._selector = selectors.DefaultSelector()
        self._wake_up, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None

    def watch(self, endpoint: str, gone: Callable[[], None]) -> Callable[[], None]:
        """Call ``gone`` once, from a thread, when no process listens there; returns a function that stops watching."""
        entry = _WatchedEndpoint(endpoint, gone, _connect_to_watch(endpoint), time.monotonic())
        with self._lock:
            self._watched.add(entry)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="podrun-watch", daemon=True)
                self._thread.start()
        self._wake_up.send(b".")
        return lambda: self._forget(entry)

    def _forget(self, entry: _WatchedEndpoint) -> None:
        with self._lock:
            self._watched.discard(entry)
        with contextlib.suppress(OSError):
            self._wake_up.send(b".")

    def _run(self) -> None:
        """Wait for connections to break. Only this thread touches the selector."""
        while self._update_selector():
            for key, _ in self._selector.select():
                if key.data is None:
                    self._woken.recv(64)
                elif _broken(key.data.connection):
                    self._reconnect(key.data)

    def _update_selector(self) -> bool:
        """Register and drop endpoints as they were added and removed; False, and the thread ends, if none is left."""
        with self._lock:
            watched = set(self._watched)
        known = self._registered()
        for entry in known - watched:
            self._drop(entry)
        for entry in watched - known:
            if entry.connection is None:
                self._report_gone(entry)
            else:
                self._selector.register(entry.connection, selectors.EVENT_READ, entry)
        with self._lock:
            # Whoever adds or removes one after this wakes the thread.
            if self._watched or self._registered():
                return True
            self._thread = None
            return False

    def _registered(self) -> set[_WatchedEndpoint]:
        return {key.data for key in self._selector.get_map().values() if key.data is not None}

    def _drop(self, entry: _WatchedEndpoint) -> None:
        if entry.connection is not None:
            self._selector.unregister(entry.connection)
            entry.connection.close()
            entry.connection = None

    def _reconnect(self, entry: _WatchedEndpoint) -> None:
        self._drop(entry)
        # A server that takes no more connections closes each at once.
        time.sleep(max(0.0, min(CLOSED_AT_ONCE_S, entry.since + CLOSED_AT_ONCE_S - time.monotonic())))
        entry.connection, entry.since = _connect_to_watch(entry.endpoint), time.monotonic()
        # `_update_selector` registers the new connection, or reports that there is none.

    def _report_gone(self, entry: _WatchedEndpoint) -> None:
        with self._lock:
            watched = entry in self._watched
            self._watched.discard(entry)
        if watched:
            threading.Thread(target=entry.gone, name=f"podrun-lost-{entry.endpoint}", daemon=True).start()


def _broken(connection: socket.socket | None) -> bool:
    """True iff the other side ended the connection; data it sent are discarded."""
    if connection is None:
        return False
    try:
        return not connection.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True
