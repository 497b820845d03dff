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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun.core.documents import compose_yaml, read_text
from podrun.core.errors import ConfigError, ConflictError, NotFoundError, UsageError
from podrun.launcher.option_table import BY_NAME, OPTIONS, Option, ValueKind
from podrun.launcher.options import nearest_option, option_value

if TYPE_CHECKING:
    import yaml

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


def merge_config(options: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """``given`` over the values of the file that its ``import-config`` names, if any."""
    path = options.get("import-config")
    merged = read_options_file(directory / path) if path else {}
    return merged | dict(options)


def read_options_file(path: Path) -> dict[str, Any]:
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


def _value(option: Option, node: yaml.Node, where: str) -> Any:
    """The value of one key; None (the default applies) if it is empty."""
    import yaml

    if isinstance(node, yaml.SequenceNode) and option.repeatable:
        return tuple(_scalar(option, item, where) for item in node.value)
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
        return None
    value = _scalar(option, node, where)
    return (value,) if option.repeatable else value


def _scalar(option: Option, node: yaml.Node, where: str) -> Any:
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
        return option_value(option, node.value, f"{where}: {option.name}")
    except UsageError as error:
        raise ConfigError(error.message, hint=error.hint) from None


def write_options_file(path: Path, values: Mapping[str, Any], *, overwrite: bool) -> None:
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
