"""``import pva`` for scripts written for the SDK's analysis library: reports of podrun, names of that library.

import pva
report = pva.openReport("training/profile.pop")
max(tile.memory.total.includingGaps for tile in report.compilation.tiles)
"""

from podrun.report.analysis_profile import Report
from podrun.report.document import open_report as openReport
from podrun.report.library.compilation import IPU, Target
from podrun.report.library.compilation import Compilation as CompilationReport
from podrun.report.library.execution import Execution as ExecutionReport
from podrun.report.library.execution import (
    ExecutionStep,
    InstrumentationSettings,
    PoplarVersion,
    ProgramVisitor,
)
from podrun.report.library.execution import LibraryProgram as Program

__all__ = [
    "IPU",
    "CompilationReport",
    "ExecutionReport",
    "ExecutionStep",
    "InstrumentationSettings",
    "PoplarVersion",
    "Program",
    "ProgramVisitor",
    "Report",
    "Target",
    "openReport",
]
