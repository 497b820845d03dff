"""Builds `podrun.collectives._meeting` when podrun is installed or packed; without a C compiler there is none.

A hook of hatchling (``[tool.hatch.build.hooks.custom]`` in ``pyproject.toml``); setuptools finds the compiler and
its options.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "podrun/collectives/_meeting.c"


class ExtensionHook(BuildHookInterface):  # type: ignore[type-arg, misc]
    """Compiles the one C file beside its source, and says so to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        built = compile_extension(Path(self.root), self.app.display_warning)
        if built is not None:
            build_data["artifacts"].append(f"/{built.as_posix()}")
            build_data["pure_python"] = False
            build_data["infer_tag"] = True


def compile_extension(root: Path, warn: Any) -> Path | None:
    """Where the module was built, relative to ``root``; None, with a warning, if that did not succeed."""
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    # No contraction: a fused multiply-add would round otherwise than NumPy. No -march: the module runs on any CPU.
    options = ["-std=gnu11", "-O3", "-ffp-contract=off"]
    extension = Extension("podrun.collectives._meeting", [str(root / SOURCE)], extra_compile_args=options)
    command = build_ext(Distribution({"name": "podrun", "ext_modules": [extension]}))
    with tempfile.TemporaryDirectory() as scratch:
        command.build_lib, command.build_temp = str(root), scratch
        try:
            command.ensure_finalized()
            command.run()
        except Exception as error:  # whatever a compiler, or its absence, can do
            warn(f"podrun is installed without its C module, collectives will be slower: {error}")
            return None
    return Path(command.get_ext_fullpath("podrun.collectives._meeting")).relative_to(root)
