"""The doors of podrun's servers: where they listen, and who may call.

A server listens at its port and, without TLS, at a Unix socket in the folder that only its user enters, which clients
of that user prefer. `Gate` replies to greetings and checks the proof of each call (`podrun.core.identity`). A server
that is shared with other users of the host also takes calls without a proof, from callers whose user the kernel knows;
what they may do is up to the server (`caller_of`). gRPC is imported on first use.
"""

from __future__ import annotations

import logging
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from podrun.core import own_sockets
from podrun.core.access import AGAIN_KEY, ANSWER_KEY, GREET, PROOF_KEY, VARIABLE, tls_asked_for
from podrun.core.errors import UsageError, present
from podrun.core.identity import Caller, OwnAddresses, ProofChecker, RefusedProof, address_text, user_of_peer

if TYPE_CHECKING:
    import grpc

log = logging.getLogger("podrun.access")

_OPEN = re.compile(r"ipv[46]:(.+):(\d+)")
OPEN_METHODS = ("/grpc.health.v1.Health/Check", GREET)
"""Methods that a server answers for everybody who reaches it: probes prove nothing and only ask whether it serves."""
REFUSALS_EVERY_S = 10.0
"""Seconds between two lines in the log about calls that are refused."""
_ATTRIBUTE = "podrun_caller"
# Limits of servers for connections that say nothing. Whoever reaches a port can open connections before any call is
# checked. Each holds a file and memory of the server.
SILENT_SECONDS = 5.0
"""Time for a connection's first HTTP/2 settings, with TLS for its handshake too; gRPC's own limit is two minutes."""
MOST_CONNECTIONS = 512
"""Most connections of a port: a program of the largest POD makes a few at each machine."""
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""HTTP/2's preface and empty settings (RFC 9113, section 3.4): who sends them is not silent."""


def caller_of(context: grpc.ServicerContext) -> Caller:
    """Who makes the call that a handler serves. Without a gate every caller counts as the server's own user."""
    caller: Caller = getattr(context, _ATTRIBUTE, None) or Caller(os.getuid(), own=True)
    return caller


def _add_port(server: grpc.Server, address: str) -> int:
    """Let a server listen at ``host:port``, over TLS where the environment asks for it. Returns the port; raises
    RuntimeError.
    """
    import grpc

    if not tls_asked_for():
        return int(server.add_insecure_port(address))
    from podrun.core.tls import credentials

    ours = present(credentials(), "a process that is asked for TLS has credentials")
    shown = grpc.ssl_server_credentials([(ours.key, ours.cert)], ours.ca, require_client_auth=True)
    return int(server.add_secure_port(address, shown))


class Gate:
    """Lets calls pass that prove that they know ``token``, or come through the own folder's socket; with ``shared``,
    also calls whose user the kernel knows.

    Give `interceptors` to the gRPC server, and `listen` before it starts.
    """

    def __init__(self, token: str, *, shared: bool = False) -> None:
        self._token, self._shared = token, shared
        self._checker: ProofChecker | None = None
        self._here = ("", 0)
        self._refused, self._next_line = 0, 0.0

    def listen(
        self, server: grpc.Server, host: str, port: int, environ: Mapping[str, str] | None = None
    ) -> int:
        """Let the server listen at ``host:port`` (0: any free port), and for its own user at a Unix socket. Returns the
        port, 0 or RuntimeError if it is taken. ``environ``: names the runtime directory.
        """
        bound = _add_port(server, address_text(host, port))
        if not bound:
            return 0
        self._here = (host, bound)
        if self._token:
            here = OwnAddresses(host, bound)
            self._checker = ProofChecker(self._token, here)
            server.add_generic_rpc_handlers((_greets(self._checker),))
            if not tls_asked_for():
                _listen_for_own_user(
                    server, self._token, [address_text(h, bound) for h in here.hosts], environ
                )
        return bound

    def interceptors(self) -> list[grpc.ServerInterceptor]:
        """What the gRPC server needs; empty without a token."""
        return [_interceptor(self)] if self._token else []

    def admit(self, context: grpc.ServicerContext, method: str, request: bytes) -> Caller:
        """The caller, after its proof has been answered. ``request``: as it was received; empty for a stream. Ends the
        call if it is refused."""
        import grpc

        if context.peer().startswith("unix:"):
            return Caller(os.getuid(), own=True)
        reason = "the call has no proof of who makes it"
        text = dict(context.invocation_metadata() or ()).get(PROOF_KEY)
        try:
            if isinstance(text, str) and self._checker is not None:
                answer = self._checker.check(text, method, request)
                context.send_initial_metadata(((ANSWER_KEY, answer),))
                return Caller(os.getuid(), own=True)
        except RefusedProof as error:
            reason = str(error)
            if error.again:
                context.set_trailing_metadata(((AGAIN_KEY, "1"),))
                context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)
        uid = self._user_of(context.peer()) if self._shared else None
        if uid is not None:
            return Caller(uid, own=False)
        self._log_refusal(method, context.peer(), reason)
        context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            f"this server answers its user alone, and {reason}. On another host set {VARIABLE} to what the server's "
            "host has; a server for all users of a host is vipu-server --shared",
        )
        raise AssertionError("abort raises")

    def _log_refusal(self, method: str, peer: str, reason: str) -> None:
        """Log one line for many refusals, so that nobody can fill the log."""
        self._refused += 1
        now = time.monotonic()
        if now >= self._next_line:
            log.warning("refused calls: %d, the last %s from %s: %s", self._refused, method, peer, reason)
            self._refused, self._next_line = 0, now + REFUSALS_EVERY_S

    def _user_of(self, peer: str) -> int | None:
        """The user at the other end of a connection, as gRPC names it (``ipv4:127.0.0.1:40000``)."""
        match = _OPEN.fullmatch(urllib.parse.unquote(peer))
        if match is None:
            return None
        host = match[1].strip("[]")
        return user_of_peer((host, int(match[2])), (self._here[0], self._here[1]))


def _listen_for_own_user(
    server: grpc.Server, token: str, addresses: list[str], environ: Mapping[str, str] | None
) -> None:
    """Let the server listen at Unix sockets too, named after its addresses. Clients do without where that fails."""
    try:
        folder = own_sockets.socket_folder(environ)
        own_sockets.remove_stale_sockets(environ)
        for address in addresses:
            if path := own_sockets.server_socket(folder, token, address):
                server.add_insecure_port(f"unix:{path}")
    except (OSError, RuntimeError, UsageError) as error:
        log.info("no Unix socket for clients of this user: %s", error)


def _greets(checker: ProofChecker) -> grpc.GenericRpcHandler:
    import grpc

    def greet(text: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return checker.greet(text.decode("ascii", "replace")).encode()
        except RefusedProof as error:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
            raise AssertionError("abort raises") from error

    service, _, method = GREET[1:].partition("/")
    return grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(greet)})


def _interceptor(gate: Gate) -> grpc.ServerInterceptor:
    import grpc

    makers = {
        (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
        (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
        (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
        (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
    }

    class Asks(grpc.ServerInterceptor):
        """Has the gate check each call before its handler runs."""

        def intercept_service(self, proceed: Callable[[Any], Any], call: Any) -> Any:
            handler = proceed(call)
            if handler is None or call.method in OPEN_METHODS:
                return handler
            streamed = bool(handler.request_streaming)
            kind, make = makers[streamed, bool(handler.response_streaming)]
            guarded = _guarded(gate, call.method, getattr(handler, kind), handler)
            reads = handler.request_deserializer
            return make(guarded, reads if streamed else _keeping(reads), handler.response_serializer)

    return Asks()


def _keeping(reads: Callable[[bytes], Any] | None) -> Callable[[bytes], tuple[bytes, Any]]:
    """A deserializer that keeps the bytes, which the proof covers."""
    return lambda raw: (raw, raw if reads is None else reads(raw))


def _guarded(gate: Gate, method: str, behaviour: Callable[..., Any], handler: Any) -> Callable[..., Any]:
    def admitted(request: Any, context: grpc.ServicerContext) -> Any:
        raw, message = (b"", request) if handler.request_streaming else request
        setattr(context, _ATTRIBUTE, gate.admit(context, method, raw))
        return message

    def answer(request: object, context: grpc.ServicerContext) -> Any:
        return behaviour(admitted(request, context), context)

    def answers(request: object, context: grpc.ServicerContext) -> Iterator[Any]:
        yield from behaviour(admitted(request, context), context)

    return answers if handler.response_streaming else answer


def connection_limits(
    silent_seconds: float = SILENT_SECONDS, most: int = MOST_CONNECTIONS
) -> tuple[tuple[str, int], ...]:
    """The options of a gRPC server that set the limits."""
    return (
        ("grpc.server_handshake_timeout_ms", round(silent_seconds * 1000)),
        ("grpc.max_allowed_incoming_connections", most),
    )
