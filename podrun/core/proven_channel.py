"""A gRPC channel that sends nothing of its user's before the server has proved whose it is.

    host:port -> addresses -> for each: the own folder's Unix socket, else a greeting over TCP -> one line -> calls

The line is chosen with the first call. A name may lead to several addresses, and another user may listen at one of
them: a line whose server proves itself comes before all others, and the greeting alone shows nothing that could be
passed on. Calls on a line with a session carry a proof (`podrun.core.identity`), and their answers are checked. After
an error that says that the server is gone, or another one, the next call chooses again; a channel whose server has
proved itself once takes no other.

Requests are turned into bytes here, once: the proof covers exactly what is sent.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Unpack, cast

import grpc

from podrun.core import own_sockets
from podrun.core.access import AGAIN_KEY, ANSWER_KEY, GREET, AdmitServer, strangers_server, tls_asked_for
from podrun.core.errors import UsageError, present
from podrun.core.identity import Greeting, Proof, address_text, numeric_hosts, user_of_server
from podrun.core.proven_calls import (
    CallOptions,
    CallState,
    FailedCallError,
    HeldRequests,
    Metadata,
    ProvenLine,
    ProvenStream,
    Reply,
    ReplyStream,
    Request,
    UnaryCall,
    as_they_are,
    has_ended,
    status_name,
)

GREETING_S = 30.0
"""Longest wait for a greeting's reply where the call has no deadline of its own."""
_NO_ANSWER = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
"""Codes of calls that failed before a server could answer."""


def open_channel(
    endpoint: str,
    options: Sequence[tuple[str, Any]],
    token: str = "",
    *,
    own: bool = False,
    admit: AdmitServer | None = None,
) -> ProvenChannel:
    """A gRPC channel whose calls prove that the caller knows ``token``; with an empty token they prove nothing.

    A call goes out once the server has proved that it knows the token too. Calls raise StrangersServerError where it
    has not, with two exceptions unless ``own``: a server of this host run by another user, if ``admit`` lets it pass;
    and any server, with an empty token.
    """
    return ProvenChannel(endpoint, options, token, own=own, admit=admit)


class ProvenChannel(grpc.Channel):
    """See the module, and `open_channel`, which makes them. Thread-safe."""

    def __init__(
        self,
        endpoint: str,
        options: Sequence[tuple[str, Any]],
        token: str,
        *,
        own: bool,
        admit: AdmitServer | None,
    ) -> None:
        self._endpoint, self._options = endpoint, list(options)
        self._token, self._own, self._admit = token, own, admit
        self._choosing = threading.Lock()
        self._closed = False
        self._channels: dict[str, grpc.Channel] = {}
        self._line: ProvenLine | None = None
        self._proved = False
        self._uid = os.getuid()

    @property
    def proved(self) -> bool:
        """Whether the server has proved that it is this user's; known after the first call."""
        return self._proved

    @property
    def server_uid(self) -> int:
        """The user who runs the server; known after the first call."""
        return self._uid

    # --- the line -------------------------------------------------------------------------------------------

    def line(self, timeout: float | None) -> ProvenLine:
        """The way to the server, chosen if there is none. Raises StrangersServerError, grpc.RpcError."""
        known = self._line
        if known is not None and not known.stale:
            return known
        end = time.monotonic() + (timeout or GREETING_S)
        if not self._choosing.acquire(timeout=max(end - time.monotonic(), 0.001)):
            raise FailedCallError(grpc.StatusCode.DEADLINE_EXCEEDED, "another call waits for the server")
        try:
            known = self._line
            if known is None or known.stale:
                line = self._choose(end)
                if line.own or line.session is not None:
                    if self._admit is not None and not self._proved:
                        self._admit(line.where, os.getuid())
                    self._proved = True
                self._line = known = line
            return known
        finally:
            self._choosing.release()

    def forget(self, line: ProvenLine) -> None:
        """Choose again before the next call."""
        if self._line is line:
            self._line = None

    def _choose(self, end: float) -> ProvenLine:
        if not self._token:
            return ProvenLine(self._endpoint, self._connected(self._endpoint, ""))
        host, _, port = self._endpoint.rpartition(":")
        hosts = numeric_hosts(host.strip("[]")) if port.isdecimal() else []
        for host_address in hosts:
            if line := self._own_line(address_text(host_address, int(port)), port):
                return line
        silent: grpc.RpcError | None = None
        others: list[str] = []
        for host_address in hosts:
            where = address_text(host_address, int(port))
            try:
                if line := self._greeted(where, host.strip("[]"), end):
                    return line
                others.append(where)
            except grpc.RpcError as error:
                silent = error
        if not others:
            # Nobody answers, or there is no such host: the call itself says so.
            raise silent or FailedCallError(
                grpc.StatusCode.UNAVAILABLE, f"no address is known for {self._endpoint}"
            )
        return self._line_to_stranger(others[0], host.strip("[]"))

    def _own_line(self, where: str, port: str) -> ProvenLine | None:
        """The line through the Unix socket of this user's server; None if there is none."""
        if tls_asked_for():
            return None
        with contextlib.suppress(OSError, UsageError):
            folder = own_sockets.socket_folder()
            for address in (where, f"*:{port}"):
                path = own_sockets.server_socket(folder, self._token, address)
                if path is not None and own_sockets.listens_for_me(path):
                    return ProvenLine(where, self._connected(f"unix:{path}", ""), own=True)
        return None

    def _greeted(self, where: str, name: str, end: float) -> ProvenLine | None:
        """The line to a server that proves itself; None if what answers does not. Raises grpc.RpcError if nobody
        answers."""
        channel = self._connected(where, name)
        greeting = Greeting(self._token, where)
        greet: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(GREET)
        try:
            reply = greet(greeting.text.encode(), timeout=max(end - time.monotonic(), 0.001))
        except grpc.RpcError as error:
            if status_name(error) in _NO_ANSWER:
                raise
            return None
        session = greeting.session(reply.decode("ascii", "replace"))
        return None if session is None else ProvenLine(where, channel, session, time.monotonic())

    def _line_to_stranger(self, where: str, name: str) -> ProvenLine:
        """A line without proofs, to another user's server that was named. Raises StrangersServerError."""
        host, _, port = where.rpartition(":")
        uid = user_of_server(host.strip("[]"), int(port))
        if self._own or self._proved or uid is None:
            raise strangers_server(where, uid)
        if self._admit is not None:
            self._admit(where, uid)
        self._uid = uid
        return ProvenLine(where, self._connected(where, name))

    def _connected(self, target: str, name: str) -> grpc.Channel:
        """A channel, over TLS where the environment asks for it (`podrun.core.tls`). ``name``: of the host, as it was
        given."""
        if self._closed:
            raise FailedCallError(grpc.StatusCode.CANCELLED, "the channel is closed")
        channel = self._channels.get(target)
        if channel is None:
            channel = self._channels[target] = _connect(target, name, list(self._options))
        return channel

    # --- grpc.Channel ---------------------------------------------------------------------------------------

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Request], bytes] | None = None,
        response_deserializer: Callable[[bytes], Reply] | None = None,
        *_: object,
        **__: object,
    ) -> grpc.UnaryUnaryMultiCallable[Request, Reply]:
        call = UnaryCall(self, method, request_serializer, response_deserializer)
        return cast("grpc.UnaryUnaryMultiCallable[Request, Reply]", call)

    def unary_stream(
        self,
        method: str,
        request_serializer: Callable[[Request], bytes] | None = None,
        response_deserializer: Callable[[bytes], Reply] | None = None,
        *_: object,
        **__: object,
    ) -> grpc.UnaryStreamMultiCallable[Request, Reply]:
        def begin(
            request: Request,
            timeout: float | None = None,
            metadata: Metadata | None = None,
            **more: Unpack[CallOptions],
        ) -> ProvenStream[Reply]:
            raw = (request_serializer or as_they_are)(request)

            def start(line: ProvenLine, shown: Metadata | None, gate: HeldRequests) -> ReplyStream[Reply]:
                call: grpc.UnaryStreamMultiCallable[bytes, Reply] = line.channel.unary_stream(
                    method, None, response_deserializer
                )
                return call(raw, timeout=timeout, metadata=shown, **more)

            return ProvenStream(self, method, start, raw=raw, metadata=metadata, timeout=timeout)

        return cast("grpc.UnaryStreamMultiCallable[Request, Reply]", begin)

    def stream_stream(
        self,
        method: str,
        request_serializer: Callable[[Request], bytes] | None = None,
        response_deserializer: Callable[[bytes], Reply] | None = None,
        *_: object,
        **__: object,
    ) -> grpc.StreamStreamMultiCallable[Request, Reply]:
        def begin(
            requests: Iterable[Request],
            timeout: float | None = None,
            metadata: Metadata | None = None,
            **more: Unpack[CallOptions],
        ) -> ProvenStream[Reply]:
            def start(line: ProvenLine, shown: Metadata | None, held: HeldRequests) -> ReplyStream[Reply]:
                call = line.channel.stream_stream(method, request_serializer, response_deserializer)
                return call(held.release(requests), timeout=timeout, metadata=shown, **more)

            return ProvenStream(self, method, start, raw=b"", metadata=metadata, timeout=timeout)

        return cast("grpc.StreamStreamMultiCallable[Request, Reply]", begin)

    def stream_unary(self, method: str, *_: object, **__: object) -> Any:
        raise NotImplementedError("no protocol of podrun has such calls")

    def subscribe(self, callback: object, try_to_connect: bool | None = False) -> None:
        raise NotImplementedError("a channel has no state before its first call")

    def unsubscribe(self, callback: object) -> None:
        raise NotImplementedError("a channel has no state before its first call")

    def close(self) -> None:
        """End all connections, also one that is being chosen. Idempotent."""
        self._closed = True
        for channel in list(self._channels.values()):
            channel.close()

    def __enter__(self) -> ProvenChannel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def checked(self, line: ProvenLine, proof: Proof | None, call: CallState) -> bool:
        """Whether the call is to be made again, because the server does not know the session. Raises
        StrangersServerError if what answered the call, or its error, did not answer the proof."""
        code = call.code().name if has_ended(call) else ""
        if code == "UNAVAILABLE":
            self.forget(line)  # Another server may listen there next time.
        if proof is None or code in _NO_ANSWER:
            return False
        if dict(call.initial_metadata() or ()).get(ANSWER_KEY) == proof.answer:
            return False
        code = call.code().name if has_ended(call) else ""
        if code in _NO_ANSWER:
            return False
        self.forget(line)
        if code == "UNAUTHENTICATED" and AGAIN_KEY in dict(call.trailing_metadata() or ()):
            return True
        raise strangers_server(line.where)


def _connect(target: str, name: str, options: list[tuple[str, Any]]) -> grpc.Channel:
    if target.startswith("unix:") or not tls_asked_for():
        return grpc.insecure_channel(target, options=options)
    from podrun.core.tls import credentials, split_endpoint

    ours = present(credentials(), "a process that is asked for TLS has credentials")
    host = name or split_endpoint(target)[0]
    if (wanted := ours.name_at(host)) != split_endpoint(target)[0]:
        options.append(("grpc.ssl_target_name_override", wanted))
    shown = grpc.ssl_channel_credentials(ours.ca, ours.key, ours.cert)
    return grpc.secure_channel(target, shown, options=options)
