"""A profile that also shows itself in notebooks, as tables, and as the SDK's analysis library has it."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import Any

from podrun.core.quick_dataclass import dataclass
from podrun.report.analysis import compilation, execution
from podrun.report.library.compilation import Compilation
from podrun.report.library.execution import Execution, InstrumentationSettings, PoplarVersion, ReportVersion
from podrun.report.model import SCHEMA_VERSION, Profile


class Report:
    """The result of ``pva.openReport``: `compilation` and `execution` of a profile, each computed once."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.poplarVersion = PoplarVersion()
        self.version = ReportVersion(SCHEMA_VERSION)
        self.instrumentationSettings = InstrumentationSettings()

    def show(self, *, height: int = 700) -> None:
        """See `podrun.report.notebook.show`."""
        from podrun.report.notebook import show

        show(self.profile, height)

    @cached_property
    def compilation(self) -> Compilation:
        """The facts known before anything runs."""
        return compilation(self.profile)

    @cached_property
    def execution(self) -> Execution:
        """The modelled time of one run, as the SDK's analysis library shows it."""
        return execution(self.profile)


@dataclass(frozen=True, slots=True)
class AnalysisProfile(Profile):
    """What ``session.getReport()`` returns: the values of a `Profile`, and these views of them."""

    @staticmethod
    def of(profile: Profile) -> AnalysisProfile:
        """An `AnalysisProfile` with the values of a plain profile."""
        return AnalysisProfile(**{field.name: getattr(profile, field.name) for field in fields(profile)})

    def show(self, *, height: int = 700) -> None:
        """Show the page inline in a notebook, ``height`` pixels high; elsewhere print the summary."""
        from podrun.report.notebook import show

        show(self, height)

    def _repr_html_(self) -> str:
        """The form in which a notebook shows a profile."""
        from podrun.report.notebook import frame

        return frame(self)

    def table(self, what: str) -> Any:
        """A pandas table: ``layers``, ``operators``, ``timeline``, ``tiles``, ``memory`` or ``causes``.

        Raises NotFoundError without pandas, UsageError for another name. See `podrun.report.notebook.table`.
        """
        from podrun.report.notebook import table

        return table(self, what)

    @property
    def compilation(self) -> Compilation:
        """The compiled program as the SDK's analysis library shows it: see `podrun.report.analysis`."""
        return compilation(self)

    @property
    def execution(self) -> Execution:
        """The run as the SDK's analysis library shows it: see `podrun.report.analysis`."""
        return execution(self)

    @property
    def poplarVersion(self) -> PoplarVersion:
        """The version of Poplar as the SDK's analysis library shows it."""
        return Report(self).poplarVersion

    @property
    def version(self) -> ReportVersion:
        """The version of the report's format as the SDK's analysis library shows it."""
        return Report(self).version

    @property
    def instrumentationSettings(self) -> InstrumentationSettings:
        """What was counted, as the SDK's analysis library shows it."""
        return Report(self).instrumentationSettings
