"""Who may connect to a rank, and TLS for the connections between hosts.

**Admission.** A rank accepts a connection only if its other end proves that it knows the group's key. The side that
connects says whose connection it is and sends a random number. The listener answers with a proof of the key for that
number and text, and with a random number of its own; the other end then proves the same. So a stranger that listens at
a rank's port, or connects to it, learns nothing about the key, and an overheard exchange opens nothing later. The
listener serves all incoming connections at once: a stranger that connects and sends nothing, or something else, delays
no member.

**TLS.** Collectives send with scatter/gather calls, wait in the kernel and use one connection from two threads; TLS can
do none of this. So where TLS is asked for (`podrun.core.tls`), a rank reads and writes one end of a local socket pair,
and a thread of each connection carries the bytes over TLS. Everything that leaves the host is encrypted; what shares
memory on a host never leaves it. The price is one more copy and one thread for each connection.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import logging
import secrets
import select
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from podrun.collectives.group import within_limits
from podrun.core.quick_dataclass import dataclass
from podrun.core.tls import Credentials

_NUMBER, _PROOF = 16, 32
_HELLO = struct.Struct(f"<I??{_NUMBER}s")
_ANSWER = _NUMBER + _PROOF
MOST_STRANGERS = 256
"""Most connections without a proof beyond the number that members make; the oldest is closed then."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first bytes of a connection: whose it is, whether it carries data to that rank, and whether that rank is
    near.
    """

    rank: int
    outgoing: bool
    near: bool


class StrangerError(ConnectionError):
    """The listener at a rank's port does not know the group's key."""


class Introduction:
    """The side that connects. ``said`` goes first; `answered` then turns the listener's answer into the proof."""

    def __init__(self, hello: Hello, key: bytes) -> None:
        self._key = key
        self.said = _HELLO.pack(hello.rank, hello.outgoing, hello.near, secrets.token_bytes(_NUMBER))

    @staticmethod
    def answer_bytes() -> int:
        """How long the listener's answer is."""
        return _ANSWER

    def answered(self, answer: bytes) -> bytes:
        """What to send next. Raises StrangerError if the listener has not proved that it knows the key."""
        number, proof = answer[:_NUMBER], answer[_NUMBER:]
        if not hmac.compare_digest(proof, _proof(self._key, "listener", self.said, number)):
            raise StrangerError("what listens there does not know the group's key")
        return _proof(self._key, "member", self.said, number)


def _proof(key: bytes, who: str, said: bytes, number: bytes) -> bytes:
    """A proof that one side knows the key, for both sides' numbers and what the connection is."""
    return hmac.new(key, b"podrun link " + who.encode() + b"\n" + said + number, "sha256").digest()


@dataclass(slots=True)
class _Incoming:
    """A connection that has not proved anything. ``wanted``: the proof it has to send; empty before its hello."""

    received: bytes = b""
    hello: Hello | None = None
    wanted: bytes = b""


class Admission:
    """The incoming connections at a listener while a group connects. Close it when all members are connected.

    ``most``: most connections that members make; beyond them, the newest `MOST_STRANGERS` others are listened to.
    ``dress``: what becomes of an accepted connection (`podrun.collectives.connection_security`).
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        most: int,
        dress: Callable[[socket.socket], socket.socket] = lambda sock: sock,
    ) -> None:
        self._key, self._most, self._dress = key, most + MOST_STRANGERS, dress
        self._strangers: dict[socket.socket, _Incoming] = {}
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def admitted(self, seconds: float) -> Iterator[tuple[Hello, socket.socket]]:
        """The connections that have shown within ``seconds`` that they know the key. The caller owns their sockets."""
        for ready, _ in self._selector.select(seconds):
            if ready.fileobj is self._listener:
                self._accept()
                continue
            stranger = next((sock for sock in self._strangers if sock is ready.fileobj), None)
            hello = self._listen_to(stranger) if stranger is not None else None
            if stranger is not None and hello is not None:
                yield hello, stranger

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # the peer is gone already
            with within_limits("connection for a rank that joins"):
                sock = self._dress(self._listener.accept()[0])
            sock.setblocking(False)
            self._strangers[sock] = _Incoming()
            self._selector.register(sock, selectors.EVENT_READ)
            if len(self._strangers) > self._most:
                self._reject(next(iter(self._strangers)))

    def _listen_to(self, sock: socket.socket) -> Hello | None:
        """The hello of a connection, once its proof is complete and right."""
        stranger = self._strangers[sock]
        size = len(stranger.wanted) or _HELLO.size
        try:
            data = sock.recv(size - len(stranger.received))
            stranger.received += data
            if data and len(stranger.received) < size:
                return None
            if data and not stranger.wanted:
                self._answer(sock, stranger)
                return None
        except OSError:
            data = b""
        if not data or not hmac.compare_digest(stranger.received, stranger.wanted):
            self._reject(sock)
            return None
        self._selector.unregister(sock)
        del self._strangers[sock]
        return stranger.hello

    def _answer(self, sock: socket.socket, stranger: _Incoming) -> None:
        said, number = stranger.received, secrets.token_bytes(_NUMBER)
        rank, outgoing, near, _ = _HELLO.unpack(said)
        stranger.hello, stranger.received = Hello(rank, outgoing, near), b""
        stranger.wanted = _proof(self._key, "member", said, number)
        # A few bytes into an empty buffer: this does not wait.
        sock.sendall(number + _proof(self._key, "listener", said, number))

    def _reject(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._strangers[sock]
        sock.close()

    def close(self) -> None:
        """Close all connections that have proved nothing."""
        for sock in list(self._strangers):
            self._reject(sock)
        self._selector.close()


log = logging.getLogger("podrun.collectives")
HANDSHAKE_S = 10.0
"""Seconds for the handshake: who connects and says nothing keeps no thread for longer."""
FLUSH_S = 5.0
"""Seconds that bytes already written may take to leave when their rank has closed."""
_CHUNK = 1 << 18
_READ, _WRITE = select.POLLIN, select.POLLOUT
_running: weakref.WeakSet[_Relay] = weakref.WeakSet()


def dialled(sock: socket.socket, address: str, ours: Credentials | None) -> socket.socket:
    """A connection that this rank made to ``address``, encrypted if it has credentials. The result owns ``sock``."""
    return sock if ours is None else _relayed(sock, ours, ours.name_at(address))


def accepted(sock: socket.socket, ours: Credentials | None) -> socket.socket:
    """`dialled` for a connection that somebody made to this rank."""
    return sock if ours is None else _relayed(sock, ours, None)


def _relayed(sock: socket.socket, ours: Credentials, name: str | None) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end, inner = socket.socketpair()
    try:
        end.settimeout(sock.gettimeout())
        relay = _Relay(sock, inner, ours, name)
        relay.thread.start()
    except BaseException:
        for opened in (end, inner, sock):
            opened.close()
        raise
    _running.add(relay)
    return end


class _Relay:
    """Carries bytes between a rank's end of a socket pair and a TCP connection. ``name``: expected of the server."""

    def __init__(self, tcp: socket.socket, inner: socket.socket, ours: Credentials, name: str | None) -> None:
        import ssl

        self._tcp, self._inner = tcp, inner
        for sock in (tcp, inner):
            sock.setblocking(False)
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ours.server if name is None else ours.client
        self._tls: Any = context.wrap_bio(
            self._arrived, self._leaving, server_side=name is None, server_hostname=name
        )
        self._out, self._in = memoryview(b""), memoryview(b"")
        self._plain = memoryview(bytearray(2 * _CHUNK))
        self._open = self._ended = False  # the handshake is done; the other side sends no more
        self._ends: float | None = None
        """When what is left is given up; None while the rank may still write."""
        self.thread = threading.Thread(target=self._run, name="group-tls", daemon=True)

    def finish(self) -> None:
        """Send what the rank has written, because the process ends."""
        with contextlib.suppress(OSError):
            self._inner.shutdown(socket.SHUT_RD)
        self.thread.join(FLUSH_S + 1)

    def _run(self) -> None:
        import ssl

        begin = time.monotonic()
        try:
            while self._step(begin):
                pass
        except ssl.SSLError as error:
            said = getattr(error, "verify_message", "") or error.reason or str(error)
            level = (
                logging.INFO
                if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
                else logging.WARNING
            )
            log.log(level, "a connection of a group is refused or ended by TLS: %s", said)
            with contextlib.suppress(OSError):
                self._tcp.send(self._leaving.read())  # the alert that tells the other side
        except OSError:
            pass  # the other side is gone, which the rank sees as the end of its connection
        finally:
            self._inner.close()
            self._tcp.close()

    def _step(self, begin: float) -> bool:
        """Move what can be moved; whether there is more to come."""
        import ssl

        if not self._open:
            with contextlib.suppress(ssl.SSLWantReadError):
                self._tls.do_handshake()
                self._open = True
            if not self._open and time.monotonic() > begin + HANDSHAKE_S:
                return False
        if self._open and not self._in:
            self._decrypt()
        if not self._out:
            self._out = memoryview(self._leaving.read())
        self._push()
        if self._ends is not None and (not self._out or time.monotonic() > self._ends):
            return False
        if self._ended and not self._in:
            return False
        wanted = [(self._tcp, (0 if self._in else _READ) | (_WRITE if self._out else 0))]
        reads_rank = self._open and not self._out and self._ends is None
        wanted.append((self._inner, (_READ if reads_rank else 0) | (_WRITE if self._in else 0)))
        poll = select.poll()
        for sock, events in wanted:
            if events:
                poll.register(sock, events)
        waits = None if self._open and self._ends is None else 200
        ready = dict(poll.poll(waits))
        if ready.get(self._inner.fileno()):
            self._serve_rank(reads_rank)
        return self._serve_tcp() if ready.get(self._tcp.fileno()) else True

    def _push(self) -> None:
        """Write what can be written at once."""
        with contextlib.suppress(BlockingIOError):
            while self._in:
                self._in = self._in[self._inner.send(self._in) :]
        with contextlib.suppress(BlockingIOError):
            while self._out:
                self._out = self._out[self._tcp.send(self._out) :]

    def _serve_rank(self, reads: bool) -> None:
        import ssl

        if reads:
            try:
                data = self._inner.recv(_CHUNK)
            except BlockingIOError:
                return
            if data:
                self._tls.write(data)
                return
            self._ends = time.monotonic() + FLUSH_S
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()

    def _serve_tcp(self) -> bool:
        if not self._in:
            with contextlib.suppress(BlockingIOError):
                data = self._tcp.recv(_CHUNK)
                if not data:
                    return False
                self._arrived.write(data)
        return True

    def _decrypt(self) -> None:
        """Take what has arrived, for the rank."""
        import ssl

        done = 0
        try:
            while True:  # what arrives at once fits
                count = self._tls.read(_CHUNK, self._plain[done:])
                self._ended = not count
                if not count:
                    break
                done += count
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self._ended = True
        self._in = self._plain[:done]


@atexit.register
def _finish() -> None:
    for relay in list(_running):
        if relay.thread.is_alive():
            relay.finish()
