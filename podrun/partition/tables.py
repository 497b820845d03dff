"""Tables as the V-IPU command line prints them.

One leading space, `` | `` between columns, a dashed rule under the header and after the last row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The table as text, without a final newline. Cells must not hold newlines."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    rule = "-" * (sum(widths) + 3 * len(widths) - 1)
    shown = [" " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in lines]
    shown = [line.rstrip() for line in shown]
    return "\n".join([shown[0], rule, *shown[1:], rule])


def fields(pairs: Iterable[tuple[str, str]]) -> str:
    """Name and value, one pair a line, values aligned."""
    known = list(pairs)
    width = max(len(name) for name, _ in known)
    return "\n".join(f" {name.ljust(width)} | {value}".rstrip() for name, value in known)
