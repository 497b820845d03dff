"""``python -m podrun.compat [OPTIONS] SCRIPT [ARGS...]`` (or ``-m MODULE``, ``-c CODE``, ``-i``): run a program written
for the SDK alone, on emulated machines inside its own process.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

import click

from podrun import commands
from podrun.compat import COMPAT_PATH, _error_reports
from podrun.core.command_line import HELP_OPTIONS, run_command
from podrun.core.environment import (
    PODRUN_TENSORFLOW,
    POPDIST_LOCAL_INSTANCE_INDEX,
    POPDIST_NUM_IPUS_PER_REPLICA,
    POPDIST_NUM_LOCAL_REPLICAS,
    POPDIST_NUM_TOTAL_REPLICAS,
    POPDIST_REPLICA_INDEX_OFFSET,
    POPDIST_UNIFORM_REPLICAS_PER_INSTANCE,
    environment,
)
from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.core.shadowing import check_script_name
from podrun.core.terminal import show_error

_NEEDS = {
    "-m": ("name of a module", "pytest tests"),
    "-c": ("text of a program", "'import popart; print(popart.__version__)'"),
}
"""What an option needs, and an example of it."""


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a command line. ``kind``: kind of ``program`` (``"script"``, ``"-m"``, ``"-c"``, empty: none)."""

    kind: str = ""
    program: str = ""
    arguments: tuple[str, ...] = ()
    replicas: int | None = None
    ipus_per_replica: int | None = None
    interactive: bool = False
    tensorflow: str | None = None


def _print_path(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        click.echo(COMPAT_PATH)
        context.exit()


class _BeforeAProgram(click.Command):
    """Options end where the program begins; what follows is the program's own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            message = error.format_message()
            raise UsageError(
                message[:1].lower() + message[1:],
                hint=f"Options of the program follow its name: {ctx.command_path} SCRIPT {error.option_name}",
            ) from error


@click.command(
    "python -m podrun.compat",
    cls=_BeforeAProgram,
    context_settings={**HELP_OPTIONS, "allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    epilog="""\b
    Examples: python -m podrun.compat --num-replicas 16 train.py
              python -m podrun.compat -m pytest tests
              PYTHONPATH=$(python -m podrun.compat --print-path) jupyter lab""",
)
@click.option(
    "--num-replicas",
    "replicas",
    type=click.IntRange(1),
    metavar="N",
    help="What popdist answers: one instance with N replicas [a program without popdist].",
)
@click.option(
    "--ipus-per-replica",
    type=click.IntRange(1),
    metavar="N",
    help="What popdist answers: IPUs of each replica [1].",
)
@click.option(
    "--tensorflow",
    type=click.Choice(["1", "2"]),
    help="API of TensorFlow that a program gets [the one that it uses].",
)
@click.option("-m", "module", is_flag=True, help="The program is a module.")
@click.option("-c", "code", is_flag=True, help="The program is given as text.")
@click.option(
    "-i",
    "interactive",
    is_flag=True,
    help="Afterwards (or at once, without a program) read Python from the terminal.",
)
@click.option(
    "--print-path",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_path,
    help="Print the folder of popart, poptorch, popdist and the others, for PYTHONPATH, and end.",
)
@click.argument("words", nargs=-1, type=click.Path(), metavar="SCRIPT|-m MODULE|-c CODE [ARGUMENTS]...")
@click.pass_context
def compat_command(
    ctx: click.Context, /, module: bool, code: bool, words: Sequence[str], **options: Any
) -> int:
    """Run a program written for the SDK alone, on IPU-M2000s emulated inside its own process: no partition, no server,
    the same results. podrun starts it on a POD of machine processes instead: podrun --num-replicas 16 SCRIPT

    SCRIPT may be -: the program is read from standard input. Options stand before the program; what follows it is the
    program's own.
    """
    kind = "-m" if module else "-c" if code else "script"
    if not words and kind != "script":
        what, like = _NEEDS[kind]
        raise UsageError(f"{kind} needs the {what}", hint=f"As in: python -m podrun.compat {kind} {like}")
    if not words and not options["interactive"]:
        click.echo(ctx.get_help(), err=True)
        return 2
    ctx.obj.append(Request(kind, words[0], tuple(words[1:]), **options) if words else Request(**options))
    return 0


def request_of(arguments: Sequence[str]) -> Request | int:
    """The request of a command line, or the exit code if there is nothing to run: it is wrong, or asks for help."""
    requests: list[Request] = []
    code = run_command(compat_command, arguments, name="podrun compat", obj=requests)
    return requests[0] if requests else code


class _NoProgramError(UsageError):
    """There is nothing to run under that name."""


def main(arguments: Sequence[str]) -> int:
    """Run the requested program as ``__main__`` with popart and popdist on the path, for it and for its child
    processes.
    """
    request = request_of(arguments)
    if isinstance(request, int):
        return request
    try:
        _run_with_surroundings(request)  # Not inside click, which has its own way with errors and Ctrl-C.
    except _NoProgramError as error:
        show_error("podrun compat", error)
        return 2
    return 0


def _run_with_surroundings(request: Request) -> None:
    _prepare(request)
    try:
        names = _run(request)
    except _NoProgramError:
        raise
    except BaseException as error:
        if isinstance(error, SystemExit) or request.interactive:
            _check_replicas(request)
        if not request.interactive:
            raise
        names = _names_at_the_end(error)
    else:
        _check_replicas(request)
    if request.interactive:
        _read_from_terminal(names)


def _prepare(request: Request) -> None:
    """Set the path, ``sys.argv`` and the variables that popdist reads, for the program."""
    if request.kind == "script" and request.program != "-":
        _check_script(request.program)
        script = Path(request.program).resolve()
        sys.path[0] = str(script if script.is_dir() else script.parent)
    else:
        # As for Python's own -m: the working directory comes first.
        sys.path[0] = os.getcwd() if request.kind == "-m" else ""
    sys.argv = [request.program if request.kind in ("script", "-m") else request.kind, *request.arguments]
    # Before site-packages, so that the names are ours; podrun itself is importable already.
    sys.path.insert(1, COMPAT_PATH)
    inherited = environment().get("PYTHONPATH")
    os.environ["PYTHONPATH"] = COMPAT_PATH + (os.pathsep + inherited if inherited else "")
    os.environ.update(_popdist_variables(request))
    if request.tensorflow:
        os.environ[PODRUN_TENSORFLOW] = request.tensorflow
    _error_reports.install()


def _check_script(name: str) -> None:
    """Raise _NoProgramError for what Python cannot run."""
    script = Path(name)
    if not os.path.exists(name):
        raise _NoProgramError(
            f"there is no script {name}",
            hint="Check the path. Options of podrun.compat stand before the script (--help lists them).",
        )
    if script.is_dir() and not (script / "__main__.py").exists():
        raise _NoProgramError(f"{name} is a folder without __main__.py", hint="Name the Python file to run.")
    if not os.access(script, os.R_OK):
        raise _NoProgramError(f"cannot read {name}: permission denied", hint=f"See who may: ls -l {name}")
    try:
        check_script_name(script)
    except UsageError as error:
        raise _NoProgramError(error.message, hint=error.hint) from None


def _popdist_variables(request: Request) -> dict[str, str]:
    """One instance with all replicas. popdist reads them as it reads podrun's."""
    if request.replicas is None and request.ipus_per_replica is None:
        return {}
    replicas = str(request.replicas or 1)
    return {
        POPDIST_NUM_TOTAL_REPLICAS: replicas,
        POPDIST_NUM_LOCAL_REPLICAS: replicas,
        POPDIST_NUM_IPUS_PER_REPLICA: str(request.ipus_per_replica or 1),
        POPDIST_REPLICA_INDEX_OFFSET: "0",
        POPDIST_LOCAL_INSTANCE_INDEX: "0",
        POPDIST_UNIFORM_REPLICAS_PER_INSTANCE: "1",
    }


def _run(request: Request) -> dict[str, object]:
    """Run the program; returns its names."""
    if request.kind == "-m":
        _check_module(request.program)
        return runpy.run_module(request.program, run_name="__main__", alter_sys=True)
    if request.kind == "-c":
        return _execute(request.program, "<string>")
    if request.program == "-":
        return _execute(sys.stdin.read(), "<stdin>")
    if not request.kind:
        return {}
    try:
        if Path(request.program).is_file() or Path(request.program).is_dir():
            return runpy.run_path(request.program, run_name="__main__")
        return _execute(Path(request.program).read_bytes(), request.program)  # A pipe: <(...)
    except (SyntaxError, ValueError) as error:
        if _of_reading(error):
            raise _NoProgramError(
                f"{request.program} is no Python program: {error}", hint="Name the Python file to run."
            ) from None
        raise


def _of_reading(error: SyntaxError | ValueError) -> bool:
    """Whether Python could not read a program's text, as opposed to an error in it. Of null bytes Python 3.11.3 and
    earlier raise a ValueError."""
    if isinstance(error, SyntaxError):
        return error.filename is None
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame.f_code.co_filename == "<frozen runpy>"


def _execute(text: str | bytes, name: str) -> dict[str, object]:
    module = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(text, name, "exec"), module.__dict__)  # noqa: S102 - the user typed it
    return module.__dict__


def _names_at_the_end(error: BaseException) -> dict[str, object]:
    """Report how the program ended, for the terminal that is read next; returns the program's names."""
    if not isinstance(error, SystemExit):
        sys.stderr.write("".join(_error_reports.lines(error, error.__traceback__)))
    for frame, _ in walk_tb(error.__traceback__):
        names = frame.f_globals
        if (
            frame.f_code.co_name == "<module>"
            and names.get("__name__") == "__main__"
            and names is not globals()
        ):
            return dict(names)
    return {}


def _check_replicas(request: Request) -> None:
    """Warn if the program cannot know how many replicas it was to have."""
    if request.replicas is not None and request.kind and "popdist" not in sys.modules:
        print(
            f"podrun.compat: --num-replicas {request.replicas} had no effect: the program does not import popdist, "
            "which answers how many replicas there are",
            file=sys.stderr,
        )


def _read_from_terminal(names: dict[str, object]) -> None:
    import code

    class Console(code.InteractiveConsole):
        """Errors as `_start` reports them, without the end of the process."""

        def showtraceback(self) -> None:
            error = sys.exception()
            if error is not None:
                self.write("".join(_error_reports.lines(error, error.__traceback__)))

    Console({**names, "__name__": "__main__"}).interact(
        f"Python {sys.version.split()[0]} with podrun: import popart, poptorch, popdist. Ctrl-D ends it.", ""
    )


def _check_module(name: str) -> None:
    """Raise _NoProgramError if there is no such module to run. An error inside a package above it is the program's
    own.
    """
    missing = _NoProgramError(
        f"there is no module {name}", hint="Check the name, and that its folder is on Python's path."
    )
    if not name or name.startswith(".") or name in sys.builtin_module_names:
        raise missing
    try:
        spec = find_spec(name)
        inner = find_spec(f"{name}.__main__") if spec and spec.submodule_search_locations else spec
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise missing from None
        raise
    if spec is None:
        raise missing
    if inner is None:
        raise _NoProgramError(
            f"{name} is a package without __main__, which cannot be run",
            hint=f"Name one of its modules: -m {name}.MODULE",
        )


def run_compat() -> int:
    """Run the program that this process's arguments name; returns the exit code."""
    # The script has done its work, even if its output is lost; podrun treats its instances in the same way.
    return commands.run(
        lambda: main(sys.argv[1:]), command="podrun.compat", loss_fails=False, hosts_program=True
    )


if __name__ == "__main__":
    sys.exit(run_compat())
