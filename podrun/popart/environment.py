"""What PopART's front end takes from the environment, read in one place, at the moment that it counts.

Everything else is handed a mapping: a device keeps the one it was made with, and `ours` stands for "the process's own".
"""

from __future__ import annotations

import os
from collections.abc import Mapping

CACHE_DIRECTORIES = ("POPART_CACHE_DIR", "POPXL_CACHE_DIR")
"""They name a cache directory and so switch the executable cache on."""

SHARED_CACHE = "POPDIST_EXECUTABLE_CACHE_PATH"
"""Names the executable cache that all instances of a run share."""

LOG_LEVEL, LOG_DESTINATION = "POPART_LOG_LEVEL", "POPART_LOG_DEST"


def ours(environ: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """``environ``, or the environment of this process if it is None."""
    return os.environ if environ is None else environ


def cache_directory(environ: Mapping[str, str] | None = None) -> str:
    """The directory of the executable cache that a user has asked for, or empty."""
    found = ours(environ)
    return next((found[name] for name in CACHE_DIRECTORIES if found.get(name)), "")


def shared_cache(environ: Mapping[str, str] | None = None) -> str:
    """The directory that ``podrun`` gives all instances of a run, or empty."""
    return ours(environ).get(SHARED_CACHE, "")


def dot_checks(environ: Mapping[str, str] | None = None) -> list[str]:
    """The points at which the graph is to be drawn: POPART_DOT_CHECKS, with colons between them."""
    return [name for name in ours(environ).get("POPART_DOT_CHECKS", "").split(":") if name]
