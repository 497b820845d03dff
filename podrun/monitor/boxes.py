"""Tables drawn with ``+ - |``, cells centred, as gc-monitor draws them."""

from __future__ import annotations

from collections.abc import Sequence


def fit(text: str, width: int) -> str:
    """Text centred in a cell; text that does not fit keeps its end after three dots."""
    if len(text) > width:
        return "..." + text[len(text) - (width - 3) :] if width > 3 else text[-width:]
    left = (width - len(text)) // 2
    return " " * left + text + " " * (width - len(text) - left)


def rule(widths: Sequence[int]) -> str:
    """A horizontal line with a plus where columns meet."""
    return "+" + "+".join("-" * width for width in widths) + "+"


def row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """A row of centred cells."""
    return "|" + "|".join(fit(cell, width) for cell, width in zip(cells, widths, strict=True)) + "|"


def span(widths: Sequence[int]) -> int:
    """Width of one cell over several columns: their widths and the bars between them."""
    return sum(widths) + len(widths) - 1
