"""Strict mode: equations that no planner knows are refused by name, not costed by the stated bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from podrun.errors import UnimplementedError

SCOPES = 8
"""Places that a report names for each primitive."""


def check_planned(bounds: Iterable[Mapping[str, Mapping[str, Any]]]) -> None:
    """Raise if any of several reports' ``bounds`` (by primitive: ``count``, ``cycles``, ``scopes``) is not
    empty.

    Raises:
        UnimplementedError: it lists all such primitives, how often they occur and where.
    """
    counts: dict[str, int] = {}
    places: dict[str, dict[str, None]] = {}
    for report in bounds:
        for name, entry in report.items():
            counts[name] = counts.get(name, 0) + int(entry["count"])
            places.setdefault(name, {}).update(dict.fromkeys(entry.get("scopes", ())))
    if not counts:
        return
    listed = "; ".join(
        f"{name} x {count} ({', '.join(list(places[name])[:SCOPES]) or 'at top level'})"
        for name, count in sorted(counts.items())
    )
    raise UnimplementedError(
        f"Strict mode: no tile planner knows {len(counts)} kind(s) of equations: {listed}.",
        hint="Switch strict mode off (engine option podrun.strict, or --strict): a stated bound then costs them.",
    )


def bounds_of(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The bounds of all parts of a compiled program's tile report."""
    parts = [*report.get("segments", ()), *report.get("update", ())]
    return [part["report"]["bounds"] for part in parts]
