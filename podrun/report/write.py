"""The files of a report: ``profile.json``, ``profile.pop`` (the same under the SDK's name), ``summary.txt``,
``profile.html`` and ``trace.json`` in one directory."""

from __future__ import annotations

from pathlib import Path

from podrun.errors import ConfigError
from podrun.report.document import to_json
from podrun.report.html import page
from podrun.report.model import Profile
from podrun.report.text import compare, summary
from podrun.report.trace import to_trace

DOCUMENT = "profile.json"
ARCHIVE = "profile.pop"
"""What the SDK calls its report. Ours is the JSON document; ``pva.openReport`` reads it."""
PAGE = "profile.html"
SUMMARY = "summary.txt"
TRACE = "trace.json"


def write_report(
    profile: Profile, directory: Path, *, trace: bool = True, other: Profile | None = None
) -> Path:
    """Write the files; returns the path of ``profile.pop``. ``other``: what page and summary compare with.

    Raises:
        ConfigError: the directory cannot be written.
    """
    document = to_json(profile)
    texts = {
        DOCUMENT: document,
        ARCHIVE: document,
        PAGE: page(profile, other=other),
        SUMMARY: summary(profile) + ("" if other is None else compare(other, profile)),
    }
    if trace:
        texts[TRACE] = to_trace(profile)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in texts.items():
            (directory / name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written to {directory}: {error.strerror}",
            hint="Name another directory with autoReport.directory (or podrun profile --report-directory DIR).",
        ) from error
    return directory / ARCHIVE
