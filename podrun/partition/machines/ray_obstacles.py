"""What keeps Ray from starting on this host: limits, locales, paths, a package that is gone; and what to type then."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from podrun.core.errors import MissingPackageError, ServiceError
from podrun.partition.host.discovery import (
    scratch_directory,
    scratch_parent,
)
from podrun.partition.host.guardian import SCRATCH_PREFIX

OBJECT_STORE_BYTES = 80 << 20
"""Ray's smallest usual object store: podrun moves tensors through shared memory of its own."""
MAX_SOCKET_PATH = 107
FEW_FILES = 256
"""A lower limit of open files is the likely cause if Ray does not start (it started with 64, not with 40)."""
RAY_DIRECTORY = "r"
"""Ray's directory has mode 0777; it lies in a scratch directory of mode 0700."""
_SOMEWHERE = "8.8.8.8"
"""An address of another network; nothing is sent there."""
_NEAR_SECONDS = 2.0
"""Longest wait for a connection to this host."""
SESSION_SUFFIX = len(f"/{RAY_DIRECTORY}/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store")


def is_read_only(path: str) -> bool:
    """True iff there is a folder at ``path`` that this process may not write to."""
    return os.path.isdir(path) and not os.access(path, os.W_OK)


def check_file_size() -> None:
    """Raise ServiceError where files may not be as large as Ray's object store: it would wait a minute for itself."""
    import resource

    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= most < OBJECT_STORE_BYTES:
        raise ServiceError(
            f"a file may have {most} bytes here (ulimit -f); machines need {OBJECT_STORE_BYTES}",
            hint="Type ulimit -f unlimited and try again, or run the script without podrun.",
        )


def check_paths(paths: Sequence[str]) -> None:
    """Raise ServiceError for a path with characters that this locale lacks: Ray passes such paths on as UTF-8."""
    for path in paths:
        try:
            path.encode("utf-8")
        except UnicodeEncodeError:
            shown = os.fsencode(path).decode("utf-8", "backslashreplace")
            raise ServiceError(
                f"the locale of this terminal ({sys.getfilesystemencoding()}) cannot write the path {shown}",
                hint="Type export PYTHONUTF8=1 (or LC_ALL=C.UTF-8) and try again.",
            ) from None


def what_to_try() -> str:
    """The most probable reason why Ray does not start, and what to type; Ray itself says little."""
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < FEW_FILES:
        return f"Only {files} files may be open at a time; type ulimit -n 4096 and try again."
    return "Free some memory or processes and try again; RAY_BACKEND_LOG_LEVEL=debug says more."


def check_installed() -> None:
    """Raise MissingPackageError if Ray is gone, although podrun is installed with it (``pip install --no-deps``)."""
    if importlib.util.find_spec("ray") is None:
        raise MissingPackageError(
            "Ray is not installed, and podrun and vipu-server start machine processes with it",
            hint="Install it: pip install ray (in a checkout: pip install -c constraints.txt .). "
            "Without Ray, in one process: podrun compat PROGRAM",
        )


def listens_on_loopback_only(address: str) -> bool:
    """True iff ``address`` (``HOST:PORT``) is a loopback address and nobody answers at that port of this host's own
    address, which Ray puts in its place; Ray would ask there for ever."""
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost", "[::1]"):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        try:
            outward.connect((_SOMEWHERE, 1))  # Chooses the address; sends nothing.
        except OSError:
            return True  # The host has no other address.
        own = outward.getsockname()[0]
    try:
        with socket.create_connection((own, int(port)), timeout=_NEAR_SECONDS):
            return False
    except OSError:
        return True


def short_scratch(announce: Callable[[str], None]) -> Path:
    """A scratch directory whose path leaves room for Ray's sockets, whose length Linux limits."""
    longest = MAX_SOCKET_PATH - len(SCRATCH_PREFIX) - 9 - SESSION_SUFFIX - 1
    return scratch_directory(announce, scratch_parent(longest))
