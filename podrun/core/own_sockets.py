"""Unix sockets that only their user reaches: files in a folder of mode 0700, whose other end the kernel names.

A socket of the abstract namespace, or a TCP port, is open to every user of the host, and ``/proc/net`` shows both. A
socket in a folder that only one user enters is not: who listens there was able to make a file in it, and who connects
was able to enter it. `peer_uid` tells each side the user at the other end all the same.

Folders are opened before they are checked and are then used by their descriptor, so that a path of any length will do
and nobody exchanges a folder between the check and the use.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from podrun.core.environment import runtime_directory
from podrun.core.errors import UsageError

FOLDER = "sockets"
LONGEST_PATH = 100
"""Bytes of a path that every Unix socket can have."""
STALE_S = 1.0
"""Age in seconds from which a socket at which nobody listens is removed: a younger one may be about to listen."""
_CREDENTIALS = struct.Struct("iII")


def socket_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The folder for this user's sockets, in the runtime directory. Raises UsageError or OSError if it cannot be
    used.
    """
    path = runtime_directory(environ) / FOLDER
    path.mkdir(mode=0o700, exist_ok=True)
    return path


@contextlib.contextmanager
def reached_by(path: Path) -> Iterator[str]:
    """A short name of a socket in an own folder, valid inside the context. Raises PermissionError if its folder is a
    link, another user's, or open to others, and OSError if there is none."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(errno.EACCES, "the folder is not this user's alone", str(path.parent))
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def server_socket(folder: Path, token: str, address: str) -> Path | None:
    """Where a server of this user that listens at ``address`` (host:port, the host as a number or ``*``) has its Unix
    socket; None if the path is too long for gRPC.

    The name depends on the secret, on this start of the host and on its network namespace: an address means another
    server in another namespace, and a folder may lie on a disk that hosts share.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    network = os.stat("/proc/self/ns/net").st_ino
    words = "\n".join(("podrun socket 1", boot, str(network), address)).encode()
    name = hmac.new(token.encode("ascii"), words, "sha256").hexdigest()[:32]
    path = folder / name
    return path if len(os.fsencode(path)) < LONGEST_PATH else None


def peer_uid(connection: socket.socket) -> int:
    """The user id at the other end of a connected Unix socket: of who connected, or of who listened."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def listens_for_me(path: Path, kind: int = socket.SOCK_STREAM) -> bool:
    """Whether this user, or root, listens at a socket in an own folder."""
    try:
        with reached_by(path) as name, socket.socket(socket.AF_UNIX, kind) as probe:
            probe.settimeout(1.0)
            probe.connect(name)
            return peer_uid(probe) in (os.getuid(), 0)
    except OSError:
        return False


def remove_stale_sockets(environ: Mapping[str, str] | None = None, now: float | None = None) -> None:
    """Remove sockets of processes that have ended: those at which nobody listens. No-op where there is no folder."""
    moment = time.time() if now is None else now
    with contextlib.suppress(OSError, UsageError):
        _remove_stale(socket_folder(environ), moment)


def remove_server_socket(token: str, address: str) -> None:
    """Remove the socket of a server of this user that is about to be killed."""
    with contextlib.suppress(OSError, UsageError):
        path = server_socket(socket_folder(), token, address)
        if path is not None:
            path.unlink()


def _remove_stale(folder: Path, moment: float) -> None:
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISSOCK(status.st_mode) and moment - status.st_ctime > STALE_S and _refuses(path):
                path.unlink()


def _refuses(path: Path) -> bool:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with reached_by(path) as name, socket.socket(socket.AF_UNIX, kind) as probe:
            probe.settimeout(0)
            code = probe.connect_ex(name)
            if code not in (errno.ECONNREFUSED, errno.EPROTOTYPE):
                return False
    return True
