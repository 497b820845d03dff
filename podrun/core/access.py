"""Who may talk to podrun's servers: who proves that they know the secret of the user who runs them.

The secret is the *token*: ``$PODRUN_TOKEN``, else the file ``token`` of the user's runtime directory (mode 0600), made
when it is first needed. It never travels. On one host, a client reaches its user's own servers through a Unix socket in
a folder that nobody else enters (`podrun.core.own_sockets`). Everywhere else client and server prove to each other that
they know the secret, the server first (`podrun.core.identity`).

This module has the secret, `podrun.core.proven_channel` is the clients' side and `podrun.core.gate` the servers'. gRPC
is imported on first use.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun.core.environment import TLS_VARIABLES, environment
from podrun.core.errors import ServiceError, UsageError
from podrun.core.identity import user_name

if TYPE_CHECKING:
    import grpc


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
GREET = "/podrun.access.v1.Access/Greet"
"""The method by which a server proves itself; it takes and returns text (`podrun.core.identity.Greeting`)."""
AGAIN_KEY = "podrun-greet-again"
"""Trailing metadata of a refusal: another greeting may help."""


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


QUIET_GRPC = {"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "ERROR"}
"""Variables of processes that run gRPC and start others. They count only before gRPC is first imported.

Ray and data loaders fork. gRPC's fork handlers print a line for each fork and can end the child.
"""


def quiet_grpc() -> None:
    """Set the variables of `QUIET_GRPC` that are not set."""
    for name, value in QUIET_GRPC.items():
        os.environ.setdefault(name, value)


class StrangersServerError(ServiceError):
    """The server at an address did not prove that it knows this user's secret."""


def strangers_server(where: str, uid: int | None = None) -> StrangersServerError:
    """The error for the server at ``where``. ``uid``: the user who runs it, if that is known."""
    whose = f"it is run by {user_name(uid)}, and " if uid is not None else "it "
    return StrangersServerError(
        f"what listens at {where} is not this user's: {whose}did not prove that it knows the user's secret",
        hint="A server that another user of this host shares has to be named: --vipu-server-host in podrun, "
        f"--api-host in vipu. On another host set {VARIABLE} to what the server's host has.",
    )


# --- the caller's side --------------------------------------------------------------------------------------


def with_account(channel: grpc.Channel, account: tuple[str, str]) -> grpc.Channel:
    """A channel whose calls name a user and show its access key (`podrun.partition.state.accounts`). Returns the same
    channel if both are empty.
    """
    import grpc

    name, key = account
    if not name and not key:
        return channel
    shown = ((USER_KEY, name), (ACCESS_KEY_KEY, key))

    class Shows(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
        """Adds the user's name and access key to the metadata of each call."""

        def intercept_unary_unary(self, proceed: Callable[..., Any], details: object, request: object) -> Any:
            return proceed(_with_metadata(details, shown), request)

        def intercept_unary_stream(
            self, proceed: Callable[..., Any], details: object, request: object
        ) -> Any:
            return proceed(_with_metadata(details, shown), request)

    return grpc.intercept_channel(channel, Shows())


def account_of(environ: Mapping[str, str]) -> tuple[str, str]:
    """The user and access key that the environment names; empty if it names none."""
    return environ.get("VIPU_CLI_API_USER_ID", ""), environ.get("VIPU_CLI_API_ACCESS_KEY", "")


AdmitServer = Callable[[str, int], None]
"""Is told the address of a server and the id of the user who runs it: this user's if it proved to know the secret, else
what the kernel says. Raises StrangersServerError if calls must not go there."""


def why_unreachable(endpoint: str) -> str:
    """Why TLS may keep a server from answering, and what to do; empty if TLS is not the cause."""
    from podrun.core.tls import explain_connection_failure

    return explain_connection_failure(endpoint)


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
