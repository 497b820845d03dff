"""Limits of podrun's gRPC servers for connections that say nothing: how long they stay, and how many there may be.

Whoever reaches a port can open connections before any call is checked. Each holds a file and memory of the server, so
that one which does not speak HTTP/2 is closed after seconds, and more than a number are closed at once.
"""

from __future__ import annotations

SILENT_SECONDS = 5.0
"""Time for a connection's first HTTP/2 settings, with TLS for its handshake too; gRPC's own limit is two minutes."""
MOST_CONNECTIONS = 512
"""Most connections of a port: a program of the largest POD makes a few at each machine."""
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""HTTP/2's preface and empty settings (RFC 9113, section 3.4): who sends them is not silent."""


def connection_limits(
    silent_seconds: float = SILENT_SECONDS, most: int = MOST_CONNECTIONS
) -> tuple[tuple[str, int], ...]:
    """The options of a gRPC server that set the limits."""
    return (
        ("grpc.server_handshake_timeout_ms", round(silent_seconds * 1000)),
        ("grpc.max_allowed_incoming_connections", most),
    )
