"""Metrics for Prometheus: one page with the reports of all machines of the POD.

    podrun exporter --port 2112      # http://127.0.0.1:2112/metrics

It shows what its user may see. So it answers only that user and root, whom the kernel knows on loopback addresses, and
callers that show its *key* (``Authorization: Bearer KEY``). The key is derived from the user's secret and lies in the
file ``exporter-key`` of the runtime directory. ``--public`` answers everybody. Where TLS is asked for
(`podrun.core.tls`) it speaks TLS.

`podrun.monitor.metric_families` has the families.
"""

from __future__ import annotations

import functools
import hmac
import itertools
import os
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun.core.access import tls_asked_for
from podrun.core.http_service import BoundedHTTPServer, QuietHandler
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


def make_server(
    client: VipuClient, host: str, port: int, key: str = "", *, dcgm_names: bool = False
) -> ThreadingHTTPServer:
    """An HTTP server that answers /metrics; the caller runs ``serve_forever``. ``key``: see `may_read`; with an empty
    key it answers everybody. ``dcgm_names``: see `partition_families`.
    """
    from podrun.monitor.devices import Followed

    followed = Followed(client)
    handler = functools.partial(_Handler, page=_MetricsSource(client, followed, dcgm_names).text, key=key)
    return _Server((host, port), handler, followed)


class _MetricsSource:
    """Makes pages from a partition service."""

    def __init__(self, client: VipuClient, followed: Followed, dcgm_names: bool) -> None:
        self._client, self._followed, self._dcgm_names = client, followed, dcgm_names
        self._ticks = itertools.count(1)

    def text(self) -> str:
        """A page. Raises PodrunError if the service does not answer."""
        from podrun.monitor.metric_families import (
            MetricsPage,
            agent_families,
            partition_families,
            service_families,
        )

        client, followed = self._client, self._followed
        partitions, reports = followed.all("partition"), client.machine_reports()
        families = [
            *partition_families(partitions, reports, next(self._ticks), dcgm_names=self._dcgm_names),
            *agent_families(followed.all("machine"), followed.incidents),
            *service_families(client.service_metrics()),
        ]
        return MetricsPage(tuple(families)).text()


class _Handler(QuietHandler):
    """Answers one caller. ``page``: makes the text of /metrics."""

    timeout = PATIENCE_S

    def __init__(self, *args: Any, page: Callable[[], str], key: str) -> None:
        self._page, self._key = page, key
        super().__init__(*args)  # It answers within.

    def do_GET(self) -> None:
        """Answer, or say why not."""
        from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

        from podrun.core.errors import PodrunError

        key = self._key
        if key and not may_read(self.connection, self.headers.get("Authorization", ""), key):
            self.send_response(401, "Who asks is unknown")
            self.send_header("WWW-Authenticate", "Bearer")
            self.end_headers()
            self.wfile.write(f"Show the key of {KEY_FILE} (Authorization: Bearer KEY).\n".encode())
            return
        if self.path.split("?")[0] != "/metrics":
            self.send_error(404, "there is only /metrics")
            return
        try:
            body = self._page().encode()
        except PodrunError as error:
            self.send_error(503, error.message)
            return
        self.answer(200, CONTENT_TYPE_PLAIN_0_0_4, body)


class _Server(BoundedHTTPServer):
    """Speaks TLS where the environment asks for it; each caller's thread does its handshake. More than `CALLERS` are
    dropped at once.
    """

    def __init__(
        self, address: tuple[str, int], handler: Callable[..., BaseHTTPRequestHandler], followed: Followed
    ) -> None:
        self._followed = followed
        try:
            super().__init__(address, handler, CALLERS)
        except OSError:
            followed.close()
            raise

    def server_close(self) -> None:
        """See `socketserver.BaseServer`."""
        super().server_close()
        self._followed.close()

    def get_request(self) -> tuple[Any, Any]:
        """See `socketserver.BaseServer`."""
        sock, peer = super().get_request()
        if tls_asked_for():
            from podrun.core.tls import credentials

            ours = credentials()
            if ours is None:
                raise OSError("TLS is asked for, and no certificate is there")
            sock = ours.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return sock, peer
