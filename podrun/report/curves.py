"""A chart of lines over two axes, and the frame of a page of pictures that loads nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 14, 44
PALETTE = ("#3a7d44", "#c0504d", "#4f81bd", "#e0a030", "#8064a2")
STYLE = """body{font:15px sans-serif;max-width:52em;margin:2em auto;padding:0 1em;color:#222;background:#fff}
svg{max-width:100%;height:auto}
svg text{fill:#222}.axis{stroke:#888}.grid{stroke:#ddd}.limit{stroke:#c0504d;stroke-dasharray:6 4}
pre{overflow:auto}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}svg text{fill:#ddd}.grid{stroke:#333}}"""

Points = Sequence[tuple[float, float]]


def picture_page(title: str, parts: Sequence[str]) -> str:
    """A page of HTML with a title and parts of HTML under it, light or dark as the reader's system is."""
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style>"
    )
    body = "\n".join((f"<h1>{escape(title)}</h1>", *parts))
    return f"<!doctype html>\n<html lang=en><head>{head}</head><body>\n{body}\n</body></html>\n"


def line_chart(
    lines: Mapping[str, Points], x_title: str, y_title: str, limits: Mapping[str, float] | None = None
) -> str:
    """Lines by name over linear axes that begin at 0. ``limits``: heights of dashed lines across, by name. Points
    whose height is above three times the highest limit are cut off at the edge, so that limits stay visible."""
    limits = limits or {}
    every = [point for points in lines.values() for point in points]
    if not every:
        return ""
    highest = max(y for _, y in every)
    top = rounded_up(min(highest, 3 * max(limits.values())) if limits else highest)
    right = rounded_up(max(x for x, _ in every))
    content = [*_axes(right, top, x_title, y_title)]
    for name, height in limits.items():
        y = _y(height, top)
        content.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        content.append(_label(WIDTH - RIGHT, y - 5, name, "end"))
    for number, (name, points) in enumerate(lines.items()):
        content += _line(points, right, top, PALETTE[number % len(PALETTE)])
        content.append(
            f'<circle cx="{LEFT + 14}" cy="{TOP + 10 + 18 * number}" r="5" fill="{PALETTE[number % len(PALETTE)]}"/>'
        )
        content.append(_label(LEFT + 26, TOP + 15 + 18 * number, name))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" font-size="13" font-family="sans-serif"'
        f' aria-label="{escape(f"{y_title} over {x_title}")}">{"".join(content)}</svg>'
    )


def rounded_up(value: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten: the end of an axis."""
    if value <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1.0, 2.0, 2.5, 5.0, 10.0) if step * power >= value * (1 - 1e-12))


def _x(value: float, right: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / right


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(value, top) / top


def _label(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _axes(right: float, top: float, x_title: str, y_title: str) -> list[str]:
    content = []
    for part in range(5):
        y, x = _y(top * part / 4, top), _x(right * part / 4, right)
        kind = "grid" if part else "axis"
        content.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        content.append(_label(LEFT - 6, y + 4, f"{top * part / 4:,.4g}", "end"))
        content.append(_label(x, HEIGHT - BOTTOM + 17, f"{right * part / 4:,.6g}", "middle"))
    content.append(_label(WIDTH - RIGHT, HEIGHT - 6, x_title, "end"))
    content.append(_label(4, HEIGHT - 6, y_title))
    return content


def _line(points: Points, right: float, top: float, colour: str) -> list[str]:
    places = [(_x(x, right), _y(y, top)) for x, y in points]
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    content = [f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for (x, y), (value, height) in zip(places, points, strict=True):
        title = escape(f"{value:,.6g}: {height:,.4g}")
        content.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{title}</title></circle>'
        )
    return content
