"""Metrics for Prometheus: one page with the reports of all machines of the POD.

    podrun exporter --port 2112      # http://127.0.0.1:2112/metrics

It shows what its user may see. So it answers only that user and root, whom the kernel knows on loopback addresses, and
callers that show its *key* (``Authorization: Bearer KEY``). The key is derived from the user's secret and lies in the
file ``exporter-key`` of the runtime directory. ``--public`` answers everybody. Where TLS is asked for
(`podrun.core.tls`) it speaks TLS.

`podrun.monitor.metric_families` has the families.
"""

from __future__ import annotations

import hmac
import os
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun import commands
from podrun.core.access import tls_asked_for
from podrun.core.command_line import run_command
from podrun.core.identity import user_of_peer

if TYPE_CHECKING:
    from podrun.monitor.devices import Followed
    from podrun.partition.client.vipu_client import VipuClient


PATIENCE_S = 10.0
"""Seconds that a caller may be silent."""
CALLERS = 64
"""Most callers at a time."""
KEY_FILE = "exporter-key"


def make_key(directory: Path, token: str) -> str:
    """The key for scrapers of another user or host, kept in ``directory`` for this user alone. It is derived from the
    user's ``token``, and opens nothing else."""
    key = hmac.new(token.encode(), b"podrun exporter 1", "sha256").hexdigest()
    path = directory / KEY_FILE
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w", encoding="ascii") as file:
        os.fchmod(fd, 0o600)
        file.write(key + "\n")
    return key


def may_read(connection: socket.socket, authorization: str, key: str) -> bool:
    """Whether the caller shows the key, or is this user or root on this host."""
    kind, _, shown = authorization.partition(" ")
    if kind.lower() == "bearer" and hmac.compare_digest(shown.strip().encode(), key.encode()):
        return True
    peer, here = connection.getpeername(), connection.getsockname()
    return user_of_peer((peer[0], peer[1]), (here[0], here[1])) in (0, os.getuid())


def make_server(client: VipuClient, host: str, port: int, key: str = "") -> ThreadingHTTPServer:
    """An HTTP server that answers /metrics; the caller runs ``serve_forever``. ``key``: see `may_read`; with an empty
    key it answers everybody.
    """
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

    from podrun.monitor.devices import Followed
    from podrun.monitor.metric_families import (
        MetricsPage,
        agent_families,
        partition_families,
        service_families,
    )

    ticks = iter(range(1, sys.maxsize))
    followed = Followed(client)

    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE_S

        def do_GET(self) -> None:
            from podrun.core.errors import PodrunError

            if key and not may_read(self.connection, self.headers.get("Authorization", ""), key):
                self.send_response(401, "Who asks is unknown")
                self.send_header("WWW-Authenticate", "Bearer")
                self.end_headers()
                self.wfile.write(f"Show the key of {KEY_FILE} (Authorization: Bearer KEY).\n".encode())
                return
            if self.path.split("?")[0] != "/metrics":
                self.send_error(404, "There is only /metrics.")
                return
            try:
                families = [
                    *partition_families(followed.all("partition"), client.machine_reports(), next(ticks)),
                    *agent_families(followed.all("machine"), followed.incidents),
                    *service_families(client.service_metrics()),
                ]
            except PodrunError as error:
                self.send_error(503, error.message)
                return
            body = MetricsPage(tuple(families)).text().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: scrapes come every few seconds."""

    return _Server((host, port), Handler, followed)


class _Server(ThreadingHTTPServer):
    """Speaks TLS where the environment asks for it; each caller's thread does its handshake. At most `CALLERS` have a
    thread; further callers are dropped at once.
    """

    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], followed: Followed
    ) -> None:
        self._room = threading.BoundedSemaphore(CALLERS)
        self._followed = followed
        try:
            super().__init__(address, handler)
        except OSError:
            followed.close()
            raise

    def server_close(self) -> None:
        """See `socketserver.BaseServer`."""
        super().server_close()
        self._followed.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """See `socketserver.BaseServer`."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See `socketserver.ThreadingMixIn`."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def get_request(self) -> tuple[Any, Any]:
        """See `socketserver.BaseServer`."""
        sock, peer = super().get_request()
        if tls_asked_for():
            from podrun.core.tls import credentials

            ours = credentials()
            assert ours is not None
            sock = ours.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return sock, peer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore callers that go away, or that TLS refuses."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def main() -> int:
    """Entry point of ``python -m podrun.monitor.exporter``."""
    from podrun.monitor.commands.exporter import exporter_verb

    return run_command(exporter_verb)


if __name__ == "__main__":
    sys.exit(commands.run(main, command="podrun.monitor.exporter"))
