"""The tile report of a program as values: stages on IPUs, what they cost, what the tiles hold.

The compiler's report holds ``segments`` (pieces of one micro-batch: IPU, place in the pipeline, the tile model's
report) and ``update`` (the same for the weight update of each IPU). A report of one function (`cost_jaxpr`) is read
as a program of one segment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podrun.errors import ConfigError

CAUSES = ("compute", "exchange", "rearrange", "launch", "sync")
"""Causes of cycles within a stage, in the order they are shown."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One piece of work on one IPU. ``cycle``: its place in the pipeline; ``report``: of `podrun.device.tiles`."""

    name: str
    ipu: int
    cycle: int
    sent_bytes: int
    report: Mapping[str, Any]

    @property
    def cycles(self) -> int:
        """Cycles of one execution."""
        return int(self.report["step"]["cycles"])


@dataclass(frozen=True, slots=True)
class Profile:
    """A program's modelled time and memory. ``seconds_by_cause`` adds up to ``seconds`` of one batch."""

    target: str
    cycles: int
    seconds: float
    seconds_by_cause: Mapping[str, float]
    stages: tuple[Stage, ...]
    updates: tuple[Stage, ...]
    pipelined: bool

    @property
    def ipus(self) -> tuple[int, ...]:
        """IPUs of a replica that have work."""
        return tuple(sorted({stage.ipu for stage in (*self.stages, *self.updates)}))

    def causes(self) -> dict[str, int]:
        """Cycles of one micro-batch by cause, over all stages."""
        return {
            cause: sum(int(s.report["step"]["by_cause"].get(cause, 0)) for s in self.stages)
            for cause in CAUSES
        }

    def operators(self) -> dict[str, int]:
        """Cycles of one micro-batch by family of operations, largest first."""
        found: dict[str, int] = {}
        for stage in self.stages:
            for name, entry in stage.report["by_operator"].items():
                found[name] = found.get(name, 0) + int(entry["cycles"])
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def scopes(self) -> dict[str, int]:
        """Cycles of one micro-batch by named scope (layer), largest first."""
        found: dict[str, int] = {}
        for stage in self.stages:
            for name, cycles in stage.report["by_scope"].items():
                found[name] = found.get(name, 0) + int(cycles)
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def fullest(self) -> Stage:
        """The stage whose tiles hold most."""
        return max(self.stages, key=lambda stage: (stage.report["memory"]["max_tile_bytes"], -stage.ipu))

    def bounds(self) -> dict[str, tuple[int, int]]:
        """Equations that no planner knew: how often, and the cycles of their bound."""
        found: dict[str, tuple[int, int]] = {}
        for stage in self.stages:
            for name, entry in stage.report.get("bounds", {}).items():
                count, cycles = found.get(name, (0, 0))
                found[name] = (count + int(entry["count"]), cycles + int(entry["cycles"]))
        return found


def read_report(report: Mapping[str, Any]) -> Profile:
    """The Profile of a tile report.

    Raises:
        ConfigError: it is not a tile report, or there is no tile model of this program in it.
    """
    if "step" not in report:
        raise ConfigError(
            "this is not a tile report: it has no 'step'", hint="Give a program that podrun compiled."
        )
    step = report["step"]
    if "segments" in report:
        stages = tuple(
            Stage(f"segment {index}", int(s["ipu"]), int(s["cycle"]), int(s["sent_bytes"]), s["report"])
            for index, s in enumerate(report["segments"])
        )
        updates = tuple(Stage("update", int(u["ipu"]), 0, 0, u["report"]) for u in report.get("update", ()))
        causes = {name: float(seconds) for name, seconds in step.get("seconds_by_cause", {}).items()}
        pipelined = bool(report.get("pipelined", False))
    elif "memory" in report:
        stages, updates, pipelined = (Stage("program", 0, 0, 0, report),), (), False
        causes = {"compute": float(step["seconds"])}
    else:
        raise ConfigError(
            "the program holds no tile model's report", hint="Compile it again with this version."
        )
    if not stages:
        raise ConfigError("the tile report holds no segments")
    target = str(stages[0].report["target"])
    return Profile(target, int(step["cycles"]), float(step["seconds"]), causes, stages, updates, pipelined)
