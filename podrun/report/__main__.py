"""``python -m podrun.report PROGRAM``: show the tile report of a compiled program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from podrun import commands
from podrun.core.command_line import HELP_OPTIONS, run_command
from podrun.core.errors import ConfigError, UsageError
from podrun.report.chrome_trace import to_trace
from podrun.report.document import (
    SCHEMA,
    from_object,
    load_origin,
    parse_report,
    profile_of,
    profile_to_json,
    read_report,
    read_report_text,
)
from podrun.report.html import page
from podrun.report.model import Profile, ReportOrigin
from podrun.report.text import compare as changes_between
from podrun.report.text import summary

DOES_NOT_FIT = 1
"""Exit code for a program that does not fit the tiles."""


def profile_in_file(path: Path) -> Profile:
    """The profile in a file: a program that podrun compiled, a profile.json or .pop, or a tile report as JSON.

    Raises:
        ConfigError: there is no such file, or it holds none of these.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", hint=f"Look for one: ls {path.parent}")
    if path.suffix not in (".json", ".pop"):
        from podrun.popef.reader import read_program

        return profile_of(read_program(path))
    content = parse_report(read_report_text(path), source=str(path))
    return from_object(content, source=str(path)) if content.get("schema") == SCHEMA else read_report(content)


_FILE = click.Path(path_type=Path)


@click.command(
    "python -m podrun.report",
    context_settings=HELP_OPTIONS,
    epilog="Example: python -m podrun.report podrun-profile__instance_0/training/profile.json --html page.html",
)
@click.argument("program", type=_FILE)
@click.option("--html", type=_FILE, metavar="FILE", help="Write one self-contained page.")
@click.option("--json", type=_FILE, metavar="FILE", help="Write the profile as JSON.")
@click.option(
    "--trace", type=_FILE, metavar="FILE", help="Write a trace for ui.perfetto.dev or chrome://tracing."
)
@click.option(
    "--compare", type=_FILE, metavar="FILE", help="Another program or profile: show what changed from it."
)
def report_command(
    program: Path, html: Path | None, json: Path | None, trace: Path | None, compare: Path | None
) -> int:
    """Show what a compiled program takes on the tiles: time by cause, cycles, memory.

    PROGRAM is a compiled program (executable.popef), a profile.json or .pop, or a tile report as .json.
    """
    profile = profile_in_file(program)
    other = profile_in_file(compare) if compare else None
    if html:
        origin = _origin(program)
        _write(html, lambda: page(profile, title=program.name, other=other, origin=origin))
    if json:
        _write(json, lambda: profile_to_json(profile))
    if trace:
        _write(trace, lambda: to_trace(profile))
    sys.stdout.write(summary(profile) if other is None else changes_between(other, profile))
    sys.stdout.flush()
    if profile.fits:
        return 0
    sys.stderr.write("hint: podrun estimate MODEL --scan tries layouts and lists those that fit.\n")
    return DOES_NOT_FIT


def main(argv: Sequence[str] | None = None) -> int:
    """Print the summary and write the requested files. Returns 0, `DOES_NOT_FIT`, or 2 for bad input."""
    return run_command(report_command, argv, name="podrun.report")


def _origin(path: Path) -> ReportOrigin | None:
    return load_origin(path) if path.suffix in (".json", ".pop") else None


def _write(path: Path, text: Callable[[], str]) -> None:
    """Write a file. Raises UsageError if that is impossible."""
    try:
        path.write_text(text(), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}",
            hint="Name a file in a directory that is there and can be written.",
        ) from error


if __name__ == "__main__":
    sys.exit(commands.run(main, command="podrun.report"))
