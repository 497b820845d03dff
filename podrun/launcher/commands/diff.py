"""``podrun diff RECORD RECORD``: the first event in which two records differ."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from podrun.launcher.commands.click_verbs import RecordCommand, records_argument
from podrun.launcher.relaunch import DIFFERENT
from podrun.record.compare import first_difference, header_differences
from podrun.record.events import read_record


def diff_records(ours: Path, theirs: Path) -> int:
    """Name the first event that differs. Returns 0 for records of the same events, else `DIFFERENT`."""
    a, b = read_record(ours), read_record(theirs)
    for line in header_differences(a, b):
        sys.stdout.write(f"{line}\n")
    difference = first_difference(a, b)
    sys.stdout.write(f"the same {len(a.events)} events\n" if difference is None else f"{difference.text}\n")
    return 0 if difference is None else DIFFERENT


@click.command(
    "diff",
    cls=RecordCommand,
    usage="podrun diff RECORD RECORD",
    help="""Names the first event in which two records differ, and its fields. Ends with 1
if there is one.""",
)
@records_argument(2)
def diff_verb(records: Sequence[Path]) -> int:
    """``podrun diff``."""
    return diff_records(records[0], records[1])
