"""HTTP servers of podrun: a bounded number of callers have a thread, and answers say how long they are."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket

_Request = socket | tuple[bytes, socket]


class BoundedHTTPServer(ThreadingHTTPServer):
    """At most ``most`` callers have a thread. Further callers wait to be accepted, or are dropped at once if not
    ``waits``. Callers that go away are no errors. Raises OSError if the address is taken.
    """

    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        handler: Callable[..., BaseHTTPRequestHandler],
        most: int,
        *,
        waits: bool = False,
    ) -> None:
        self._room, self._waits = threading.BoundedSemaphore(most), waits
        super().__init__(address, handler)

    def process_request(self, request: _Request, client_address: tuple[str, int]) -> None:
        """See `socketserver.BaseServer`."""
        if not self._room.acquire(blocking=self._waits):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: _Request, client_address: tuple[str, int]) -> None:
        """See `socketserver.ThreadingMixIn`."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: _Request, client_address: tuple[str, int]) -> None:
        """Ignore callers that go away, or that TLS refuses."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class QuietHandler(BaseHTTPRequestHandler):
    """A handler that logs no requests."""

    def answer(self, status: int, kind: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole answer; ``kind``: its content type."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: requests may come many times a second."""
