"""How long one run of a model takes on the IPUs of a replica, by batch size: modelled, of an ONNX model or of a
compiled file.

An ONNX model is traced and costed for each batch size, as `podrun estimate` does; the host's copies are those of
machines whose IPUs all work. A compiled file has one batch size, and the time that its runs report on a server.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from podrun.core.errors import ConfigError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.core.terminal import report_step

BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Batch sizes that are tried where the model leaves its batch open."""
_BATCH = "{batch}"
"""What stands for the batch size in the name of a file."""


@dataclass(frozen=True, slots=True)
class RunCost:
    """One run of a compiled batch. ``rows``: of the batch; a run of fewer takes as long. ``seconds`` of the run, of
    which ``host_s`` are the host's copies and waits; ``tile_share``: the fullest tile over its memory, None if
    unknown."""

    rows: int
    seconds: float
    host_s: float
    tile_share: float | None

    @property
    def fits(self) -> bool:
        """True iff the fullest tile holds its share."""
        return self.tile_share is None or self.tile_share <= 1

    def run_seconds(self, rows: int) -> float:
        """Seconds of a run of so many rows: whole compiled batches, one after the other."""
        return math.ceil(rows / self.rows) * self.seconds


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """A model with its runs by batch size, ascending, and the IPUs of one replica."""

    name: str
    ipus_per_replica: int
    runs: tuple[RunCost, ...]

    def with_host_time(self, seconds: float) -> ModelCosts:
        """The model where the host works so long for each run besides, and the IPUs wait for it."""
        runs = (replace(run, seconds=run.seconds + seconds, host_s=run.host_s + seconds) for run in self.runs)
        return replace(self, runs=tuple(runs))

    @property
    def fitting(self) -> tuple[RunCost, ...]:
        """Runs of batches that fit the tiles."""
        return tuple(run for run in self.runs if run.fits)


def model_costs(path: Path, target: str, ipus_per_replica: int | None, batches: Sequence[int]) -> ModelCosts:
    """Costs of a file's model on the chip of a target, for these batch sizes (none: those of `BATCHES`).

    ``net-b{batch}.onnx`` stands for a file for each batch size, whose models have their batch fixed. Raises
    PodrunError.
    """
    if _BATCH in path.name:
        costs = _numbered_costs(path, target, ipus_per_replica, batches)
    elif path.suffix == ".onnx":
        runs = _onnx_runs(path, target, ipus_per_replica or 1, batches)
        costs = ModelCosts(path.stem, ipus_per_replica or 1, tuple(runs))
    else:
        costs = _compiled_costs(path, ipus_per_replica, batches)
    if not costs.fitting:
        least = min(costs.runs, key=lambda run: run.tile_share or 0.0)
        raise UsageError(
            f"{path} does not fit: its fullest tile is {least.tile_share or 0:.0%} full at batch {least.rows}",
            hint=f"Take more IPUs: --ipus-per-replica {2 * costs.ipus_per_replica}",
        )
    return costs


def _numbered_costs(
    path: Path, target: str, ipus_per_replica: int | None, batches: Sequence[int]
) -> ModelCosts:
    if not batches:
        raise UsageError(f"which batches does {path.name} stand for?", hint="Say them: --batch 1,4,16")
    costs = [
        model_costs(path.with_name(path.name.replace(_BATCH, str(rows))), target, ipus_per_replica, (rows,))
        for rows in batches
    ]
    runs = tuple(run for one in costs for run in one.runs)
    return ModelCosts(path.stem.replace(_BATCH, "N"), costs[0].ipus_per_replica, runs)


def _onnx_runs(path: Path, target: str, ipus: int, batches: Sequence[int]) -> Iterator[RunCost]:
    from podrun.costmodel.target import system
    from podrun.estimate.layout import ProgramLayout, check_layout
    from podrun.estimate.model import estimate
    from podrun.estimate.tracing import OnnxModel, load_onnx_file, trace_model

    pod = system(target)
    check_layout(pod, ProgramLayout(ipus_per_replica=ipus))
    model = OnnxModel(load_onnx_file(path))
    written_for = model.micro_batch
    if written_for and batches and set(batches) != {written_for}:
        raise UsageError(
            f"{path} is written for batch {written_for}, and --batch asks for others",
            hint="Leave --batch out, or leave the first dimension of the model's inputs open.",
        )
    sizes = [written_for] if written_for else list(batches or BATCHES)
    for number, rows in enumerate(sizes):
        report_step(f"costing {path.stem} at batch {rows}", number, len(sizes))
        layout = ProgramLayout(rows, ipus_per_replica=ipus)
        answer = estimate(trace_model(model, pod.chip, layout, train=False), pod, layout, train=False)
        host = answer.seconds["host"]
        share = answer.max_tile_bytes / answer.tile_bytes
        yield RunCost(rows, math.fsum(answer.seconds.values()), host, share)
        if share > 1 and not batches:  # A larger batch needs more memory.
            return


def _compiled_costs(path: Path, ipus_per_replica: int | None, batches: Sequence[int]) -> ModelCosts:
    from podrun.serving.compiler import ServedModel

    model = ServedModel(path)
    program = model.program()
    seconds = float(program.tile_report.get("step", {}).get("seconds") or 0.0) / program.batches_per_pass
    if not seconds > 0:
        raise ConfigError(
            f"{path} has no modelled time", hint="Compile it again: poprt -i MODEL --export_popef"
        )
    shapes = [anchor.tensorInfo.shape for anchor in model.metadata.inputs()]
    rows = max((shape[0] for shape in shapes if shape), default=1)
    if batches and set(batches) != {rows}:
        raise UsageError(f"{path} is compiled for batch {rows}", hint="Leave --batch out.")
    per_replica = program.layout.ipus // model.metadata.replicationFactor
    if ipus_per_replica not in (None, per_replica):
        raise UsageError(f"{path} is compiled for {per_replica} IPUs", hint="Leave --ipus-per-replica out.")
    return ModelCosts(path.parent.name or path.stem, per_replica, (RunCost(rows, seconds, 0.0, None),))
