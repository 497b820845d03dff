"""Who calls and who answers: proofs that both sides know the same secret, which neither side sends.

Every user has one secret, the file ``token`` of the runtime directory (`podrun.core.access`). A caller computes a
*proof* for each call: an HMAC-SHA256 with the secret over the called method, the address that the caller dialled, the
time and a random number. So a proof is of no use for another method, at another server, later, or a second time. The
server's answer is an HMAC over the proof, which only a server that knows the secret can compute: a server of somebody
else learns nothing from a proof that it could use, and cannot answer it.

What a proof does not cover is the content of the call.

On one host the kernel knows who is at the other end of a connection: `user_of_peer` asks it for the user id. That is
how a server that is shared with other users tells them apart.
"""

from __future__ import annotations

import contextlib
import hmac
import pwd
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

WINDOW_S = 300.0
"""Seconds by which the clocks of two hosts may differ; a proof is refused when it is older or newer."""
_FIELDS = 5
_LONGEST = 512
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
    """An invalid proof; the message tells the caller why."""


def _mac(secret: str, *parts: str) -> str:
    return hmac.new(secret.encode("ascii"), "\n".join(parts).encode(), "sha256").hexdigest()


def make_proof(secret: str, method: str, where: str, now: float | None = None) -> Proof:
    """A proof for one call of ``method`` at the server ``where`` (host:port, as dialled)."""
    moment, nonce = str(int((time.time() if now is None else now) * 1000)), secrets.token_hex(16)
    mac = _mac(secret, "podrun call 1", method, where, moment, nonce)
    return Proof(f"1 {where} {moment} {nonce} {mac}", _mac(secret, "podrun answer 1", mac))


class ProofChecker:
    """The server's side of proofs. ``is_here(host, port)``: whether that is an address of this server. Thread-safe."""

    def __init__(
        self, secret: str, is_here: Callable[[str, int], bool], clock: Callable[[], float] = time.time
    ) -> None:
        self._secret, self._is_here, self._clock = secret, is_here, clock
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}
        self._oldest = 0.0

    def check(self, text: str, method: str) -> str:
        """The answer to a proof. Raises RefusedProof if it is wrong, too old, or was used before."""
        parts = text.split(" ") if len(text) <= _LONGEST else []
        if len(parts) != _FIELDS or parts[0] != "1" or not (parts[2].isdecimal() and text.isascii()):
            raise RefusedProof("the call's proof is malformed")
        _, where, moment, nonce, mac = parts
        if not hmac.compare_digest(mac, _mac(self._secret, "podrun call 1", method, where, moment, nonce)):
            raise RefusedProof("the caller does not know the secret of the user who runs this server")
        host, _, port = where.rpartition(":")
        if not port.isdecimal() or not self._is_here(host.strip("[]"), int(port)):
            raise RefusedProof(f"the call was made for another server, {where}")
        age = self._clock() - int(moment) / 1000
        if abs(age) > WINDOW_S:
            raise RefusedProof(
                f"the call is {age:.0f} s old: the clocks of the two hosts differ, or it is a replay"
            )
        self._use_once(nonce)
        return _mac(self._secret, "podrun answer 1", mac)

    def _use_once(self, nonce: str) -> None:
        now = self._clock()
        with self._lock:
            if now > self._oldest + WINDOW_S:
                self._seen = {n: t for n, t in self._seen.items() if t > now - 2 * WINDOW_S}
                self._oldest = now
            if nonce in self._seen:
                raise RefusedProof("the call repeats an earlier one")
            self._seen[nonce] = now


class OwnAddresses:
    """Whether an address that a caller dialled leads to this server, which listens at ``host`` and ``port``."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._known: dict[str, bool] = {}

    def __call__(self, host: str, port: int) -> bool:
        """See the class."""
        if port != self._port:
            return False
        if host == self._host:
            return True
        if host not in self._known and len(self._known) < 64:
            self._known[host] = _is_of_this_host(host)
        return self._known.get(host, False)


def _is_of_this_host(host: str) -> bool:
    """Whether a name or address belongs to this host, that is, whether a socket can be bound to it."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    return False


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


def _overflow_uid() -> int:
    """The user id that stands for all users of other user namespaces."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 65534
