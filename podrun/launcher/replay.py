"""``podrun replay``, ``shrink``, ``diff`` and ``incidents``: what can be done with a record."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from podrun.core.errors import NotFoundError, UsageError
from podrun.faults import parse_fault
from podrun.record.compare import first_difference, header_differences
from podrun.record.events import Record, read_record
from podrun.record.goodput import Goodput
from podrun.record.incidents import incidents_json, incidents_of
from podrun.record.shrinking import smallest

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
_OPTIONS = {
    "replay": ("--record", "--directory"),
    "shrink": ("--record", "--directory"),
    "diff": (),
    "incidents": ("--json",),
}


@dataclass(frozen=True, slots=True)
class Again:
    """How a recorded launch is started again: by what, with which environment, and in which folder (None: its own)."""

    start: Start
    environ: Mapping[str, str]
    directory: str | None = None
    each_in_a_new_folder: bool = False
    """Each launch gets a new folder in ``directory``."""

    def launch(self, record: Record, faults: Sequence[str], place: Path) -> int:
        """Launch what was recorded with these faults, and record it to ``place``."""
        folder = self.directory or record.header.directory
        if os.path.isdir(folder) and self.directory is not None and self.each_in_a_new_folder:
            folder = tempfile.mkdtemp(prefix="launch-", dir=folder)
        if not os.path.isdir(folder):
            raise NotFoundError(
                f"the launch was recorded in {folder}, which is not there",
                hint="Name a folder: --directory DIR",
            )
        words = [
            f"--record={place.absolute()}",
            *(f"--fault={text}" for text in faults),
            *record.header.words,
        ]
        bare = {name: value for name, value in self.environ.items() if name != "PODRUN_FAULTS"}
        sys.stdout.flush()
        return self.start(words, bare, folder)


def start_podrun(words: Sequence[str], environ: Mapping[str, str], folder: str) -> int:
    """`Start` in a process of its own."""
    command = [sys.executable, "-m", "podrun.launcher.cli", *words]
    return subprocess.run(command, env=dict(environ), cwd=folder, check=False).returncode


def main(verb: str, words: Sequence[str], environ: Mapping[str, str], start: Start = start_podrun) -> int:
    """Carry out ``podrun VERB ...``. Raises UsageError."""
    if list(words) in (["-h"], ["--help"]):
        sys.stdout.write(f"{USAGE[verb]}\n")
        return 0
    files, given = _parse(verb, list(words))
    again = Again(start, environ, given.get("--directory"), each_in_a_new_folder=verb == "shrink")
    match verb:
        case "diff":
            return diff(files[0], files[1])
        case "incidents":
            return incidents(files[0], as_json="--json" in given)
        case "replay":
            return replay(files[0], given.get("--record"), again)
    return shrink(files[0], given.get("--record"), again)


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
    """Name the first event that differs. 0 for records of the same events, else `DIFFERENT`."""
    a, b = read_record(ours), read_record(theirs)
    for line in header_differences(a, b):
        sys.stdout.write(f"{line}\n")
    found = first_difference(a, b)
    sys.stdout.write(f"the same {len(a.events)} events\n" if found is None else f"{found.text}\n")
    return 0 if found is None else DIFFERENT


def incidents(file: Path, *, as_json: bool) -> int:
    """Tell the incidents of a record, and its goodput where that is beside it."""
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
    """Launch again what was recorded, with the same faults, and compare. ``keep``: where the new record goes."""
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
    """How a launch failed: its exit code and the type of its last error; None if it ended well."""
    ends = [event for event in record.events if event.kind == "end"]
    code = int(ends[-1].data.get("code", 0)) if ends else 1
    errors = [event for event in record.events if event.kind == "error"]
    return (code, str(errors[-1].data.get("error")) if errors else "") if code else None


def struck_faults(record: Record) -> list[str]:
    """The faults that struck, each as one that need not strike."""
    found = [str(event.data.get("fault")) for event in record.events if event.kind == "fault"]
    return [text if parse_fault(text).optional else f"{text}:optional" for text in found]


@contextlib.contextmanager
def _new_record(keep: str | None) -> Iterator[Path]:
    if keep is not None:
        yield Path(keep).absolute()
        return
    with tempfile.TemporaryDirectory(prefix="podrun-replay-") as folder:
        yield Path(folder, "record")
