"""What podrun writes down about a launch (``--record FILE``), and what it says at the end: incidents and goodput.

Instances write to files in a folder of the launch (`podrun.record.recorder`), podrun to one beside them. At the end
they become one record. Without ``--record`` a launch that plans faults or may start instances again is recorded too,
because the end of the launch reports on it.

``podrun replay``, ``shrink``, ``diff`` and ``incidents`` read records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podrun.core.errors import NotFoundError, UsageError
from podrun.core.telemetry import MachineReport
from podrun.faults import parse_fault
from podrun.launcher.option_table import BY_NAME
from podrun.launcher.process import Ended
from podrun.launcher.recovery import (
    GoOnWithFewer,
    PowerCycleMachine,
    ReplaceMachine,
    ResetThePartition,
    ResetTheseIpus,
    Step,
    TakeSpare,
    Verdict,
)
from podrun.launcher.spec import LaunchLayout, LaunchSpec
from podrun.record.compare import first_difference, header_differences, smallest
from podrun.record.events import (
    AT_END,
    LAUNCH,
    FaultTime,
    LaunchHeader,
    Record,
    normalised,
    read_parts,
    read_record,
    strikes_of,
    to_lines,
    with_control,
    with_faults,
    without_ends_after_errors,
)
from podrun.record.goodput import Goodput, goodput_of, progress_of
from podrun.record.incidents import Incident, incidents_json, incidents_of
from podrun.record.recorder import FOLDER, EventRecorder

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
    spec: LaunchSpec, given: Mapping[str, Any], program: Sequence[str], directory: str
) -> LaunchSpec:
    """The launch with the header of its record. Raises NotFoundError if the record cannot be written."""
    if spec.record is not None:
        check_file(Path(spec.record))
    planned = () if spec.partition is None else spec.partition.faults
    faults = tuple(fault.text for fault in planned)
    return dataclasses.replace(spec, header=LaunchHeader(words_of(given, program), directory, faults))


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

    def started_again(self, number: int, steps: Sequence[Step]) -> None:
        """Note a restart after the steps of a recovery. ``number``: of the restart."""
        words = [*map(step_in_words, steps), f"instances started again (restart {number})"]
        self.note("restart", text=", ".join(words))

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

    def note(self, kind: str, **data: Any) -> None:
        """Write an event that comes after everything that the instances did since they were started."""
        self._notes.note_at(AT_END, kind, data)

    def finish(
        self,
        left: Set[str],
        reports: Sequence[MachineReport] = (),
        inside: Sequence[tuple[str, str, float]] = (),
    ) -> Recorded:
        """Join all files and write the record, with ``FILE.incidents.json`` and ``FILE.goodput.json``.

        ``left``: planned faults that have strikes left. ``reports``: of the machines, with what changed the partition
        and which faults struck when. ``inside``: faults that struck in instances: in which, which, and when. Raises
        NotFoundError if the files cannot be written.
        """
        self._notes.close()
        control = [event for report in reports for event in report.control_events]
        since = [entry for entry in control if float(entry["time_s"]) >= self._since]
        told = [*inside, *((r.agent_id, s["fault"], s["time_s"]) for r in reports for s in r.struck_faults)]
        recent = [(by, FaultTime(fault, float(at))) for by, fault, at in told if float(at) >= self._since]
        times = strikes_of(recent, self._header.faults)
        known = {strike.fault for strike in times}
        struck = [text for text in self._header.faults if text not in left or text in known]
        timed = with_faults(read_parts(self._folder), struck, times)
        timed = with_control(timed, since)
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


def beside(file: Path, what: str) -> Path:
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


def words_of(given: Mapping[str, Any], program: Sequence[str]) -> tuple[str, ...]:
    """The words after ``podrun`` that state these options and this program, without faults and record."""
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


Start = Callable[[Sequence[str], Mapping[str, str], str], int]
"""Carries out the words after ``podrun`` with an environment in a folder; the exit code."""
DIFFERENT = 1
"""Exit code of a replay that went differently, and of records that differ."""

USAGE = {
    "replay": "podrun replay RECORD [--record FILE] [--directory DIR]",
    "shrink": "podrun shrink RECORD [--record FILE] [--directory DIR]",
    "diff": "podrun diff RECORD RECORD",
    "incidents": "podrun incidents RECORD [--json]",
}
HELP = {
    "replay": """Launches what was recorded again: the same words, folder and faults. Ends with
0 if the incidents are the same to the byte, else with 1, and names the first
event that differs.""",
    "shrink": """Launches with fewer and fewer of the faults that struck, as long as the launch
fails in the same way, and prints the smallest plan as --fault options.""",
    "diff": """Names the first event in which two records differ, and its fields. Ends with 1
if there is one.""",
    "incidents": """Says what happened in a recorded launch: each incident with its errors and
what it cost.""",
}
_OPTION_HELP = {
    "--record": ("--record FILE", "record of the new launch (shrink: of the smallest)"),
    "--directory": (
        "--directory DIR",
        "folder for relative paths (shrink: a new one each)",
    ),
    "--json": ("--json", "print one JSON document"),
}
_OPTIONS = {
    "replay": ("--record", "--directory"),
    "shrink": ("--record", "--directory"),
    "diff": (),
    "incidents": ("--json",),
}


@dataclass(frozen=True, slots=True)
class Again:
    """How a recorded launch starts again: with which command, environment and folder (None: its own)."""

    start: Start
    environ: Mapping[str, str]
    directory: str | None = None
    each_in_a_new_folder: bool = False
    """Each launch gets a new folder in ``directory``."""
    on_a_fresh_partition: bool = False
    """Each launch resets the partition that it finds: what an earlier one broke must not count against this one."""

    def launch(self, record: Record, faults: Sequence[str], place: Path) -> int:
        """Launch what was recorded with these faults, and record it to ``place``."""
        folder = self.directory or record.header.directory
        if os.path.isdir(folder) and self.directory is not None and self.each_in_a_new_folder:
            folder = tempfile.mkdtemp(prefix="launch-", dir=folder)
        if not os.path.isdir(folder):
            raise NotFoundError(
                f"the launch was recorded in {folder}, which does not exist",
                hint="Name a folder: --directory DIR",
            )
        words = [
            f"--record={place.absolute()}",
            *(f"--fault={text}" for text in faults),
            *words_in(record.header, folder),
        ]
        if self.on_a_fresh_partition:
            words = fresh_partition(words)
        bare = {name: value for name, value in self.environ.items() if name != "PODRUN_FAULTS"}
        sys.stdout.flush()
        return self.start(words, bare, folder)


def words_in(header: LaunchHeader, folder: str) -> list[str]:
    """The recorded words for a launch in a folder: files that the launch found in its own folder by relative paths, and
    that are not in this one, get absolute paths.
    """
    if os.path.abspath(folder) == os.path.abspath(header.directory):
        return list(header.words)

    def placed(path: str) -> str:
        there = os.path.join(header.directory, path)
        found = (
            not os.path.isabs(path)
            and os.path.isfile(there)
            and not os.path.exists(os.path.join(folder, path))
        )
        return there if found else path

    words, script = [], False
    for word in header.words:
        name, equals, value = word.partition("=")
        if script or not word.startswith("--") or not equals:
            words.append(placed(word) if script else word)
        else:
            words.append(f"{name}={placed(value)}")
        script = script or word == "--"
    return words


def fresh_partition(words: Sequence[str]) -> list[str]:
    """The words of a launch that resets the partition it finds."""
    kept = [word for word in words if not word.startswith("--reset-partition")]
    return ["--reset-partition=yes", *kept]


def start_podrun(words: Sequence[str], environ: Mapping[str, str], folder: str) -> int:
    """`Start` in a new process."""
    command = [sys.executable, "-m", "podrun.launcher.cli", *words]
    return subprocess.run(command, env=dict(environ), cwd=folder, check=False).returncode


def main(verb: str, words: Sequence[str], environ: Mapping[str, str], start: Start = start_podrun) -> int:
    """Carry out ``podrun VERB ...``. Raises UsageError."""
    if list(words) in (["-h"], ["--help"]):
        sys.stdout.write(help_text(verb))
        return 0
    files, given = _parse(verb, list(words))
    shrinks = verb == "shrink"
    again = Again(
        start, environ, given.get("--directory"), each_in_a_new_folder=shrinks, on_a_fresh_partition=shrinks
    )
    match verb:
        case "diff":
            return diff(files[0], files[1])
        case "incidents":
            return incidents(files[0], as_json="--json" in given)
        case "replay":
            return replay(files[0], given.get("--record"), again)
    return shrink(files[0], given.get("--record"), again)


def help_text(verb: str) -> str:
    """What ``podrun VERB --help`` shows."""
    options = [_OPTION_HELP[name] for name in _OPTIONS[verb]] + [("-h, --help", "this text")]
    table = "".join(f"  {name:<18}{text}\n" for name, text in options)
    return (
        f"Usage: {USAGE[verb]}\n\n{HELP[verb]}\n\nRECORD is a file that podrun --record FILE has written.\n\n"
        f"Options:\n{table}"
    )


def _parse(verb: str, words: list[str]) -> tuple[list[Path], dict[str, str]]:
    """The files and the options. Raises UsageError."""
    wanted, usage = (2 if verb == "diff" else 1), USAGE[verb]
    given: dict[str, str] = {}
    files: list[str] = []
    while words:
        name, equals, value = words.pop(0).partition("=")
        if name in _OPTIONS[verb]:
            if not equals and name != "--json" and not words:
                raise UsageError(f"podrun {verb}: {name} needs a value", hint=usage)
            given[name] = value if equals else "" if name == "--json" else words.pop(0)
        elif name.startswith("-"):
            raise UsageError(f"podrun {verb} has no option {name}", hint=usage)
        else:
            files.append(name + equals + value)
    if len(files) != wanted:
        raise UsageError(
            f"podrun {verb} takes {('one record', 'two records')[wanted - 1]}, not {len(files)}", hint=usage
        )
    return [Path(file) for file in files], given


def diff(ours: Path, theirs: Path) -> int:
    """Name the first event that differs. Returns 0 for records of the same events, else `DIFFERENT`."""
    a, b = read_record(ours), read_record(theirs)
    for line in header_differences(a, b):
        sys.stdout.write(f"{line}\n")
    found = first_difference(a, b)
    sys.stdout.write(f"the same {len(a.events)} events\n" if found is None else f"{found.text}\n")
    return 0 if found is None else DIFFERENT


def incidents(file: Path, *, as_json: bool) -> int:
    """Print the incidents of a record, and its goodput if that lies beside it."""
    record = read_record(file)
    if as_json:
        sys.stdout.write(incidents_json(record))
        return 0
    found = incidents_of(record)
    for incident in found:
        sys.stdout.write(f"{incident.text}\n")
        sys.stdout.writelines(f"    {line}\n" for line in incident.evidence)
    if not found:
        sys.stdout.write("no incidents\n")
    with contextlib.suppress(OSError, ValueError, TypeError):
        text = file.with_name(f"{file.name}.goodput.json").read_text(encoding="utf-8")
        plain = {name: value for name, value in json.loads(text).items() if name != "schema_version"}
        sys.stdout.write(f"{Goodput(**plain).text}\n")
    return 0


def replay(file: Path, keep: str | None, again: Again) -> int:
    """Repeat a recorded launch with the same faults, and compare. ``keep``: where to write the new record."""
    before = read_record(file)
    with _new_record(keep) as place:
        again.launch(before, before.header.faults, place)
        after = read_record(place)
    if incidents_json(before) == incidents_json(after):
        count = len(incidents_of(before))
        sys.stdout.write(f"replay: the same {count} incident{'' if count == 1 else 's'}\n")
        found = first_difference(before, after)
        if found is not None:
            sys.stdout.write(f"the events differ otherwise: {found.text}\n")
        return 0
    sys.stdout.write("replay: the incidents differ\n")
    found = first_difference(before, after)
    sys.stdout.write(f"{found.text}\n" if found is not None else "")
    return DIFFERENT


def shrink(file: Path, keep: str | None, again: Again) -> int:
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
    faults = list(dict.fromkeys(struck_faults(before)))
    if not faults:
        raise UsageError(
            f"no fault struck in the launch recorded in {file}: there is nothing to shrink",
            hint="podrun shrink takes faults away; it needs a record of a launch that one of them ended.",
        )

    def fails(chosen: Sequence[str]) -> bool:
        with _new_record(None) as place:
            again.launch(before, chosen, place)
            found = verdict(read_record(place)) == wanted
        sys.stdout.write(
            f"shrink: {' '.join(chosen) or 'no faults'}: {'fails' if found else 'does not fail so'}\n"
        )
        sys.stdout.flush()
        return found

    if not fails(faults):
        raise UsageError(
            f"the launch recorded in {file} does not fail in the same way again",
            hint=f"podrun replay {file} says what differs.",
        )
    least = smallest(faults, fails)
    if keep is not None:
        again.launch(before, least, Path(keep))
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


def struck_faults(record: Record) -> list[str]:
    """The faults that struck, each marked as optional."""
    found = [str(event.data.get("fault")) for event in record.events if event.kind == "fault"]
    return [text if parse_fault(text).optional else f"{text}:optional" for text in found]


@contextlib.contextmanager
def _new_record(keep: str | None) -> Iterator[Path]:
    if keep is not None:
        yield Path(keep).absolute()
        return
    with tempfile.TemporaryDirectory(prefix="podrun-replay-") as folder:
        yield Path(folder, "record")
