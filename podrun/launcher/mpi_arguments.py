"""Options of Open MPI's mpirun, as ``--mpi-global-args`` and its siblings pass them on.

Those with a meaning here keep it: ``-x VAR``, ``-x VAR=VALUE``, ``--output-filename DIR``, ``-wdir DIR``,
``--tag-output`` (always on). The others are warned about once and have no effect; how many words each takes comes from
mpirun(1) of Open MPI 4.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import field

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass

WORDS_TAKEN: Mapping[str, int] = {
    "mca": 2,
    "gmca": 2,
    "x": 1,
    "output-filename": 1,
    "wdir": 1,
    "wd": 1,
    "bind-to": 1,
    "map-by": 1,
    "rank-by": 1,
    "host": 1,
    "H": 1,
    "hostfile": 1,
    "machinefile": 1,
    "n": 1,
    "np": 1,
    "c": 1,
    "npernode": 1,
    "N": 1,
    "prefix": 1,
    "path": 1,
    "stdin": 1,
    "timeout": 1,
    "rankfile": 1,
    "rf": 1,
    "am": 1,
    "cpu-set": 1,
    "xterm": 1,
}
"""Options of mpirun that take words; options that are not listed take none."""
NO_EFFECT_NEEDED = frozenset({"tag-output", "allow-run-as-root", "oversubscribe", "q", "quiet"})
"""Options that ask for what podrun does anyway."""
RESERVED = ("POPDIST_", "OMPI_COMM_WORLD_")
"""Prefixes of variables that podrun sets for each instance."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class MpiArguments:
    """``exports`` are variables for the instances; None means the value that a variable has where podrun runs."""

    exports: Mapping[str, str | None] = field(default_factory=dict)
    output_directory: str | None = None
    working_directory: str | None = None
    without_effect: tuple[str, ...] = ()


def parse_mpi_arguments(texts: Iterable[str], option: str) -> MpiArguments:
    """Read the option's values (it may be repeated). ``option`` names it in errors. Raises UsageError."""
    exports: dict[str, str | None] = {}
    directory: str | None = None
    working: str | None = None
    without: list[str] = []
    for text in texts:
        words = _split(text, option)
        while words:
            word = words.pop(0)
            name, taken = _take(word, words, text, option)
            if name == "x":
                variable, value = _export(taken[0], option)
                if exports.get(variable, value) != value:
                    raise UsageError(
                        f"{option} gives {variable} two values", hint=f"Keep one -x {variable}=..."
                    )
                exports[variable] = value
            elif name == "output-filename":
                directory = taken[0]
            elif name in ("wdir", "wd"):
                working = taken[0]
            elif name not in NO_EFFECT_NEEDED and word not in without:
                without.append(word)
    return MpiArguments(exports, directory, working, tuple(without))


def parse_instance_arguments(texts: Iterable[str], instances: int) -> dict[int, MpiArguments]:
    """``IDX:"STR"`` values of --instance-mpi-local-args by instance. Raises UsageError."""
    option = "--instance-mpi-local-args"
    gathered: dict[int, list[str]] = {}
    for text in texts:
        index, colon, rest = text.partition(":")
        if not colon or not index.isdecimal():
            raise UsageError(
                f'{option} takes INDEX:"STR", not {text!r}', hint=f'As in {option}=0:"-x VARIABLE=1"'
            )
        if int(index) >= instances:
            raise UsageError(
                f"{option} names instance {index}; there are {instances}",
                hint=f"Instances are numbered 0 to {instances - 1}.",
            )
        gathered.setdefault(int(index), []).append(rest.removeprefix('"').removesuffix('"'))
    return {index: parse_mpi_arguments(values, f"{option}={index}") for index, values in gathered.items()}


def _split(text: str, option: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option}={text!r} cannot be read: {error}", hint="Close the quotes.") from error


def _take(word: str, words: list[str], text: str, option: str) -> tuple[str, list[str]]:
    """The option's name without dashes, and the words that belong to it."""
    if not word.startswith("-"):
        raise UsageError(
            f"{option}={text!r}: {word!r} is not an option of mpirun",
            hint="The program comes after all options of podrun.",
        )
    name = word.lstrip("-")
    count = WORDS_TAKEN.get(name, 0)
    if len(words) < count:
        raise UsageError(
            f"{option}={text!r}: {word} needs {count} more word{'s' if count > 1 else ''}",
            hint=f"Quote all of it: {option}='-x VARIABLE=1 -wdir DIRECTORY'",
        )
    taken, words[:count] = words[:count], []
    return name, taken


def _export(text: str, option: str) -> tuple[str, str | None]:
    variable, equals, value = text.partition("=")
    if not _VARIABLE.fullmatch(variable):
        raise UsageError(
            f"{option}: {variable!r} is not a variable name", hint="As in -x VARIABLE or -x VARIABLE=1"
        )
    if variable.startswith(RESERVED):
        raise UsageError(
            f"{option} sets {variable}, which podrun sets for each instance",
            hint="Take it out; the layout comes from --num-replicas and --num-instances.",
        )
    return variable, value if equals else None
