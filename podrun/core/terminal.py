"""How podrun's commands speak: errors in one form, tables, and colour where a terminal shows it.

An error is two lines on standard error, the same for every command:

    vipu: error: there is no partition p9
    hint: vipu list partitions

Colour appears on a terminal only: never in a file or a pipe, with ``NO_COLOR`` set (https://no-color.org), or where
``TERM`` is ``dumb``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from podrun.core.environment import environment
from podrun.core.errors import PodrunError

STYLES: Mapping[str, str] = {
    "bold": "1",
    "dim": "2",
    "red": "1;31",
    "green": "32",
    "yellow": "33",
}
"""Names of styles and their codes (ECMA-48, select graphic rendition)."""
TONES: Mapping[str, str] = {"ok": "green", "warning": "yellow", "wrong": "red"}
"""The style of a state's name in tables and lists."""


def shows_colour(stream: TextIO, environ: Mapping[str, str] | None = None) -> bool:
    """True iff text written to ``stream`` may be coloured."""
    env = environment(environ)
    return not env.get("NO_COLOR") and env.get("TERM") != "dumb" and stream.isatty()


def styled(text: str, style: str, stream: TextIO, environ: Mapping[str, str] | None = None) -> str:
    """``text`` in a style of `STYLES` if ``stream`` shows colour, else as it is."""
    if not style or not text or not shows_colour(stream, environ):
        return text
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def error_lines(command: str, message: str, hint: str | None = None, stream: TextIO | None = None) -> str:
    """What a command prints for an error: its name, the message, and the hint on a line of its own."""
    to = stream or sys.stderr
    said = f"{command}: {styled('error:', 'red', to)} {message}\n"
    return said + (f"{styled('hint:', 'bold', to)} {hint}\n" if hint else "")


def show_error(command: str, error: PodrunError, stream: TextIO | None = None) -> None:
    """Print an error and its hint."""
    to = stream or sys.stderr
    to.write(error_lines(command, error.message, error.hint, to))
    to.flush()


def table(header: Sequence[str], rows: Iterable[Sequence[str]], stream: TextIO | None = None) -> str:
    """A table as the V-IPU command line prints it, without a final newline; cells hold no newlines.

    One leading space, `` | `` between columns, a dashed rule under the header and after the last row. On a terminal the
    header is bold and rules are dim.
    """
    to = stream or sys.stdout
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    rule = styled("-" * (sum(widths) + 3 * len(widths) - 1), "dim", to)
    shown = [" " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in lines]
    shown = [line.rstrip() for line in shown]
    return "\n".join([styled(shown[0], "bold", to), rule, *shown[1:], rule])


def fields(pairs: Iterable[tuple[str, str]]) -> str:
    """Name and value, one pair a line, values aligned."""
    known = list(pairs)
    width = max(len(name) for name, _ in known)
    return "\n".join(f" {name.ljust(width)} | {value}".rstrip() for name, value in known)
