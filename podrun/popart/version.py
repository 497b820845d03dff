"""The version this front end answers for."""

from __future__ import annotations

from podrun import __version__

POPART_VERSION = "3.4.0"
"""The release whose API this is (SDK 3.4)."""


def versionString() -> str:
    """PopART's version with podrun's behind it."""
    return f"{POPART_VERSION}+podrun.{__version__}"


def versionNumber() -> str:
    """PopART's version number."""
    return POPART_VERSION


def packageHash() -> str:
    """What stands for the SDK's package hash."""
    return f"podrun-{__version__}"
