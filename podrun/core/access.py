"""Who may talk to podrun's servers: who proves that they know the secret of the user who runs them.

The secret is the *token*: ``$PODRUN_TOKEN``, else the file ``token`` of the user's runtime directory (mode 0600), made
when it is first needed. It never travels: every gRPC call carries a proof (`podrun.core.identity`), on loopback
addresses too, and the server answers it. A client that expects its user's own server takes no answer from any other.

A server that is shared with other users of the host also takes calls without a proof, from callers whose user the
kernel knows; what they may do is up to the server (`caller_of`). gRPC is imported on first use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun.core.environment import TLS_VARIABLES, environment
from podrun.core.errors import ServiceError, UsageError
from podrun.core.identity import (
    Caller,
    OwnAddresses,
    Proof,
    ProofChecker,
    RefusedProof,
    make_proof,
    user_of_peer,
)

if TYPE_CHECKING:
    import grpc

log = logging.getLogger("podrun.access")

VARIABLE = "PODRUN_TOKEN"
OWN_SERVER = "PODRUN_OWN_SERVER"
PROOF_KEY = "podrun-proof"
"""Metadata of a call: the caller's proof."""
USER_KEY = "podrun-user"
ACCESS_KEY_KEY = "podrun-access-key"
"""Metadata of calls at a V-IPU server with users of its own (``--secure``): who calls, and the access key."""
ANSWER_KEY = "podrun-answer"
"""Initial metadata of an answer: the server's."""
_SHAPE = re.compile(r"[\x21-\x7e]{16,256}")
_OPEN = re.compile(r"ipv[46]:(.+):(\d+)")
OPEN_METHODS = ("/grpc.health.v1.Health/Check",)
"""Methods that a server answers for everybody who reaches it: probes prove nothing and only ask whether it serves."""
REFUSALS_EVERY_S = 10.0
"""Seconds between two lines in the log about calls that are refused."""
_NO_ANSWER = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
"""Codes of calls that failed before a server could answer."""


def known_token(environ: Mapping[str, str], directory: Path | None) -> str:
    """The token that ``environ`` or the file in ``directory`` holds; empty if neither does. Raises UsageError for a
    malformed token, and for a file that others may read or write.
    """
    token = environ.get(VARIABLE, "")
    if not token and directory is not None:
        token = _read_token(directory / "token")
    if token and not _SHAPE.fullmatch(token):
        raise UsageError(
            "podrun's token is not 16 to 256 printable characters without spaces",
            hint=f"Unset {VARIABLE}, or make one: export {VARIABLE}=$(openssl rand -hex 32)",
        )
    return token


def _read_token(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UsageError(
            f"podrun's token cannot be read from {path}: {error.strerror}", hint=f"Remove it: rm {path}"
        ) from error
    with open(fd, encoding="ascii", errors="replace") as file:
        status = os.fstat(fd)
        private = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
        if not stat.S_ISREG(status.st_mode) or not private:
            raise UsageError(
                f"podrun's token in {path} is not this user's alone",
                hint=f"Remove it, and podrun makes another: rm {path}",
            )
        return file.read(1024).strip()


def make_token(environ: Mapping[str, str], directory: Path) -> str:
    """The token, made and kept in ``directory`` if there is none yet. Raises UsageError if it cannot be kept."""
    token = known_token(environ, directory)
    if token:
        return token
    fresh = directory / f"token.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
        with contextlib.suppress(FileExistsError):  # Another process made the token first: use that one.
            os.link(fresh, directory / "token")
    except OSError as error:
        raise UsageError(
            f"podrun's token cannot be kept in {directory}: {error.strerror}",
            hint="Make room there, or name another directory: export PODRUN_RUNTIME_DIR=DIRECTORY",
        ) from error
    finally:
        fresh.unlink(missing_ok=True)
    return known_token(environ, directory)


def tls_asked_for() -> bool:
    """Whether connections of this process use TLS (`podrun.core.tls`, whose import takes a while)."""
    return any(environment().get(name) for name in TLS_VARIABLES)


def is_loopback(host: str) -> bool:
    """True iff only processes of this host can reach ``host``."""
    return host in ("localhost", "::1") or host.startswith("127.")


def quiet_grpc() -> None:
    """Configure processes that run gRPC and start others. The settings count only before gRPC is first imported.

    Ray and data loaders fork. gRPC's fork handlers print a line for each fork and can end the child.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


class StrangersServerError(ServiceError):
    """The server at an address did not prove that it knows this user's secret."""


# --- the caller's side --------------------------------------------------------------------------------------


def with_account(channel: grpc.Channel, account: tuple[str, str]) -> grpc.Channel:
    """A channel whose calls name a user and show its access key (`podrun.vipu.accounts`). Returns the same channel if
    both are empty.
    """
    import grpc

    name, key = account
    if not name and not key:
        return channel
    shown = ((USER_KEY, name), (ACCESS_KEY_KEY, key))

    class Shows(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
        """Adds the user's name and access key to the metadata of each call."""

        def intercept_unary_unary(self, proceed: Callable[..., Any], details: Any, request: Any) -> Any:
            return proceed(_with_metadata(details, shown), request)

        def intercept_unary_stream(self, proceed: Callable[..., Any], details: Any, request: Any) -> Any:
            return proceed(_with_metadata(details, shown), request)

    return grpc.intercept_channel(channel, Shows())


def account_of(environ: Mapping[str, str]) -> tuple[str, str]:
    """The user and access key that the environment names; empty if it names none."""
    return environ.get("VIPU_CLI_API_USER_ID", ""), environ.get("VIPU_CLI_API_ACCESS_KEY", "")


def open_channel(
    endpoint: str,
    options: Sequence[tuple[str, Any]],
    token: str = "",
    *,
    own: bool = False,
    harmless: str = "",
) -> grpc.Channel:
    """A gRPC channel whose calls prove that the caller knows ``token``; with an empty token they prove nothing.

    ``own``: calls raise StrangersServerError unless the server proves that it knows the token too. ``harmless``: a
    method that changes nothing and takes an empty request. It is called before the first call that may change
    something, because a server proves itself with its answer, when it has carried out the call.
    """
    import grpc

    channel = _connected(endpoint, list(options))
    if not token:
        return channel
    checks = _first_check(channel, endpoint, token, harmless) if own and harmless else None
    return grpc.intercept_channel(channel, _proves(endpoint, token, own, checks))


_READS = ("Get", "List", "Watch", "Explain")
"""How the names of methods begin that change nothing."""
FIRST_CHECK_SECONDS = 10.0
"""Longest wait for the answer to the harmless call; where there is none, the call itself says so."""


def _first_check(channel: grpc.Channel, endpoint: str, token: str, harmless: str) -> Callable[[str], None]:
    """A function that is told the method of each call, and raises StrangersServerError before a stranger's server is
    asked to change something.
    """
    import grpc

    checked = False

    def check(method: str) -> None:
        nonlocal checked
        if checked or method.rpartition("/")[2].startswith(_READS):
            return
        proof = make_proof(token, harmless, endpoint)
        shown = ((PROOF_KEY, proof.text),)
        ask: Any = channel.unary_unary(harmless)
        call = ask.future(b"", timeout=FIRST_CHECK_SECONDS, metadata=shown)
        with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError):
            call.result()
        _check_answer(call, proof, endpoint)
        checked = call.code().name not in _NO_ANSWER

    return check


def _connected(endpoint: str, options: list[tuple[str, Any]]) -> grpc.Channel:
    """A channel, over TLS where the environment asks for it (`podrun.core.tls`)."""
    import grpc

    if not tls_asked_for():
        return grpc.insecure_channel(endpoint, options=options)
    from podrun.core.tls import credentials, split_endpoint

    ours = credentials()
    assert ours is not None
    host = split_endpoint(endpoint)[0]
    if (name := ours.name_at(host)) != host:
        options.append(("grpc.ssl_target_name_override", name))
    shown = grpc.ssl_channel_credentials(ours.ca, ours.key, ours.cert)
    return grpc.secure_channel(endpoint, shown, options=options)


def why_unreachable(endpoint: str) -> str:
    """Why TLS may keep a server from answering, and what to do; empty if TLS is not the cause."""
    from podrun.core.tls import explain

    return explain(endpoint)


def _proves(endpoint: str, token: str, own: bool, check: Callable[[str], None] | None) -> Any:
    import grpc

    class Proves(
        grpc.UnaryUnaryClientInterceptor,
        grpc.UnaryStreamClientInterceptor,
        grpc.StreamStreamClientInterceptor,
    ):
        """Adds a proof to the metadata of each call, and checks the server's answer to it."""

        def intercept_unary_unary(self, proceed: Callable[..., Any], details: Any, request: Any) -> Any:
            if check is not None:
                check(_text(details.method))
            proof = make_proof(token, _text(details.method), endpoint)
            call = proceed(_with_proof(details, proof), request)
            if not own:
                return call
            if not call.done():
                return _CheckedCall(call, proof, endpoint)
            _check_answer(call, proof, endpoint)
            return call

        def intercept_unary_stream(self, proceed: Callable[..., Any], details: Any, request: Any) -> Any:
            return self.intercept_stream_stream(proceed, details, request)

        def intercept_stream_stream(self, proceed: Callable[..., Any], details: Any, requests: Any) -> Any:
            proof = make_proof(token, _text(details.method), endpoint)
            call = proceed(_with_proof(details, proof), requests)
            return _CheckedStream(call, proof, endpoint) if own else call

    return Proves()


class _CheckedCall:
    """A call under way whose result is handed out only if the server has answered the proof."""

    def __init__(self, call: Any, proof: Proof, endpoint: str) -> None:
        self._call, self._proof, self._endpoint = call, proof, endpoint

    def result(self, timeout: float | None = None) -> Any:
        """See `grpc.Future`."""
        try:
            found = self._call.result(timeout)
        finally:
            if self._call.done():
                _check_answer(self._call, self._proof, self._endpoint)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


class _CheckedStream:
    """A stream of replies of which none is handed out before the server has answered the proof."""

    def __init__(self, call: Any, proof: Proof, endpoint: str) -> None:
        self._call, self._proof, self._endpoint = call, proof, endpoint
        self._checked = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._checked:
            try:
                _check_answer(self._call, self._proof, self._endpoint)
            except StrangersServerError:
                self._call.cancel()
                raise
            self._checked = True
        return next(self._call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def _check_answer(call: Any, proof: Proof, endpoint: str) -> None:
    """Raise StrangersServerError if a server answered without knowing the secret. No-op if no server answered."""
    answer = dict(call.initial_metadata() or ()).get(ANSWER_KEY)
    if answer == proof.answer:
        return
    code = call.code() if answer is None and call.done() else None
    if code is not None and code.name in _NO_ANSWER:
        return
    raise StrangersServerError(
        f"what listens at {endpoint} is not this user's: it did not prove that it knows the user's secret",
        hint="A server that another user shares has to be named: --vipu-server-host in podrun, --api-host in vipu. "
        f"On another host set {VARIABLE} to what the server's host has.",
    )


def _with_proof(details: Any, proof: Proof) -> Any:
    return _with_metadata(details, ((PROOF_KEY, proof.text),))


def _with_metadata(details: Any, more: tuple[tuple[str, str], ...]) -> Any:
    import grpc

    class Details(grpc.ClientCallDetails):
        """A call's details with more metadata."""

        def __init__(self) -> None:
            self.method, self.timeout = details.method, details.timeout
            self.credentials = details.credentials
            self.wait_for_ready, self.compression = details.wait_for_ready, details.compression
            self.metadata = (*(details.metadata or ()), *more)

    return Details()


def _text(method: str | bytes) -> str:
    return method.decode() if isinstance(method, bytes) else method


# --- the server's side --------------------------------------------------------------------------------------

_ATTRIBUTE = "podrun_caller"


def caller_of(context: Any) -> Caller:
    """Who makes the call that a handler serves. Without a gate every caller counts as the server's own user."""
    found: Caller = getattr(context, _ATTRIBUTE, None) or Caller(os.getuid(), own=True)
    return found


def add_port(server: grpc.Server, address: str) -> int:
    """Let a server listen at ``host:port``, over TLS where the environment asks for it. Returns the port; raises
    RuntimeError.
    """
    import grpc

    if not tls_asked_for():
        return int(server.add_insecure_port(address))
    from podrun.core.tls import credentials

    ours = credentials()
    assert ours is not None
    shown = grpc.ssl_server_credentials([(ours.key, ours.cert)], ours.ca, require_client_auth=True)
    return int(server.add_secure_port(address, shown))


class Gate:
    """Lets calls pass that prove that they know ``token``; with ``shared``, also calls whose user the kernel knows.

    Give `interceptors` to the gRPC server, and say where it listens (`listens`) before it starts.
    """

    def __init__(self, token: str, *, shared: bool = False) -> None:
        self._token, self._shared = token, shared
        self._checker: ProofChecker | None = None
        self._here = ("", 0)
        self._refused, self._next_line = 0, 0.0

    def listens(self, host: str, port: int) -> None:
        """Record an address at which the server listens."""
        self._here = (host, port)
        self._checker = ProofChecker(self._token, OwnAddresses(host, port))

    def interceptors(self) -> list[grpc.ServerInterceptor]:
        """What the gRPC server needs; empty without a token."""
        return [_interceptor(self)] if self._token else []

    def admit(self, context: Any, method: str) -> Caller:
        """The caller, after its proof has been answered. Ends the call if it is refused."""
        import grpc

        reason = "the call has no proof of who makes it"
        text = dict(context.invocation_metadata() or ()).get(PROOF_KEY)
        try:
            if isinstance(text, str) and self._checker is not None:
                context.send_initial_metadata(((ANSWER_KEY, self._checker.check(text, method)),))
                return Caller(os.getuid(), own=True)
        except RefusedProof as error:
            reason = str(error)
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
            kind, make = makers[bool(handler.request_streaming), bool(handler.response_streaming)]
            guarded = _guarded(gate, call.method, getattr(handler, kind), handler.response_streaming)
            return make(guarded, handler.request_deserializer, handler.response_serializer)

    return Asks()


def _guarded(gate: Gate, method: str, behaviour: Callable[..., Any], streams: bool) -> Callable[..., Any]:
    def answer(request: Any, context: Any) -> Any:
        setattr(context, _ATTRIBUTE, gate.admit(context, method))
        return behaviour(request, context)

    def answers(request: Any, context: Any) -> Iterator[Any]:
        setattr(context, _ATTRIBUTE, gate.admit(context, method))
        yield from behaviour(request, context)

    return answers if streams else answer
