"""``python -m podrun.report PROGRAM``: show the tile report of a compiled program."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from podrun.errors import ConfigError, PodrunError
from podrun.report.document import SCHEMA, from_object, parse, read_text, to_json
from podrun.report.html import page
from podrun.report.model import Profile
from podrun.report.read import profile_of, read_report
from podrun.report.text import compare, summary
from podrun.report.trace import to_trace


def load(path: Path) -> Profile:
    """The profile in a file: a program that podrun compiled, a profile.json or .pop, or a tile report as JSON.

    Raises:
        ConfigError: there is no such file, or it holds none of these.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", hint=f"Look for one: ls {path.parent}")
    if path.suffix not in (".json", ".pop"):
        from podrun.executable_file import read

        return profile_of(read(path))
    found = parse(read_text(path), source=str(path))
    return from_object(found, source=str(path)) if found.get("schema") == SCHEMA else read_report(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the summary; write the files that are asked for. 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m podrun.report", description=__doc__)
    parser.add_argument(
        "program", type=Path, help="a compiled program, a profile.json, or a tile report as .json"
    )
    parser.add_argument("--html", type=Path, help="write one self-contained page")
    parser.add_argument("--json", type=Path, help="write the profile as JSON")
    parser.add_argument("--trace", type=Path, help="write a trace for Perfetto or chrome://tracing")
    parser.add_argument("--compare", type=Path, help="another program: show what changed from it")
    options = parser.parse_args(argv)
    try:
        profile = load(options.program)
        other = load(options.compare) if options.compare else None
    except PodrunError as error:
        print(f"error: {error}" + (f"\n{error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    sys.stdout.write(summary(profile) if other is None else compare(other, profile))
    if options.html:
        options.html.write_text(page(profile, title=options.program.name, other=other), encoding="utf-8")
    if options.json:
        options.json.write_text(to_json(profile), encoding="utf-8")
    if options.trace:
        options.trace.write_text(to_trace(profile), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
