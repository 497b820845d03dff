"""What a larger POD gives a model: step time, efficiency, and throughput after failures, from the cost model.

The plan is the work of one batch (`BatchWork`), which the estimator counts once; a POD of another size differs in its
replicas. Up to POD256 the model is compared with measurements; beyond, the wait of IPU-Link domains for each other is a
law fitted on POD128 and POD256, and what is said is labelled as extrapolated. Throughput after failures is the exact
efficiency of checkpoints in the best period, with a rate carried over from GPUs.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from podrun.checkpoint.policy import optimal_period, periodic_efficiency
from podrun.core.documents import read_text, write_output
from podrun.core.errors import ConfigError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.core.terminal import text_table
from podrun.costmodel.batch import BatchWork, batch_seconds
from podrun.costmodel.target import GC200

SIZES = {
    f"pod{name}": ipus for name, ipus in (("16", 16), ("64", 64), ("256", 256), ("1k", 1024), ("4k", 4096))
}
SIZES |= {"pod16k": 16_384, "pod64k": 65_536, "pod128": 128, "pod512": 512, "pod1024": 1024, "pod4096": 4096}
SHOWN = ("pod16", "pod64", "pod256", "pod1024", "pod4096", "pod64k")
MEASURED_IPUS = 256
"""The largest POD with published measurements."""
MODEL_ERROR = 0.10
"""Error of a step time that the comparison with published measurements allows for (docs/fidelity.md)."""


@dataclass(frozen=True, slots=True)
class FailureCosts:
    """What failures cost: failures of a chip in an hour, seconds of a write, of a restart."""

    per_chip_hour: float = 19_733e-9
    write_s: float = 20.0
    restart_s: float = 300.0


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """One POD. Seconds of a batch with its interval; ``efficiency``: throughput per IPU, the smallest POD's is 1."""

    pod: str
    ipus: int
    replicas: int
    step_s: float
    step_low_s: float
    step_high_s: float
    samples_per_second: float
    efficiency: float
    ettr: float
    useful_samples_per_second: float
    extrapolated: bool


def read_scale_plan(path: Path) -> tuple[BatchWork, int]:
    """The work of a batch, and its micro-batch, from a file that `write_scale_plan` wrote. Raises ConfigError."""
    try:
        values = json.loads(read_text(path, hint="podrun scale MODEL.onnx --plan FILE writes one."))
        known = {entry.name for entry in fields(BatchWork)}
        if (
            not isinstance(values, dict)
            or set(values) != {"micro_batch", "work"}
            or not set(values["work"]) <= known
        ):
            raise ValueError("it has other keys than a plan")
        return BatchWork(**values["work"]), int(values["micro_batch"])
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} is no plan: {error}", hint="podrun scale MODEL.onnx --plan FILE writes one."
        ) from None


def write_scale_plan(path: Path, work: BatchWork, micro_batch: int) -> None:
    """Write a plan to a file."""
    plan = {"micro_batch": micro_batch, "work": asdict(work)}
    write_output(path, json.dumps(plan, indent=1) + "\n")


def pods_named(text: str) -> list[str]:
    """``pod16..pod64k`` or ``pod16,pod64``. Raises UsageError."""
    first, dots, last = text.partition("..")
    names = [first, last] if dots else text.split(",")
    for name in names:
        if name not in SIZES:
            raise UsageError(f"there is no POD {name!r} to scale to", hint=f"Known: {', '.join(SIZES)}.")
    if not dots:
        return names
    low, high = sorted(SIZES[name] for name in names)
    return [name for name in SHOWN if low <= SIZES[name] <= high]


def scale_points(
    work: BatchWork, micro_batch: int, pods: list[str], costs: FailureCosts = FailureCosts()
) -> list[ScalePoint]:
    """The figures for each POD. Raises UsageError for one that is smaller than a replica."""
    points: list[ScalePoint] = []
    per_ipu = 0.0
    for pod in pods:
        ipus = SIZES[pod]
        replicas = ipus // work.stages
        if not replicas:
            raise UsageError(
                f"a replica of {work.stages} IPUs does not fit {pod}", hint="Leave that POD out."
            )
        causes = batch_seconds(GC200, replace(work, replicas=replicas))
        step = math.fsum(causes.values())
        far = ipus > MEASURED_IPUS
        wait = causes["domains"]
        low = (step - (wait * 0.5 if far else 0.0)) * (1 - MODEL_ERROR)
        high = (step + (wait if far else 0.0)) * (1 + MODEL_ERROR)
        rate = micro_batch * work.accumulation * replicas / step
        per_ipu = per_ipu or rate / ipus
        useful = _ettr(ipus, costs)
        points.append(
            ScalePoint(
                pod, ipus, replicas, step, low, high, rate, rate / ipus / per_ipu, useful, rate * useful, far
            )
        )
    return points


def _ettr(ipus: int, costs: FailureCosts) -> float:
    mttf = 3600 / (costs.per_chip_hour * ipus)
    period = optimal_period(costs.write_s, mttf)
    return periodic_efficiency(period, costs.write_s, mttf, costs.restart_s)


def points_json(points: list[ScalePoint], costs: FailureCosts) -> dict[str, Any]:
    """The points of a scaling curve as values of JSON."""
    return {"schema_version": 1, "failure_costs": asdict(costs), "pods": [asdict(point) for point in points]}


def shown_points(points: list[ScalePoint]) -> str:
    """The figures of a scaling curve as a table of text."""
    rows = [
        (
            point.pod,
            f"{point.replicas:,}",
            f"{point.step_s * 1e3:,.2f} ({point.step_low_s * 1e3:,.2f} to {point.step_high_s * 1e3:,.2f})",
            f"{point.efficiency:.1%}",
            f"{point.samples_per_second:,.0f}",
            f"{point.ettr:.3f}",
            f"{point.useful_samples_per_second:,.0f}",
            "extrapolated" if point.extrapolated else "",
        )
        for point in points
    ]
    head = ("POD", "replicas", "step ms", "efficiency", "samples/s", "ETTR", "after failures", "")
    return text_table(head, rows)
