"""TLS for a group's connections: a socket that a thread encrypts.

Collectives send with scatter/gather calls, wait in the kernel and use one connection from two threads, none of which
TLS can do. So where TLS is asked for (`podrun.core.tls`), what a rank reads and writes is one end of a local socket
pair, and a thread of each connection carries its bytes over TLS. What leaves the host is encrypted, all of it; what
shares memory on a host never leaves it. Costs one more copy and a thread's time for each connection.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import select
import socket
import ssl
import threading
import time
import weakref
from typing import Any

from podrun.core.tls import Credentials

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
        for each in (end, inner, sock):
            each.close()
        raise
    _running.add(relay)
    return end


class _Relay:
    """Carries bytes between a rank's end of a socket pair and a TCP connection. ``name``: expected of the server."""

    def __init__(self, tcp: socket.socket, inner: socket.socket, ours: Credentials, name: str | None) -> None:
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
