"""The report of a campaign as one HTML page with pictures, drawn here as SVG; nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from podrun.report.curves import picture_page
from podrun.simulate.chaos_report import shown_report
from podrun.simulate.virtual_job import BINS

WIDTH, ROW = 720, 26
COLOURS = (
    "#999",
    "#c9b458",
    "#6a9fb5",
    "#3a7d44",
    "#8064a2",
    "#c0504d",
    "#e0a030",
    "#7f6000",
    "#4f81bd",
    "#b0c4b1",
)


def chaos_page(report: Mapping[str, Any]) -> str:
    """The report as a page of HTML."""
    inputs = report["inputs"]
    title = f"{inputs['ipus']:,} IPUs of {inputs['pod']} for {inputs['days']:g} days"
    parts = [f"<p>{escape(_origin(inputs))}</p>"]
    parts += ["<h2>Where time went</h2>", _bars(report), "<h2>ETTR of each replication</h2>", _dots(report)]
    for rows in report["sweeps"]:
        parts += [f"<h2>{escape(rows[0]['knob'])}</h2>", _line(rows)]
    if report["tornado"]:
        parts += ["<h2>Which knob matters most</h2>", _tornado(report["tornado"])]
    parts += ["<h2>Figures</h2>", f"<pre>{escape(shown_report(report))}</pre>"]
    return picture_page(title, parts)


def _origin(inputs: Mapping[str, Any]) -> str:
    notes = " ".join(inputs["notes"])
    carried = f" {inputs['carried_over']}." if inputs["carried_over"] else ""
    return f"Rates {inputs['rates']}.{carried} {notes} Seed {inputs['seed']}, {inputs['replications']} replications."


def _svg(height: float, body: str) -> str:
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    return f'<svg {size} role="img" font-size="13" font-family="sans-serif">{body}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{ROW - 8}" fill="{colour}"/>'


def _bars(report: Mapping[str, Any]) -> str:
    body = ""
    for row, (name, colour) in enumerate(zip(BINS, COLOURS, strict=True)):
        share, y = report[f"{name}_share"], row * ROW
        body += _text(0, y + 14, name) + _rect(110, y, share * 500, colour)
        body += _text(116 + share * 500, y + 14, f"{share:.2%}")
    return _svg(len(BINS) * ROW, body)


def _dots(report: Mapping[str, Any]) -> str:
    values = [entry["ettr"] for entry in report["replications"]]
    low, high = _range(values)
    body = f'<line x1="60" y1="40" x2="660" y2="40" stroke="#888"/>{_text(60, 62, f"{low:.4f}", "middle")}'
    body += _text(660, 62, f"{high:.4f}", "middle")
    for value in values:
        x = 60 + 600 * (value - low) / (high - low)
        body += f'<circle cx="{x:.1f}" cy="40" r="5" fill="#3a7d44" fill-opacity="0.5"/>'
    return _svg(72, body)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    more = (high - low) * 0.05 or 0.005
    return low - more, high + more


def _line(rows: Sequence[Mapping[str, Any]]) -> str:
    values = [row["value"] for row in rows]
    ends = [
        end
        for row in rows
        for end in (row["intervals"]["ettr"]["low"], row["intervals"]["ettr"]["high"], row["ettr"])
        if end is not None
    ]
    (left, right), (low, high) = _range(values), _range(ends)
    points, body = [], ""
    for row in rows:
        x = 70 + 580 * (row["value"] - left) / (right - left)
        y = 180 - 160 * (row["ettr"] - low) / (high - low)
        points.append(f"{x:.1f},{y:.1f}")
        interval = row["intervals"]["ettr"]
        if interval["low"] is not None:
            top, bottom = (180 - 160 * (interval[end] - low) / (high - low) for end in ("high", "low"))
            body += f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}" stroke="#888"/>'
        body += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#3a7d44"/>'
        body += _text(x, 204, f"{row['value']:g}", "middle") + _text(x + 8, y - 6, f"{row['ettr']:.4f}")
    body += f'<polyline points="{" ".join(points)}" fill="none" stroke="#3a7d44"/>'
    return _svg(214, body)


def _tornado(rows: Sequence[Mapping[str, Any]]) -> str:
    ends = [row[name] for row in rows for name in ("ettr_low", "ettr_high")]
    low, high = _range(ends)
    body = ""
    for place, row in enumerate(rows):
        y = place * ROW
        x, other = sorted(200 + 400 * (row[name] - low) / (high - low) for name in ("ettr_low", "ettr_high"))
        better = row["ettr_high"] >= row["ettr_low"]
        body += _text(0, y + 14, row["knob"]) + _rect(x, y, other - x, "#3a7d44" if better else "#c0504d")
        body += _text(other + 6, y + 14, f"{row['low']:g} .. {row['high']:g}")
    return _svg(len(rows) * ROW, body)
