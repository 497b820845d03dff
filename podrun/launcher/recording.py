"""What podrun writes down about a launch (``--record FILE``), and what it says at the end: incidents and goodput.

Instances write to files in a folder of the launch (`podrun.record.recorder`), podrun to one beside them. At the end
they become one record. Without ``--record`` a launch that plans faults or may start instances again is recorded too,
for what is said at the end.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podrun.core.errors import NotFoundError
from podrun.launcher.option_table import BY_NAME
from podrun.launcher.process import Ended
from podrun.launcher.recovery import Recovery, Step, Verdict
from podrun.launcher.spec import LaunchLayout, LaunchSpec
from podrun.record.events import LAUNCH, LaunchHeader, Record, to_lines
from podrun.record.goodput import Goodput, goodput_of
from podrun.record.incidents import Incident, incidents_json, incidents_of
from podrun.record.merge import AT_END, read_parts, with_faults, without_ends_after_errors
from podrun.record.recorder import FOLDER, EventRecorder

NOT_RECORDED = frozenset({"record", "fault", "export-config", "overwrite-config", "import-config"})
"""Options that a replay does not repeat: its faults come from the record."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What came out of it."""

    record: Record
    incidents: tuple[Incident, ...]
    goodput: Goodput | None

    @property
    def lines(self) -> list[str]:
        """What is said at the end of a launch in which something went wrong."""
        if not self.incidents:
            return []
        said = [incident.text for incident in self.incidents]
        return said if self.goodput is None else [*said, self.goodput.text]


def with_header(
    spec: LaunchSpec, given: Mapping[str, Any], program: Sequence[str], directory: str
) -> LaunchSpec:
    """A launch that is written down. Raises NotFoundError if its record cannot be."""
    if spec.record is not None:
        check_file(Path(spec.record))
    planned = () if spec.partition is None else spec.partition.faults
    faults = tuple(fault.text for fault in planned)
    return dataclasses.replace(spec, header=LaunchHeader(words_of(given, program), directory, faults))


class LaunchRecording:
    """The record of one launch. ``folder``: for the files of its processes; ``file``: of the record, if one is asked
    for.
    """

    def __init__(self, folder: Path, file: str | None, header: LaunchHeader) -> None:
        self._folder, self._header = folder, header
        self._file = None if file is None else Path(file)
        self._notes = EventRecorder(folder / f"launch.0.{os.getpid()}.jsonl", LAUNCH, 0)
        self.environment: Mapping[str, str] = {FOLDER: str(folder)}
        """Variables for instances on this host."""

    def begin(self, life: int, layout: LaunchLayout) -> None:
        """Instances are about to start; they were started ``life`` times before."""
        self._notes.life = life
        parts = {"replicas": layout.replicas, "instances": layout.instances, "ipus": layout.ipus}
        self._notes.note_at(0, "start", parts)

    def decided(self, failed: Ended, decision: Recovery | Verdict) -> None:
        """An attempt failed, and this was decided."""
        self.ended(failed)
        if isinstance(decision, Verdict):
            self.note("verdict", text="not started again: " + decision.text.partition("\n")[0])
            return
        steps = ", ".join(step_in_words(step) for step in decision.ways[0]) if decision.ways else ""
        text = f"instances started again (restart {decision.number})"
        self.note("restart", text=f"{steps}, {text}" if steps else text)

    def ended(self, failed: Ended) -> None:
        """An instance failed."""
        self.note("ended", instance=failed.instance, code=failed.code, how=failed.in_words)

    def note(self, kind: str, **data: Any) -> None:
        """Write down what came after all that the instances did since they were started."""
        self._notes.note_at(AT_END, kind, data)

    def finish(self, left: Set[str]) -> Recorded:
        """Bring all files together, and write the record, with ``FILE.incidents.json`` and ``FILE.goodput.json``.

        ``left``: planned faults that did not strike. Raises NotFoundError if the files cannot be written.
        """
        self._notes.close()
        struck = [text for text in self._header.faults if text not in left]
        timed = with_faults(read_parts(self._folder), struck)
        record = Record(self._header, tuple(each.event for each in without_ends_after_errors(timed)))
        incidents = tuple(incidents_of(record))
        goodput = goodput_of(timed, incidents=len(incidents))
        if self._file is not None:
            _write(self._file, "\n".join(to_lines(record)) + "\n")
            _write(beside(self._file, "incidents"), incidents_json(record))
            if goodput is not None:
                _write(beside(self._file, "goodput"), json.dumps(goodput.plain, indent=2) + "\n")
        return Recorded(record, incidents, goodput)


def step_in_words(step: Step) -> str:
    """A step of a recovery: ``replace machine ipum2``."""
    words = " ".join(re.findall("[A-Z][a-z]*", type(step).__name__)).lower()
    values = [getattr(step, field.name) for field in dataclasses.fields(step)]
    return " ".join(
        [words, *(" ".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values)]
    ).rstrip()


def beside(file: Path, what: str) -> Path:
    """The file for ``what`` beside a record."""
    return file.with_name(f"{file.name}.{what}.json")


def check_file(file: Path) -> None:
    """Raises NotFoundError if a record cannot be written there: before a launch, not after it."""
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


def words_of(given: Mapping[str, Any], program: Sequence[str]) -> tuple[str, ...]:
    """The words after ``podrun`` that give these options and this program, without faults and record."""
    words: list[str] = []
    for name, value in given.items():
        if name in NOT_RECORDED:
            continue
        if not BY_NAME[name].takes_value:
            words += [f"--{name}"] * (int(value) if name == "verbose" else 1)
            continue
        for each in value if BY_NAME[name].repeatable else (value,):
            text = ("yes" if each else "no") if isinstance(each, bool) else str(each)
            words.append(f"--{name}={text}")
    return (*words, "--", *program)
