"""Who calls and who answers: proofs that both sides know the same secret, which neither side sends.

Every user has one secret, the file ``token`` of the runtime directory (`podrun.core.access`). A client and a server
begin with a *greeting*: the client says the address that it dials and a random number, the server replies with a random
number of its own and an HMAC-SHA256 over all three, which only a server that knows the secret can compute, and which it
computes only for addresses at which it listens itself. The client sends nothing else before it has checked that. So
whoever listens at another address and passes the greeting on gets no reply to show, and the client's proofs never reach
it.

Then each call carries a *proof*: an HMAC over the called method, the digest of the request and the call's number, with
a key that secret, address and both random numbers give. It holds for that call alone, once, at that server, as long as
the server knows its random number (`NONCE_S`); clocks play no part. The server's answer is an HMAC over the proof. What
is sent in a stream after its beginning is not covered, nor what the server replies; TLS covers both.

On one host the kernel knows who is at the other end of a connection: `user_of_peer` asks it for the user id. That is
how a server that is shared with other users tells them apart, and how they know whose server it is.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import hashlib
import hmac
import itertools
import os
import pwd
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import field
from pathlib import Path

from podrun.core.quick_dataclass import dataclass

NONCE_S = 600.0
"""Seconds after which a server takes another random number; it takes proofs for the one before, too."""
FRESH_S = 300.0
"""Seconds for which a client goes on with one greeting."""
WINDOW = 1024
"""Calls of one session that may overtake each other."""
_FIELDS = 6
_LONGEST = 512
_VERSION = "2"
_SOCK_DIAG = 4
_BY_FAMILY = 20
_ERROR_MESSAGE = 2
_ESTABLISHED = 1


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call. ``own``: it proved that it knows the secret of the user who runs the server. ``uid``: its user
    id on this host.
    """

    uid: int
    own: bool


@dataclass(frozen=True, slots=True)
class Proof:
    """A caller's proof: ``text`` is what it sends, ``answer`` what the server must send back."""

    text: str
    answer: str


class RefusedProof(Exception):
    """An invalid proof; the message tells the caller why. ``again``: another greeting may help."""

    def __init__(self, reason: str, *, again: bool = False) -> None:
        super().__init__(reason)
        self.again = again


def _mac(secret: str, *parts: str) -> str:
    return hmac.new(secret.encode("ascii"), "\n".join(parts).encode(), "sha256").hexdigest()


def _session_key(secret: str, where: str, client: str, server: str) -> str:
    return _mac(secret, "podrun session 2", where, client, server)


def _call_mac(key: str, method: str, request: bytes, number: str) -> str:
    return _mac(key, "call", method, hashlib.sha256(request).hexdigest(), number)


class Greeting:
    """A client's first words to the server at ``where``: host and port, the host as a number."""

    def __init__(self, secret: str, where: str) -> None:
        self._secret, self._where, self._nonce = secret, where, secrets.token_hex(16)
        self.text = f"{_VERSION} {where} {self._nonce}"

    def session(self, reply: str) -> ProvenSession | None:
        """The session that a server's reply opens; None if the server has not proved that it knows the secret."""
        server, _, mac = reply.partition(" ")
        if not reply.isascii() or len(reply) > _LONGEST:
            return None
        key = _session_key(self._secret, self._where, self._nonce, server)
        if not hmac.compare_digest(mac, _mac(key, "server")):
            return None
        return ProvenSession(key, f"{_VERSION} {self._where} {server} {self._nonce}")


class ProvenSession:
    """A client's session with a server that proved itself. Thread-safe."""

    def __init__(self, key: str, names: str) -> None:
        self._key, self._names = key, names
        self._numbers = itertools.count(1)

    def proof(self, method: str, request: bytes) -> Proof:
        """A proof for one call. ``request``: as it is sent; empty for a stream of requests."""
        number = str(next(self._numbers))
        mac = _call_mac(self._key, method, request, number)
        return Proof(f"{self._names} {number} {mac}", _mac(self._key, "answer", mac))


@dataclass(slots=True)
class _UsedNumbers:
    """The numbers of a session's calls: each counts once."""

    key: str
    highest: int = 0
    used: set[int] = field(default_factory=set)

    def use(self, number: int) -> bool:
        """Whether the number is new."""
        if number <= self.highest - WINDOW or number in self.used:
            return False
        self.used.add(number)
        if number > self.highest:
            self.highest = number
            if len(self.used) > 2 * WINDOW:
                self.used = {n for n in self.used if n > number - WINDOW}
        return True


class ProofChecker:
    """The server's side. ``is_here(host, port)``: whether the server listens at that address. Thread-safe.

    It keeps nothing of a client before it has proved that it knows the secret, and of others for at most twice
    `NONCE_S`.
    """

    def __init__(
        self, secret: str, is_here: Callable[[str, int], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._secret, self._is_here, self._clock = secret, is_here, clock
        self._lock = threading.Lock()
        self._sessions: dict[str, dict[tuple[str, str], _UsedNumbers]] = {}
        self._since = 0.0

    def greet(self, text: str) -> str:
        """The reply to a greeting. Raises RefusedProof if it is for another server."""
        parts = text.split(" ") if len(text) <= _LONGEST and text.isascii() else []
        if len(parts) != 3 or parts[0] != _VERSION:
            raise RefusedProof("the greeting is malformed, or of another release")
        _, where, client = parts
        self._check_address(where)
        server = self._nonce()
        return f"{server} {_mac(_session_key(self._secret, where, client, server), 'server')}"

    def check(self, text: str, method: str, request: bytes = b"") -> str:
        """The answer to a proof. Raises RefusedProof if it is wrong, too old, or was used before."""
        parts = text.split(" ") if len(text) <= _LONGEST and text.isascii() else []
        if len(parts) != _FIELDS or parts[0] != _VERSION or not parts[4].isdecimal() or len(parts[4]) > 18:
            raise RefusedProof("the call's proof is malformed, or of another release")
        _, where, server, client, number, mac = parts
        self._check_address(where)
        self._nonce()
        with self._lock:
            known = self._sessions.get(server)
            session = None if known is None else known.get((where, client))
        if known is None:
            raise RefusedProof(
                "the call belongs to a greeting that this server does not remember", again=True
            )
        key = _session_key(self._secret, where, client, server) if session is None else session.key
        if not hmac.compare_digest(mac, _call_mac(key, method, request, number)):
            raise RefusedProof("the caller does not know the secret of the user who runs this server")
        with self._lock:
            if not known.setdefault((where, client), _UsedNumbers(key)).use(int(number)):
                raise RefusedProof("the call repeats an earlier one")
        return _mac(key, "answer", mac)

    def _check_address(self, where: str) -> None:
        host, _, port = where.rpartition(":")
        if not port.isdecimal() or not self._is_here(host.strip("[]"), int(port)):
            raise RefusedProof(f"the call was made for another server, {where}")

    def _nonce(self) -> str:
        """This server's random number now; forgets the one before the last."""
        now = self._clock()
        with self._lock:
            if not self._sessions or now >= self._since + NONCE_S:
                missed = now >= self._since + 2 * NONCE_S
                last = [] if missed else list(self._sessions.items())[-1:]
                self._sessions = dict([*last, (secrets.token_hex(16), {})])
                self._since = now
            return next(reversed(self._sessions))


ANY_HOST = ("", "*", "0.0.0.0", "::")
"""Where a server listens that listens at all addresses of its host."""


class OwnAddresses:
    """Whether an address that a client dials is one at which a server listens, which was told to listen at ``host`` and
    ``port``. Another address of the same host does not count, since another user's program may listen there.
    """

    def __init__(self, host: str, port: int) -> None:
        self._port, self._any = port, host in ANY_HOST
        self.hosts = ("*",) if self._any else tuple(numeric_hosts(host)) or (host,)
        self._known: dict[str, bool] = {}

    def __call__(self, host: str, port: int) -> bool:
        """See the class."""
        if port != self._port:
            return False
        if not self._any:
            return host in self.hosts
        if host not in self._known and len(self._known) < 64:
            self._known[host] = _is_of_this_host(host)
        return self._known.get(host, False)


def numeric_hosts(host: str) -> list[str]:
    """The addresses of a host, as numbers, in the order in which they are to be tried; empty if it has none."""
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in answers))


def connect_tcp(host: str, port: int, timeout: float) -> socket.socket:
    """A connection to a host and port. Raises OSError if nobody takes it, and for a name that no host can have."""
    try:
        return socket.create_connection((host, port), timeout=timeout)
    except UnicodeError as error:  # Of the form that names have in DNS.
        raise OSError(errno.EINVAL, "no name of a host") from error


def address_text(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_of_this_host(host: str) -> bool:
    """Whether an address belongs to this host, that is, whether a socket can be bound to it."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(
            host, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        ):
            with socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    return False


def user_of_server(host: str, port: int, patience: float = 1.0) -> int | None:
    """The user id of the process that answers at an address of this host. None if the kernel does not know it: the
    address is of another host, nobody answers, or within ``patience`` seconds nobody takes the connection."""
    if not _is_of_this_host(host):
        return None
    end = time.monotonic() + patience
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=patience) as connection:
        here = connection.getsockname()
        while (uid := user_of_peer((host, port), (here[0], here[1]))) is None and time.monotonic() < end:
            time.sleep(0.001)  # A connection is nobody's before the server has taken it.
        return uid
    return None


def user_of_peer(peer: tuple[str, int], here: tuple[str, int]) -> int | None:
    """The user id of the process at the other end of a TCP connection on this host, as the kernel knows it.

    ``peer`` and ``here`` are address and port of the two ends. None if the kernel knows no such connection, does not
    allow the question, or the user belongs to another user namespace.
    """
    try:
        family = socket.AF_INET6 if ":" in peer[0] else socket.AF_INET
        ends = [socket.inet_pton(family, address).ljust(16, b"\0") for address in (peer[0], here[0])]
        ports = struct.pack("!HH", peer[1], here[1])
        wanted = ports + b"".join(ends) + struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
        request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + wanted
        header = struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, 1, 1, 0)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
            kernel.settimeout(1.0)
            kernel.sendto(header + request, (0, 0))
            reply = kernel.recv(8192)
    except (OSError, struct.error):
        return None
    kind = struct.unpack_from("=H", reply, 4)[0]
    # The addresses in the reply may be those of an IPv6 socket that carries IPv4.
    if kind == _ERROR_MESSAGE or len(reply) < 16 + 72 or reply[20:24] != ports:
        return None
    uid, inode = struct.unpack_from("=II", reply, 16 + 64)
    # A connection that is being closed has no owner any more, and the kernel then says user 0.
    if reply[17] != _ESTABLISHED or inode == 0 or uid == _overflow_uid():
        return None
    return int(uid)


def user_name(uid: int) -> str:
    """The name of a user, or the number of a user without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def own_user_name() -> str:
    """The name under which this process's user is logged in, or the number of a user without a name (containers)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _overflow_uid() -> int:
    """The user id that stands for all users of other user namespaces."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 65534
