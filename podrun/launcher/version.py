"""``--version`` in its three formats."""

from __future__ import annotations

import json
import platform
from importlib import metadata

from podrun import __version__

DEPENDENCIES = ("click", "grpcio", "jax", "jaxlib", "numpy", "onnx", "protobuf", "pydantic", "ray", "rich")


def version_text(form: str) -> str:
    """``text``: podrun's own; ``full-text`` and ``full-json``: with Python and what podrun depends on."""
    if form == "text":
        return f"podrun {__version__}\n"
    versions = {"podrun": __version__, "python": platform.python_version()}
    for name in DEPENDENCIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    if form == "full-json":
        return json.dumps(versions, indent=2) + "\n"
    return "".join(f"{name} {version}\n" for name, version in versions.items())
