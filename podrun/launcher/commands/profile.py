"""What podrun says of a launch: how it will go (``--dry-run``, the topology table) and how it went; ``podrun profile``.

    podrun profile [--report-directory DIR] [--compare OTHER.json] [podrun's options] program [arguments]
    podrun profile --compare BEFORE.json AFTER.json

is a launch with reports on, which are shown when it has ended. Every instance writes its sessions' reports to
``DIR__instance_<i>/<session>`` (see `podrun.report`); those of instance 0 are shown. Instances are told by
POPLAR_ENGINE_OPTIONS, so that any program that prepares a PopART session can be profiled as it is.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from podrun.core.environment import PODRUN_COMMAND, POPLAR_ENGINE_OPTIONS
from podrun.core.errors import NotFoundError, UsageError
from podrun.launcher.config_file import current_directory
from podrun.launcher.option_table import Option, ValueKind
from podrun.launcher.options import CommandLine, parse_command_line

if TYPE_CHECKING:
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


OPTIONS = (
    Option("report-directory", ValueKind.NAME, "where reports go", None, "DIR", config=False),
    Option(
        "compare",
        ValueKind.NAME,
        "a profile.json of an earlier run",
        None,
        "FILE",
        config=False,
    ),
)
"""The verb's own options, besides podrun's."""


def main(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the verb; returns the program's exit code. Raises PodrunError for invalid options."""
    from podrun.launcher.run_line import run_command_line
    from podrun.report.document import load_profile

    line, reports, compared = read_words(words)
    if line.options.get("help"):
        sys.stdout.write(HELP)
        return 0
    if (
        compared
        and not line.options
        and len(line.program) == 1
        and line.program[0].endswith((".json", ".pop"))
    ):
        return show_side_by_side(Path(compared), Path(line.program[0]), reports)
    other = load_profile(Path(compared)) if compared else None
    if not line.program:
        raise UsageError("no program to profile", hint="Type podrun profile --num-replicas 16 train.py")
    told, directory = environment_with_reports(environ, reports)
    told[PODRUN_COMMAND] = shlex.join(["podrun", "profile", *words])
    first = directory.with_name(f"{directory.name}__instance_0")
    before = _documents(first)
    code = run_command_line(line, told)
    if line.options.get("dry-run"):
        return code
    written = [path for path, stamp in _documents(first).items() if before.get(path) != stamp]
    if written:
        profiles = {path: load_profile(path) for path in written}
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


def read_words(words: Sequence[str]) -> tuple[CommandLine, str | None, str | None]:
    """The launch that the words ask for, and the values of --report-directory and --compare (None: not given).

    Raises UsageError.
    """
    line = parse_command_line(words, OPTIONS)
    own = {option.name for option in OPTIONS}
    launch = {name: value for name, value in line.options.items() if name not in own}
    reports, compared = (line.options.get(option.name) for option in OPTIONS)
    return CommandLine(MappingProxyType(launch), line.program), reports, compared


def show_side_by_side(before: Path, after: Path, directory: str | None) -> int:
    """Write a page with two reports side by side, and print what changed. Raises ConfigError, UsageError."""
    from podrun.report.document import load_origin, load_profile
    from podrun.report.html import side_by_side
    from podrun.report.text import compare

    first, second = load_profile(before), load_profile(after)
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


def environment_with_reports(
    environ: Mapping[str, str], directory: str | None
) -> tuple[dict[str, str], Path]:
    """The environment with all reports on, and the absolute directory that the names of instances' directories begin
    with.

    Engine options that the user has set stay; so does their directory, unless another one is given. Raises
    InvalidOptionError if they are invalid.
    """
    from podrun.report.engine_options import DIRECTORY as KEY
    from podrun.report.engine_options import engine_options

    engine_options({}, environ)
    own = json.loads(environ.get(POPLAR_ENGINE_OPTIONS, "").strip() or "{}")
    folder = os.path.expanduser(str(directory or own.get(KEY) or DIRECTORY))
    path = Path(os.path.normpath(Path(current_directory(), folder)))
    options = {**own, "autoReport.all": "true", KEY: str(path)}
    return {**environ, POPLAR_ENGINE_OPTIONS: json.dumps(options)}, path


def _documents(directory: Path) -> dict[Path, int]:
    """Reports in the folders of a directory, each with when it was written (ns)."""
    return {path: path.stat().st_mtime_ns for path in sorted(directory.glob("*/profile.json"))}


def _shown(path: Path, profile: Profile, other: Profile | None) -> str:
    """A session's summary and files. With ``other``, also what changed, which goes into its page as well."""
    from podrun.report.document import PAGE, TRACE, load_origin, write_report
    from podrun.report.text import compare, folded_line, summary

    text = summary(profile)
    if other is not None:
        write_report(profile, path.parent, other=other, origin=load_origin(path))
        text += f"Compared with {other.name}\n{compare(other, profile)}"
    folder = os.path.relpath(path.parent)
    files = {PAGE: " (browser)", TRACE: " (ui.perfetto.dev)", path.name: ""}
    there = [f"{folder}/{name}{what}" for name, what in files.items() if (path.parent / name).is_file()]
    report = folded_line(f"Report: {', '.join(there)}")
    return f"{text}{report}\n"
