"""Python files of users that podrun takes a model from: run as programs, or imported for one of their names.

While a file runs, ``import popart``, ``poptorch`` and ``tensorflow`` find podrun's modules, ``sys.argv`` is the
program's, and what it prints goes to standard error: standard output is for podrun's answer.
"""

from __future__ import annotations

import difflib
import importlib.util
import runpy
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TypeVar

import podrun
from podrun.core.errors import InternalError, PodrunError, UsageError


@contextmanager
def as_program(path: Path, arguments: Sequence[str] = ()) -> Iterator[None]:
    """Set the search path, ``sys.argv`` and standard output as a program has them."""
    compat = str(Path(podrun.__file__).parent / "compat")
    before = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path[:0] = [str(path.resolve().parent), compat]
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv, sys.path[:] = before


def run_until_compiled(path: Path) -> None:
    """Run a file as a program, for a caller that ends it where it compiles a model. Returns if the program ends first.

    Raises:
        UsageError: an error of the program ends it before.
    """
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit:
        pass
    except PodrunError:
        raise
    except Exception as error:
        raise UsageError(
            f"{path} ends before it compiles a model: {type(error).__name__}: {error}{line_in(path, error)}",
            hint=f"Arguments of the program follow --: podrun estimate {path} -- --epochs 1",
        ) from error


def names_in_file(path: Path) -> Mapping[str, object]:
    """The names of a file, imported as a module. UsageError with the line where it fails."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InternalError(f"Python has no loader for {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except PodrunError:
        raise
    except Exception as error:
        raise UsageError(
            f"{path} cannot be imported: {type(error).__name__}: {error}{line_in(path, error)}"
        ) from None
    return vars(module)


def _model_made_by(path: Path, name: str, maker: object, wanted: str) -> object:
    """The result of a class or function of a file. ``wanted``: what it should give, in words.

    Raises UsageError with the line of the file where it fails, and for what cannot be called.
    """
    if not callable(maker):
        raise UsageError(f"{name} of {path} is a {type(maker).__name__}, not a {wanted}")
    try:
        return maker()
    except PodrunError:
        raise
    except Exception as error:
        raise UsageError(
            f"{name}() of {path} fails: {type(error).__name__}: {error}{line_in(path, error)}",
            hint="Name a model, or a class or function that takes no arguments.",
        ) from None


K = TypeVar("K")


def model_in_file(path: Path, name: str, kind: type[K], wanted: str, several: str) -> K:
    """The model called ``name`` in a file, or what a class or function of that name gives.

    ``kind``: the class of models; ``wanted``, ``several``: one and many of them in words. UsageError for a wrong name,
    and for what is no model.
    """
    names = names_in_file(path)
    value = names.get(name)
    if value is None:
        known = _models_in(names, kind)
        near = difflib.get_close_matches(name, known, 1)
        guess = f"Did you mean {near[0]}? " if near else ""
        raise UsageError(
            f"{path} has no {name}",
            hint=f"{guess}{several} in it: {', '.join(known) or 'none'}. A function that gives one can be named too.",
        )
    model = value if isinstance(value, kind) else _model_made_by(path, name, value, wanted)
    if not isinstance(model, kind):
        raise UsageError(f"{name} of {path} gives a {type(model).__name__}, not a {wanted}")
    return model


def _models_in(names: Mapping[str, object], kind: type) -> list[str]:
    """Names of the models of a file, and of its own classes of models."""
    own = names.get("__name__")
    return [
        name
        for name, value in names.items()
        if isinstance(value, kind)
        or (isinstance(value, type) and issubclass(value, kind) and value.__module__ == own)
    ]


def line_in(path: Path, error: Exception) -> str:
    """`` (FILE:LINE)`` of the innermost line of a file that an error went through; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return f" ({path}:{own[-1].lineno})" if own else ""


INPUT_TYPES = ("float32", "float16", "int32", "int64", "bool")
"""Types of inputs that a command line can name."""


def parse_input(text: str) -> tuple[tuple[int, ...], str]:
    """Shape and type of an input like ``8x3x32x32`` or ``4x128:int64``. UsageError for other texts."""
    shape, _, kind = text.partition(":")
    sizes = shape.split("x")
    if not all(size.isdecimal() and int(size) for size in sizes) or (kind or "float32") not in INPUT_TYPES:
        raise UsageError(
            f"--input {text} is no shape",
            hint=f"As in 8x3x32x32 or 4x128:int64. Types: {', '.join(INPUT_TYPES)}.",
        )
    return tuple(int(size) for size in sizes), kind or "float32"
