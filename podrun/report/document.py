"""A profile as a JSON document with a schema version, and back; the files of a report.

The document is ``{"schema": "podrun.profile", "schema_version": 1, "profile": {...}}``; the profile's keys are the
fields of `podrun.report.model`, units in their names, numbers as numbers, null for unknown. Same profile, same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from podrun.core.documents import parse_json, read_bytes
from podrun.core.errors import ConfigError, NotFoundError, UsageError
from podrun.report.chrome_trace import to_trace
from podrun.report.html import page
from podrun.report.model import Profile
from podrun.report.text import compare, summary

SCHEMA = "podrun.profile"
SCHEMA_VERSION = 1
"""Grows when a key changes its meaning or goes; new keys alone do not change it."""

MOST_BYTES = 512 << 20
"""The largest report that is read."""
_SEE = "Give the profile.json that podrun profile or autoReport wrote."
_ANEW = "Write it again with this version: podrun profile --report-directory DIR train.py"


def to_json(profile: Profile) -> str:
    """The document's text, ending with a newline."""
    content = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "profile": dataclasses.asdict(profile)}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def from_json(text: str, *, source: str = "the document") -> Profile:
    """Read a document back; ``source`` names it in errors.

    Raises:
        ConfigError: it is no such document, of a newer version, or a field is missing, unknown or of a wrong type.
    """
    return from_object(parse(text, source=source), source=source)


def parse(text: str, *, source: str) -> dict[str, Any]:
    """The JSON object in a text. Raises ConfigError if there is none."""
    content = parse_json(text, source, hint=_SEE)
    if not isinstance(content, dict):
        raise ConfigError(f"{source} holds no report: an object was expected", hint=_SEE)
    return content


def from_object(content: Mapping[str, Any], *, source: str) -> Profile:
    """The profile in a parsed document. Raises ConfigError as `from_json`."""
    from pydantic import ValidationError

    if content.get("schema") != SCHEMA:
        raise ConfigError(f"{source} is no profile: its 'schema' is not {SCHEMA!r}", hint=_SEE)
    if content.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{source} has schema_version {content.get('schema_version')!r}; this podrun reads {SCHEMA_VERSION}",
            hint=_ANEW,
        )
    try:
        found: Profile = _adapter().validate_json(json.dumps(content.get("profile")), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in ("profile", *first["loc"]))
        raise ConfigError(f"{source}: {where}: {first['msg']}", hint=_ANEW) from error
    if not found.stages or not found.seconds_by_cause:
        raise ConfigError(
            f"{source}: profile.stages: a program has at least one stage and one cause", hint=_ANEW
        )
    return found


def load(path: Path | str) -> Profile:
    """The profile in a file that podrun wrote. Raises ConfigError as `from_json`, or if there is no such file."""
    return from_json(read_text(Path(path)), source=str(path))


def read_text(path: Path) -> str:
    """What a file holds. Raises ConfigError if there is no such file, or no text in it."""
    hint = "Write one first: podrun profile --report-directory DIR train.py"
    try:
        data = read_bytes(path, MOST_BYTES, hint=hint)
    except NotFoundError as error:
        raise ConfigError(f"{path} cannot be read: No such file or directory", hint=hint) from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not JSON: it is not UTF-8 text", hint=_SEE) from error


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    properties = {
        "schema": {"const": SCHEMA},
        "schema_version": {"const": SCHEMA_VERSION},
        "profile": {"$ref": "#/$defs/Profile"},
    }
    inner = _adapter().json_schema(ref_template="#/$defs/{model}")
    definitions = inner.pop("$defs", {})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "$defs": {**definitions, "Profile": inner},
    }


@cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Profile)


DOCUMENT = "profile.json"
ARCHIVE = "profile.pop"
"""The SDK's name of a report. podrun writes the JSON document there; ``pva.openReport`` reads it."""
PAGE = "profile.html"
SUMMARY = "summary.txt"
TRACE = "trace.json"


def write_report(
    profile: Profile, directory: Path, *, trace: bool = True, other: Profile | None = None
) -> Path:
    """Write the files; returns the path of ``profile.pop``. ``other``: what page and summary compare with.

    Raises:
        ConfigError: the directory cannot be written.
    """
    document = to_json(profile)
    texts = {
        DOCUMENT: document,
        ARCHIVE: document,
        PAGE: page(profile, other=other),
        SUMMARY: summary(profile) + ("" if other is None else compare(other, profile)),
    }
    if trace:
        texts[TRACE] = to_trace(profile)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in texts.items():
            (directory / f".{name}.part").write_text(content, encoding="utf-8")
        for name in texts:
            (directory / f".{name}.part").replace(directory / name)
    except OSError as error:
        for name in texts:  # All files or none.
            with contextlib.suppress(OSError):
                (directory / f".{name}.part").unlink(missing_ok=True)
        raise ConfigError(
            f"the report cannot be written to {directory}: {error.strerror}",
            hint="Name another directory with autoReport.directory (or podrun profile --report-directory DIR).",
        ) from error
    return directory / ARCHIVE


class Parser(argparse.ArgumentParser):
    """argparse that raises UsageError, as podrun does, and says where all options are listed."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help lists all options.")
