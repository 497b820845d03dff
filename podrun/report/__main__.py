"""``python -m podrun.report PROGRAM``: show the tile report of a compiled program."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from podrun import commands
from podrun.core.errors import ConfigError, PodrunError, UsageError
from podrun.core.terminal import show_error
from podrun.report.chrome_trace import to_trace
from podrun.report.document import (
    SCHEMA,
    Parser,
    from_object,
    load_origin,
    parse,
    profile_of,
    read_report,
    read_text,
    to_json,
)
from podrun.report.html import page
from podrun.report.model import Profile, ReportOrigin
from podrun.report.text import compare, summary

DOES_NOT_FIT = 1
"""Exit code for a program that does not fit the tiles."""


def load(path: Path) -> Profile:
    """The profile in a file: a program that podrun compiled, a profile.json or .pop, or a tile report as JSON.

    Raises:
        ConfigError: there is no such file, or it holds none of these.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", hint=f"Look for one: ls {path.parent}")
    if path.suffix not in (".json", ".pop"):
        from podrun.core.executable_file import read

        return profile_of(read(path))
    found = parse(read_text(path), source=str(path))
    return from_object(found, source=str(path)) if found.get("schema") == SCHEMA else read_report(found)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(
        prog="python -m podrun.report",
        description="Show what a compiled program takes on the tiles: time by cause, cycles, memory.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example:\n  python -m podrun.report podrun-profile__instance_0/training/profile.json --html page.html",
        allow_abbrev=False,
    )
    made.add_argument(
        "program",
        type=Path,
        help="a compiled program (executable.popef), a profile.json or .pop, or a tile report as .json",
    )
    for name, text in (
        ("html", "write one self-contained page"),
        ("json", "write the profile as JSON"),
        ("trace", "write a trace for ui.perfetto.dev or chrome://tracing"),
        ("compare", "another program or profile: show what changed from it"),
    ):
        made.add_argument(f"--{name}", type=Path, metavar="FILE", help=text)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print the summary and write the requested files. Returns 0, `DOES_NOT_FIT`, or 2 for bad input."""
    try:
        return _show(parser().parse_args(argv))
    except PodrunError as error:
        show_error("podrun.report", error)
        return error.exit_code


def _show(options: argparse.Namespace) -> int:
    profile = load(options.program)
    other = load(options.compare) if options.compare else None
    if options.html:
        origin = _origin(options.program)
        _write(options.html, lambda: page(profile, title=options.program.name, other=other, origin=origin))
    if options.json:
        _write(options.json, lambda: to_json(profile))
    if options.trace:
        _write(options.trace, lambda: to_trace(profile))
    sys.stdout.write(summary(profile) if other is None else compare(other, profile))
    sys.stdout.flush()
    if profile.fits:
        return 0
    sys.stderr.write("hint: podrun estimate MODEL --scan tries layouts and lists those that fit.\n")
    return DOES_NOT_FIT


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
