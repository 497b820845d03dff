"""Builds podrun's C modules when it is installed or packed; without a C compiler there are none.

A hook of hatchling (``[tool.hatch.build.hooks.custom]`` in ``pyproject.toml``); setuptools finds the compiler and
its options.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Module(NamedTuple):
    """A C module: its name, the folder of its sources or the one source, and what is worse without it.

    Not a dataclass: hatchling runs this file without entering it in ``sys.modules``, where dataclasses look.
    """

    name: str
    source: str
    without: str

    def files(self, root: Path) -> list[str]:
        place = root / self.source
        return [str(place)] if place.is_file() else sorted(map(str, place.glob("*.c")))


MODULES = (
    Module(
        "podrun.collectives._collectives", "podrun/collectives/_collectives.c", "collectives will be slower"
    ),
    Module(
        "podrun.device._crash_stack",
        "podrun/device/_crash_stack.c",
        "a script in which native code dies will not say what it computed",
    ),
    Module(
        "podrun.device.xla._onednn",
        "podrun/device/xla/native",
        "convolutions will take twice as long or more",
    ),
)


class ExtensionHook(BuildHookInterface):  # type: ignore[type-arg, misc]
    """Compiles the C files to modules beside podrun's own, and says so to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        for module in MODULES:
            built = compile_extension(Path(self.root), self.app.display_warning, module)
            if built is not None:
                build_data["artifacts"].append(f"/{built.as_posix()}")
                build_data["pure_python"] = False
                build_data["infer_tag"] = True


def compile_extension(root: Path, warn: Any, module: Module = MODULES[0]) -> Path | None:
    """Where the module was built, relative to ``root``; None, with a warning, if that did not succeed."""
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    # No contraction: a fused multiply-add would round otherwise than NumPy. No -march: the module runs on any CPU.
    options = ["-std=gnu11", "-O3", "-ffp-contract=off"]
    libraries = ["pthread", "dl", "m"] if module.name.endswith("_onednn") else []
    extension = Extension(module.name, module.files(root), extra_compile_args=options, libraries=libraries)
    command = build_ext(Distribution({"name": "podrun", "ext_modules": [extension]}))
    with tempfile.TemporaryDirectory() as scratch:
        command.build_lib, command.build_temp = str(root), scratch
        try:
            command.ensure_finalized()
            command.run()
        except Exception as error:  # whatever a compiler, or its absence, can do
            warn(f"podrun is installed without its C module {module.name}, {module.without}: {error}")
            return None
    return Path(command.get_ext_fullpath(module.name)).relative_to(root)
