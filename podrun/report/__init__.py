"""Reports of the tile model about a program, for people and tools: text, JSON, an HTML page, a trace, a comparison.

    podrun profile train.py
    python -m podrun.report PROGRAM [--html FILE] [--trace FILE] [--json FILE] [--compare OTHER]

Only the ``tile_report`` of an `Executable` enters (made by the compiler from `podrun.costmodel`); no cost is computed
here. `document` turns the report into a `Profile` (`model`) and writes all files; `text`, `html` and `chrome_trace`
show it; `engine_options` reads when and where to. Results go to files, notebooks and the terminal.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podrun.report.document import read_report
    from podrun.report.model import Profile, ReportStage

__all__ = ["Profile", "ReportStage", "read_report"]


def __getattr__(name: str) -> Any:
    """Names of modules that are imported when somebody asks: programs read `engine_options` alone."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{'document' if name == 'read_report' else 'model'}")
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
