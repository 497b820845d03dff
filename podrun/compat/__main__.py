"""``python -m podrun.compat [OPTIONS] SCRIPT [ARGS...]`` (or ``-m MODULE``, ``-c CODE``, ``-i``): run a program written
for the SDK alone, on emulated machines inside its own process.
"""

from __future__ import annotations

import difflib
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from types import ModuleType

from podrun import commands
from podrun.compat import COMPAT_PATH, _start
from podrun.core.environment import environment
from podrun.core.errors import UsageError
from podrun.core.shadowing import check_script_name
from podrun.core.terminal import error_lines

USAGE = """\
Usage: python -m podrun.compat [options] SCRIPT [arguments of the script]
       python -m podrun.compat [options] -m MODULE [arguments of the module]
       python -m podrun.compat [options] -c CODE [arguments]
       python -m podrun.compat [options] -i

Runs a program written for the SDK alone, on IPU-M2000s emulated inside its own
process: no partition, no server, the same results. podrun starts it on a POD of
machine processes instead: podrun --num-replicas 16 SCRIPT

SCRIPT may be -: the program is read from standard input. Options stand before
the program; what follows it is the program's own:
  --num-replicas N      what popdist answers: one instance with N replicas
                        (default: a program without popdist)
  --ipus-per-replica N  what popdist answers: IPUs of each replica (default: 1)
  -i                    afterwards (or at once, without a program) read Python
                        from the terminal
  --print-path          print the folder of popart, poptorch, popdist and the
                        others, for PYTHONPATH, and end
  -h, --help            print this and end

Examples: python -m podrun.compat --num-replicas 16 train.py
          python -m podrun.compat -m pytest tests
          PYTHONPATH=$(python -m podrun.compat --print-path) jupyter lab"""

_NUMBERS = ("--num-replicas", "--ipus-per-replica")
_OPTIONS = (*_NUMBERS, "--print-path", "--help", "-h", "-i", "-c", "-m")

_NEEDS = {
    "-m": ("name of a module", "pytest tests"),
    "-c": ("text of a program", "'import popart; print(popart.__version__)'"),
}
"""What an option needs, and an example of it."""


class _Wrong(Exception):
    """An invalid command line: message and hint."""


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a command line. ``kind``: kind of ``program`` (``"script"``, ``"-m"``, ``"-c"``, empty: none)."""

    kind: str = ""
    program: str = ""
    arguments: tuple[str, ...] = ()
    replicas: int | None = None
    ipus_per_replica: int | None = None
    interactive: bool = False
    only: str = ""
    """``"help"`` or ``"path"``: print it and end."""


def parse(words: Sequence[str]) -> Request:
    """The request of a command line. Raises _Wrong."""
    found, rest = Request(), list(words)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            return replace(found, only="help")
        if word == "--print-path":
            return replace(found, only="path")
        if word == "-i":
            found = replace(found, interactive=True)
        elif word.split("=")[0] in _NUMBERS:
            name, _, value = word.partition("=")
            number = _number(name, value or (rest.pop(0) if rest else ""))
            field = "replicas" if name == "--num-replicas" else "ipus_per_replica"
            found = replace(found, **{field: number})  # type: ignore[arg-type]
        elif word in ("-m", "-c"):
            if not rest:
                what, like = _NEEDS[word]
                raise _Wrong(f"{word} needs the {what}", f"As in: python -m podrun.compat {word} {like}")
            return replace(found, kind=word, program=rest[0], arguments=tuple(rest[1:]))
        elif word.startswith("-") and word != "-":
            long = word.split("=")[0] if word.startswith("--") else ""
            near = difflib.get_close_matches(long, _OPTIONS, n=1, cutoff=0.5)
            meant = f"Did you mean {near[0]}? " if near else ""
            raise _Wrong(
                f"podrun.compat has no option {word}",
                f"{meant}Options of the program follow its name: python -m podrun.compat SCRIPT {word}",
            )
        else:
            return replace(found, kind="script", program=word, arguments=tuple(rest))
    return found


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise _Wrong(f"{name} must be a number of at least 1, not {text!r}", f"As in: {name} 4 SCRIPT")
    return int(text)


def main(arguments: list[str]) -> int:
    """Run the requested program as ``__main__`` with popart and popdist on the path, for it and for its child
    processes.
    """
    try:
        request = parse(arguments)
        if request.only == "path":
            print(COMPAT_PATH)
            return 0
        if request.only == "help" or not (request.kind or request.interactive):
            print(USAGE, file=sys.stdout if request.only else sys.stderr)
            return 0 if request.only else 2
        _prepare(request)
        try:
            names = _run(request)
        except _Wrong:
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
    except _Wrong as error:
        message, hint = error.args
        sys.stderr.write(error_lines("podrun compat", message, hint))
        return 2
    return 0


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
    _start.install()


def _check_script(name: str) -> None:
    """Raise _Wrong for what Python cannot run."""
    script = Path(name)
    if not os.path.exists(name):
        raise _Wrong(
            f"there is no script {name}",
            "Check the path. Options of podrun.compat stand before the script (--help lists them).",
        )
    if script.is_dir() and not (script / "__main__.py").exists():
        raise _Wrong(f"{name} is a folder without __main__.py", "Name the Python file to run.")
    if not os.access(script, os.R_OK):
        raise _Wrong(f"cannot read {name}: permission denied", f"See who may: ls -l {name}")
    try:
        check_script_name(script)
    except UsageError as error:
        raise _Wrong(error.message, error.hint) from None


def _popdist_variables(request: Request) -> dict[str, str]:
    """One instance with all replicas. popdist reads them as it reads podrun's."""
    if request.replicas is None and request.ipus_per_replica is None:
        return {}
    replicas = str(request.replicas or 1)
    return {
        "POPDIST_NUM_TOTAL_REPLICAS": replicas,
        "POPDIST_NUM_LOCAL_REPLICAS": replicas,
        "POPDIST_NUM_IPUS_PER_REPLICA": str(request.ipus_per_replica or 1),
        "POPDIST_REPLICA_INDEX_OFFSET": "0",
        "POPDIST_LOCAL_INSTANCE_INDEX": "0",
        "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
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
            raise _Wrong(
                f"{request.program} is no Python program: {error}", "Name the Python file to run."
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
        sys.stderr.write("".join(_start.lines(error, error.__traceback__)))
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
                self.write("".join(_start.lines(error, error.__traceback__)))

    Console({**names, "__name__": "__main__"}).interact(
        f"Python {sys.version.split()[0]} with podrun: import popart, poptorch, popdist. Ctrl-D ends it.", ""
    )


def _check_module(name: str) -> None:
    """Raise _Wrong if there is no such module to run. An error inside a package above it is the program's own."""
    missing = _Wrong(f"there is no module {name}", "Check the name, and that its folder is on Python's path.")
    if not name or name.startswith(".") or name in sys.builtin_module_names:
        raise missing
    try:
        found = find_spec(name)
        inner = find_spec(f"{name}.__main__") if found and found.submodule_search_locations else found
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise missing from None
        raise
    if found is None:
        raise missing
    if inner is None:
        raise _Wrong(
            f"{name} is a package without __main__, which cannot be run",
            f"Name one of its modules: -m {name}.MODULE",
        )


if __name__ == "__main__":
    # The script has done its work, even if its output is lost; podrun treats its instances in the same way.
    sys.exit(
        commands.run(
            lambda: main(sys.argv[1:]), command="podrun.compat", loss_fails=False, hosts_program=True
        )
    )
