"""The rows of a state file: how values become rows, and rows values again, each checked field by field.

Who reads a row trusts nothing in it. A damaged file may hold text for a number, a number that no clock shows, or lists
in lists without an end: each ends in one `ValueError` that names the field, and what stands there.
"""

from __future__ import annotations

import enum
import functools
import math
import re
import sqlite3
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from podrun.core.cluster import IPUS_PER_MACHINE
from podrun.core.documents import parse_json
from podrun.core.errors import ConfigError, PodrunError
from podrun.core.quick_dataclass import dataclass
from podrun.faults import FaultSpec, parse_fault

Row = tuple[Any, ...]
SCHEMA_VERSION = 7
"""The schema of state files. Others are refused: earlier ones were never released."""
LATEST = 253_402_300_799.0
"""The last second of the year 9999, after which Python has no dates."""
LARGEST = (1 << 63) - 1
_NO_CHARACTERS = re.compile(r"[\0\ud800-\udfff]")
DEEPEST = 8
"""Most levels of lists and mappings in a row."""
_RANGES: Mapping[str, tuple[float, float]] = {
    "owner": (-1, (1 << 32) - 1),
    "size": (1, 1 << 20),
    "num_gcds": (1, 1 << 20),
    "num_ilds": (0, 1 << 20),
    "index": (0, 1 << 20),
    "priority": (-(1 << 31), (1 << 31) - 1),
    "generation": (0, (1 << 32) - 1),
    "first_slot": (0, IPUS_PER_MACHINE - 1),
    "count": (1, IPUS_PER_MACHINE),
}
"""The least and the largest value of fields, by name; other whole numbers fit SQLite, other numbers are times."""


def other_schema(path: Path | None, version: int) -> ConfigError:
    """The refusal of a file of another schema."""
    age = "a newer" if version > SCHEMA_VERSION else "an unreleased"
    return ConfigError(
        f"{path} is of {age} podrun (schema {version}; this one reads {SCHEMA_VERSION})",
        hint="Use that podrun, or name another file with --state-file.",
    )


def plain_row(value: object) -> Any:
    """A value as a row holds it, in JSON: what `checked` reads."""
    if isinstance(value, FaultSpec):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, tuple):
        return [plain_row(entry) for entry in value]
    if is_dataclass(value):
        return {entry.name: plain_row(getattr(value, entry.name)) for entry in fields(value)}
    return value


def parse_row(text: object) -> Any:
    """The value that the JSON of a row holds. Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError(f"it is recorded as {_shown(text)}")
    try:
        value = parse_json(text, "it")
    except PodrunError as error:
        raise ValueError(error.message) from error
    level = [value]
    for _ in range(DEEPEST):
        level = [
            part
            for entry in level
            if isinstance(entry, dict | list)
            for part in (entry.values() if isinstance(entry, dict) else entry)
        ]
    if level:
        raise ValueError("lists and objects are nested too deeply")
    return value


def checked(kind: object, value: object, place: str) -> Any:
    """A value of a row as its field's type wants it: a dataclass from an object, a tuple from a list, an enum from a
    name, a fault from its text. Raises ValueError that names the place."""
    if kind is FaultSpec:
        try:
            return parse_fault(checked(str, value, place))
        except PodrunError as error:
            raise ValueError(f"{place}: {error.message}") from error
    if is_dataclass(kind):
        return _dataclass(typing.cast(type, kind), value, place)
    origin = typing.get_origin(kind)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{place} is {_shown(value)}, not a list")
        of = typing.get_args(kind)[0]
        return tuple(checked(of, entry, f"{place}[{i}]") for i, entry in enumerate(value))
    if origin is types.UnionType:  # T | None
        inner = next(of for of in typing.get_args(kind) if of is not type(None))
        return None if value is None else checked(inner, value, place)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        if not isinstance(value, str) or value not in kind.__members__:
            raise ValueError(f"{place} is {_shown(value)}, not one of {', '.join(kind.__members__)}")
        return kind[value]
    return _plain_value(kind, value, place)


def _plain_value(kind: Any, value: Any, place: str) -> Any:
    name = place.rpartition(".")[2]
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str):
        if _NO_CHARACTERS.search(value):
            raise ValueError(f"{place} holds what is no character")
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int and number and isinstance(value, int):
        low, high = _RANGES.get(name, (0, LARGEST))
    elif kind is float and number and (isinstance(value, int) or math.isfinite(value)):
        low, high = 0.0, LATEST
    else:
        raise ValueError(f"{place} is {_shown(value)}, not {_KINDS[kind]}")
    if not low <= value <= high:
        raise ValueError(f"{place} is {_shown(value)}; it can be {low:.0f} to {high:.0f}")
    return value


_KINDS: Mapping[Any, str] = {
    bool: "true or false",
    str: "text",
    int: "a whole number",
    float: "a number",
}


def _dataclass(kind: type, value: object, place: str) -> Any:
    inside = f"{place}." if place else ""
    if not isinstance(value, dict):
        raise ValueError(f"{place or 'it'} is {_shown(value)}, not an object")
    hints = _hints(kind)
    if unknown := sorted(value.keys() - hints.keys()):
        raise ValueError(f"{inside}{unknown[0][:40]!r} is no field")
    arguments = {name: checked(hints[name], entry, inside + name) for name, entry in value.items()}
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    if missing := sorted(required - value.keys()):
        raise ValueError(f"{inside}{missing[0]} is missing")
    return kind(**arguments)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, localns={"FaultSpec": FaultSpec})


def _shown(value: object) -> str:
    """What stands in a row, in few words."""
    match value:
        case None:
            return "empty"
        case str():
            return f"the text {value[:40]!r}"
        case bytes():
            return "bytes"
        case list():
            return "a list"
        case dict():
            return "an object"
        case int() if abs(value) > LARGEST:
            return "a very large number"
    return str(value).lower() if isinstance(value, bool) else f"{value!r}"


# --- the file ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateRows:
    """The content of a state file: the rows that could be read, and problems with the others. ``pod``: the row about
    the POD.
    """

    pod: Mapping[str, Any] | None
    partitions: tuple[Row, ...] = ()
    allocations: tuple[Row, ...] | None = None
    lost: tuple[Any, ...] = ()
    plans: tuple[Row, ...] = ()
    users: tuple[Row, ...] = ()
    layout: tuple[Row, ...] | None = None
    unreadable: tuple[str, ...] = ()


def rows_of(db: sqlite3.Connection) -> StateRows:
    """All rows of an open state file, as far as they can be read."""
    unreadable: list[str] = []

    def ask(statement: str) -> list[Row]:
        rows: list[Row] = []
        try:
            rows.extend(db.execute(statement))
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            table = statement.rsplit(" FROM ", maxsplit=1)[-1].split(maxsplit=1)[0]
            unreadable.append(f"{table}: {error}")
        return rows

    columns = [str(row[1]) for row in ask("SELECT * FROM pragma_table_info('pod')")]
    pods = [dict(zip(columns, row, strict=True)) for row in ask("SELECT * FROM pod")]
    if len(pods) > 1:
        unreadable.append(f"pod: there are {len(pods)} rows, and the first counts")
    pod = pods[0] if pods else None
    own, own_layout = (bool(pod and pod.get(name)) for name in ("own_allocations", "own_layout"))
    return StateRows(
        pod,
        tuple(ask("SELECT name, data FROM partitions")),
        tuple(ask("SELECT name, agents FROM allocations ORDER BY position")) if own else None,
        tuple(row[0] for row in ask("SELECT agent FROM lost")),
        tuple(ask("SELECT kind, name, data FROM plans ORDER BY kind, name")),
        tuple(ask("SELECT name, data FROM users")),
        tuple(ask("SELECT kind, position, data FROM layout")) if own_layout else None,
        tuple(unreadable),
    )


_POD_COLUMNS: Mapping[str, type] = {
    "name": str,
    "own_allocations": int,
    "fingerprint": str,
    "uid": str,
    "epoch": int,
    "own_layout": int,
}


def check_pod(pod: Mapping[str, Any]) -> None:
    """Raise ValueError that names a column of the row about the POD which holds what it cannot."""
    for name, kind in _POD_COLUMNS.items():
        if name in pod:  # A damaged file may lack some.
            checked(kind, pod[name], f"pod: {name}")
