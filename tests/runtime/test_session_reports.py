"""A report shows the runs that follow it, and leaves alone what something else has written meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podrun.report import document
from podrun.report.document import ARCHIVE, DOCUMENT, write_report
from podrun.report.engine_options import EngineOptions
from podrun.runtime.device import DeviceKind
from podrun.runtime.session_reports import SessionReports
from tests.report.profiles import pipeline_profile


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    return EngineOptions(
        directory=tmp_path, graph_profile=True, execution_profile=True, allow_out_of_memory=True
    )


@pytest.fixture
def reports(options: EngineOptions, monkeypatch: pytest.MonkeyPatch) -> SessionReports:
    """Of a session whose report was written, which has run once."""
    monkeypatch.setattr(document, "profile_of", lambda _: pipeline_profile())
    executable: Any = SimpleNamespace(tile_report={"segments": []})
    program: Any = SimpleNamespace(prepared=lambda _: executable, device=SimpleNamespace(kind=DeviceKind.IPU))
    reports = SessionReports(program, SimpleNamespace(), 1, "session")  # type: ignore[arg-type]
    reports.after_compile(options)
    reports.count_run(options)
    return reports


def names(path: Path) -> list[str]:
    return list(json.loads(path.read_text())["profile"]["run_names"])


def test_a_report_shows_later_runs_up_to_the_number_asked_for(
    reports: SessionReports, options: EngineOptions
) -> None:
    assert reports.folder is not None
    for _ in range(3):
        reports.count_run(options)
    assert names(reports.folder / ARCHIVE) == names(reports.folder / DOCUMENT) == ["session"] * 2


@pytest.mark.parametrize("text", ['{"schema": 1}', "[1]", '{"profile": 3}', "\xff", "{"])
def test_a_file_of_something_else_stays_and_ends_no_training(
    reports: SessionReports, options: EngineOptions, text: str
) -> None:
    assert reports.folder is not None
    (reports.folder / ARCHIVE).write_text(text)
    reports.count_run(options)
    assert (reports.folder / ARCHIVE).read_text() == text


def test_the_report_of_another_session_of_the_same_name_stays(
    reports: SessionReports, options: EngineOptions
) -> None:
    assert reports.folder is not None
    other = write_report(pipeline_profile(), reports.folder)
    before = other.read_bytes()
    reports.count_run(options)
    assert other.read_bytes() == before


def test_what_cannot_be_written_leaves_no_draft(reports: SessionReports, options: EngineOptions) -> None:
    assert reports.folder is not None
    (reports.folder / f".{ARCHIVE}.part").mkdir()  # In the place of the second file's draft.
    before = sorted(path.name for path in reports.folder.iterdir())
    text = (reports.folder / DOCUMENT).read_text()
    reports.count_run(options)
    assert sorted(path.name for path in reports.folder.iterdir()) == before
    assert (reports.folder / DOCUMENT).read_text() == text
