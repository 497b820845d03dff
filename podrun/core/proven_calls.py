"""Calls on a channel whose server has to prove itself: each is held until the proof is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypedDict, TypeVar, Unpack, cast

import grpc

from podrun.core.access import PROOF_KEY
from podrun.core.identity import FRESH_S, Proof, ProvenSession
from podrun.core.quick_dataclass import dataclass

if TYPE_CHECKING:
    from podrun.core.proven_channel import ProvenChannel


Request = TypeVar("Request")
Reply = TypeVar("Reply")
AnyReply = TypeVar("AnyReply", covariant=True)
Metadata = tuple[tuple[str, str | bytes], ...]


class CallOptions(TypedDict, total=False):
    """What a call of gRPC takes besides its deadline and metadata."""

    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class CallState(Protocol):
    """How a call stands, or the error in its place."""

    def code(self) -> grpc.StatusCode: ...

    def initial_metadata(self) -> Metadata: ...

    def trailing_metadata(self) -> Metadata: ...


class ReplyStream(CallState, Protocol[AnyReply]):
    """A call whose replies come one after the other."""

    def __next__(self) -> AnyReply: ...

    def cancel(self) -> bool: ...


class UnderWay(CallState, Protocol[AnyReply]):
    """A call whose reply is awaited later."""

    def result(self, timeout: float | None = None) -> AnyReply: ...

    def done(self) -> bool: ...


TRIES = (False, False, True)
"""Of a call whose server does not know the session; whether each is the last."""


@dataclass(slots=True, eq=False)
class ProvenLine:
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


class UnaryCall(Generic[Request, Reply]):
    """One method with one request and one reply: `grpc.UnaryUnaryMultiCallable`."""

    def __init__(
        self,
        channel: ProvenChannel,
        method: str,
        serializer: Callable[[Request], bytes] | None,
        deserializer: Callable[[bytes], Reply] | None,
    ) -> None:
        self._channel, self._method = channel, method
        self._bytes, self._deserializer = serializer or as_they_are, deserializer

    def __call__(
        self,
        request: Request,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **more: Unpack[CallOptions],
    ) -> Reply:
        return self.with_call(request, timeout, metadata, **more)[0]

    def with_call(
        self,
        request: Request,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **more: Unpack[CallOptions],
    ) -> tuple[Reply, grpc.Call]:
        raw = self._bytes(request)
        end = None if timeout is None else time.monotonic() + timeout
        for last in TRIES:
            line, proof, shown = _prepared(self._channel, self._method, raw, metadata, _left(end))
            try:
                reply, call = self._on(line).with_call(raw, timeout=_left(end), metadata=shown, **more)
            except grpc.RpcError as error:
                if not self._channel.checked(line, proof, cast(grpc.Call, error)) or last:
                    raise
            else:
                self._channel.checked(line, proof, call)
                return reply, call
        raise AssertionError("the last try returns or raises")

    def future(
        self,
        request: Request,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **more: Unpack[CallOptions],
    ) -> _ProvenFuture[Reply]:
        raw = self._bytes(request)
        line, proof, shown = _prepared(self._channel, self._method, raw, metadata, timeout)
        call = self._on(line).future(raw, timeout=timeout, metadata=shown, **more)
        return _ProvenFuture(self._channel, line, proof, call)

    def _on(self, line: ProvenLine) -> grpc.UnaryUnaryMultiCallable[bytes, Reply]:
        return line.channel.unary_unary(self._method, None, self._deserializer)


def as_they_are(request: object) -> bytes:
    """Requests of a method without a serializer, which are bytes."""
    return cast(bytes, request)


class _ProvenFuture(Generic[Reply]):
    """A call under way whose result is handed out only if the server has answered the proof."""

    def __init__(
        self, channel: ProvenChannel, line: ProvenLine, proof: Proof | None, call: UnderWay[Reply]
    ) -> None:
        self._channel, self._line, self._proof, self._call = channel, line, proof, call

    def result(self, timeout: float | None = None) -> Reply:
        """See `grpc.Future`."""
        try:
            return self._call.result(timeout)
        finally:
            if self._call.done():
                self._channel.checked(self._line, self._proof, self._call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


class HeldRequests:
    """Requests of a stream, kept back until the server has answered the proof on that stream."""

    def __init__(self) -> None:
        self._decided = threading.Event()
        self._go = False

    def decide(self, go: bool) -> None:
        """Let the requests out, or drop them."""
        self._go = self._go or go
        self._decided.set()

    def release(self, requests: Iterable[Request]) -> Iterator[Request]:
        """The requests, once they may go."""
        self._decided.wait()
        if self._go:
            yield from requests


class ProvenStream(Generic[Reply]):
    """A stream of replies, begun with the first `next`; none is handed out, and no request of a stream of requests is
    sent, before the server has answered the proof."""

    def __init__(
        self,
        channel: ProvenChannel,
        method: str,
        start: Callable[[ProvenLine, Metadata | None, HeldRequests], ReplyStream[Reply]],
        *,
        raw: bytes,
        metadata: Metadata | None,
        timeout: float | None,
    ) -> None:
        self._channel, self._method, self._start = channel, method, start
        self._raw, self._metadata, self._timeout = raw, metadata, timeout
        self._lock = threading.Lock()
        self._call: ReplyStream[Reply] | None = None
        self._held = HeldRequests()
        self._begun = self._cancelled = False

    def __iter__(self) -> Iterator[Reply]:
        return self

    def __next__(self) -> Reply:
        return next(self._begin())

    def _begin(self) -> ReplyStream[Reply]:
        """The call, which is begun if it is not yet."""
        if self._begun and self._call is not None:
            return self._call
        self._begun = True
        for last in TRIES:
            line, proof, shown = _prepared(
                self._channel, self._method, self._raw, self._metadata, self._timeout
            )
            with self._lock:
                if self._cancelled:
                    raise StopIteration
                self._held = HeldRequests()
                call = self._call = self._start(line, shown, self._held)
            go = False
            try:
                if proof is not None:
                    call.initial_metadata()  # Waits until the server has answered or the call has ended.
                go = not self._channel.checked(line, proof, call) or last
            except BaseException:
                call.cancel()
                raise
            finally:
                self._held.decide(go)
            if go:
                return call
        raise AssertionError("the last try begins the stream or raises")

    def cancel(self) -> bool:
        """End the stream, as `grpc.Call.cancel` does."""
        with self._lock:
            self._cancelled = True
            call = self._call
        self._held.decide(go=False)
        return call.cancel() if call is not None else True

    def code(self) -> grpc.StatusCode:
        """The status of the call, which is begun if it is not yet."""
        return self._begin().code()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def _prepared(
    channel: ProvenChannel, method: str, raw: bytes, metadata: Metadata | None, timeout: float | None
) -> tuple[ProvenLine, Proof | None, Metadata | None]:
    """The line for a call, its proof, and its metadata."""
    line = channel.line(timeout)
    if line.session is None:
        return line, None, metadata
    proof = line.session.proof(method, raw)
    return line, proof, (*(metadata or ()), (PROOF_KEY, proof.text))


def _left(end: float | None) -> float | None:
    return None if end is None else max(end - time.monotonic(), 0.001)


def has_ended(call: CallState) -> bool:
    """Whether a call, or the error in its place, has a status."""
    done = getattr(call, "done", None)
    return True if done is None else bool(done())


def status_name(error: grpc.RpcError) -> str:
    """The name of the gRPC status that a failed call ended with, such as ``UNAVAILABLE``."""
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
