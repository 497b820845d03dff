"""What the tile model says about a program, for people and tools: text, JSON, one HTML page, a trace, a comparison.

Reads the ``tile_report`` of an `Executable` (made by the compiler from `podrun.device.tiles`) and nothing else; no
cost is ever computed here. `read` turns the report into a `Profile` (`model`); `text`, `document`, `html` and
`trace` show it; `write` writes them all; `engine_options` reads when and where to.

    podrun profile train.py
    python -m podrun.report PROGRAM [--html FILE] [--trace FILE] [--json FILE] [--compare OTHER]
"""

from podrun.report.model import Profile, Stage
from podrun.report.read import read_report

__all__ = ["Profile", "Stage", "read_report"]
