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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from podrun.core import own_sockets
from podrun.core.access import (
    AGAIN_KEY,
    ANSWER_KEY,
    GREET,
    PROOF_KEY,
    AdmitServer,
    strangers_server,
    tls_asked_for,
)
from podrun.core.errors import UsageError, present
from podrun.core.identity import (
    FRESH_S,
    Greeting,
    Proof,
    ProvenSession,
    address_text,
    numeric_hosts,
    user_of_server,
)

GREETING_S = 30.0
"""Longest wait for a greeting's reply where the call has no deadline of its own."""
_TRIES = (False, False, True)
"""Of a call whose server does not know the session; whether each is the last."""
_NO_ANSWER = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
"""Codes of calls that failed before a server could answer."""


@dataclass(slots=True, eq=False)
class _Line:
    """The way to one server. ``session``: what proofs come from; None where they are not needed (``own``: the Unix
    socket of this user's server) or of no use."""

    where: str
    channel: grpc.Channel
    session: ProvenSession | None = None
    since: float = 0.0
    own: bool = False

    @property
    def stale(self) -> bool:
        """Whether it is time for another greeting."""
        return self.session is not None and time.monotonic() > self.since + FRESH_S


class ProvenChannel(grpc.Channel):
    """See the module, and `podrun.core.access.open_channel`, which makes them. Thread-safe."""

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
        self._line: _Line | None = None
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

    def line(self, timeout: float | None) -> _Line:
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

    def forget(self, line: _Line) -> None:
        """Choose again before the next call."""
        if self._line is line:
            self._line = None

    def _choose(self, end: float) -> _Line:
        if not self._token:
            return _Line(self._endpoint, self._connected(self._endpoint, ""))
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

    def _own_line(self, where: str, port: str) -> _Line | None:
        """The line through the Unix socket of this user's server; None if there is none."""
        if tls_asked_for():
            return None
        with contextlib.suppress(OSError, UsageError):
            folder = own_sockets.socket_folder()
            for address in (where, f"*:{port}"):
                path = own_sockets.server_socket(folder, self._token, address)
                if path is not None and own_sockets.listens_for_me(path):
                    return _Line(where, self._connected(f"unix:{path}", ""), own=True)
        return None

    def _greeted(self, where: str, name: str, end: float) -> _Line | None:
        """The line to a server that proves itself; None if what answers does not. Raises grpc.RpcError if nobody
        answers."""
        channel = self._connected(where, name)
        greeting = Greeting(self._token, where)
        greet: Any = channel.unary_unary(GREET)
        try:
            reply = greet(greeting.text.encode(), timeout=max(end - time.monotonic(), 0.001))
        except grpc.RpcError as error:
            if _code(error) in _NO_ANSWER:
                raise
            return None
        session = greeting.session(reply.decode("ascii", "replace"))
        return None if session is None else _Line(where, channel, session, time.monotonic())

    def _line_to_stranger(self, where: str, name: str) -> _Line:
        """A line without proofs, to another user's server that was named. Raises StrangersServerError."""
        host, _, port = where.rpartition(":")
        uid = user_of_server(host.strip("[]"), int(port))
        if self._own or self._proved or uid is None:
            raise strangers_server(where, uid)
        if self._admit is not None:
            self._admit(where, uid)
        self._uid = uid
        return _Line(where, self._connected(where, name))

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
        request_serializer: Any = None,
        response_deserializer: Any = None,
        *_: Any,
        **__: Any,
    ) -> Any:
        return _UnaryCall(self, method, request_serializer, response_deserializer)

    def unary_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        *_: Any,
        **__: Any,
    ) -> Any:
        def begin(request: Any, timeout: float | None = None, metadata: Any = None, **more: Any) -> Any:
            raw = request if request_serializer is None else request_serializer(request)

            def start(line: _Line, shown: Any, gate: _HeldRequests) -> Any:
                call: Any = line.channel.unary_stream(method, None, response_deserializer)
                return call(raw, timeout=timeout, metadata=shown, **more)

            return _ProvenStream(self, method, start, raw=raw, metadata=metadata, timeout=timeout)

        return begin

    def stream_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        *_: Any,
        **__: Any,
    ) -> Any:
        def begin(
            requests: Iterable[Any], timeout: float | None = None, metadata: Any = None, **more: Any
        ) -> Any:
            def start(line: _Line, shown: Any, held: _HeldRequests) -> Any:
                call: Any = line.channel.stream_stream(method, request_serializer, response_deserializer)
                return call(held.release(requests), timeout=timeout, metadata=shown, **more)

            return _ProvenStream(self, method, start, raw=b"", metadata=metadata, timeout=timeout)

        return begin

    def stream_unary(self, method: str, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("no protocol of podrun has such calls")

    def subscribe(self, callback: Any, try_to_connect: bool | None = False) -> None:
        raise NotImplementedError("a channel has no state before its first call")

    def unsubscribe(self, callback: Any) -> None:
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

    def checked(self, line: _Line, proof: Proof | None, call: Any) -> bool:
        """Whether the call is to be made again, because the server does not know the session. Raises
        StrangersServerError if what answered the call, or its error, did not answer the proof."""
        code = call.code().name if _has_ended(call) else ""
        if code == "UNAVAILABLE":
            self.forget(line)  # Another server may listen there next time.
        if proof is None or code in _NO_ANSWER:
            return False
        if dict(call.initial_metadata() or ()).get(ANSWER_KEY) == proof.answer:
            return False
        code = call.code().name if _has_ended(call) else ""
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


class _UnaryCall:
    """One method with one request and one reply: `grpc.UnaryUnaryMultiCallable`."""

    def __init__(self, channel: ProvenChannel, method: str, serializer: Any, deserializer: Any) -> None:
        self._channel, self._method = channel, method
        self._serializer, self._deserializer = serializer, deserializer

    def __call__(self, request: Any, timeout: float | None = None, metadata: Any = None, **more: Any) -> Any:
        return self.with_call(request, timeout, metadata, **more)[0]

    def with_call(
        self, request: Any, timeout: float | None = None, metadata: Any = None, **more: Any
    ) -> tuple[Any, Any]:
        raw = self._bytes(request)
        end = None if timeout is None else time.monotonic() + timeout
        for last in _TRIES:
            line, proof, shown = _prepared(self._channel, self._method, raw, metadata, _left(end))
            ask: Any = line.channel.unary_unary(self._method, None, self._deserializer)
            try:
                reply, call = ask.with_call(raw, timeout=_left(end), metadata=shown, **more)
            except grpc.RpcError as error:
                if not self._channel.checked(line, proof, error) or last:
                    raise
            else:
                self._channel.checked(line, proof, call)
                return reply, call
        raise AssertionError("the last try returns or raises")

    def future(self, request: Any, timeout: float | None = None, metadata: Any = None, **more: Any) -> Any:
        raw = self._bytes(request)
        line, proof, shown = _prepared(self._channel, self._method, raw, metadata, timeout)
        ask: Any = line.channel.unary_unary(self._method, None, self._deserializer)
        call = ask.future(raw, timeout=timeout, metadata=shown, **more)
        return _ProvenFuture(self._channel, line, proof, call)

    def _bytes(self, request: Any) -> bytes:
        raw: bytes = request if self._serializer is None else self._serializer(request)
        return raw


class _ProvenFuture:
    """A call under way whose result is handed out only if the server has answered the proof."""

    def __init__(self, channel: ProvenChannel, line: _Line, proof: Proof | None, call: Any) -> None:
        self._channel, self._line, self._proof, self._call = channel, line, proof, call

    def result(self, timeout: float | None = None) -> Any:
        """See `grpc.Future`."""
        try:
            return self._call.result(timeout)
        finally:
            if self._call.done():
                self._channel.checked(self._line, self._proof, self._call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


class _HeldRequests:
    """Requests of a stream, kept back until the server has answered the proof on that stream."""

    def __init__(self) -> None:
        self._decided = threading.Event()
        self._go = False

    def decide(self, go: bool) -> None:
        """Let the requests out, or drop them."""
        self._go = self._go or go
        self._decided.set()

    def release(self, requests: Iterable[Any]) -> Iterator[Any]:
        """The requests, once they may go."""
        self._decided.wait()
        if self._go:
            yield from requests


class _ProvenStream:
    """A stream of replies, begun with the first `next`; none is handed out, and no request of a stream of requests is
    sent, before the server has answered the proof."""

    def __init__(
        self,
        channel: ProvenChannel,
        method: str,
        start: Callable[[_Line, Any, _HeldRequests], Any],
        *,
        raw: bytes,
        metadata: Any,
        timeout: float | None,
    ) -> None:
        self._channel, self._method, self._start = channel, method, start
        self._raw, self._metadata, self._timeout = raw, metadata, timeout
        self._lock = threading.Lock()
        self._call: Any = None
        self._held = _HeldRequests()
        self._begun = self._cancelled = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._begun:
            self._begin()
        return next(self._call)

    def _begin(self) -> None:
        self._begun = True
        for last in _TRIES:
            line, proof, shown = _prepared(
                self._channel, self._method, self._raw, self._metadata, self._timeout
            )
            with self._lock:
                if self._cancelled:
                    raise StopIteration
                self._held = _HeldRequests()
                self._call = self._start(line, shown, self._held)
            go = False
            try:
                if proof is not None:
                    self._call.initial_metadata()  # Waits until the server has answered or the call has ended.
                go = not self._channel.checked(line, proof, self._call) or last
            except BaseException:
                self._call.cancel()
                raise
            finally:
                self._held.decide(go)
            if go:
                return

    def cancel(self) -> Any:
        """End the stream."""
        with self._lock:
            self._cancelled = True
            call = self._call
        self._held.decide(go=False)
        return call.cancel() if call is not None else True

    def code(self) -> Any:
        """The status of the call, which is begun if it is not yet."""
        if not self._begun:
            self._begin()
        return self._call.code()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def _prepared(
    channel: ProvenChannel, method: str, raw: bytes, metadata: Any, timeout: float | None
) -> tuple[_Line, Proof | None, Any]:
    """The line for a call, its proof, and its metadata."""
    line = channel.line(timeout)
    if line.session is None:
        return line, None, metadata
    proof = line.session.proof(method, raw)
    return line, proof, (*(metadata or ()), (PROOF_KEY, proof.text))


def _left(end: float | None) -> float | None:
    return None if end is None else max(end - time.monotonic(), 0.001)


def _has_ended(call: Any) -> bool:
    """Whether a call, or the error in its place, has a status."""
    done = getattr(call, "done", None)
    return True if done is None else bool(done())


def _code(error: Any) -> str:
    return str(error.code().name)


class FailedCallError(grpc.RpcError):
    """A call that failed before it went out, as gRPC would report it."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code = code

    def code(self) -> grpc.StatusCode:
        """See `grpc.Call`."""
        return self._code

    def details(self) -> str:
        """See `grpc.Call`."""
        return str(self)

    def trailing_metadata(self) -> tuple[()]:
        """See `grpc.Call`."""
        return ()
