"""``podrun replay RECORD``: launch again what was recorded, and compare."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from podrun.core.errors import ConflictError
from podrun.launcher.commands.click_verbs import (
    DIRECTORY_OPTION,
    RECORD_OPTION,
    RecordCommand,
    RecordContext,
    records_argument,
)
from podrun.launcher.relaunch import DIFFERENT, Relaunch, new_record
from podrun.record.compare import first_difference
from podrun.record.events import Record, read_record
from podrun.record.incidents import incidents_json, incidents_of


def replay_launch(file: Path, keep: str | None, relaunch: Relaunch) -> int:
    """Repeat a recorded launch with the same faults, and compare. ``keep``: where to write the new record. Raises
    ConflictError if the launch got no IPUs.
    """
    before = read_record(file)
    with new_record(keep) as place:
        relaunch.launch(before, [fault.text for fault in before.header.faults], place)
        after = read_record(place)
    if _has_attached(before) and not _has_attached(after):
        words = [word.partition("=") for word in before.header.words]
        name = next((value for option, _, value in words if option == "--vipu-partition"), "NAME")
        raise ConflictError(
            f"the launch got no IPUs this time, so there is nothing to compare with {file}",
            hint="The error above says why. What an earlier launch broke goes with: "
            f"vipu reset partition {name} (or gc-reset -d ID, for one IPU); then: podrun replay {file}",
        )
    if incidents_json(before) == incidents_json(after):
        count = len(incidents_of(before))
        sys.stdout.write(f"replay: the same {count} incident{'' if count == 1 else 's'}\n")
        difference = first_difference(before, after)
        if difference is not None:
            sys.stdout.write(f"the events differ otherwise: {difference.text}\n")
        return 0
    sys.stdout.write("replay: the incidents differ\n")
    difference = first_difference(before, after)
    sys.stdout.write(f"{difference.text}\n" if difference is not None else "")
    return DIFFERENT


def _has_attached(record: Record) -> bool:
    return any(event.kind == "attach" for event in record.events)


@click.command(
    "replay",
    cls=RecordCommand,
    usage="podrun replay RECORD [--record FILE] [--directory DIR]",
    help="""Launches what was recorded again: the same words, folder and faults. Ends with
0 if the incidents are the same to the byte, else with 1, and names the first
event that differs.""",
)
@records_argument(1)
@RECORD_OPTION
@DIRECTORY_OPTION
@click.pass_obj
def replay_verb(
    context: RecordContext, records: Sequence[Path], keep: str | None, directory: str | None
) -> int:
    """``podrun replay``."""
    return replay_launch(records[0], keep, Relaunch(context.start, context.environ, directory))
