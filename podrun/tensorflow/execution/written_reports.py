"""What a compiled program leaves in folders: reports, ``framework.json``, and the tables for which ``TF_POPLAR_FLAGS``
ask. The program that runs is one iteration, and its report one of all mini-batches of an update.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tensorflow import version

from podrun.core.environment import POPLAR_ENGINE_OPTIONS
from podrun.core.executable import Executable
from podrun.runtime.environment import ours
from podrun.runtime.session_reports import SessionReports
from podrun.tensorflow.execution.poplar_flags import flags


def write_reports(reports: SessionReports, program: str, *, quiet: bool) -> None:
    """Write the reports of a program, with ``framework.json`` beside them, and check that it fits its tiles.

    ``quiet``: in the SDK nothing is compiled, because the program came from a cache or needs no engine. Only
    ``POPLAR_ENGINE_OPTIONS``, with which ``podrun profile`` asks, lets it have reports. PoplarError if it does not fit.
    """
    options = reports.engine_settings()
    if quiet and POPLAR_ENGINE_OPTIONS not in ours():
        options = replace(options, graph_profile=False, execution_profile=False)
    reports.after_compile(options)
    if reports.folder is not None:
        framework = {"framework": "TensorFlow", "version": version.VERSION, "module": program}
        text = json.dumps(framework, indent=2) + "\n"
        (reports.folder / "framework.json").write_text(text, encoding="utf-8")
    if flags().vertex_graphs:
        head, lines = "stage,ipu,scope,operator,steps,compute_cycles", _steps(reports)
        _write_table(flags().vertex_graphs, program, "vertex_graph", [head, *lines])
    if flags().interval_reports:
        head, lines = "ipu,first_tile,end_tile,category,bytes", _intervals(reports)
        _write_table(flags().interval_reports, program, "csv", [head, *lines])


def _steps(reports: SessionReports) -> list[str]:
    """Rows of the table of steps: what the tiles execute, in order."""
    profile = reports.profile()
    return [
        f"{stage.name},{stage.ipu},{step.scope},{step.operator},{step.steps},{step.compute_cycles}"
        for stage in (*profile.stages, *profile.updates)
        for step in stage.timeline
    ]


def _intervals(reports: SessionReports) -> list[str]:
    """Rows of the table of intervals: the bytes of each category on each range of tiles."""
    return [
        f"{use.ipu},{part.first_tile},{part.end_tile},{category},{size}"
        for use in reports.profile().ipu_memory
        for part in use.memory.by_tile
        for category, size in part.bytes_by_category.items()
    ]


def _write_table(folder: str, program: str, ending: str, lines: Sequence[str]) -> None:
    """Write a table under a name that no other program of the folder has, in this process or another."""
    place, name = Path(folder).expanduser(), program.replace("/", "_")
    place.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(len(list(place.glob(f"*.{ending}")))):
        try:
            file = (place / f"{number}_{name}.{ending}").open("x", encoding="utf-8")
        except FileExistsError:
            continue
        with file:
            file.write("\n".join([*lines, ""]))
        return


def each_iteration(whole: Executable, micro_batches: int) -> Executable:
    """The program whose modelled time is that of one of the mini-batches that its report is of."""
    step = dict(whole.tile_report["step"])
    step["cycles"] = round(step["cycles"] / micro_batches)
    step["seconds"] /= micro_batches
    causes = {cause: seconds / micro_batches for cause, seconds in step["seconds_by_cause"].items()}
    step["seconds_by_cause"] = causes
    return replace(whole, tile_report={**whole.tile_report, "step": step})
