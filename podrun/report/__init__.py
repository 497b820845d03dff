"""What the tile model says about a program, for people and tools: text, one HTML page, a trace, a comparison.

Reads the ``tile_report`` of an `Executable` (made by the compiler from `podrun.device.tiles`) and nothing else; no
report is ever computed here. `read` turns the report into a `Profile`; `text`, `html` and `trace` show it.

    python -m podrun.report PROGRAM [--html FILE] [--trace FILE] [--json FILE] [--compare OTHER]
"""

from podrun.report.read import Profile, Stage, read_report

__all__ = ["Profile", "Stage", "read_report"]
