"""Charts of a profile as SVG and HTML text: stacks, bars, BSP timeline, memory, pipeline.

Hovering shows the figures, and so does a tap where a chart has an ``output``; `page.js` zooms, searches and reads out.
Drawings hold no text, so that they can be stretched to any width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape

from podrun.report.chrome_trace import runs, shown_micro_batches
from podrun.report.model import PHASES, MemoryUse, Profile, ReportStage
from podrun.report.text import size

WIDTH = 860
OTHER = "#59636e"
COLOURS = {
    "compute": "#3b6fb6",
    "exchange": "#d9822b",
    "rearrange": "#e3b23c",
    "launch": "#8a8f98",
    "sync": "#b5443c",
    "copies": "#7a5ea8",
    "update": "#4b9b63",
    "all_reduce": "#2f8f8a",
    "always_live": "#3b6fb6",
    "not_always_live": "#6aa0dc",
    "temporary": "#d9822b",
    "weights": "#3b6fb6",
    "optimizer_state": "#7a5ea8",
    "accumulators": "#2f8f8a",
    "streams": "#b5443c",
    "stash": "#e3b23c",
    "constants": "#59636e",
    "arguments": "#3b6fb6",
    "activations": "#6aa0dc",
    "vertex_state": "#4b9b63",
    "vertex_code": "#2f8f8a",
    "exchange_code": "#7a5ea8",
    "control_code": "#8a8f98",
}
IDLE_COLOUR = "#ececec"
MICRO_BATCH_COLOURS = ("#3b6fb6", "#d9822b", "#4b9b63", "#7a5ea8", "#2f8f8a", "#e3b23c", "#b5443c", "#6aa0dc")


def rect(x: float, y: float, width: float, height: float, fill: str, title: str, more: str = "") -> str:
    """A bar that shows ``title`` when the mouse is over it. ``more``: further attributes."""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.05):.2f}" height="{height:.2f}" fill="{fill}"{more}>'
        f"<title>{escape(title)}</title></rect>"
    )


def svg(height: float, content: Sequence[str], label: str, *, stretch: bool = False) -> str:
    """A drawing as wide as the page. ``stretch``: its height stays the same however wide the page is."""
    how = f' preserveAspectRatio="none" style="height:{height:.0f}px"' if stretch else ""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}"{how} role="img" aria-label="{escape(label)}">'
        + "".join(content)
        + "</svg>"
    )


def key(names: Sequence[str]) -> str:
    """A legend of the colours."""
    spans = (
        f'<span><i style="background:{COLOURS.get(n, OTHER)}"></i>{escape(n.replace("_", " "))}</span>'
        for n in names
    )
    return f'<p class="key">{"".join(spans)}</p>'


def stack(parts: Mapping[str, float], unit: str, meaning: Mapping[str, str]) -> str:
    """One bar cut into shares, and a table of them with what each means."""
    total = sum(parts.values()) or 1.0
    shapes, x = [], 0.0
    digits = 0 if all(float(value).is_integer() for value in parts.values()) else 3
    for name, value in parts.items():
        width = WIDTH * value / total
        figure = size(round(value)) if unit == "B" else f"{value:,.{digits}f} {unit}"
        tip = f"{name}: {figure} ({value / total:.1%})"
        shapes.append(rect(x, 0, width, 28, COLOURS.get(name, OTHER), tip))
        x += width
    rows = "".join(
        f"<tr><td>{escape(n.replace('_', ' '))}</td>"
        f"<td>{size(round(v)) if unit == 'B' else f'{v:,.{digits}f} {unit}'}</td>"
        f'<td>{v / total:.1%}</td><td class="words">{escape(meaning.get(n, ""))}</td></tr>'
        for n, v in parts.items()
    )
    drawing = svg(28, shapes, "shares", stretch=True)
    return f'{drawing}{key(list(parts))}<div class="table"><table>{rows}</table></div>'


def bars(values: Mapping[str, int], total: int, unit: str = "cycles") -> str:
    """A bar for each name, longest first as given."""
    most = max(values.values(), default=1) or 1
    return "".join(
        f'<div class="bar" title="{escape(f"{name}: {value:,} {unit}")}"><b>{escape(name)}</b>'
        f'<i style="width:{100 * value / most:.2f}%"></i><span>{value:,} ({value / (total or 1):.1%})</span></div>'
        for name, value in values.items()
    )


def timeline(stage: ReportStage) -> str:
    """The BSP steps of a stage along its cycles, a lane for each phase."""
    total = sum(step.total_cycles for step in stage.timeline) or 1
    shapes, x = [], 0.0
    for step in stage.timeline:
        for lane, phase in enumerate(PHASES):
            cycles = step.cycles(phase)
            width = WIDTH * cycles / total
            if cycles:
                tip = f"{step.operator} {step.scope}: {cycles:,} cycles of {phase}"
                more = f' data-cycles="{cycles}"'
                shapes.append(rect(x, 22 * lane, width, 20, COLOURS[phase], tip, more))
            x += width
    drawing = svg(66, shapes, "BSP timeline", stretch=True)
    return f'<div class="chart timeline" data-cycles="{total}">{drawing}<output></output></div>{key(PHASES)}'


def memory_by_tile(memory: MemoryUse, layers: str = "") -> str:
    """Bytes on each tile by category. A dashed line shows the memory of a tile, if it is in view. ``layers``: the id of
    the element that opens on a click.
    """
    height = 160.0
    tiles = memory.by_tile[-1].end_tile if memory.by_tile else 1
    fullest = max((interval.total_bytes for interval in memory.by_tile), default=0)
    near = fullest * 4 >= memory.tile_capacity_bytes
    most = max(memory.tile_capacity_bytes, fullest) * 1.02 if near else max(1.0, fullest * 1.25)
    categories = list(dict.fromkeys(name for i in memory.by_tile for name in i.bytes_by_category))
    shapes = []
    for interval in memory.by_tile:
        x = WIDTH * interval.first_tile / tiles
        width = WIDTH * (interval.end_tile - interval.first_tile) / tiles
        y = height
        for name in categories:
            held = interval.bytes_by_category.get(name, 0)
            y -= height * held / most
            tip = f"tiles {interval.first_tile} to {interval.end_tile - 1}: {name} {size(held)}"
            shapes.append(rect(x, y, width, height * held / most, COLOURS.get(name, OTHER), tip))
    if near:
        line = height - height * memory.tile_capacity_bytes / most
        shapes.append(
            f'<line x1="0" x2="{WIDTH}" y1="{line:.1f}" y2="{line:.1f}" stroke="#b5443c" '
            f'stroke-width="2" stroke-dasharray="4"/>'
        )
    data = json.dumps([[i.first_tile, i.end_tile, i.bytes_by_category] for i in memory.by_tile])
    note = f"At most {size(fullest)} here; a tile has {size(memory.tile_capacity_bytes)}."
    return (
        f'<div class="chart tiles" data-capacity="{memory.tile_capacity_bytes}" data-layers="{layers}" '
        f'data-tiles="{escape(data)}">{svg(height + 2, shapes, "memory by tile", stretch=True)}'
        f"<output>{note}</output></div>{key(categories)}"
    )


def memory_over_time(memory: MemoryUse) -> str:
    """Not-always-live bytes along the schedule."""
    curve = memory.over_time_bytes
    most = max(curve, default=0) or 1
    step = WIDTH / max(1, len(curve))
    corners = []
    for index, held in enumerate(curve):
        y = 100 - 100 * held / most
        corners += [f"{index * step:.1f},{y:.1f}", f"{(index + 1) * step:.1f},{y:.1f}"]
    area = (
        f'<polygon points="0,100 {" ".join(corners)} {WIDTH},100" fill="{COLOURS["not_always_live"]}">'
        f"<title>peak {size(most)} on the IPU</title></polygon>"
    )
    drawing = svg(102, [area], "not-always-live bytes over the schedule", stretch=True)
    return f"{drawing}<p>Peak {size(most)}.</p>"


def pipeline(profile: Profile) -> str:
    """Which micro-batch each IPU works on, over the modelled time of a batch (its first micro-batches)."""
    shown = shown_micro_batches(profile)
    found = runs(profile, shown)
    rows = {ipu: row for row, ipu in enumerate(sorted({run.stage.ipu for run in found}))}
    length = max(run.end_cycles for run in found) or 1
    scale = WIDTH / length
    # The visible part of these bars is the bubble.
    shapes = [rect(0, row * 26, WIDTH, 22, IDLE_COLOUR, f"IPU {ipu} idle") for ipu, row in rows.items()]
    last = max(stage.pipeline_cycle for stage in profile.stages)
    for run in found:
        stage = run.stage
        tip = (
            f"{stage.name} of micro-batch {run.micro_batch}: {stage.cycles:,} cycles, "
            f"sends {size(stage.sent_bytes)}"
        )
        colour = MICRO_BATCH_COLOURS[run.micro_batch % len(MICRO_BATCH_COLOURS)]
        # The second half of a training pipeline goes backward: drawn lower, so that the two differ.
        late = stage.pipeline_cycle * 2 > last
        y = rows[stage.ipu] * 26 + (6 if late else 0)
        shapes.append(rect(run.start_cycles * scale, y, stage.cycles * scale * 0.98, 16, colour, tip))
    names = "".join(f"<span>IPU {ipu}</span>" for ipu in rows)
    drawing = svg(26 * len(rows), shapes, "pipeline", stretch=True)
    return f'<div class="rows"><div class="names">{names}</div>{drawing}</div>'
