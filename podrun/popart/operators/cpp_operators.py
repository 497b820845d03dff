"""Programs that compile C++ operators for the SDK: they are told at once which file and which operators to replace.

Published programs start ``make`` or a compiler for their operators. podrun has neither the SDK's headers nor IPUs that
run the result, so `explain_compilers` looks into the sources before a compiler starts: it names each operator and the
line that registers it. With ``PODRUN_CUSTOM_OPS`` nothing is compiled and the program goes on.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podrun.popart.values.exceptions import popart_unsupported
from podrun.runtime.user_operators import FILES, custom_op_files

_COMPILERS = re.compile(r"(.*-)?(g\+\+|gcc|c\+\+|cc|clang\+\+|clang|popc)(-\d+)?")
_BUILDERS = ("make", "ninja", "cmake")
_SOURCES = (".cpp", ".cc", ".cxx")
_SDK = re.compile(r"#\s*include\s*[<\"](popart|poplar|popops|poputil|snap)/")
_IDENTIFIER = re.compile(
    r"OperatorIdentifier\s+\w+\s*(?:=\s*)?(?:popart::)?(?:OperatorIdentifier\s*)?[({]\s*"
    r"\"([^\"]+)\"\s*,\s*\"([^\"]+)\"\s*,\s*(\d+)"
)


Operator = tuple[str, str, int]
"""Domain, name and version."""


def operators_in(text: str) -> list[Operator]:
    """Domain, name and version of the operators that a C++ source defines."""
    return [(domain, name, int(version)) for domain, name, version in _IDENTIFIER.findall(text)]


def sdk_sources(command: Sequence[str], folder: Path) -> list[Path]:
    """The C++ sources for the SDK that a command compiles: those it names, or all that lie where ``make`` runs."""
    words = [word for word in command if "=" not in word.partition("/")[0] or word.startswith("-")]
    if not words:
        return []
    program = Path(words[0]).name
    if _COMPILERS.fullmatch(program):
        candidates: list[Path] = [folder / word for word in words[1:] if word.endswith(_SOURCES)]
    elif program in _BUILDERS:
        place = folder / words[words.index("-C") + 1] if "-C" in words[:-1] else folder
        candidates = [*_sources_below(place), *_sources_of_ninja(place)]
    else:
        return []
    return [path for path in candidates if _SDK.search(_text(path))]


def sources_beside(library: Path) -> list[Path]:
    """The C++ sources for the SDK in the folder of a library, or else in the one above: ``build/ops.so`` is made of
    ``ops.cpp`` or ``src/ops.cpp``.
    """
    folder = library.absolute().parent
    for place in (folder, folder.parent):
        sources = [path for path in _sources_below(place) if _SDK.search(_text(path))]
        if sources:
            return sources
    return []


_MOST_SOURCES = 200


def _sources_below(place: Path) -> list[Path]:
    """C++ sources in a folder and in the folders in it."""
    paths = (path for pattern in ("*", "*/*") for path in place.glob(pattern) if path.suffix in _SOURCES)
    return sorted(itertools.islice(paths, _MOST_SOURCES))


def _sources_of_ninja(place: Path) -> list[Path]:
    """The C++ sources that a ``build.ninja`` names, wherever they lie: `torch.utils.cpp_extension` writes one."""
    words = _text(place / "build.ninja").split()
    return [place / word for word in dict.fromkeys(words) if word.endswith(_SOURCES)]


def operators_of(sources: Sequence[Path]) -> list[Operator]:
    """The operators that C++ sources define, without gradients of the others: JAX makes those."""
    operators = [operator for path in sources for operator in operators_in(_text(path))]
    names = {name for _, name, _ in operators}
    return [
        operator for operator in operators if operator[1].removesuffix("Grad") not in names - {operator[1]}
    ]


def listed_operators(operators: Sequence[Operator]) -> str:
    """Operators as a text: domain, name and version of each."""
    return ", ".join(f"{domain}.{name} version {version}" for domain, name, version in operators)


def replacement(operators: Sequence[Operator]) -> str:
    """What to do instead of compiling, with the calls that register the operators."""
    calls = "; ".join(
        f'podrun.popart.register_op("{domain}", "{name}", {version}, function)'
        for domain, name, version in operators
    )
    calls = calls or "podrun.popart.register_op(domain, name, version, function)"
    return f"Write what it computes as JAX functions in a file, {calls}, and start with {FILES}=ops.py podrun ..."


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _refuse(sources: Sequence[Path]) -> None:
    """Say what to replace, unless a file stands for it already; then only that nothing is compiled."""
    names = ", ".join(path.name for path in sources)
    if custom_op_files():
        logging.getLogger("podrun.popart").warning(
            "%s: not compiled; its operators are those of %s", names, os.pathsep.join(custom_op_files())
        )
        return
    operators = operators_of(sources)
    defined = f"; it defines {listed_operators(operators)}." if operators else "."
    raise popart_unsupported(
        f"{names}: C++ for the IPU cannot be compiled here{defined}", hint=replacement(operators)
    )


def explain_compilers() -> None:
    """Replace the commands by which a program compiles C++ sources against the SDK: they are refused with an
    explanation, or do nothing. Idempotent.
    """
    if getattr(subprocess.Popen.__init__, "_podrun", False):
        return
    popen, system = subprocess.Popen.__init__, os.system

    @functools.wraps(popen)
    def start(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        folder = Path(os.fsdecode(options.get("cwd") or "."))
        sources = sdk_sources(_words(args), folder)
        if sources:
            _refuse(sources)
            args = "true" if isinstance(args, (str, bytes)) else ["true"]
        popen(self, args, *rest, **options)

    @functools.wraps(system)
    def run(command: Any) -> int:
        sources = sdk_sources(_words(command), Path())
        if sources:
            _refuse(sources)
            return 0
        return system(command)

    start._podrun = True  # type: ignore[attr-defined]
    subprocess.Popen.__init__ = start  # type: ignore[method-assign]
    run.__module__ = "os"  # Where pickle finds it.
    os.system = run


def _words(command: Any) -> list[str]:
    """The words of a command, whatever form it has; empty for one that cannot be read."""
    if isinstance(command, (str, bytes, os.PathLike)):
        try:
            return shlex.split(os.fsdecode(command))
        except ValueError:
            return []
    try:
        return [os.fsdecode(word) for word in command]
    except TypeError:
        return []
