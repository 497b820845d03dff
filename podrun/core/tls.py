"""TLS between hosts, where it is asked for: one certificate, its key and one authority for everything podrun connects.

`VARIABLES` name three PEM files. Where they are set, every server that podrun starts (V-IPU, machines) and every group
of collectives speaks TLS alone and asks who connects for a certificate of the same authority; every client shows its
own and checks the server's. What proves the *user* is `podrun.core.access`, over TLS too.

A server's certificate has to name the host as clients dial it (subjectAltName, DNS or IP). Addresses of this host
itself (loopback) are in no certificate: there a client expects the name of its own certificate. `load` holds the three
files against each other, in memory, before anything connects; `explain_connection_failure` asks a server that does
not answer what is
wrong. gRPC is not imported here.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import stat
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun.core.documents import read_bytes
from podrun.core.environment import TLS_VARIABLES, environment, pass_on
from podrun.core.errors import ConfigError, NotFoundError, UsageError
from podrun.core.quick_dataclass import dataclass

if TYPE_CHECKING:
    # Imported where it is used: processes of Triton's instances have a Python of their own, which need not fit the
    # host's
    # module, and use no TLS.
    import ssl

VARIABLES = TLS_VARIABLES
CERT, KEY, CA = VARIABLES
PROBE_S = 2.0
"""Seconds that `explain_connection_failure` waits for a server."""
_HOW = "podrun help security shows how to make certificates: TLS between hosts"
_NAME_CODES = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_EXPIRED, _NOT_YET, _PURPOSE = 10, 9, 26  # X509_V_ERR_*


@dataclass(frozen=True, slots=True)
class Credentials:
    """What this process shows and what it trusts. ``names``: the hosts that its certificate is for, its own first."""

    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    ca: bytes = field(repr=False)
    names: tuple[str, ...]
    server: ssl.SSLContext = field(repr=False)
    client: ssl.SSLContext = field(repr=False)

    def name_at(self, host: str) -> str:
        """The name that the certificate of a server dialled at ``host`` must have."""
        return self.names[0] if _is_loopback(host) else host


def credentials(environ: Mapping[str, str] | None = None) -> Credentials | None:
    """The credentials that the environment names; None if it names none. Raises UsageError or ConfigError for files
    that do not fit together, or that others may read.
    """
    env = environment(environ)
    named = {name: env.get(name, "") for name in VARIABLES}
    if not any(named.values()):
        return None
    if missing := [name for name, value in named.items() if not value]:
        raise UsageError(
            f"TLS needs a certificate, its key and the authority's certificate: {', '.join(missing)} is not set",
            hint=f"export {missing[0]}=FILE, or unset {', '.join(n for n, v in named.items() if v)}. {_HOW}",
        )
    cert, key, ca = (Path(value) for value in named.values())
    return _load(cert, key, ca, (_stamp(cert), _stamp(key), _stamp(ca)))


def use(cert: str | None, key: str | None, ca: str | None) -> None:
    """Let this process and its children use these files (options of a command). None leaves a variable unchanged."""
    for name, value in zip(VARIABLES, (cert, key, ca), strict=True):
        if value:
            pass_on(name, str(Path(value).absolute()))
    credentials()


def _stamp(path: Path) -> Any:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


@functools.lru_cache(maxsize=8)
def _load(cert: Path, key: Path, ca: Path, stamps: object) -> Credentials:
    import ssl

    cert_data, key_data, ca_data = _read(cert, CERT), _read(key, KEY), _read(ca, CA)
    if stat.S_IMODE(key.stat().st_mode) & 0o007:
        raise UsageError(f"the key in {key} may be read by every user", hint=f"chmod 600 {key}")
    try:
        server, client = _context(ssl.PROTOCOL_TLS_SERVER), _context(ssl.PROTOCOL_TLS_CLIENT)
        for context in (server, client):
            context.load_verify_locations(ca)
            context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{cert}, {key} and {ca} cannot be used for TLS: {error.reason or error}",
            hint=f"The key must be that of the certificate, without a password, and all files PEM. {_HOW}",
        ) from error
    names = _names(server, client, cert, ca)
    client.check_hostname = True
    return Credentials(cert_data, key_data, ca_data, names, server, client)


def _no_password() -> str:
    return ""  # OpenSSL would ask at the terminal.


def _read(path: Path, variable: str) -> bytes:
    try:
        return read_bytes(path, hint=f"{variable} names it. {_HOW}")
    except NotFoundError as error:
        raise ConfigError(f"{variable}: {error.message}", hint=error.hint) from error


def _context(kind: int) -> ssl.SSLContext:
    import ssl

    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if kind == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # Nobody resumes sessions; unread tickets would stay in one-way connections.
    return context


def _names(server: ssl.SSLContext, client: ssl.SSLContext, cert: Path, ca: Path) -> tuple[str, ...]:
    """The names in our own certificate, after both sides of a handshake in memory have accepted it."""
    import ssl

    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    try:
        for end in (*ends, *ends):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"the certificate in {cert} {_what(error, str(ca))}", hint=_HOW) from error
    alternative_names: Any = (ends[0].getpeercert() or {}).get("subjectAltName", ())
    names = tuple(str(value) for kind, value in alternative_names if kind in ("DNS", "IP Address"))
    if not names:
        raise ConfigError(
            f"the certificate in {cert} names no host", hint=f"It needs a subjectAltName (DNS or IP). {_HOW}"
        )
    return names


def _what(error: ssl.SSLCertVerificationError, ca: str) -> str:
    match error.verify_code:
        case code if code == _EXPIRED:
            return "has expired: make a new one"
        case code if code == _NOT_YET:
            return "is not valid yet: the clocks of the hosts differ, or it is for later"
        case code if code == _PURPOSE:
            return "is not for servers and clients both: leave out extendedKeyUsage, or name serverAuth and clientAuth"
        case code if code in _NAME_CODES:
            return "is for other names: make one with the address that is dialled as subjectAltName"
        case _:
            return f"is not of the authority in {ca} ({error.verify_message})"


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[host]:port``."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


# --- what is wrong with a connection that was not made --------------------------------------------------------


def explain_connection_failure(endpoint: str, environ: Mapping[str, str] | None = None) -> str:
    """Why no connection to a server could be made, as far as TLS is the cause, and what to do; empty if it is not."""
    ours = credentials(environ)
    try:
        with socket.create_connection(split_endpoint(endpoint), timeout=PROBE_S) as sock:
            return _plain_client(sock, endpoint) if ours is None else _tls_client(sock, endpoint, ours)
    except (
        OSError,
        ValueError,
        ImportError,
    ):  # A process of Triton's may have no ssl: then TLS is not the cause.
        return ""


def _plain_client(sock: socket.socket, endpoint: str) -> str:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        context.wrap_socket(sock).close()
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            return ""
    except OSError:
        return ""
    return (
        f"the server at {endpoint} speaks TLS, and this process has no certificate: set {', '.join(VARIABLES)} "
        f"({_HOW})"
    )


def _tls_client(sock: socket.socket, endpoint: str, ours: Credentials) -> str:
    import ssl

    ours.client.set_alpn_protocols(["h2"])
    name = ours.name_at(split_endpoint(endpoint)[0])
    try:
        with ours.client.wrap_socket(sock, server_hostname=name) as wrapped:
            with contextlib.suppress(TimeoutError):
                wrapped.recv(1)  # A server that refuses our certificate says so after the handshake.
            return ""
    except ssl.SSLCertVerificationError as error:
        what = _what(error, f"${CA}")
        expected = f" (expected: {name})" if error.verify_code in _NAME_CODES else ""
        return f"the certificate of the server at {endpoint} {what}{expected}. {_HOW}"
    except ssl.SSLError as error:
        reason = error.reason or ""
        if "ALERT" in reason:
            return (
                f"the server at {endpoint} does not take this process's certificate ({reason}): it has to be of the "
                f"authority that the server trusts, and valid. {_HOW}"
            )
    except OSError:
        pass
    return (
        f"the server at {endpoint} does not speak TLS: start it with the same {', '.join(VARIABLES)} "
        "(vipu-server --tls-cert, --tls-key, --tls-ca), or unset them here"
    )
