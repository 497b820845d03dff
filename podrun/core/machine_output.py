"""Output for programs: ``--format table|json|jsonl|csv``, the same on all tools.

A command has text for people, one JSON *document*, and *rows*: the document's main list (or the document itself, if it
has none). ``jsonl`` prints a row a line as an object with the schema version; ``csv`` prints a header and the rows,
nested keys joined with dots, lists as JSON, unknown values empty.

    @click.command("gc-inventory")
    @output_options("-j", "--json")
    def command(form: str) -> None:
        print_output(form, text=lambda: table, document=document, rows=document["devices"])

Schemas are in the package: `schema_names` and `schema_text`; ``podrun schema`` prints them.
"""

from __future__ import annotations

import csv
import functools
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import click

from podrun.core.errors import NotFoundError

FORMATS = ("table", "text", "json", "jsonl", "csv")
"""What --format takes; ``text`` is another name of ``table``."""
ROW_SCHEMA_VERSION = 1
SCHEMA_PACKAGE, SCHEMA_ENDING = "podrun.core.output_schemas", ".schema.json"
OTHER_SCHEMAS = {"podrun-health": ("podrun.monitor", "health.schema.json")}
"""Schemas that lie with their tool: package and file."""


def format_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--format``, as parameter ``form``."""
    return click.option(
        "--format", "form", type=click.Choice(FORMATS), default="table", help="What to print [table]."
    )(command)


def output_options(*json_names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--format``, and options of the real tool that mean ``--format json``; both as parameter ``form``."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_form(*args: object, as_json: bool, form: str, **options: object) -> Any:
            return command(*args, form="json" if as_json else form, **options)

        with_json = click.option(*json_names, "as_json", is_flag=True, help="Print JSON (--format json).")
        return with_json(format_option(with_form))

    return decorate


def is_for_people(form: str) -> bool:
    """Whether a format is text for people."""
    return form in ("table", "text")


def print_output(
    form: str, *, text: Callable[[], str], document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Print what was asked for. ``text`` is called only for people."""
    if is_for_people(form):
        click.echo(text())
    else:
        for line in machine_lines(form, document, rows):
            click.echo(line)


def machine_lines(form: str, document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The lines of a format for programs."""
    if form == "json":
        yield json.dumps(document, indent=2)
    elif form == "jsonl":
        yield from (json_line(row) for row in rows)
    else:
        yield from csv_lines(rows)


def json_line(row: Mapping[str, Any]) -> str:
    """A row as one line of JSON."""
    return json.dumps({"schema_version": ROW_SCHEMA_VERSION, **row}, separators=(", ", ": "))


def csv_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A header with the keys of all rows, in the order in which they come, and the rows."""
    flat = [dict(csv_cells(row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    if not names:
        return
    for cells in (names, *([row.get(name, "") for name in names] for row in flat)):
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(cells)
        yield line.getvalue()


def csv_cells(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The cells of a row: keys of nested objects are joined with dots, lists are JSON, None is empty."""
    for key, value in row.items():
        if isinstance(value, Mapping) and value:
            yield from csv_cells(value, f"{prefix}{key}.")
        elif value is None or value == {}:
            yield prefix + key, ""
        elif isinstance(value, str):
            yield prefix + key, value
        else:
            yield prefix + key, json.dumps(value)


def schema_names() -> list[str]:
    """The tools whose output has a schema in the package."""
    files = [entry.name for entry in resources.files(SCHEMA_PACKAGE).iterdir()]
    here = [name.removesuffix(SCHEMA_ENDING) for name in files if name.endswith(SCHEMA_ENDING)]
    return sorted([*here, *OTHER_SCHEMAS])


def schema_text(name: str) -> str:
    """The JSON schema of a tool's document; ``$defs.row`` is that of a row. Raises NotFoundError."""
    if name not in schema_names():
        raise NotFoundError(f"there is no schema {name!r}", hint=f"Schemas: {', '.join(schema_names())}")
    package, file = OTHER_SCHEMAS.get(name, (SCHEMA_PACKAGE, f"{name}{SCHEMA_ENDING}"))
    return (resources.files(package) / file).read_text(encoding="utf-8")
