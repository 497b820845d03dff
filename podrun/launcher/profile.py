"""What podrun says of a launch: how it will go (``--dry-run``, the topology table) and how it went; ``podrun profile``.

    podrun profile [--report-directory DIR] [--compare OTHER.json] [podrun's options] program [arguments]
    podrun profile --compare BEFORE.json AFTER.json

is a launch with reports on, which are shown when it has ended. Every instance writes its sessions' reports to
``DIR__instance_<i>/<session>`` (see `podrun.report`); those of instance 0 are shown. Instances are told by
POPLAR_ENGINE_OPTIONS, so that any program that prepares a PopART session can be profiled as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from podrun.core.errors import NotFoundError, UsageError
from podrun.launcher.config import current_directory
from podrun.launcher.option_table import BY_SHORT
from podrun.launcher.options import find_option, parse_command_line
from podrun.launcher.spec import InstanceSpec, LaunchLayout, LaunchSpec, PodFacts, layout_variables

if TYPE_CHECKING:
    from podrun.core.telemetry import MachineReport
    from podrun.report import Profile

DIRECTORY = "podrun-profile"
COMPARISON = "comparison.html"
HELP = f"""Usage: podrun profile [options] [podrun's options] program [its arguments]
       podrun profile --compare BEFORE.json AFTER.json

Runs the program as podrun does, with the reports of its sessions switched on;
then shows the modelled time, memory and bottleneck of each session of
instance 0, and where the files are: profile.json, profile.html (open it in a
browser), trace.json (open it in ui.perfetto.dev) and summary.txt.

Options:
  --report-directory DIR  where reports go; instance i writes to
                          DIR__instance_i (default: {DIRECTORY})
  --compare FILE          a profile.json of an earlier run: show what changed
                          from it, here and in the page; with another
                          profile.json instead of a program, nothing runs, and
                          {COMPARISON} has the two reports side by side
  -h, --help              this text

Examples:
  podrun profile --num-replicas 16 train.py
  podrun profile --compare before__instance_0/training/profile.json train.py
"""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """The verb's own options; None: not given."""

    directory: str | None = None
    compare: str | None = None
    help: bool = False


def main(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the verb; returns the program's exit code. Raises PodrunError for invalid options."""
    from podrun.launcher.cli import run
    from podrun.report.document import load

    options, rest = split_options(words)
    if options.help:
        sys.stdout.write(HELP)
        return 0
    if options.compare and len(rest) == 1 and rest[0].endswith((".json", ".pop")):
        return beside(Path(options.compare), Path(rest[0]), options.directory)
    other = load(Path(options.compare)) if options.compare else None
    line = parse_command_line(rest)
    if not line.program:
        raise UsageError("no program to profile", hint="Type podrun profile --num-replicas 16 train.py")
    told, directory = reporting(environ, options.directory)
    told["PODRUN_COMMAND"] = shlex.join(["podrun", "profile", *words])
    first = directory.with_name(f"{directory.name}__instance_0")
    before = _documents(first)
    code = run(line, told)
    if line.given.get("dry-run"):
        return code
    written = [path for path, stamp in _documents(first).items() if before.get(path) != stamp]
    if written:
        profiles = {path: load(path) for path in written}
        for path, profile in profiles.items():
            sys.stdout.write(_shown(path, profile, other))
        if code == 0 and not all(profile.fits for profile in profiles.values()):
            sys.stderr.write("hint: podrun estimate MODEL --scan tries layouts and lists those that fit.\n")
            return 1
    elif code == 0:
        raise NotFoundError(
            f"the program ended well, but instance 0 left no report in {first}",
            hint="Reports are written when a PopART session is prepared, on any device but the CPU.",
        )
    return code


def beside(before: Path, after: Path, directory: str | None) -> int:
    """Write a page with two reports side by side, and print what changed. Raises ConfigError, UsageError."""
    from podrun.report.document import load, load_origin
    from podrun.report.html import side_by_side
    from podrun.report.text import compare

    first, second = load(before), load(after)
    text = side_by_side(first, second, (load_origin(before), load_origin(after)))
    page = Path(current_directory(), os.path.expanduser(directory or ""), COMPARISON)
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{page} cannot be written: {error.strerror}", hint="Name a directory: --report-directory DIR"
        ) from error
    sys.stdout.write(f"{compare(first, second)}Side by side: {os.path.relpath(page)} (browser)\n")
    return 0


def split_options(words: Sequence[str]) -> tuple[ProfileOptions, list[str]]:
    """The verb's own options, and the words left for podrun. Own options may stand anywhere before the program.

    Raises UsageError for an own option without its value or given twice, and for an unknown option.
    """
    queue, rest = list(words), []
    found: dict[str, str] = {}
    shown = False
    while queue and queue[0].startswith("-") and queue[0] not in ("-", "--"):
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        if name in ("-h", "--help"):
            shown = True
        elif name in ("--report-directory", "--compare"):
            if not equals:
                value = queue.pop(0) if queue else ""
            if not value or name in found:
                what = "is given twice" if value else "needs a value"
                raise UsageError(f"{name} {what}", hint="podrun profile --help shows its options.")
            found[name] = value
        else:
            rest.append(word)
            if not equals and queue and _takes_next(word):
                rest.append(queue.pop(0))
    options = ProfileOptions(found.get("--report-directory"), found.get("--compare"), shown)
    return options, rest + queue


def _takes_next(word: str) -> bool:
    if word.startswith("--"):
        return find_option(word[2:]).takes_value
    option = BY_SHORT.get(word[1])
    return option is not None and option.takes_value and len(word) == 2


def reporting(environ: Mapping[str, str], directory: str | None) -> tuple[dict[str, str], Path]:
    """The environment with all reports on, and the absolute directory that the names of instances' directories begin
    with.

    Engine options that the user has set stay; so does their directory, unless another one is given. Raises
    InvalidOptionError if they are invalid.
    """
    from podrun.report.engine_options import DIRECTORY as KEY
    from podrun.report.engine_options import VARIABLE, engine_options

    engine_options({}, environ)
    own = json.loads(environ.get(VARIABLE, "").strip() or "{}")
    given = os.path.expanduser(str(directory or own.get(KEY) or DIRECTORY))
    path = Path(os.path.normpath(Path(current_directory(), given)))
    options = {**own, "autoReport.all": "true", KEY: str(path)}
    return {**environ, VARIABLE: json.dumps(options)}, path


def _documents(directory: Path) -> dict[Path, int]:
    """Reports in the folders of a directory, each with when it was written (ns)."""
    return {path: path.stat().st_mtime_ns for path in sorted(directory.glob("*/profile.json"))}


def _shown(path: Path, profile: Profile, other: Profile | None) -> str:
    """A session's summary and files. With ``other``, also what changed, which goes into its page as well."""
    from podrun.report.document import PAGE, TRACE, load_origin, write_report
    from podrun.report.text import compare, summary

    text = summary(profile)
    if other is not None:
        write_report(profile, path.parent, other=other, origin=load_origin(path))
        text += f"Compared with {other.name}\n{compare(other, profile)}"
    folder = os.path.relpath(path.parent)
    files = {PAGE: " (browser)", TRACE: " (ui.perfetto.dev)", path.name: ""}
    there = [f"{folder}/{name}{what}" for name, what in files.items() if (path.parent / name).is_file()]
    return f"{text}Report: {', '.join(there)}\n"


NETWORK_MEDIAN, NETWORK_WORST = 6, 30
"""Errors of the model on networks, in percent: rounded up, and up to tens. A test compares them with the pages."""
TRUST = f"an estimate: published networks {NETWORK_MEDIAN} % off at the median, {NETWORK_WORST} % at worst"


def summary(
    layout: LaunchLayout, reports: Sequence[MachineReport], wall_seconds: float, command: Sequence[str] = ()
) -> list[str]:
    """Lines without line ends. Figures that machines do not report are left out. ``command``: the program's, for advice
    in the words of the front end that it imports."""
    machines = len(reports)
    parts = [counted(layout.replicas, "replica"), counted(layout.instances, "instance")]
    if machines:
        parts.append(counted(machines, "machine"))
    lines = [f"done in {wall_seconds:.1f} s: {', '.join(parts)}"]
    if idle := _idle(layout, reports, command):
        lines.append(idle)
    emulation = _emulation(reports)
    if emulation:
        lines.append(emulation)
    model = _model(reports)
    if model:
        lines += model
    return lines


def counted(number: int, noun: str) -> str:
    """``1 machine``, ``4 machines``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _idle(layout: LaunchLayout, reports: Sequence[MachineReport], command: Sequence[str]) -> str:
    """Says that the program used fewer IPUs than were asked for, as one does that has its own number of replicas."""
    wanted = layout.ipus
    used = sum(ipu.batches_done > 0 for report in reports for ipu in report.ipus)
    if not 0 < used < wanted:
        return ""
    return (
        f"the program used {used} of {wanted} IPUs; one with several replicas asks popdist for their number: "
        f"{_POPTORCH_OPTIONS if _imports_poptorch(command) else _POPART_OPTIONS}"
    )


_POPART_OPTIONS = "popdist.popart.configureSessionOptions(options)"
_POPTORCH_OPTIONS = "options = popdist.poptorch.Options()"


def _imports_poptorch(command: Sequence[str]) -> bool:
    """Whether a script of the command imports poptorch. A file that cannot be read does not."""
    for word in command:
        if word.endswith(".py"):
            with contextlib.suppress(OSError):
                if _IMPORT.search(Path(word).read_text(encoding="utf-8", errors="replace")):
                    return True
    return False


_IMPORT = re.compile(r"^\s*(import|from)\s+poptorch\b", re.MULTILINE)


def _emulation(reports: Sequence[MachineReport]) -> str:
    """Batches (weight updates) and samples a second. Machines work side by side, so the slowest counts."""
    batches = max((report.batches_done for report in reports), default=0)
    if not batches:
        return ""
    text = f"emulation: {batches} {'batch' if batches == 1 else 'batches'}"
    seconds = max((report.emulation_s or 0.0 for report in reports), default=0.0)
    if seconds <= 0:
        return text
    text += f" in {seconds:.2f} s"
    if all(report.samples_done is not None for report in reports):
        samples = sum(report.samples_done or 0 for report in reports)
        text += f", {samples / seconds:,.0f} samples/s"
    return text


def _model(reports: Sequence[MachineReport]) -> list[str]:
    """Modelled time of a batch, pipelined or not. Machines run in lockstep, so the longest counts."""
    times = [
        report.modelled_s / report.batches_done
        for report in reports
        if report.modelled_s and report.batches_done
    ]
    if not times:
        return []
    return [f"modelled on IPUs: {duration(max(times))} per batch", f"({TRUST})"]


def duration(seconds: float) -> str:
    """A time in a unit that leaves at most three digits before the point."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


TITLE = "poprun topology"
LABEL_WIDTH = 11


def topology_table(layout: LaunchLayout) -> str:
    """The whole table, ready to be written in one piece."""
    per_instance = layout.replicas_per_instance
    instances = [replica // per_instance for replica in range(layout.replicas)]
    cell = len(str(layout.replicas - 1)) + 2
    width = layout.replicas * (cell + 1) - 1
    full = LABEL_WIDTH + 1 + width
    hosts = [instance // layout.instances_per_host for instance in instances]
    rows = [
        _row("hosts", _merged(hosts, cell, lambda host, room: _host_label(layout, host, room))),
        _row("ILDs", _merged([layout.ild_of(i) for i in instances], cell, lambda ild, _: str(ild))),
        _row("instances", _merged(instances, cell, lambda instance, _: str(instance))),
        _row("replicas", "|".join(f" {replica}".ljust(cell) for replica in range(layout.replicas))),
    ]
    between = f"|{'-' * LABEL_WIDTH}|{'-' * width}|"
    lines = [f" {'=' * full}", f"|{_centred(TITLE, full)}|", f"|{'=' * full}|", rows[0]]
    for row in rows[1:]:
        lines += [between, row]
    lines.append(f" {'-' * full}")
    return "\n".join(lines) + "\n"


def _row(label: str, cells: str) -> str:
    return f"|{f' {label}'.ljust(LABEL_WIDTH)}|{cells}|"


def _merged(owners: list[int], cell: int, label: Callable[[int, int], str]) -> str:
    """Cells of one row: neighbouring replicas with one owner share a cell."""
    parts = []
    for owner, group in groupby(owners):
        room = len(list(group)) * (cell + 1) - 1
        parts.append(_centred(label(owner, room), room))
    return "|".join(parts)


def _host_label(layout: LaunchLayout, host: int, room: int) -> str:
    name = layout.hosts[host]
    return name if len(name) + 2 <= room else f"[{host}]"


def _centred(text: str, width: int) -> str:
    left = max((width - len(text)) // 2, 0)
    return (" " * left + text).ljust(width)


def describe(spec: LaunchSpec, pod: PodFacts | None, server: str) -> str:
    """The launch as text. ``server``: where the partition service is, or that one would be started."""
    return "\n".join([*_lines(spec, pod, server), ""])


def _lines(spec: LaunchSpec, pod: PodFacts | None, server: str) -> Iterator[str]:
    layout = spec.layout
    yield topology_table(layout)
    if spec.partition is None:
        yield "offline: no partition, no IPUs"
    else:
        wanted = spec.partition
        yield f"server:     {server}"
        if pod is not None:
            yield f"POD:        {pod.name}, {pod.ipus} IPUs, IPU-Link domains of {pod.ild_ipus}"
        yield f"partition:  {wanted.name or 'the only one there is, else a new one'}, {wanted.size} IPUs"
        for fault in wanted.faults:
            yield f"fault:      {fault.text}"
    yield f"cache:      {spec.cache_path or 'a directory that is removed afterwards'}"
    for instance in spec.instances:
        yield ""
        yield from _instance(spec, instance)


def _instance(spec: LaunchSpec, instance: InstanceSpec) -> Iterator[str]:
    last = instance.first_replica + instance.replicas - 1
    owned = f"replica {last}" if instance.replicas == 1 else f"replicas {instance.first_replica} to {last}"
    yield f"instance {instance.index} on {instance.host}: {owned}"
    yield f"  in        {instance.directory}"
    variables = layout_variables(spec.layout, instance)
    named = {name: value for name, value in instance.exports.items() if value is not None}
    for name, value in (variables | named).items():
        if name.startswith("POPDIST_") or name in named:
            yield f"  with      {name}={value}"
    yield f"  run       {shlex.join(instance.command)}"
