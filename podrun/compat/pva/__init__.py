"""``import pva`` for scripts written for the SDK's analysis library: reports of podrun, names of that library.

import pva
report = pva.openReport("training/profile.pop")
max(tile.memory.total.includingGaps for tile in report.compilation.tiles)
"""

from podrun.report.analysis import (
    Compilation,
    Execution,
    ExecutionStep,
    Program,
    ProgramVisitor,
    Report,
)
from podrun.report.analysis import open_report as openReport

__all__ = ["Compilation", "Execution", "ExecutionStep", "Program", "ProgramVisitor", "Report", "openReport"]
