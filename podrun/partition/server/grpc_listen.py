"""Where the V-IPU service listens: ports, gRPC servers, health checks and reflection.

Every port is opened in `_listen`, with the credentials that all of them share.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import grpc

from podrun.core.errors import ConflictError, UsageError
from podrun.core.gate import Gate, connection_limits
from podrun.partition.server.access import FrontDesk
from podrun.partition.server.event_log import WATCHERS
from podrun.partition.server.grpc_admin import AdminServicer
from podrun.partition.server.grpc_service import UserServicer
from podrun.partition.server.views import json_by_name, user_info
from podrun.protos import vipu_pb2 as messages
from podrun.protos.services import add_to_server

if TYPE_CHECKING:
    from grpc_health.v1.health import HealthServicer

    from podrun.partition.server.service import Service
    from podrun.partition.state.accounts import Accounts

IDLE_SECONDS = 60.0
"""Time without a call after which a connection is closed; clients connect again by themselves."""
HANDLER_THREADS = 16
REQUEST_BYTES = 4 << 20
"""Longest request in bytes. An allocation of all agents of the largest POD takes a hundredth of it."""


class Listening:
    """The service's gRPC servers: one for users, and perhaps one for administrators."""

    def __init__(
        self,
        servers: Sequence[grpc.Server],
        threads: Sequence[ThreadPoolExecutor],
        health: HealthServicer,
        desk: FrontDesk,
    ) -> None:
        self._servers, self._threads, self._health, self._desk = servers, threads, health, desk

    def stop(self, grace: float) -> threading.Event:
        """Stop listening; the event is set when all calls have ended."""
        self._health.enter_graceful_shutdown()
        ended = [server.stop(grace) for server in self._servers]
        for event in ended[1:]:
            event.wait(grace + 5)
        self._desk.audit.close()
        return ended[0]

    def close(self) -> None:
        """End the threads that answered calls, which gRPC leaves to the garbage collector."""
        for threads in self._threads:
            threads.shutdown(wait=False)


def serve_partitions(
    service: Service, host: str, port: int, token: str, desk: FrontDesk | None = None
) -> tuple[Listening, int]:
    """Listen for ``service``; returns the `Listening` and its port. ``token``: the secret that callers must prove that
    they know (`podrun.core.access`); ``desk``: who else may call. Raises ConflictError if a port is taken.
    """
    from grpc_health.v1.health import HealthServicer

    desk = desk or FrontDesk()
    if desk.accounts is not None:
        desk.accounts.on_change = partial(_tell_of_users, service, desk.accounts)
        desk.accounts.on_change()
    health = HealthServicer()
    bound, server, threads = _listen(
        service, (host, port), token, desk, health, admin=desk.admin_port is None
    )
    servers, pools = [server], [threads]
    if desk.admin_port is not None:
        try:
            desk.admin_port, second, threads = _listen(
                service, (host, desk.admin_port), token, desk, health, admin=True
            )
        except BaseException:
            server.stop(0)
            raise
        servers.append(second)
        pools.append(threads)
    return Listening(servers, pools, health, desk), bound


def _tell_of_users(service: Service, accounts: Accounts) -> None:
    """Tell those who watch which users there are."""
    service.events.tell("user", json_by_name(map(user_info, accounts.all())))


def _listen(
    service: Service,
    where: tuple[str, int],
    token: str,
    desk: FrontDesk,
    health: HealthServicer,
    *,
    admin: bool,
) -> tuple[int, grpc.Server, ThreadPoolExecutor]:
    """One gRPC server, and its threads. ``admin``: it also answers calls for administrators alone."""
    host, port = where
    gate = Gate(token, shared=desk.sharing.shared)
    _refuse_taken(host, port)
    threads = ThreadPoolExecutor(HANDLER_THREADS + WATCHERS, thread_name_prefix="podrun-vipu")
    server = grpc.server(
        threads,
        options=(
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", REQUEST_BYTES),
            *connection_limits(),
            ("grpc.max_connection_idle_ms", round(IDLE_SECONDS * 1000)),
        ),
        interceptors=gate.interceptors(),
    )
    for add in service.more_servicers:
        add(server)
    add_to_server(messages, "UserService", UserServicer(service, desk, admin), server)
    add_to_server(messages, "AdminService", AdminServicer(service, desk, admin), server)
    _describe(server, health)
    try:
        bound = gate.listen(server, host, port)
    except RuntimeError as error:
        raise _taken(host, port) from error
    if not bound:
        raise _taken(host, port)
    server.start()
    return bound, server, threads


def _describe(server: grpc.Server, health: HealthServicer) -> None:
    """gRPC's own health checks and reflection."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection

    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    services = [service.full_name for service in messages.DESCRIPTOR.services_by_name.values()]
    for name in ("", *services):
        health.set(name, health_pb2.HealthCheckResponse.SERVING)
    own = [health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]
    reflection.enable_server_reflection([*services, *own], server)


def _refuse_taken(host: str, port: int) -> None:
    """Check the port before gRPC does, because gRPC prints a trace to the terminal."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _taken(host, port) from error
            raise UsageError(
                f"cannot listen on {host}:{port}: {error.strerror or error}",
                hint="Name another: --host, --port.",
            ) from error
        except OverflowError as error:
            raise UsageError(f"there is no port {port}", hint="Use --port 1 to 65535.") from error


def _taken(host: str, port: int) -> ConflictError:
    return ConflictError(
        f"port {port} on {host} is taken by another program",
        hint=f"Perhaps a server runs already: vipu -H {host} --api-port {port} --server-version. "
        f"A server of another POD: vipu-server --cluster NAME --port {port + 1 if port < 65535 else port - 1}",
    )
