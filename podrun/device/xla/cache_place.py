"""Where compiled pieces are kept, if they can be."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

from podrun.device.xla.pieces import cache_directory

_log = logging.getLogger(__name__)
_PROBE_BYTES = 1 << 16


def writable_cache(environ: Mapping[str, str]) -> Path | None:
    """`pieces.cache_directory`, or None if nothing can be written there (a read-only home, a full disk): every
    process then compiles for itself.
    """
    directory = cache_directory(environ)
    try:
        (directory / "xla").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory / "xla") as file:
            file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        _log.warning(
            "compiled programs cannot be kept in %s: %s (export PODRUN_CACHE_DIR=DIRECTORY)",
            directory,
            error.strerror,
        )
        return None
    return directory
