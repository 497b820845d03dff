"""``podrun incidents RECORD``: what happened in a recorded launch, and what it cost."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from podrun.launcher.commands.click_verbs import RecordCommand, records_argument
from podrun.record.events import read_record
from podrun.record.goodput import Goodput
from podrun.record.incidents import incidents_json, incidents_of


def print_incidents(file: Path, *, as_json: bool) -> int:
    """Print the incidents of a record, and its goodput if that lies beside it."""
    record = read_record(file)
    if as_json:
        sys.stdout.write(incidents_json(record))
        return 0
    incidents = incidents_of(record)
    for incident in incidents:
        sys.stdout.write(f"{incident.text}\n")
        sys.stdout.writelines(f"    {line}\n" for line in incident.evidence)
    if not incidents:
        sys.stdout.write("no incidents\n")
    with contextlib.suppress(OSError, ValueError, TypeError):
        text = file.with_name(f"{file.name}.goodput.json").read_text(encoding="utf-8")
        plain = {name: value for name, value in json.loads(text).items() if name != "schema_version"}
        sys.stdout.write(f"{Goodput(**plain).text}\n")
    return 0


@click.command(
    "incidents",
    cls=RecordCommand,
    usage="podrun incidents RECORD [--json]",
    help="""Says what happened in a recorded launch: each incident with its errors and
what it cost.""",
)
@records_argument(1)
@click.option("--json", "as_json", is_flag=True, help="print one JSON document")
def incidents_verb(records: Sequence[Path], as_json: bool) -> int:
    """``podrun incidents``."""
    return print_incidents(records[0], as_json=as_json)
