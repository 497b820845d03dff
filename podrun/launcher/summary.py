"""The few lines at the end of a launch: what ran, how fast the emulation was, and, apart from it, what the
model says of real IPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from podrun.launcher.spec import Layout

if TYPE_CHECKING:
    from podrun.telemetry import MachineReport

NETWORK_MEDIAN, NETWORK_WORST = 10, 30
"""Percent: the errors of networks in docs/fidelity.md, rounded up to tens. A test holds them to that page."""
TRUST = (
    f"an estimate, host streams not counted: published networks are met within {NETWORK_MEDIAN} % in the median "
    f"and {NETWORK_WORST} % at worst; tiny programs, which mostly launch and wait, less surely (docs/fidelity.md)"
)


def summary(layout: Layout, reports: Sequence[MachineReport], wall_seconds: float) -> list[str]:
    """Lines without line ends. What machines do not know is left out, not guessed."""
    machines = len(reports)
    parts = [counted(layout.replicas, "replica"), counted(layout.instances, "instance")]
    if machines:
        parts.append(counted(machines, "machine"))
    lines = [f"{', '.join(parts)}; {wall_seconds:.1f} s"]
    emulation = _emulation(reports)
    if emulation:
        lines.append(emulation)
    model = _model(reports)
    if model:
        lines += model
    return lines


def counted(number: int, noun: str) -> str:
    """``1 machine``, ``4 machines``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _emulation(reports: Sequence[MachineReport]) -> str:
    """Steps and samples per second of emulation: the machines work side by side, so the slowest counts."""
    steps = max((report.batches_done for report in reports), default=0)
    if not steps:
        return ""
    text = f"emulation: {counted(steps, 'step')}"
    seconds = max((report.emulation_s or 0.0 for report in reports), default=0.0)
    if seconds <= 0:
        return text
    text += f" in {seconds:.2f} s"
    if all(report.samples_done is not None for report in reports):
        samples = sum(report.samples_done or 0 for report in reports)
        text += f", {samples / seconds:,.0f} samples/s"
    return text


def _model(reports: Sequence[MachineReport]) -> list[str]:
    """Modelled time per step: machines run in lockstep, so the longest counts."""
    times = [
        report.modelled_s / report.batches_done
        for report in reports
        if report.modelled_s and report.batches_done
    ]
    if not times:
        return []
    return [f"modelled on IPUs: {duration(max(times))} per step", f"  ({TRUST})"]


def duration(seconds: float) -> str:
    """With a unit that leaves at most three digits before the point."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
