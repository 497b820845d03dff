"""Write the reports that a program asks for into a directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podrun.report.engine_options import ReportOptions
from podrun.report.html import page
from podrun.report.read import read_report
from podrun.report.text import summary
from podrun.report.trace import chrome_trace


def write_reports(
    report: Mapping[str, Any], options: ReportOptions, *, title: str = "program"
) -> tuple[Path, ...]:
    """The files written, in order: ``profile.json``, ``summary.txt`` and ``profile.html`` for any report, and
    ``trace.json`` if the execution profile is asked for. None if nothing is.

    Raises:
        ConfigError: ``report`` holds no tile model's report.
    """
    if not options.wanted:
        return ()
    profile = read_report(report)
    files = {
        "profile.json": json.dumps(report, indent=1, sort_keys=True) + "\n",
        "summary.txt": summary(profile),
        "profile.html": page(profile, title=title),
    }
    if "trace" in options.reports:
        files["trace.json"] = json.dumps(chrome_trace(profile)) + "\n"
    options.directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in files.items():
        path = options.directory / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return tuple(written)
