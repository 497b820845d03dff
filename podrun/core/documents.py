"""YAML and JSON files that people write: plain values, and the line on which each of them stands.

`read_document` reads, `Document.check` holds the values against a JSON schema; both say file and line of what is
wrong. JSON is read as YAML, of which it is a part. Values are what JSON knows; keys are text, given once; there are no
tags and no aliases, so that a small file cannot become a large value.

Everything that podrun reads from files of others goes through here, also where it is read further by other rules:
`read_bytes` takes a regular file of bounded size and nothing else, `compose_yaml` and `parse_json` what is nested
within bounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from podrun.core.errors import ConfigError, NotFoundError, UsageError
from podrun.core.quick_dataclass import dataclass

MAX_BYTES = 1 << 20
"""The largest file that people write by hand."""
DEEPEST = 64
"""Most levels of lists and mappings."""
MOST_NODES = 20_000
"""Most values and keys of a YAML file: reading these takes a second and 40 MB, and a million of them 2 GB."""
LONGEST_NUMBER = 100
"""Most characters of a number."""
KeyPath = tuple[str | int, ...]
"""Keys and indices that lead to a value, from the top."""
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_SCALARS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null"))


class OthersFileError(ConfigError):
    """A file belongs to another user, and only this user's are read."""


@dataclass(frozen=True, slots=True)
class Document:
    """``where`` is the file's name, for messages; ``value`` is its content; ``lines`` has line numbers from 1, by
    place.
    """

    where: str
    value: Any
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def at(self, place: Sequence[str | int] = ()) -> str:
        """``FILE:LINE`` of a value, or of the nearest one around it that has a line."""
        known = tuple(place)
        while known and known not in self.lines:
            known = known[:-1]
        line = self.lines.get(known)
        return self.where if line is None else f"{self.where}:{line}"

    def error(self, place: Sequence[str | int], problem: str, *, hint: str | None = None) -> ConfigError:
        """An error about a value of this document."""
        return ConfigError(f"{self.at(place)}: {problem}", hint=hint)

    def check(self, schema: Mapping[str, Any], *, hint: str | None = None) -> None:
        """Raise ConfigError that names file, line and key of the first value that does not fit the schema."""
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import best_match

        problem = best_match(Draft202012Validator(schema).iter_errors(self.value))
        if problem is not None:
            place = tuple(problem.absolute_path)
            key = ".".join(map(str, place))
            raise self.error(place, f"{key}: {problem.message}" if key else str(problem.message), hint=hint)


def read_document(path: Path, *, hint: str | None = None) -> Document:
    """Read a file. Raises NotFoundError, or ConfigError that names file and line. ``hint``: what such a file holds."""
    return parse_document(read_text(path, hint=hint), str(path), hint=hint)


def read_bytes(path: Path, most: int = MAX_BYTES, *, hint: str | None = None, own: bool = False) -> bytes:
    """The bytes of a regular file of at most ``most`` bytes. ``own``: only of a file that belongs to this user.

    Raises NotFoundError, and ConfigError for a directory, a device, a pipe or a larger file: reading one could block
    for ever, or fill the memory.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if stat.S_ISDIR(status.st_mode):
                raise ConfigError(f"{path} cannot be read: Is a directory", hint=hint)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} is not a regular file", hint=hint)
            if own and status.st_uid != os.geteuid():
                raise OthersFileError(f"{path} belongs to another user", hint=hint)
            data = file.read(most + 1)
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {path}", hint=hint) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", hint=hint
        ) from error
    if len(data) > most:
        raise ConfigError(f"{path} has {max(status.st_size, len(data))} bytes; {most} is the most", hint=hint)
    return data


def read_text(path: Path, most: int = MAX_BYTES, *, hint: str | None = None, own: bool = False) -> str:
    """`read_bytes` as UTF-8 text."""
    try:
        return read_bytes(path, most, hint=hint, own=own).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: byte {error.start}", hint=hint) from error


def write_output(path: Path, text: str, *, hint: str | None = None) -> None:
    """Write what a command was asked to put into a file. Raises UsageError that names a file which cannot be
    written; ``hint``: instead of one that fits any command."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if hint is None:
            folder = (
                "that is one"
                if path.is_dir()
                else f"ls -ld {shlex.quote(str(path.parent))} says who may write"
            )
            hint = f"Name a file, in a folder that you may write to: {folder}."
        raise UsageError(f"{path} cannot be written: {error.strerror or error}", hint=hint) from error


def write_whole(data: bytes, path: str | os.PathLike[str]) -> None:
    """Write a file so that a reader sees all of it, or what was there before: beside its place, then renamed. Only this
    user may read it. Raises OSError.
    """
    target = Path(path)
    handle, draft = tempfile.mkstemp(prefix=".", suffix=f".{target.name}", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(draft, target)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def write_together(directory: Path, texts: Mapping[str, str]) -> None:
    """Write files by name so that a reader sees each of them whole, and none is left of those that cannot all be
    written. Raises OSError.
    """
    drafts = {name: directory / f".{name}.part" for name in texts}
    try:
        for name, draft in drafts.items():
            draft.write_text(texts[name], encoding="utf-8")
        for name, draft in drafts.items():
            draft.replace(directory / name)
    except OSError:
        for draft in drafts.values():
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
        raise


def check_outputs_writable(
    *paths: Path | None, hint: str = "Name a file in a folder where you may write."
) -> None:
    """Refuse files that `write_output` could not write, before the work whose result they are for. What stands there
    stays; None is no file. Raises UsageError.
    """
    for path in paths:
        if path is None or (path.exists() and not path.is_file() and not path.is_dir()):
            continue  # Pipes and devices are written to when there is something to write.
        try:
            new = not path.exists()
            with path.open("ab"):
                pass
            if new:
                path.unlink()
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror or error}", hint=hint) from error


def parse_json(text: str, where: str, *, hint: str | None = None) -> Any:
    """The value that JSON holds. Raises ConfigError."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}", hint=hint) from error
    except RecursionError:
        raise ConfigError(f"{where}: lists and objects are nested too deeply", hint=hint) from None


def parse_document(text: str, where: str, *, hint: str | None = None) -> Document:
    """The document that ``text`` holds; ``where``: its name in messages. Raises ConfigError."""
    node = compose_yaml(text, where, hint=hint)
    if node is None:
        raise ConfigError(f"{where}: the file is empty", hint=hint)
    reader = _Reader(where, hint)
    return Document(where, reader.value(node, ()), reader.lines)


def compose_yaml(text: str, where: str, *, hint: str | None = None) -> Any:
    """The YAML node of a text; None for an empty text. Raises ConfigError for aliases, for more than `DEEPEST` levels,
    `MOST_NODES` values or `LONGEST_NUMBER` characters of a number. Reading stops where a limit is passed.
    """
    import yaml

    def refuse(node: Any, problem: str) -> ConfigError:
        return ConfigError(f"{where}:{node.start_mark.line + 1}: {problem}", hint=hint)

    class BoundedLoader(yaml.SafeLoader):
        """Composes within the limits, so that a small file cannot take much time or memory."""

        depth = nodes = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            events: Any = self
            if events.check_event(yaml.AliasEvent):
                # It could stand for a value of any size, or for itself.
                problem = "an alias (*name) is not understood here: write the value again"
                raise refuse(events.peek_event(), problem)
            self.nodes, self.depth = self.nodes + 1, self.depth + 1
            if self.depth > DEEPEST + 1:
                raise refuse(events.peek_event(), "lists and mappings are nested too deeply")
            if self.nodes > MOST_NODES:
                raise refuse(events.peek_event(), f"there are more than {MOST_NODES} values and keys")
            node: Any = super().compose_node(parent, index)
            self.depth -= 1
            if node.tag in _NUMBERS and len(node.value) > LONGEST_NUMBER:
                raise refuse(node, f"a number has {len(node.value)} characters; {LONGEST_NUMBER} is the most")
            return node

    try:
        return yaml.compose(text, Loader=BoundedLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = mark.line + 1 if mark is not None else 1
        raise ConfigError(f"{where}:{line}: not YAML: {error.problem}", hint=hint) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not YAML: {error}", hint=hint) from error


def load_schema(package: str, name: str) -> dict[str, Any]:
    """A JSON schema that is a file of a package."""
    from importlib.resources import files

    schema: dict[str, Any] = json.loads(files(package).joinpath(name).read_text(encoding="utf-8"))
    return schema


class _Reader:
    """Turns YAML's nodes into plain values, and notes their lines."""

    def __init__(self, where: str, hint: str | None) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._where = where
        self._hint = hint

    def value(self, node: Any, place: KeyPath) -> Any:
        import yaml

        line = node.start_mark.line + 1
        self.lines[place] = line
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*place, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place)
        if node.tag not in _SCALARS:
            if node.tag.startswith("tag:yaml.org,2002:timestamp"):
                return str(node.value)
            raise self._error(line, f"a value of type {node.tag} is not understood here")
        try:
            return yaml.SafeLoader("").construct_object(node)
        except (yaml.YAMLError, ValueError, KeyError) as error:  # A tag that does not fit the text behind it.
            raise self._error(line, f"{node.value[:40]!r} is no value of type {node.tag}") from error

    def _mapping(self, node: Any, place: KeyPath) -> dict[str, Any]:
        import yaml

        entries: dict[str, Any] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(line, "a key is not text")
            name = str(key.value)
            if name in entries:
                raise self._error(line, f"{name} is given twice")
            entries[name] = self.value(value, (*place, name))
            self.lines[(*place, name)] = line
        return entries

    def _error(self, line: int, problem: str) -> ConfigError:
        return ConfigError(f"{self._where}:{line}: {problem}", hint=self._hint)
