"""Estimates as text: one in full, and the best layouts of a scan as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from podrun.estimate.layout import ProgramLayout
from podrun.estimate.model import Estimate
from podrun.report.text import TRUST, amount_of, byte_size, folded_line, printable, unit_of_time

MODULES_SHOWN = 8


def estimate_text(result: Estimate) -> str:
    """One estimate as text."""
    layout, total = result.layout, sum(result.seconds.values())
    unit, of = unit_of_time(total)
    lines = [
        f"{'Training' if result.training else 'Inference'}: {result.samples_per_second:,.0f} samples/s on "
        f"{amount_of(result.replicas, 'replica')} of {amount_of(layout.ipus_per_replica, 'IPU')}",
        f"Micro-batch {layout.micro_batch}, accumulation {layout.accumulation}, batch of {result.samples:,} samples"
        + (", recomputing" if layout.recompute else ""),
        f"Fullest tile {byte_size(result.max_tile_bytes)} of {byte_size(result.tile_bytes)}: "
        + ("fits" if result.fits else "DOES NOT FIT"),
        f"One batch {total * of:,.3f} {unit}; bottleneck: {result.bottleneck}",
    ]
    lines += [f"  {n:<15}{s * of:>12,.3f} {unit} {s / total:>6.1%}" for n, s in result.seconds.items() if s]
    if waits := result.waiting_seconds:
        lines += [
            f"  {waits * of:,.3f} {unit} of host: the wait around a run of one batch",
            f"  Batches of one run follow one another at {result.samples_per_second_in_a_run:,.0f} samples/s",
        ]
    lines += _ipus(result)
    lines += _modules(result)
    lines += [f"Bounded, no planner: {name} x {entry['count']}" for name, entry in result.bounds.items()]
    return "\n".join(folded_line(printable(line)) for line in [*lines, TRUST])


def _ipus(result: Estimate) -> list[str]:
    lines = [f"{'IPU':>5}{'layers':>8}{'cycles':>14}{'fullest tile':>14}  largest contents"]
    for number, ipu in enumerate(result.ipus):
        ranked = sorted(ipu.bytes_by_content.items(), key=lambda item: (-item[1], item[0]))
        held = ", ".join(
            f"{name.replace('_', ' ')} {byte_size(octets)}" for name, octets in ranked[:3] if octets
        )
        lines.append(
            f"{number:>5}{ipu.layers:>8}{ipu.cycles:>14,}{byte_size(ipu.max_tile_bytes):>14}  {held}"
        )
        if len(result.ipus) > 1:
            lines.append(f"{'':13}{ipu.first_layer} ... {ipu.last_layer}")
    return lines


def _modules(result: Estimate) -> list[str]:
    """The modules that take most cycles; empty for a model with fewer than two modules."""
    if len(result.modules) < 2:
        return []
    total = sum(cycles for _, cycles, _ in result.modules) or 1
    ranked = sorted(result.modules, key=lambda item: -item[1])[:MODULES_SHOWN]
    return [f"{'cycles':>13}{'share':>8}{'weights':>12}  module (of {len(result.modules)})"] + [
        f"{cycles:>13,}{cycles / total:>8.1%}{byte_size(weights):>12}  {name or '(the model itself)'}"
        for name, cycles, weights in ranked
    ]


def scan_table(estimates: Sequence[Estimate], top: int) -> str:
    """The best layouts of a scan, and the best one in full. Of a layout with and without recomputation the better one
    is listed.
    """
    lines = [
        f"{'micro':>6}{'accum':>6}{'IPUs':>5}{'recompute':>10}{'batch':>9}{'samples/s':>12}{'fullest tile':>13}  "
        "fits  bottleneck"
    ]
    best: dict[ProgramLayout, Estimate] = {}
    for one in estimates:
        best.setdefault(replace(one.layout, recompute=False), one)
    for one in [*best.values()][:top]:
        layout = one.layout
        lines.append(
            f"{layout.micro_batch:>6}{layout.accumulation:>6}{layout.ipus_per_replica:>5}"
            f"{'yes' if layout.recompute else 'no':>10} {one.samples:>8,} {one.samples_per_second:>11,.0f}"
            f"{byte_size(one.max_tile_bytes):>13}  {'yes' if one.fits else 'no':<4}  {one.bottleneck}"
        )
    return "\n".join([*lines, "", f"Best of {len(estimates)}:", estimate_text(estimates[0])])
