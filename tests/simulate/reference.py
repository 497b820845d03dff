"""Where reference logs are: in the folder that PODRUN_TRACES names; tests without it are skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def trace_file(name: str) -> Path:
    """A reference log; skips the test if there is none."""
    folder = os.environ.get("PODRUN_TRACES", "")
    path = Path(folder or "/nowhere") / name
    if not path.is_file():
        pytest.skip(f"PODRUN_TRACES names no folder with {name}")
    return path
