"""What a session reports: cycle counts, summaries and report files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from podrun.core.documents import write_together
from podrun.core.errors import UsageError
from podrun.costmodel.report_checks import bounds_of, check_planned, check_report_fits
from podrun.report.engine_options import EngineOptions, engine_options
from podrun.runtime.device import DeviceKind
from podrun.runtime.device_program import DeviceProgram
from podrun.runtime.environment import ours
from podrun.runtime.planner_options import check_planner_options
from podrun.runtime.settings import RunSettings
from podrun.runtime.words import SessionCall

if TYPE_CHECKING:
    from podrun.report.model import Profile

OUTER, INNER = "outer", "inner"
"""Cycle counters: of a run, and of each IPU."""
NAMED_RUNS = 2
"""Number of runs that a report shows apart (autoReport.executionProfileProgramRunCount)."""


class SessionReports:
    """Cycle counts and reports of a session's program. ``ipus``: of a replica. ``name``: the session's."""

    def __init__(self, program: DeviceProgram, settings: RunSettings, ipus: int, name: str) -> None:
        self._program, self._settings, self._ipus, self._name = program, settings, ipus, name
        self._run_names: list[str] = []
        self._written: Path | None = None
        """The report's file."""
        self._digest = b""
        """Of the document in it."""
        self.cycles: int | None = None
        """Modelled cycles of the last run."""

    @property
    def folder(self) -> Path | None:
        """Where the report is, once it was written."""
        return None if self._written is None else self._written.parent

    def name_run(self, name: str) -> None:
        """Note the ``debugName`` of a run; reports show the first ones apart."""
        if len(self._run_names) < NAMED_RUNS:
            self._run_names.append(name or self._name)

    def count_run(self, settings: EngineOptions) -> None:
        """Note a run of a program whose report was written when it was compiled, and let that report show it, up to
        autoReport.executionProfileProgramRunCount.
        """
        if (
            self._written is None
            or not settings.execution_profile
            or len(self._run_names) >= settings.run_count
        ):
            return
        self._run_names.append(self._name)
        if len(self._run_names) > 1:  # A report shows one run when it is written.
            self._digest = _show_runs(self._written.parent, self._run_names, self._digest)

    def cycle_count(self, id: str) -> int:
        """Modelled cycles of the last run. UsageError for a counter that the program does not have."""
        kinds = self._settings.cycle_counters
        if kinds is None:
            raise UsageError(self._settings.words.cycles_not_counted)
        if self.cycles is None:
            raise UsageError(self._settings.words.cycles_before_run)
        ids = [""] if OUTER in kinds else []
        if INNER in kinds:
            ids += [f"inner_ipu_{ipu}" for ipu in range(self._ipus)]
        if id not in ids:
            raise UsageError(
                f"There is no cycle counter {id!r}; this session has {ids}. {self._settings.words.counters_option}"
            )
        return self.cycles

    def profile(self) -> Profile:
        """The tile model's report as values."""
        from podrun.report.document import profile_of

        executable = self._program.profiled()
        return replace(profile_of(executable), run_names=tuple(self._run_names))

    def summary(self) -> str:
        """The tile model's report as text."""
        from podrun.report.text import summary

        return summary(self.profile())

    def engine_settings(self) -> EngineOptions:
        """The settings from POPLAR_ENGINE_OPTIONS and the front end's engine options. InvalidOptionError for wrong
        ones, and for wrong ones of planners.
        """
        check_planner_options(self._settings.planner_options)
        return engine_options(self._settings.engine_options, ours())

    def stops_at_exceptions(self) -> bool:
        """Whether tiles stop at floating-point exceptions: an option of the session or of the engine."""
        return self._settings.floating_point_checks or self.engine_settings().floating_point_exceptions

    def after_compile(self, settings: EngineOptions) -> None:
        """Write the requested reports, then check that the program fits its tiles.

        GraphMemoryAllocationError if it does not, unless debug.allowOutOfMemory; UsageError for equations that no
        planner knows, if podrun.strict. The reports are written in any case.
        """
        executable = self._program.prepared(SessionCall.REPORT)
        if self._program.device.kind is DeviceKind.CPU or "segments" not in executable.tile_report:
            return
        path = ""
        if settings.reports:
            from podrun.report.document import origin_of_process, profile_of, profile_to_json, write_report

            folder = settings.directory / self._name
            now = datetime.now().astimezone()
            origin = origin_of_process(ours(), sys.orig_argv, now)
            profile = profile_of(executable)
            document = profile_to_json(profile, origin)
            self._written = write_report(
                profile, folder, trace=settings.execution_profile, origin=origin, document=document
            )
            path, self._digest = str(self._written), _digest_of(document.encode())
        if settings.strict:
            check_planned(bounds_of(executable.tile_report))
        if not settings.allow_out_of_memory:
            check_report_fits(executable.tile_report, profile_path=path)


def _show_runs(folder: Path, names: Sequence[str], written: bytes) -> bytes:
    """Let the report in a folder show these runs; the digest of its document. ``written``: the digest so far. What
    something else has written there since, such as another session of the same name, stays as it is, and a report that
    is gone stays so.
    """
    from podrun.report.document import ARCHIVE, DOCUMENT, document_text

    with contextlib.suppress(OSError):
        data = (folder / ARCHIVE).read_bytes()
        if _digest_of(data) == written and (folder / DOCUMENT).read_bytes() == data:
            document = json.loads(data)
            document["profile"]["run_names"] = list(names)
            text = document_text(document)
            write_together(folder, {DOCUMENT: text, ARCHIVE: text})
            return _digest_of(text.encode())
    return written


def _digest_of(document: bytes) -> bytes:
    return hashlib.sha256(document).digest()
