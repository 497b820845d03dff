"""What podrun writes down about a launch (``--record FILE``), and what it says at the end: incidents and goodput.

Instances write to files in a folder of the launch (`podrun.record.recorder`), podrun to one beside them. At the end
they become one record. Without ``--record`` a launch that plans faults or may start instances again is recorded too,
because the end of the launch reports on it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from podrun.core.errors import NotFoundError
from podrun.core.quick_dataclass import dataclass
from podrun.core.telemetry import MachineReport
from podrun.faults import FaultSpec
from podrun.launcher.option_table import BY_NAME
from podrun.launcher.process import Ended
from podrun.launcher.recovery import (
    GoOnWithFewer,
    PowerCycleMachine,
    RecoveryStep,
    ReplaceMachine,
    ResetThePartition,
    ResetTheseIpus,
    TakeSpare,
    Verdict,
)
from podrun.launcher.spec import LaunchLayout, LaunchSpec
from podrun.record.events import (
    AT_END,
    LAUNCH,
    LaunchHeader,
    Record,
    normalised,
    read_parts,
    to_lines,
    with_control,
    without_ends_after_errors,
    without_errors_since,
)
from podrun.record.goodput import Goodput, goodput_of, progress_of
from podrun.record.incidents import Incident, incidents_json, incidents_of
from podrun.record.recorder import FOLDER, EventRecorder
from podrun.record.strikes import FaultTime, strikes_of, with_faults
from podrun.record.timeline import times_text

NOT_RECORDED = frozenset(
    {"record", "fault", "fault-plan", "export-config", "overwrite-config", "import-config"}
)
"""Options that a replay does not repeat: its faults come from the record."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a recorded launch left: its record, incidents and goodput."""

    record: Record
    incidents: tuple[Incident, ...]
    goodput: Goodput | None

    @property
    def lines(self) -> list[str]:
        """The lines printed at the end of a launch in which something went wrong."""
        if not self.incidents:
            return []
        said = [incident.text for incident in self.incidents]
        return said if self.goodput is None else [*said, self.goodput.text]


def with_header(
    spec: LaunchSpec, options: Mapping[str, Any], program: Sequence[str], directory: str
) -> LaunchSpec:
    """The launch with the header of its record. Raises NotFoundError if the record cannot be written."""
    if spec.record is not None:
        check_file(Path(spec.record))
    planned = () if spec.partition is None else spec.partition.faults
    return dataclasses.replace(
        spec, header=LaunchHeader(words_of(options, program), directory, tuple(planned))
    )


class LaunchRecording:
    """The record of one launch. ``folder`` holds the files of its processes; ``file`` is the record, if one is asked
    for; ``since`` is when the launch began, in seconds since 1970.
    """

    def __init__(self, folder: Path, file: str | None, header: LaunchHeader, since: float = 0.0) -> None:
        self._folder, self._header, self._since = folder, header, since
        self._file = None if file is None else Path(file)
        self._notes = EventRecorder(folder / f"launch.0.{os.getpid()}.jsonl", LAUNCH, 0)
        self.environment: Mapping[str, str] = {FOLDER: str(folder)}
        """Variables for instances on this host."""

    def begin(self, life: int, layout: LaunchLayout) -> None:
        """Note that instances are about to start; they were started ``life`` times before."""
        self._notes.life = life
        parts = {"replicas": layout.replicas, "instances": layout.instances, "ipus": layout.ipus}
        self._notes.note_at(0, "start", parts)

    def started_again(self, number: int, steps: Sequence[RecoveryStep]) -> None:
        """Note a restart after the steps of a recovery. ``number``: of the restart."""
        words = [*map(step_in_words, steps), f"instances started again (restart {number})"]
        self.note("restart", text=", ".join(words))

    def recovery_failed(self, why: str) -> None:
        """Note that a recovery broke off, since something else broke meanwhile."""
        self.note("repair", text=f"the recovery failed: {normalised(why.partition('. ')[0])}")

    def gave_up(self, verdict: Verdict) -> None:
        """Note that the instances are not started again."""
        self.note("verdict", text="not started again: " + normalised(verdict.text.partition("\n")[0]))

    def ended(self, failed: Ended) -> None:
        """Note that an instance failed."""
        self.note("ended", instance=failed.instance, code=failed.code, how=failed.in_words)

    def reached(self) -> int | None:
        """The batch of the training that instance 0 came to, counted from the training's first; None if it ran none."""
        own = [timed.event for timed in read_parts(self._folder) if timed.event.actor == "instance 0"]
        runs = progress_of(own).runs
        return runs[-1].batch + runs[-1].batches if runs else None

    def note(self, kind: str, **data: object) -> None:
        """Write an event that comes after everything that the instances did since they were started."""
        self._notes.note_at(AT_END, kind, data)

    def finish(
        self,
        left: Set[FaultSpec],
        reports: Sequence[MachineReport] = (),
        inside: Sequence[tuple[str, FaultTime]] = (),
        signalled: float = math.inf,
    ) -> Recorded:
        """Join all files and write the record, with its times, incidents and goodput beside it.

        ``left``: planned faults that have strikes left. ``reports``: of the machines, with what changed the partition
        and which faults struck when. ``inside``: faults that struck in instances: in which, and the strike.
        ``signalled``: when podrun was told to end the launch. Raises NotFoundError if the files cannot be written.
        """
        self._notes.close()
        control = [event for report in reports for event in report.control_events]
        since = [entry for entry in control if entry.time_s >= self._since]
        told = [
            *inside,
            *(
                (r.agent_id, FaultTime(strike.fault, strike.time_s))
                for r in reports
                for strike in r.struck_faults
            ),
        ]
        recent = [(by, strike) for by, strike in told if strike.seconds >= self._since]
        times = strikes_of(recent, self._header.faults)
        known = {strike.fault for strike in times}
        struck = [fault for fault in self._header.faults if fault not in left or fault in known]
        timed = with_faults(without_errors_since(read_parts(self._folder), signalled), struck, times)
        timed = with_control(timed, since)
        kept = without_ends_after_errors(timed)
        record = Record(self._header, tuple(timed_event.event for timed_event in kept))
        incidents = tuple(incidents_of(record))
        goodput = goodput_of(timed, incidents=len(incidents))
        if self._file is not None:
            _write(self._file, "\n".join(to_lines(record)) + "\n")
            _write(file_beside(self._file, "times"), times_text(kept))
            _write(file_beside(self._file, "incidents"), incidents_json(record))
            if goodput is not None:
                _write(file_beside(self._file, "goodput"), json.dumps(goodput.plain, indent=2) + "\n")
        return Recorded(record, incidents, goodput)


def step_in_words(step: RecoveryStep) -> str:
    """A step of a recovery in words: ``replace machine ipum2``."""
    match step:
        case ResetTheseIpus(ipus):
            return f"reset {'IPU' if len(ipus) == 1 else 'IPUs'} {', '.join(map(str, ipus))}"
        case ResetThePartition():
            return "reset the partition"
        case PowerCycleMachine(agent):
            return f"power-cycle machine {agent}"
        case ReplaceMachine(agent):
            return f"replace machine {agent}"
        case TakeSpare():
            return "make the partition anew on other machines"
        case GoOnWithFewer(least):
            return f"go on with fewer replicas, at least {least}"


def file_beside(file: Path, what: str) -> Path:
    """The file for ``what`` beside a record."""
    return file.with_name(f"{file.name}.{what}.json")


def check_file(file: Path) -> None:
    """Raise NotFoundError if a record cannot be written there, so that a launch fails at its start and not at
    its end.
    """
    if not file.parent.is_dir() or file.is_dir() or not os.access(file.parent, os.W_OK):
        raise NotFoundError(
            f"the record cannot be written to {file}",
            hint="Name a file in a folder that is there: --record FILE",
        )


def _write(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".draft")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise NotFoundError(
            f"the record cannot be written to {path}: {error.strerror}", hint="Name another --record FILE."
        ) from error


def words_of(options: Mapping[str, Any], program: Sequence[str]) -> tuple[str, ...]:
    """The words after ``podrun`` that state these options and this program, without faults and record."""
    words: list[str] = []
    for name, value in options.items():
        if name in NOT_RECORDED:
            continue
        if not BY_NAME[name].takes_value:
            words += [f"--{name}"] * (int(value) if name == "verbose" else 1)
            continue
        for item in value if BY_NAME[name].repeatable else (value,):
            text = ("yes" if item else "no") if isinstance(item, bool) else str(item)
            words.append(f"--{name}={text}")
    return (*words, "--", *program)
