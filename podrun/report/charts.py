"""Charts of a profile as SVG and HTML text: stacks, bars, BSP timeline, memory, pipeline.

Hovering shows the figures, and so does a tap where a chart has an ``output``; `page.js` zooms, searches and reads out.
Drawings hold no text, so that they can be stretched to any width.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from podrun.report.model import PHASES, MemoryUse, Profile, ReportStage
from podrun.report.stage_runs import shown_micro_batches, stage_runs
from podrun.report.text import byte_size

WIDTH = 860
PALETTE = {
    "blue": "#273dd9",
    "sky": "#56abff",
    "amber": "#e5a223",
    "rust": "#a72d12",
    "green": "#579366",
    "lilac": "#9d69b6",
    "plum": "#723b83",
    "grey": "#aeadac",
}
"""Colours that people tell apart, also with each kind of colour blindness, on white and `DARK_PAPER`; a test computes
it. Parts of one chart have colours of their own; the contents of a memory are more, and differ from their neighbours.
"""
DARK_PAPER = "#14171d"
OTHER = PALETTE["grey"]
COLOURS = {
    name: PALETTE[colour]
    for colour, names in {
        "blue": "compute always_live weights arguments constants",
        "sky": "exchange not_always_live activations",
        "amber": "rearrange collectives temporary stash",
        "rust": "sync all_reduce streams exchange_code",
        "green": "update vertex_code accumulators",
        "lilac": "copies vertex_state optimizer_state",
        "plum": "streaming control_code",
        "grey": "launch host",
    }.items()
    for name in names.split()
}
IDLE_COLOUR = "#ececec"
"""On light paper; `page.css` darkens it on dark paper."""
STRIPE = "#ffffffb0"
LIMIT_COLOUR = "#d0342c"
MICRO_BATCH_COLOURS = tuple(colour for name, colour in PALETTE.items() if name != "grey")
"""Grey is idle."""


def rect(x: float, y: float, width: float, height: float, fill: str, title: str, more: str = "") -> str:
    """A bar that shows ``title`` when the mouse is over it. ``more``: further attributes."""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.05):.2f}" height="{height:.2f}" fill="{fill}"{more}>'
        f"<title>{escape(title)}</title></rect>"
    )


def svg(height: float, content: Sequence[str], label: str) -> str:
    """A drawing as wide as the page, whose height stays the same however wide the page is."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" preserveAspectRatio="none" style="height:{height:.0f}px" role="img" '
        f'aria-label="{escape(label)}">' + "".join(content) + "</svg>"
    )


def striped(names: Iterable[str]) -> frozenset[str]:
    """The parts of a chart that share their colour with an earlier one: they are drawn with stripes."""
    seen, repeated = set[str](), set[str]()
    for name in names:
        colour = COLOURS.get(name, OTHER)
        (repeated if colour in seen else seen).add(name if colour in seen else colour)
    return frozenset(repeated)


def key(names: Sequence[str]) -> str:
    """A legend of the colours."""
    stripes = striped(names)
    spans = (
        f'<span><i{" class=striped" if n in stripes else ""} style="background-color:{COLOURS.get(n, OTHER)}"></i>'
        f"{escape(n.replace('_', ' '))}</span>"
        for n in names
    )
    return f'<p class="key">{"".join(spans)}</p>'


def stacked_bar(parts: Mapping[str, float], unit: str, meaning: Mapping[str, str]) -> str:
    """One bar cut into shares, and a table of them with what each means."""
    total = sum(parts.values()) or 1.0
    shapes, x = list[str](), 0.0
    stripes = striped(parts)
    digits = 0 if all(float(value).is_integer() for value in parts.values()) else 3
    for name, value in parts.items():
        width = WIDTH * value / total
        figure = byte_size(round(value)) if unit == "B" else f"{value:,.{digits}f} {unit}"
        tip = f"{name}: {figure} ({value / total:.1%})"
        shapes.append(rect(x, 0, width, 28, COLOURS.get(name, OTHER), tip))
        if name in stripes:
            shapes += [rect(x, y, width, 3, STRIPE, tip) for y in (4, 12, 20)]
        x += width
    rows = "".join(
        f"<tr><td>{escape(n.replace('_', ' '))}</td>"
        f"<td>{byte_size(round(v)) if unit == 'B' else f'{v:,.{digits}f} {unit}'}</td>"
        f'<td>{v / total:.1%}</td><td class="words">{escape(meaning.get(n, ""))}</td></tr>'
        for n, v in parts.items()
    )
    drawing = svg(28, shapes, "shares")
    return f'{drawing}{key(list(parts))}<div class="table"><table>{rows}</table></div>'


def bars(values: Mapping[str, int], total: int) -> str:
    """A bar for the cycles of each name, in the order of ``values``; ``total``: what the shares are of."""
    most = max(values.values(), default=1) or 1
    return "".join(
        f'<div class="bar" title="{escape(f"{name}: {value:,} cycles")}"><b>{escape(name)}</b>'
        f'<i style="width:{100 * value / most:.2f}%"></i><span>{value:,} ({value / (total or 1):.1%})</span></div>'
        for name, value in values.items()
    )


def timeline_chart(stage: ReportStage) -> str:
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
    drawing = svg(66, shapes, "BSP timeline")
    return f'<div class="chart timeline" data-cycles="{total}">{drawing}<output></output></div>{key(PHASES)}'


def memory_by_tile(memory: MemoryUse, layers: str = "") -> str:
    """Bytes on each tile by category, beside an axis in bytes. From a quarter of a tile's memory on the axis reaches
    that limit, which a dashed line shows; below, it ends sooner and says at which share. ``layers``: the id of the
    element that opens on a click.
    """
    height = 160.0
    tiles = memory.by_tile[-1].end_tile if memory.by_tile else 1
    fullest = max((interval.total_bytes for interval in memory.by_tile), default=0)
    near = fullest * 4 >= memory.tile_capacity_bytes
    most = max(memory.tile_capacity_bytes, fullest) * 1.02 if near else max(1.0, fullest * 1.25)
    scale = _axis(height, most, memory.tile_capacity_bytes)
    categories = list(dict.fromkeys(name for i in memory.by_tile for name in i.bytes_by_category))
    shapes = []
    for interval in memory.by_tile:
        x = WIDTH * interval.first_tile / tiles
        width = WIDTH * (interval.end_tile - interval.first_tile) / tiles
        y = height
        for name in categories:
            held = interval.bytes_by_category.get(name, 0)
            y -= height * held / most
            tip = f"tiles {interval.first_tile} to {interval.end_tile - 1}: {name} {byte_size(held)}"
            shapes.append(rect(x, y, width, height * held / most, COLOURS.get(name, OTHER), tip))
    if near:
        line = height - height * memory.tile_capacity_bytes / most
        shapes.append(
            f'<line x1="0" x2="{WIDTH}" y1="{line:.1f}" y2="{line:.1f}" stroke="{LIMIT_COLOUR}" '
            f'stroke-width="2" stroke-dasharray="4"/>'
        )
    data = json.dumps([[i.first_tile, i.end_tile, i.bytes_by_category] for i in memory.by_tile])
    note = f"At most {byte_size(fullest)} here; a tile has {byte_size(memory.tile_capacity_bytes)}."
    drawing = svg(height, shapes, "memory by tile")
    return (
        f'<div class="chart tiles" data-capacity="{memory.tile_capacity_bytes}" data-layers="{layers}" '
        f'data-tiles="{escape(data)}">{scale}<div class="plot">{drawing}</div>'
        f"<output>{note}</output></div>{key(categories)}"
    )


def meter(share: float) -> str:
    """A bar whose whole width is a limit, filled to ``share`` of it; in another colour if that is above 1."""
    over = " over" if share > 1 else ""
    return f'<div class="meter{over}"><i style="width:{100 * min(1.0, share):.2f}%"></i></div>'


def _axis(height: float, most: float, capacity: int) -> str:
    """The marks of a chart of a tile's memory as text beside it, and a sentence if it ends below the limit."""
    top = min(float(capacity), most)
    marks = [(top, byte_size(round(top))), (top / 2, byte_size(round(top / 2))), (0.0, "0")]
    texts = "".join(
        f'<span style="top:{height - height * at / most:.0f}px">{escape(words)}</span>' for at, words in marks
    )
    note = ""
    if most < capacity:
        note = f'<p class="note">Enlarged: the top is {most / capacity:.1%} of a tile\'s {byte_size(capacity)}.</p>'
    return f'{note}<div class="axis" style="height:{height:.0f}px">{texts}</div>'


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
        f"<title>peak {byte_size(most)} on the IPU</title></polygon>"
    )
    drawing = svg(102, [area], "not-always-live bytes over the schedule")
    return f"{drawing}<p>Peak {byte_size(most)}.</p>"


def pipeline(profile: Profile) -> str:
    """Which micro-batch each IPU works on, over the modelled time of a batch (its first micro-batches)."""
    shown = shown_micro_batches(profile)
    runs = stage_runs(profile, shown)
    rows = {ipu: row for row, ipu in enumerate(sorted({run.stage.ipu for run in runs}))}
    length = max(run.end_cycles for run in runs) or 1
    scale = WIDTH / length
    # The visible part of these bars is the bubble.
    shapes = [rect(0, row * 26, WIDTH, 22, IDLE_COLOUR, f"IPU {ipu} idle") for ipu, row in rows.items()]
    last = max(stage.pipeline_cycle for stage in profile.stages)
    for run in runs:
        stage = run.stage
        tip = (
            f"{stage.name} of micro-batch {run.micro_batch}: {stage.cycles:,} cycles, "
            f"sends {byte_size(stage.sent_bytes)}"
        )
        colour = MICRO_BATCH_COLOURS[run.micro_batch % len(MICRO_BATCH_COLOURS)]
        # The second half of a training pipeline goes backward: drawn lower, so that the two differ.
        late = stage.pipeline_cycle * 2 > last
        y = rows[stage.ipu] * 26 + (6 if late else 0)
        shapes.append(rect(run.start_cycles * scale, y, stage.cycles * scale * 0.98, 16, colour, tip))
    names = "".join(f"<span>IPU {ipu}</span>" for ipu in rows)
    drawing = svg(26 * len(rows), shapes, "pipeline")
    return f'<div class="rows"><div class="names">{names}</div>{drawing}</div>'
