"""Fault plans: YAML or JSON files of faults, for ``--fault-plan``.

    version: 1
    faults:
      - ipu:5@batch=17:tile-parity
      - target: {link: [2, 3]}
        when: {batch: 17}
        for: 10
        effect: degraded
        settings: {lanes: 4}
        optional: true

An entry is a short form (`podrun.faults.spec`) or a mapping that says the same. ``fault-plan.schema.json`` in this
package is `plan_schema`, for editors and other tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podrun.core.documents import Document, parse_document, read_document
from podrun.core.errors import UsageError
from podrun.faults.effects import EVENTS, REQUESTS, WHERE, kinds_of
from podrun.faults.spec import MOST_REPEATS, FaultSpec, make_fault, parse_fault

VERSION = 1
HINT = "As in: {version: 1, faults: [{target: {ipu: 5}, when: {batch: 17}, effect: tile-parity}]} (docs/faults.md)."


def plan_schema() -> dict[str, Any]:
    """The JSON schema of a plan."""
    whole = {"type": "integer", "minimum": 0}
    pair = {"type": "array", "items": whole, "minItems": 2, "maxItems": 2}
    where = {target: pair if form == "A-B" else whole for target, form in WHERE.items()}
    targets: dict[str, Any] = {**where, "service": {"const": "vipu"}}
    effects = sorted({kind for target in WHERE for kind in kinds_of(target)})
    entry = {
        "type": "object",
        "additionalProperties": False,
        "required": ["target", "when", "effect"],
        "properties": {
            "target": {
                "type": "object",
                "additionalProperties": False,
                "minProperties": 1,
                "maxProperties": 1,
                "properties": targets,
            },
            "when": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "batch": whole,
                    "instruction": whole,
                    "time": {"type": "number", "minimum": 0},
                    "during": {"enum": [*EVENTS, *REQUESTS]},
                    "rate": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                    "seed": whole,
                },
            },
            "for": {"type": "integer", "minimum": 1},
            "repeat": {
                "type": "object",
                "additionalProperties": False,
                "required": ["times"],
                "properties": {
                    "times": {"type": "integer", "minimum": 1, "maximum": MOST_REPEATS},
                    "every": {"type": "integer", "minimum": 1},
                },
            },
            "effect": {"enum": effects},
            "settings": {"type": "object", "additionalProperties": {"type": ["number", "string"]}},
            "optional": {"type": "boolean"},
        },
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Fault plan of podrun (podrun --fault-plan FILE)",
        "type": "object",
        "additionalProperties": False,
        "required": ["version", "faults"],
        "properties": {
            "version": {"const": VERSION},
            "faults": {"type": "array", "items": {"$ref": "#/$defs/fault"}},
        },
        "$defs": {"fault": {"if": {"type": "string"}, "then": True, "else": entry}},
    }


def read_plan(path: Path) -> tuple[FaultSpec, ...]:
    """The faults of a plan. Raises NotFoundError, or ConfigError that names file and line."""
    return _faults(read_document(path, hint=HINT))


def parse_plan(text: str, where: str = "the fault plan") -> tuple[FaultSpec, ...]:
    """The faults of a plan that is given as text; ``where``: its name in messages."""
    return _faults(parse_document(text, where, hint=HINT))


def _faults(document: Document) -> tuple[FaultSpec, ...]:
    document.check(plan_schema(), hint=HINT)
    found: list[FaultSpec] = []
    for number, entry in enumerate(document.value["faults"]):
        place = ("faults", number)
        try:
            spec = parse_fault(entry) if isinstance(entry, str) else _fault(entry)
        except UsageError as error:
            raise document.error(place, error.message, hint=error.hint) from error
        if spec in found:
            first = document.at(("faults", found.index(spec)))
            raise document.error(
                place,
                f"fault {spec.text} is planned twice, also at {first}",
                hint="Keep one, or give it repeat: {times: 2}.",
            )
        found.append(spec)
    return tuple(found)


def _fault(entry: Mapping[str, Any]) -> FaultSpec:
    """The fault that a mapping describes; its shape is as the schema says."""
    ((target, indices),) = entry["target"].items()
    where = (
        "-".join(map(str, indices)) if isinstance(indices, Sequence) and target != "service" else str(indices)
    )
    when = {name: str(value) for name, value in entry["when"].items()}
    if "for" in entry:
        when["for"] = str(entry["for"])
    repeat = entry.get("repeat", {})
    when |= {
        name: str(repeat[key]) for name, key in (("repeat", "times"), ("every", "every")) if key in repeat
    }
    text = f"{target}:{where}@{','.join(f'{k}={v}' for k, v in when.items())}:{entry['effect']}"
    return make_fault(
        text,
        target,
        where,
        when,
        entry["effect"],
        entry.get("settings", {}),
        optional=entry.get("optional", False),
    )
