"""Uses of other libraries beyond their public API: one module for each library, `torch_compiler` beside torch's, and
`lean_imports` for several.

A use may enter with its purpose, what happens without it, and a test in ``tests/private_apis/`` that fails by name when
the library changes. The rooms that need one import it from here; no other module touches private names. Nothing goes on
from here: each function does one thing for its caller.
"""

from __future__ import annotations

import importlib
from typing import Any


def find_name(name: str) -> Any:
    """The module, class, function or value of a dotted name; None if the installed libraries do not have it."""
    module, parts = name, list[str]()
    while module:
        try:
            value: Any = importlib.import_module(module)
        except ImportError:
            module, _, last = module.rpartition(".")
            parts.insert(0, last)
            continue
        for part in parts:
            value = getattr(value, part, None)
        return value
    return None


def installed_version(package: str) -> str:
    """The version of an installed package, in words if it is not installed."""
    from importlib import metadata  # reads e-mail headers, which takes a command's start longer

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"
