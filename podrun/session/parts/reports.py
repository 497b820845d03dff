"""What a session tells about itself: cycle counts, a summary of the tile model, report files."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import datetime

from podrun.costmodel.cost import bounds_of, check_planned, check_program
from podrun.report.document import origin_of_process, profile_of, write_report
from podrun.report.engine_options import EngineOptions, engine_options
from podrun.report.model import Profile
from podrun.report.text import summary
from podrun.session.enums import DeviceType, Instrumentation
from podrun.session.environment import ours
from podrun.session.exceptions import popart_exception, surfaced
from podrun.session.options.session_options import SessionOptions
from podrun.session.parts.device_program import DeviceProgram

NAMED_RUNS = 2
"""Runs that a report tells apart, as autoReport.executionProfileProgramRunCount has it."""


class SessionReports:
    """Cycle counts and reports of a session's program. ``ipus``: of a replica. ``name``: the session's."""

    def __init__(self, program: DeviceProgram, options: SessionOptions, ipus: int, name: str) -> None:
        self._program, self._options, self._ipus, self._name = program, options, ipus, name
        self._run_names: list[str] = []
        self.cycles: int | None = None
        """Modelled cycles of the last run."""

    def name_run(self, name: str) -> None:
        """Note the ``debugName`` of a run; reports tell the first ones apart."""
        if len(self._run_names) < NAMED_RUNS:
            self._run_names.append(name or self._name)

    def cycle_count(self, id: str) -> int:
        """`Session.getCycleCount`."""
        if not self._options.instrumentWithHardwareCycleCounter:
            raise popart_exception(
                "SessionOption 'instrumentWithHardwareCycleCounter' must be set to True in order to measure cycles."
            )
        if self.cycles is None:
            raise popart_exception("Must call run before getCycleCount.")
        kinds = self._options.hardwareInstrumentations
        ids = [""] if Instrumentation.Outer in kinds else []
        if Instrumentation.Inner in kinds:
            ids += [f"inner_ipu_{ipu}" for ipu in range(self._ipus)]
        if id not in ids:
            raise popart_exception(
                f"There is no cycle counter {id!r}; this session has {ids}. Make sure you have set "
                "SessionOption::hardwareInstrumentations correctly."
            )
        return self.cycles

    def profile(self) -> Profile:
        """`Session.getReport`."""
        executable = self._program.profiled()
        with surfaced():
            return replace(profile_of(executable), run_names=tuple(self._run_names))

    def summary(self) -> str:
        """`Session.getSummaryReport`."""
        return summary(self.profile())

    def engine_settings(self) -> EngineOptions:
        """What POPLAR_ENGINE_OPTIONS and SessionOptions.engineOptions ask for; poplar_exception for what
        cannot be.
        """
        with surfaced():
            return engine_options(self._options.engineOptions, ours())

    def after_compile(self, settings: EngineOptions) -> None:
        """Write the reports that are asked for, then see that the program fits its tiles.

        OutOfMemoryException if it does not, unless debug.allowOutOfMemory; popart_exception for equations that no
        planner knows, if podrun.strict. The report is there all the same.
        """
        executable = self._program.prepared("getReport")
        if self._program.device.type is DeviceType.Cpu or "segments" not in executable.tile_report:
            return
        path = ""
        with surfaced():
            if settings.reports:
                folder = settings.directory / self._name
                now = datetime.now().astimezone()
                origin = origin_of_process(ours(), sys.orig_argv, now)
                found = profile_of(executable)
                written = write_report(found, folder, trace=settings.execution_profile, origin=origin)
                path = str(written)
            if settings.strict:
                check_planned(bounds_of(executable.tile_report))
            if not settings.allow_out_of_memory:
                check_program(executable.tile_report, profile_path=path)
