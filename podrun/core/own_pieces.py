"""Which numerical pieces podrun itself has exported, for this user.

A piece is StableHLO, which native code reads: bytes that were changed by mistake or by intent can end the process that
reads them. Pieces that podrun exported are read as they are; all others are first read by a process of their own
(`podrun.device.xla.vetting`). A piece is known by the SHA-256 of its bytes, in this process and, as an empty file, in
the user's cache directory, so that a program from a cache or a file on disk is known in the next process too.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from podrun.core.environment import cache_directory, environment

FOLDER = "own-pieces"
_known: set[bytes] = set()


def _digest(stablehlo: bytes) -> bytes:
    return hashlib.sha256(stablehlo).digest()


def remember(stablehlo: bytes) -> None:
    """The piece may be read in this process."""
    _known.add(_digest(stablehlo))


def note(stablehlo: bytes, environ: Mapping[str, str] | None = None) -> None:
    """podrun has exported the piece: it may be read in this process and in later ones of this user."""
    digest = _digest(stablehlo)
    if digest in _known:
        return
    _known.add(digest)
    path = _file(digest, environ)
    if path is not None:
        with contextlib.suppress(OSError):  # A cache that cannot be written costs a second look, later.
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)


def is_own(stablehlo: bytes, environ: Mapping[str, str] | None = None) -> bool:
    """Whether the piece may be read in this process."""
    digest = _digest(stablehlo)
    if digest in _known:
        return True
    path = _file(digest, environ)
    if path is None or not path.exists():
        return False
    _known.add(digest)
    return True


def are_own(pieces: Iterable[bytes]) -> bool:
    """Whether all of them may."""
    return all(map(is_own, pieces))


def _file(digest: bytes, environ: Mapping[str, str] | None) -> Path | None:
    base = cache_directory(environment(environ))
    return None if base is None else base / FOLDER / digest.hex()
