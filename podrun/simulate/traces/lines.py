"""What readers of logs share: a log with its broken lines, and how times, sizes and durations are read."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import field
from datetime import UTC, datetime
from pathlib import Path

from podrun.core.errors import ConfigError
from podrun.core.quick_dataclass import dataclass
from podrun.simulate.engine import nanoseconds
from podrun.simulate.jobs import TraceJob

SHOWN_LINES = 5
"""Broken lines that a message names."""


class BrokenLineError(ValueError):
    """What is wrong with one line of a log: a phrase."""


@dataclass(slots=True)
class JobLog:
    """A log. ``broken``: (line, what is wrong) of lines that are left out because they make no sense; ``dropped``: how
    many were left out by a rule, by reason, such as jobs that never ran. ``header``: what the log says of itself."""

    path: Path
    format: str
    jobs: list[TraceJob] = field(default_factory=list)
    broken: list[tuple[int, str]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    header: dict[str, str] = field(default_factory=dict)

    def drop(self, why: str) -> None:
        """Leave a job out by a rule."""
        self.dropped[why] += 1

    def break_line(self, line: int, why: str) -> None:
        """Leave a line out that makes no sense."""
        self.broken.append((line, why))

    @property
    def lines(self) -> int:
        """How many jobs the log names."""
        return len(self.jobs) + len(self.broken) + sum(self.dropped.values())

    def broken_words(self) -> str:
        """The first broken lines in words."""
        shown = "; ".join(f"{self.path}:{line}: {why}" for line, why in self.broken[:SHOWN_LINES])
        more = len(self.broken) - SHOWN_LINES
        return f"{shown}; and {more} more" if more > 0 else shown

    def check(self, most: float) -> None:
        """Raise ConfigError if more than this share of the lines is broken, or if no job is left."""
        share = len(self.broken) / max(self.lines, 1)
        if share > most:
            raise ConfigError(
                f"{self.broken_words()}: {len(self.broken)} of {self.lines} jobs of {self.path} make no sense,"
                f" more than {most:.0%}",
                hint="Correct the lines, or accept more of them: --max-broken SHARE.",
            )
        if not self.jobs:
            raise ConfigError(
                f"{self.path} has no job that ran" + (f": {self.broken_words()}" if self.broken else ""),
                hint="podrun help simulate shows the formats of logs.",
            )


def job_of(
    name: str, times: tuple[float, float, float], size: int, *, user: str, status: str, line: int
) -> TraceJob:
    """A job from seconds: submitted, run, requested. A run ends at the time that was asked for."""
    submit, run, requested = map(nanoseconds, times)
    return TraceJob(name, submit, min(run, requested), requested, size, user, status, line)


LARGEST_NUMBER = 1e15
"""Of seconds that is 30 million years; a float still has each whole number up to there."""


def read_number(text: str, what: str) -> float:
    """A number of a field. Raises BrokenLineError."""
    try:
        value = float(text)
    except ValueError:
        raise BrokenLineError(f"{what} is {text!r}, not a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise BrokenLineError(f"{what} is {text!r}, not a number")
    if abs(value) > LARGEST_NUMBER:
        raise BrokenLineError(f"{what} is {text!r}, more than {LARGEST_NUMBER:g}")
    return value


def read_integer(text: str, what: str) -> int:
    """A whole number of a field. Raises BrokenLineError."""
    value = read_number(text, what)
    if value != int(value):
        raise BrokenLineError(f"{what} is {text!r}, not a whole number")
    return int(value)


NO_TIME = ("", "none", "unknown", "null", "nan", "n/a", "-")


def read_moment(text: str, what: str) -> float | None:
    """Seconds since 1970 of a date or of seconds; None for what stands for no time. Without a zone: as UTC."""
    plain = text.strip()
    if plain.lower() in NO_TIME:
        return None
    if re.fullmatch(r"-?\d+(\.\d*)?", plain):
        return float(plain)
    try:
        parsed = datetime.fromisoformat(plain)
    except ValueError:
        raise BrokenLineError(f"{what} is {text!r}, not a time") from None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)")


def read_duration(text: str, what: str) -> float | None:
    """Seconds of ``D-HH:MM:SS``, ``HH:MM:SS`` or ``MM:SS``; None if there is no limit."""
    plain = text.strip()
    if plain.lower() in (*NO_TIME, "unlimited", "partition_limit"):
        return None
    if parts := _DURATION.fullmatch(plain):
        days, hours, minutes, seconds = (float(part or 0) for part in parts.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if parts := re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?", plain):
        days, hours, minutes = (float(part or 0) for part in parts.groups())
        return (days * 24 + hours) * 3600 + minutes * 60
    raise BrokenLineError(f"{what} is {text!r}, not a duration such as 1-12:00:00")


def spent(start: float | None, end: float | None) -> float | None:
    """Seconds from start to end; None if one is missing. Raises BrokenLineError for a clock that runs backwards."""
    if start is None or end is None:
        return None
    if end < start:
        raise BrokenLineError(f"the clock runs backwards: it ends {start - end:g} s before it starts")
    return end - start


def table_rows(text: str, delimiter: str = ",") -> Iterator[tuple[int, Mapping[str, str]]]:
    """The rows of a table with a header, with their lines from 1; fields of a short row are empty."""
    reader = csv.DictReader(io.StringIO(text), delimiter=delimiter, restval="")
    for row in reader:
        yield (
            reader.line_num,
            {str(k).strip(): v for k, v in row.items() if k is not None and isinstance(v, str)},
        )


def required_field(row: Mapping[str, str], *names: str) -> str:
    """The first of these fields that has a value. Raises BrokenLineError."""
    for name in names:
        if row.get(name, "").strip():
            return row[name].strip()
    raise BrokenLineError(f"there is no {' or '.join(names)}")
