"""Programs that compile C++ operators for the SDK: they are told at once which file and which operators to replace.

Published programs start ``make`` or a compiler for their operators. podrun has neither the SDK's headers nor IPUs that
run the result, so `explain_compilers` looks into the sources before a compiler starts: it names each operator and the
line that registers it. With ``PODRUN_CUSTOM_OPS`` nothing is compiled and the program goes on.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from podrun.popart.exceptions import popart_unsupported
from podrun.runtime.user_operators import FILES, custom_op_files

_COMPILERS = re.compile(r"(.*-)?(g\+\+|gcc|c\+\+|cc|clang\+\+|clang|popc)(-\d+)?")
_BUILDERS = ("make", "ninja", "cmake")
_SOURCES = (".cpp", ".cc", ".cxx")
_SDK = re.compile(r"#\s*include\s*[<\"](popart|poplar|popops|poputil|snap)/")
_IDENTIFIER = re.compile(
    r"OperatorIdentifier\s+\w+\s*(?:=\s*)?(?:popart::)?(?:OperatorIdentifier\s*)?[({]\s*"
    r"\"([^\"]+)\"\s*,\s*\"([^\"]+)\"\s*,\s*(\d+)"
)


def operators_in(text: str) -> list[tuple[str, str, int]]:
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
        paths = [path for pattern in ("*", "*/*") for path in place.glob(pattern)]
        candidates = sorted(path for path in paths if path.suffix in _SOURCES)
    else:
        return []
    return [path for path in candidates if _SDK.search(_text(path))]


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
    defined = [operator for path in sources for operator in operators_in(_text(path))]
    told = ", ".join(f"{domain}.{name} version {version}" for domain, name, version in defined)
    calls = "; ".join(_registrations(defined)) or "podrun.popart.register_op(domain, name, version, function)"
    raise popart_unsupported(
        f"{names}: C++ for the IPU cannot be compiled here" + (f"; it defines {told}." if told else "."),
        hint=f"Write what it computes as JAX functions in a file, {calls}, and start with {FILES}=ops.py podrun ...",
    )


def _registrations(defined: Sequence[tuple[str, str, int]]) -> Iterator[str]:
    for domain, name, version in defined:
        yield f'podrun.popart.register_op("{domain}", "{name}", {version}, function)'


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
