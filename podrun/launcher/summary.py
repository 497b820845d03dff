"""What is said at the end of a launch: replicas, batches, samples a second, and the modelled time of a batch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from podrun.launcher.spec import LaunchLayout

if TYPE_CHECKING:
    from podrun.core.telemetry import MachineReport


NETWORK_MEDIAN, NETWORK_WORST = 6, 30
"""Errors of the model on networks, in percent: rounded up, and up to tens. A test compares them with the pages."""
TRUST = f"an estimate: published networks {NETWORK_MEDIAN} % off at the median, {NETWORK_WORST} % at worst"


def launch_summary(
    layout: LaunchLayout, reports: Sequence[MachineReport], wall_seconds: float, command: Sequence[str] = ()
) -> list[str]:
    """Lines without line ends. Figures that machines do not report are left out. ``command``: the program's, for advice
    in the words of the front end that it imports."""
    machines = len(reports)
    parts = [number_of(layout.replicas, "replica"), number_of(layout.instances, "instance")]
    if machines:
        parts.append(number_of(machines, "machine"))
    lines = [f"done in {wall_seconds:.1f} s: {', '.join(parts)}"]
    if idle := _idle(layout, reports, command):
        lines.append(idle)
    emulation = _emulation(reports)
    if emulation:
        lines.append(emulation)
    model = _model(reports)
    if model:
        lines += model
    return lines


def number_of(number: int, noun: str) -> str:
    """``1 machine``, ``4 machines``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _idle(layout: LaunchLayout, reports: Sequence[MachineReport], command: Sequence[str]) -> str:
    """Says that the program used fewer IPUs than were asked for, as one does that has its own number of replicas."""
    wanted = layout.ipus
    used = sum(ipu.batches_done > 0 for report in reports for ipu in report.ipus)
    if not 0 < used < wanted:
        return ""
    return (
        f"the program used {used} of {wanted} IPUs; one with several replicas asks popdist for their number: "
        f"{_OPTIONS[_front_end(command)]}"
    )


_POPART = "popart"
_OPTIONS = {
    "poptorch": "options = popdist.poptorch.Options()",
    _POPART: "popdist.popart.configureSessionOptions(options)",
    "tensorflow": "popdist.tensorflow.set_ipu_config(config, ipus_per_replica=1)",
}
"""What gives a program the number of its replicas, by its front end. PyTorch and PopART programs may import TensorFlow
too, for its data."""


def _front_end(command: Sequence[str]) -> str:
    """The first of `_OPTIONS` that scripts of the command import, else PopART. A file that cannot be read has none."""
    imported: set[str] = set()
    for word in command:
        if word.endswith(".py"):
            with contextlib.suppress(OSError):
                imported.update(_IMPORT.findall(Path(word).read_text(encoding="utf-8", errors="replace")))
    return next((name for name in _OPTIONS if name in imported), _POPART)


_IMPORT = re.compile(rf"^\s*(?:import|from)\s+({'|'.join(_OPTIONS)})\b", re.MULTILINE)


def _emulation(reports: Sequence[MachineReport]) -> str:
    """Batches (weight updates) and samples a second. Machines work side by side, so the slowest counts."""
    batches = max((report.batches_done for report in reports), default=0)
    if not batches:
        return ""
    text = f"emulation: {batches} {'batch' if batches == 1 else 'batches'}"
    seconds = max((report.emulation_s or 0.0 for report in reports), default=0.0)
    if seconds <= 0:
        return text
    text += f" in {seconds:.2f} s"
    if all(report.samples_done is not None for report in reports):
        samples = sum(report.samples_done or 0 for report in reports)
        text += f", {samples / seconds:,.0f} samples/s"
    return text


def _model(reports: Sequence[MachineReport]) -> list[str]:
    """Modelled time of a batch, pipelined or not. Machines run in lockstep, so the longest counts."""
    times = [
        report.modelled_s / report.batches_done
        for report in reports
        if report.modelled_s and report.batches_done
    ]
    if not times:
        return []
    return [f"modelled on IPUs: {scaled_duration(max(times))} per batch", f"({TRUST})"]


def scaled_duration(seconds: float) -> str:
    """A time in a unit that leaves at most three digits before the point."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
