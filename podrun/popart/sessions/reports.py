"""What a session tells about itself: cycle counts, a summary of the tile model, report files."""

from __future__ import annotations

from dataclasses import replace

from podrun.device.tiles.fit import check_program
from podrun.device.tiles.strict import bounds_of, check_planned
from podrun.popart.enums import DeviceType, Instrumentation
from podrun.popart.environment import ours
from podrun.popart.errors import popart_exception, poplar_exception, surfaced
from podrun.popart.sessions.state import SessionState
from podrun.report.engine_options import EngineOptions, engine_options
from podrun.report.model import Profile
from podrun.report.read import profile_of
from podrun.report.text import summary
from podrun.report.write import write_report


class SessionReports(SessionState):
    """The part of a session that reports."""

    def getCycleCount(self, id: str = "") -> int:
        """Modelled cycles of the last run. popart_exception unless instrumentWithHardwareCycleCounter was
        set.
        """
        if not self._options.instrumentWithHardwareCycleCounter:
            raise popart_exception(
                "SessionOption 'instrumentWithHardwareCycleCounter' must be set to True in order to measure cycles."
            )
        if self._cycles is None:
            raise popart_exception("Must call run before getCycleCount.")
        kinds = self._options.hardwareInstrumentations
        ids = [""] if Instrumentation.Outer in kinds else []
        if Instrumentation.Inner in kinds:
            ids += [f"inner_ipu_{ipu}" for ipu in range(self._built.program.ipus_per_replica)]
        if id not in ids:
            raise popart_exception(
                f"There is no cycle counter {id!r}; this session has {ids}. Make sure you have set "
                "SessionOption::hardwareInstrumentations correctly."
            )
        return self._cycles

    def _check_report(self) -> Profile:
        if self._executable is None:
            raise popart_exception("Session must have been prepared before a report can be fetched")
        if self._device.type is DeviceType.Cpu:
            raise poplar_exception("Profiling is disabled for current device type.")
        with surfaced():
            return replace(profile_of(self._executable), run_names=tuple(self._run_names))

    def getSummaryReport(self, resetProfile: bool = True) -> str:
        """The tile model's report as text: time by cause, operators, layers, memory."""
        return summary(self._check_report())

    def getReport(self) -> Profile:
        """The tile model's report as values: a `podrun.report.Profile`, units in the names of its fields.

        Its ``compilation`` and ``execution`` have the shape of the SDK's analysis library.
        """
        return self._check_report()

    def _engine_settings(self) -> EngineOptions:
        """What POPLAR_ENGINE_OPTIONS and SessionOptions.engineOptions ask for; poplar_exception for what
        cannot be.
        """
        with surfaced():
            return engine_options(self._options.engineOptions, ours())

    def _after_compile(self, settings: EngineOptions) -> None:
        """Write the reports that are asked for, then see that the program fits its tiles.

        OutOfMemoryException if it does not, unless debug.allowOutOfMemory; popart_exception for equations that no
        planner knows, if podrun.strict. The report is there all the same.
        """
        executable = self._prepared("getReport")
        if self._device.type is DeviceType.Cpu or "segments" not in executable.tile_report:
            return
        path = ""
        with surfaced():
            if settings.reports:
                folder = settings.directory / self._name
                written = write_report(profile_of(executable), folder, trace=settings.execution_profile)
                path = str(written)
            if settings.strict:
                check_planned(bounds_of(executable.tile_report))
            if not settings.allow_out_of_memory:
                check_program(executable.tile_report, profile_path=path)
