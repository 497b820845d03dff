"""Options from other places than podrun's command line: a YAML file, and the options of mpirun.

The file (``--import-config``, ``--export-config``) is

    num-replicas: 16
    num-instances: 4
    reset-partition: no
    mpi-local-args:
      - -x POPLAR_LOG_LEVEL

Keys are the options' long names; values are read as on the command line, and checked against the same table.

Options of Open MPI's mpirun come in ``--mpi-global-args`` and ``--mpi-local-args``. Those with a meaning here keep it:
``-x VAR``, ``-x VAR=VALUE``, ``--output-filename DIR``, ``-wdir DIR``, ``--tag-output`` (always on). The others are
warned about once and have no effect; how many words each takes comes from mpirun(1) of Open MPI 4.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podrun.core.documents import compose_yaml, read_text
from podrun.core.errors import ConfigError, ConflictError, NotFoundError, UsageError
from podrun.launcher.option_table import BY_NAME, OPTIONS, Option, ValueKind
from podrun.launcher.options import convert, nearest_option

CONFIGURABLE = tuple(option.name for option in OPTIONS if option.config)
HEADING = "# Options of podrun: podrun --import-config FILE program\n"


def current_directory() -> str:
    """The current directory. Raises NotFoundError if it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise NotFoundError(
            "the current directory does not exist any more", hint="Change to another directory: cd ~"
        ) from None


def merge_config(given: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """``given`` over the values of the file that its ``import-config`` names, if any."""
    path = given.get("import-config")
    merged = read_config(directory / path) if path else {}
    return merged | dict(given)


def read_config(path: Path) -> dict[str, Any]:
    """The option values in a file. Raises NotFoundError, or ConfigError that names file, line and key."""
    import yaml

    try:
        text = read_text(path, hint=_WRITE_ONE)
    except NotFoundError:
        raise NotFoundError(f"there is no configuration file {path}", hint=_WRITE_ONE) from None
    node = compose_yaml(text, str(path), hint=_EXAMPLE)
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:1: expected option: value on each line", hint=_EXAMPLE)
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        option = _option(str(key_node.value), f"{path}:{line}")
        if option.name in values:
            raise ConfigError(f"{path}:{line}: {option.name} is given twice", hint="Keep one of them.")
        value = _value(option, value_node, f"{path}:{line}")
        if value is not None:
            values[option.name] = value
    return values


_EXAMPLE = "One option a line, as in: num-replicas: 16"
_WRITE_ONE = "Write one: podrun --export-config FILE ... program"


def reason(error: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be used, without its path and the error's number."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"


def _option(key: str, where: str) -> Option:
    if key in CONFIGURABLE:
        return BY_NAME[key]
    if key in BY_NAME:
        raise ConfigError(f"{where}: {key} belongs on the command line", hint="Take it out of the file.")
    close = nearest_option(key, CONFIGURABLE)
    raise ConfigError(
        f"{where}: {key} is not an option",
        hint=f"Did you mean {close}?" if close else "podrun --help lists all options.",
    )


def _value(option: Option, node: Any, where: str) -> Any:
    """The value of one key; None (the default applies) if it is empty."""
    import yaml

    if isinstance(node, yaml.SequenceNode) and option.repeatable:
        return tuple(_scalar(option, item, where) for item in node.value)
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
        return None
    value = _scalar(option, node, where)
    return (value,) if option.repeatable else value


def _scalar(option: Option, node: Any, where: str) -> Any:
    import yaml

    if not isinstance(node, yaml.ScalarNode):
        expected = "one value or a list of values" if option.repeatable else "one value"
        raise ConfigError(f"{where}: {option.name} takes {expected}", hint=_EXAMPLE)
    if option.kind is ValueKind.VERBOSITY:
        if node.value not in ("0", "1", "2"):
            raise ConfigError(
                f"{where}: {option.name} is 0, 1 or 2, not {node.value!r}", hint=f"As in: {option.name}: 1"
            )
        return int(node.value)
    try:
        return convert(option, node.value, f"{where}: {option.name}")
    except UsageError as error:
        raise ConfigError(error.message, hint=error.hint) from None


def write_config(path: Path, values: Mapping[str, Any], *, overwrite: bool) -> None:
    """Write the options in effect. Raises ConflictError if the file exists and ``overwrite`` is False."""
    text = config_text(values)
    try:
        with path.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConflictError(
            f"the configuration file {path} exists already",
            hint="Add --overwrite-config=yes, or name another.",
        ) from None
    except OSError as error:
        raise UsageError(
            f"the configuration cannot be written to {path}: {reason(error)}",
            hint="Name a file in an existing, writable directory.",
        ) from error


def config_text(values: Mapping[str, Any]) -> str:
    """YAML with the value of every option that has one, in the order of ``--help``."""
    import yaml

    body = dict(_entries(values))
    return HEADING + yaml.safe_dump(body, sort_keys=False, default_flow_style=False)


def _entries(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in CONFIGURABLE:
        value = values.get(name)
        if value is None or value == ():
            continue
        if name == "vv":
            continue  # A synonym of verbose.
        yield name, list(value) if isinstance(value, tuple) else value


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
