"""Who may talk to servers that listen on a network: those that show podrun's token.

Servers on 127.0.0.1 ask for nothing, as before. A server that listens on another address asks for the token in gRPC
metadata, so that an open port is of no use to strangers. The token is ``$PODRUN_TOKEN``, else the one in the file
``token`` of the user's runtime directory (mode 0600). It is no encryption: who can read the network's packets can read
it. gRPC is imported on first use.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun.errors import UsageError

if TYPE_CHECKING:
    import grpc

VARIABLE = "PODRUN_TOKEN"
METADATA_KEY = "podrun-token"
_SHAPE = re.compile(r"[\x21-\x7e]{16,256}")


def known_token(environ: Mapping[str, str], directory: Path | None) -> str:
    """The token that ``environ`` or the file in ``directory`` holds; empty if neither does. UsageError for one that
    cannot be right."""
    token = environ.get(VARIABLE, "")
    if not token and directory is not None and (directory / "token").is_file():
        token = (directory / "token").read_text(encoding="ascii").strip()
    if token and not _SHAPE.fullmatch(token):
        raise UsageError(
            "podrun's token is not 16 to 256 printable characters without spaces",
            hint=f"Unset {VARIABLE}, or make one: export {VARIABLE}=$(openssl rand -hex 32)",
        )
    return token


def make_token(environ: Mapping[str, str], directory: Path) -> str:
    """The token, made and kept in ``directory`` if there is none yet."""
    token = known_token(environ, directory)
    if token:
        return token
    fresh = directory / f"token.{os.getpid()}"
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32) + "\n")
    try:
        os.link(fresh, directory / "token")
    except FileExistsError:
        pass  # Another process was first: its token is the one.
    finally:
        fresh.unlink()
    return known_token(environ, directory)


def is_loopback(host: str) -> bool:
    """True iff only this host reaches what listens there."""
    return host in ("localhost", "::1") or host.startswith("127.")


def quiet_grpc() -> None:
    """Settings for processes that run gRPC and start others. They count only before gRPC is first imported.

    Ray forks, and so do loaders of data: gRPC's handlers for that print a line for each fork, and may end the child.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def open_channel(endpoint: str, options: Sequence[tuple[str, Any]], token: str = "") -> grpc.Channel:
    """A gRPC channel that shows ``token`` with every call (none: says nothing)."""
    import grpc

    channel = grpc.insecure_channel(endpoint, options=list(options))
    return grpc.intercept_channel(channel, _shows(token)) if token else channel


def guards(token: str) -> list[grpc.ServerInterceptor]:
    """What to give a gRPC server as ``interceptors`` so that it refuses calls without ``token`` (none: takes all)."""
    return [_asks_for(token)] if token else []


def _shows(token: str) -> Any:
    import grpc

    class Shows(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
        """Adds the token to the metadata of each call."""

        def intercept_unary_unary(self, proceed: Callable[..., Any], details: Any, request: Any) -> Any:
            return proceed(_with_token(details, token), request)

        def intercept_stream_stream(self, proceed: Callable[..., Any], details: Any, requests: Any) -> Any:
            return proceed(_with_token(details, token), requests)

    return Shows()


def _with_token(details: Any, token: str) -> Any:
    import grpc

    class Details(grpc.ClientCallDetails):
        """A call's details with more metadata."""

        def __init__(self) -> None:
            self.method, self.timeout = details.method, details.timeout
            self.credentials = details.credentials
            self.wait_for_ready, self.compression = details.wait_for_ready, details.compression
            self.metadata = (*(details.metadata or ()), (METADATA_KEY, token))

    return Details()


def _asks_for(token: str) -> grpc.ServerInterceptor:
    import grpc

    def refuse(request: Any, context: grpc.ServicerContext) -> Any:
        context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            f"this server wants podrun's token: set {VARIABLE} to what the host that runs it has",
        )

    refusal = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }

    class Asks(grpc.ServerInterceptor):
        """Lets calls pass that show the token."""

        def intercept_service(self, proceed: Callable[[Any], Any], call: Any) -> Any:
            shown = dict(call.invocation_metadata).get(METADATA_KEY, "")
            handler = proceed(call)
            if handler is None or (isinstance(shown, str) and hmac.compare_digest(shown, token)):
                return handler
            return refusal[bool(handler.request_streaming), bool(handler.response_streaming)](refuse)

    return Asks()
