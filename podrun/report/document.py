"""A profile as a JSON document with a schema version, and back.

The document is ``{"schema": "podrun.profile", "schema_version": 1, "profile": {...}}``; the profile's keys are the
fields of `podrun.report.model`, units in their names, numbers as numbers, null for unknown. Same profile, same bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from podrun.errors import ConfigError
from podrun.report.model import Profile

SCHEMA = "podrun.profile"
SCHEMA_VERSION = 1
"""Grows when a key changes its meaning or goes; new keys alone do not change it."""

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
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not JSON: {error}", hint=_SEE) from error
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
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}",
            hint="Write one first: podrun profile --report-directory DIR train.py",
        ) from error
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
