"""The environment variables that PopART's own functions read."""

from __future__ import annotations

from collections.abc import Mapping

from podrun.runtime.environment import ours

CACHE_DIRECTORIES = ("POPART_CACHE_DIR", "POPXL_CACHE_DIR")
"""Variables that name a cache directory and so switch the executable cache on."""

LOG_LEVEL, LOG_DESTINATION = "POPART_LOG_LEVEL", "POPART_LOG_DEST"


def cache_directory(environ: Mapping[str, str] | None = None) -> str:
    """The directory of the executable cache that the user's variables name, or empty."""
    found = ours(environ)
    return next((found[name] for name in CACHE_DIRECTORIES if found.get(name)), "")


def dot_checks(environ: Mapping[str, str] | None = None) -> list[str]:
    """The points at which the graph is to be drawn: POPART_DOT_CHECKS, with colons between them."""
    return [name for name in ours(environ).get("POPART_DOT_CHECKS", "").split(":") if name]
