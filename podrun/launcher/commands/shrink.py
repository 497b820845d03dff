"""``podrun shrink RECORD``: the fewest faults with which a recorded launch still fails."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from podrun.core.errors import UsageError
from podrun.launcher.commands.click_verbs import (
    DIRECTORY_OPTION,
    RECORD_OPTION,
    RecordCommand,
    RecordContext,
    records_argument,
)
from podrun.launcher.relaunch import Relaunch, new_record
from podrun.record.compare import smallest
from podrun.record.events import Record, read_record, struck_faults


def shrink_faults(file: Path, keep: str | None, relaunch: Relaunch) -> int:
    """Find the smallest part of a record's faults with which the launch still fails in the same way.

    ``keep``: where the record of the smallest failing launch goes. Raises UsageError for a launch that did not fail.
    """
    before = read_record(file)
    wanted = verdict(before)
    if wanted is None:
        raise UsageError(
            f"the launch recorded in {file} did not fail",
            hint="podrun shrink needs one that ended with an error.",
        )
    faults = [replace(spec, optional=True).text for spec in struck_faults(before.events)]
    if not faults:
        raise UsageError(
            f"no fault struck in the launch recorded in {file}: there is nothing to shrink",
            hint="podrun shrink takes faults away; it needs a record of a launch that one of them ended.",
        )

    def fails(chosen: Sequence[str]) -> bool:
        with new_record(None) as place:
            relaunch.launch(before, chosen, place)
            alike = verdict(read_record(place)) == wanted
        sys.stdout.write(
            f"shrink: {' '.join(chosen) or 'no faults'}: {'fails' if alike else 'does not fail so'}\n"
        )
        sys.stdout.flush()
        return alike

    if not fails(faults):
        raise UsageError(
            f"the launch recorded in {file} does not fail in the same way again",
            hint=f"podrun replay {file} says what differs.",
        )
    least = smallest(faults, fails)
    if keep is not None:
        relaunch.launch(before, least, Path(keep))
    options = " ".join(f"--fault {shlex.quote(text)}" for text in least)
    sys.stdout.write(
        f"the smallest plan that still fails has {len(least)} of {len(faults)} faults: {options or 'none'}\n"
    )
    return 0


def verdict(record: Record) -> tuple[int, str] | None:
    """How a launch failed: its exit code and the type of its last error; None if it succeeded."""
    ends = [event for event in record.events if event.kind == "end"]
    code = int(ends[-1].data.get("code", 0)) if ends else 1
    errors = [event for event in record.events if event.kind == "error"]
    return (code, str(errors[-1].data.get("error")) if errors else "") if code else None


@click.command(
    "shrink",
    cls=RecordCommand,
    usage="podrun shrink RECORD [--record FILE] [--directory DIR]",
    help="""Launches with fewer and fewer of the faults that struck, as long as the launch
fails in the same way, and prints the smallest plan as --fault options.""",
)
@records_argument(1)
@RECORD_OPTION
@DIRECTORY_OPTION
@click.pass_obj
def shrink_verb(
    context: RecordContext, records: Sequence[Path], keep: str | None, directory: str | None
) -> int:
    """``podrun shrink``."""
    relaunch = Relaunch(
        context.start, context.environ, directory, each_in_a_new_folder=True, on_a_fresh_partition=True
    )
    return shrink_faults(records[0], keep, relaunch)
