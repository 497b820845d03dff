"""A profile as one self-contained HTML page: no script, no font and no picture from anywhere else.

Charts are SVG made here: where time goes, operators, layers, the BSP timeline, memory by tile, by category and by
time, the pipeline. Hovering shows figures (SVG titles); the page works without JavaScript.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from podrun.report.read import Profile, Stage
from podrun.report.text import TRUST, compare

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
    "vertex_state": "#4b9b63",
    "vertex_code": "#2f8f8a",
    "exchange_code": "#7a5ea8",
    "control_code": "#8a8f98",
}
WIDTH = 860
STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em auto;max-width:900px;color:#1d2330;background:#fff}"
    "h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}table{border-collapse:collapse}"
    "td,th{padding:.15em .8em .15em 0;text-align:right}td:first-child,th:first-child{text-align:left}"
    "svg{display:block;max-width:100%}.key span{display:inline-block;margin-right:1em}"
    ".key i{display:inline-block;width:.8em;height:.8em;margin-right:.3em}.warn{color:#b5443c;font-weight:600}"
    "pre{overflow:auto;background:#f4f6f9;padding:1em}"
)


def page(profile: Profile, *, title: str = "podrun profile", other: Profile | None = None) -> str:
    """The page; with ``other``, what changed from ``other`` to ``profile`` stands at its end."""
    total = sum(profile.causes().values())
    memory = profile.fullest().report["memory"]
    verdict = "fits" if memory["fits"] else '<span class="warn">does not fit</span>'
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1><p>{escape(TRUST)}</p>",
        f"<p>Target <b>{escape(profile.target)}</b>, {len(profile.ipus)} IPU(s) per replica. One batch takes "
        f"<b>{profile.seconds * 1e3:,.3f} ms</b> ({profile.cycles:,} cycles); fullest tile "
        f"{memory['max_tile_bytes']:,} of {memory['tile_bytes']:,} B: {verdict}.</p>",
        "<h2 id=batch>Where a batch's time goes</h2>",
        _stack({n: s * 1e3 for n, s in profile.seconds_by_cause.items()}, "ms"),
        "<h2 id=causes>Where a micro-batch's cycles go</h2>",
        _stack(profile.causes(), "cycles"),
        "<h2 id=operators>Cycles by operator</h2>",
        _bars(profile.operators(), total),
        "<h2 id=layers>Cycles by layer</h2>",
        _bars(dict(list(profile.scopes().items())[:25]), total),
    ]
    if len(profile.stages) > 1:
        parts += ["<h2 id=pipeline>Pipeline</h2>", _pipeline(profile)]
    for stage in profile.stages:
        where = f"{stage.name} on IPU {stage.ipu}"
        parts += [f"<h2>BSP timeline: {where}</h2>", _timeline(stage)]
        parts += [f"<h2>Memory by tile: {where}</h2>", _by_tile(stage)]
        parts += [f"<h2>Memory by time: {where}</h2>", _by_time(stage)]
    if other is not None:
        parts += ["<h2 id=compare>Compared</h2>", f"<pre>{escape(compare(other, profile))}</pre>"]
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _rect(x: float, y: float, width: float, height: float, name: str, title: str) -> str:
    colour = COLOURS.get(name, "#59636e")
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.05):.2f}" height="{height:.2f}" fill="{colour}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _svg(height: float, content: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
        + "".join(content)
        + "</svg>"
    )


def _key(names: Sequence[str]) -> str:
    spans = (f'<span><i style="background:{COLOURS.get(n, "#59636e")}"></i>{escape(n)}</span>' for n in names)
    return f'<p class="key">{"".join(spans)}</p>'


def _stack(parts: Mapping[str, float], unit: str) -> str:
    total = sum(parts.values()) or 1.0
    shapes, x = [], 0.0
    for name, value in parts.items():
        width = WIDTH * value / total
        shapes.append(_rect(x, 0, width, 28, name, f"{name}: {value:,.3f} {unit} ({value / total:.1%})"))
        x += width
    rows = "".join(
        f"<tr><td>{escape(n)}</td><td>{v:,.3f} {unit}</td><td>{v / total:.1%}</td></tr>"
        for n, v in parts.items()
    )
    return _svg(28, shapes, "shares") + _key(list(parts)) + f"<table>{rows}</table>"


def _bars(values: Mapping[str, int], total: int) -> str:
    most = max(values.values(), default=1) or 1
    shapes = []
    for index, (name, value) in enumerate(values.items()):
        y = index * 20
        shapes.append(
            _rect(300, y + 2, (WIDTH - 420) * value / most, 15, "compute", f"{name}: {value:,} cycles")
        )
        label = escape(name if len(name) <= 44 else "..." + name[-41:])
        shapes.append(f'<text x="0" y="{y + 14}" font-size="12">{label}</text>')
        share = f"{value:,} ({value / (total or 1):.1%})"
        shapes.append(f'<text x="{WIDTH}" y="{y + 14}" font-size="12" text-anchor="end">{share}</text>')
    return _svg(20 * max(1, len(values)), shapes, "cycles")


def _timeline(stage: Stage) -> str:
    entries = stage.report["timeline"]
    total = sum(e["sync"] + e["exchange"] + e["compute"] for e in entries) or 1
    shapes, x = [], 0.0
    lanes = {"sync": 0, "exchange": 22, "compute": 44}
    for entry in entries:
        for phase, y in lanes.items():
            width = WIDTH * entry[phase] / total
            if entry[phase]:
                what = f"{entry['operator']} {entry['scope']}: {entry[phase]:,} cycles of {phase}"
                shapes.append(_rect(x, y, width, 20, phase, what))
            x += width
    return _svg(66, shapes, "BSP timeline") + _key(list(lanes))


def _by_tile(stage: Stage) -> str:
    memory = stage.report["memory"]
    intervals, room = memory["by_tile"], memory["tile_bytes"]
    tiles = intervals[-1]["last"]
    most = max(room, *(sum(i["bytes"].values()) for i in intervals))
    categories = list(dict.fromkeys(name for i in intervals for name in i["bytes"]))
    shapes = []
    for interval in intervals:
        x = WIDTH * interval["first"] / tiles
        width = WIDTH * (interval["last"] - interval["first"]) / tiles
        y = 160.0
        for name in categories:
            size = interval["bytes"].get(name, 0)
            height = 160.0 * size / most
            y -= height
            tip = f"tiles {interval['first']} to {interval['last'] - 1}: {name} {size:,} B"
            shapes.append(_rect(x, y, width, height, name, tip))
    line = 160.0 - 160.0 * room / most
    shapes.append(
        f'<line x1="0" x2="{WIDTH}" y1="{line:.1f}" y2="{line:.1f}" stroke="#b5443c" stroke-dasharray="4"/>'
    )
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{size:,} B on the IPU</td></tr>"
        for name, size in (
            ("always live", memory["always_live_bytes"]),
            ("peak of the rest", memory["not_always_live_peak_bytes"]),
            *memory["code"].items(),
        )
    )
    return _svg(162, shapes, "memory by tile") + _key(categories) + f"<table>{rows}</table>"


def _by_time(stage: Stage) -> str:
    curve = stage.report["memory"]["by_time"]
    most = max(curve, default=0) or 1
    step = WIDTH / max(1, len(curve))
    points = " ".join(f"{i * step:.1f},{100 - 100 * v / most:.1f}" for i, v in enumerate(curve))
    area = f'<polygon points="0,100 {points} {WIDTH},100" fill="#6aa0dc"><title>peak {most:,} B</title></polygon>'
    return _svg(102, [area], "not-always-live bytes by time")


def _pipeline(profile: Profile) -> str:
    ipus = {ipu: row for row, ipu in enumerate(profile.ipus)}
    slowest = max(stage.cycles for stage in profile.stages) or 1
    length = max(stage.cycle for stage in profile.stages) + 1
    cell = (WIDTH - 60) / length
    shapes = [f'<text x="0" y="{row * 26 + 16}" font-size="12">IPU {ipu}</text>' for ipu, row in ipus.items()]
    for stage in profile.stages:
        tip = f"{stage.name}: {stage.cycles:,} cycles, sends {stage.sent_bytes:,} B"
        width = cell * 0.95 * stage.cycles / slowest
        shapes.append(_rect(60 + stage.cycle * cell, ipus[stage.ipu] * 26, width, 20, "compute", tip))
    return _svg(26 * len(ipus), shapes, "pipeline")
