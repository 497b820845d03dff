"""The compiler."""

from podrun.serving.compiler import Compiler, CompilerOptions
from podrun.serving.compiler import ServedModel as Executable

__all__ = ["Compiler", "CompilerOptions", "Executable"]
