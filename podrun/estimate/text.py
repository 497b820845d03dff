"""Estimates as text: one in full, and the best layouts of a scan as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from podrun.estimate.layout import ProgramLayout
from podrun.estimate.model import Estimate
from podrun.report.text import byte_size, number_of, printable, unit_of_time

MODULES_SHOWN = 8


def estimate_text(found: Estimate) -> str:
    """One estimate as text."""
    layout, total = found.layout, sum(found.seconds.values())
    unit, of = unit_of_time(total)
    lines = [
        f"{'Training' if found.training else 'Inference'}: {found.samples_per_second:,.0f} samples/s on "
        f"{number_of(found.replicas, 'replica')} of "
        f"{number_of(layout.ipus_per_replica, 'IPU')}, micro-batch {layout.micro_batch}, accumulation "
        f"{layout.accumulation} (batch of {found.samples:,} samples)"
        + (", recomputing" if layout.recompute else ""),
        f"Fullest tile {byte_size(found.max_tile_bytes)} of {byte_size(found.tile_bytes)}: "
        + ("fits" if found.fits else "DOES NOT FIT"),
        f"One batch {total * of:,.3f} {unit}; bottleneck: {found.bottleneck}",
    ]
    lines += [f"  {n:<15}{s * of:>12,.3f} {unit} {s / total:>6.1%}" for n, s in found.seconds.items() if s]
    if waits := found.waiting_seconds:
        lines.append(
            f"  {waits * of:,.3f} {unit} of host: the wait around a run of one batch. Batches of one run follow "
            f"one another at {found.samples_per_second_in_a_run:,.0f} samples/s"
        )
    lines += _ipus(found)
    lines += _modules(found)
    lines += [f"Bounded, no planner: {name} x {entry['count']}" for name, entry in found.bounds.items()]
    return "\n".join(
        printable(line) for line in [*lines, "Modelled, not measured: podrun help fidelity says how well."]
    )


def _ipus(found: Estimate) -> list[str]:
    lines = [f"{'IPU':>5}{'layers':>8}{'cycles':>14}{'fullest tile':>14}  largest contents"]
    for number, ipu in enumerate(found.ipus):
        ranked = sorted(ipu.bytes_by_content.items(), key=lambda item: (-item[1], item[0]))
        held = ", ".join(
            f"{name.replace('_', ' ')} {byte_size(octets)}" for name, octets in ranked[:3] if octets
        )
        lines.append(
            f"{number:>5}{ipu.layers:>8}{ipu.cycles:>14,}{byte_size(ipu.max_tile_bytes):>14}  {held}"
        )
        if len(found.ipus) > 1:
            lines.append(f"{'':13}{ipu.first_layer} ... {ipu.last_layer}")
    return lines


def _modules(found: Estimate) -> list[str]:
    """The modules that take most cycles; empty for a model with fewer than two modules."""
    if len(found.modules) < 2:
        return []
    total = sum(cycles for _, cycles, _ in found.modules) or 1
    ranked = sorted(found.modules, key=lambda item: -item[1])[:MODULES_SHOWN]
    return [f"{'cycles':>13}{'share':>8}{'weights':>12}  module (of {len(found.modules)})"] + [
        f"{cycles:>13,}{cycles / total:>8.1%}{byte_size(weights):>12}  {name or '(the model itself)'}"
        for name, cycles, weights in ranked
    ]


def scan_table(found: Sequence[Estimate], top: int) -> str:
    """The best layouts of a scan, and the best one in full. Of a layout with and without recomputation the better one
    is listed.
    """
    lines = [
        f"{'micro':>6}{'accum':>7}{'IPUs':>6}{'recompute':>11}{'batch':>9}{'samples/s':>13}{'fullest tile':>14}  "
        "fits  bottleneck"
    ]
    best: dict[ProgramLayout, Estimate] = {}
    for one in found:
        best.setdefault(replace(one.layout, recompute=False), one)
    for one in [*best.values()][:top]:
        layout = one.layout
        lines.append(
            f"{layout.micro_batch:>6}{layout.accumulation:>7}{layout.ipus_per_replica:>6}"
            f"{'yes' if layout.recompute else 'no':>11} {one.samples:>8,} {one.samples_per_second:>12,.0f}"
            f"{byte_size(one.max_tile_bytes):>14}  {'yes' if one.fits else 'no':<4}  {one.bottleneck}"
        )
    return "\n".join([*lines, "", f"Best of {len(found)}:", estimate_text(found[0])])
