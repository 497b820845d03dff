"""The program of a launch: looked up before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from podrun.core.errors import NotFoundError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.core.shadowing import check_script_name
from podrun.launcher.host_names import LOCAL_HOST
from podrun.launcher.spec import LaunchLayout


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What planning reads apart from options: the environment, the working directory, the interpreter for .py files."""

    environ: Mapping[str, str]
    directory: str
    python: str


def resolve_program(
    program: tuple[str, ...], context: LaunchContext, layout: LaunchLayout
) -> tuple[str, ...]:
    """The words to execute: a .py file runs with podrun's interpreter. Raises UsageError, NotFoundError.

    A program is looked up here only if instances run on this host.
    """
    if not program:
        raise UsageError("no program to run", hint="Type podrun --num-replicas 16 train.py")
    name, rest = program[0], program[1:]
    if not name:
        raise UsageError("the program's name is empty", hint="Type podrun --num-replicas 16 train.py")
    if not name.endswith(".py"):
        if layout.hosts == (LOCAL_HOST,) and not _command_exists(name, context):
            if Path(context.directory, name).is_dir():
                raise UsageError(f"{name} is a directory", hint="Name the program or the script in it.")
            raise NotFoundError(f"there is no program {name}", hint=_program_hint(name, context))
        return program
    path = Path(context.directory, name)
    if layout.hosts == (LOCAL_HOST,):
        if path.is_dir():
            raise UsageError(f"{name} is a directory", hint="Name the script in it.")
        if not path.is_file():
            raise NotFoundError(f"there is no script {name} in {context.directory}", hint=_script_hint(path))
    check_script_name(Path(name))
    return (context.python, name, *rest)


def _command_exists(name: str, context: LaunchContext) -> bool:
    import shutil

    if os.sep in name:
        path = Path(context.directory, name)
        return path.is_file() and os.access(path, os.X_OK)
    return shutil.which(name, path=context.environ.get("PATH")) is not None


def _program_hint(name: str, context: LaunchContext) -> str:
    if Path(context.directory, name + ".py").is_file():
        return f"Did you mean {name}.py?"
    if Path(context.directory, name).is_file():
        called = name if os.sep in name else f"./{name}"
        return f"{name} is a file but no command: type {called} and make it executable (chmod +x {name})."
    if name.isalnum():
        return "Name a script or a command; podrun --help lists podrun's own commands."
    return "Options of podrun come before the program, its own arguments after it."


def _script_hint(path: Path) -> str:
    import difflib

    there = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, there, n=1)
    return f"Did you mean {close[0]}?" if close else "Check the path; it is relative to where podrun runs."


def interpreter_warning(command: tuple[str, ...], context: LaunchContext) -> list[str]:
    """Warn of a Python other than podrun's, which may not find podrun."""
    import shutil

    if os.path.basename(command[0]) not in ("python", "python3") or command[0] == context.python:
        return []
    interpreter = shutil.which(command[0], path=context.environ.get("PATH")) or command[0]
    if os.path.dirname(os.path.abspath(interpreter)) == os.path.dirname(os.path.abspath(context.python)):
        return []
    return [
        f"{command[0]} is {interpreter}, which may not find podrun; without it the script runs with {context.python}"
    ]
