"""``import poprt`` for programs written for PopRT: podrun's converter, compiler, passes and runtime."""

from podrun import __version__
from podrun.serving.compiler import Compiler, CompilerOptions
from podrun.serving.compiler import ServedModel as Executable
from podrun.serving.convert.converter import Converter
from podrun.serving.convert.pass_manager import Pass, PassManager, get_registered_passes
from podrun.serving.convert.reference_runs import ORTBackend
from podrun.serving.sessions import Backend

from . import (
    backend,
    backends,
    compiler,
    converter,
    frontend,
    optimizer,
    passes,
    profile,
    quantizer,
    runtime,
    utils,
)

__all__ = [
    "Backend",
    "Compiler",
    "CompilerOptions",
    "Converter",
    "Executable",
    "ORTBackend",
    "Pass",
    "PassManager",
    "__version__",
    "backend",
    "backends",
    "compiler",
    "converter",
    "frontend",
    "get_registered_passes",
    "optimizer",
    "passes",
    "profile",
    "quantizer",
    "runtime",
    "utils",
]
