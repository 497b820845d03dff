"""Checks of a compiled program's tile report: does it fit, and has a planner costed all of it?

A report that was kept is checked again by each program, so nothing here imports what makes one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from podrun.core.errors import GraphMemoryAllocationError, UnimplementedError
from podrun.costmodel.target import chip

MOST_REMEDIES = 4
"""Changes that a hint names."""


def check_fits(
    memory: Mapping[str, Any],
    *,
    ipu: int = 0,
    tiles: int = 0,
    profile_path: str = "",
    hint: str | None = None,
) -> None:
    """Raise if the fullest tile of a report's ``memory`` holds too much.

    ``ipu`` of ``tiles`` tiles each: tiles are numbered through all IPUs, as in the SDK's message. ``hint``: a change
    that makes it fit, if one is known.

    Raises GraphMemoryAllocationError if the program does not fit; the message begins as the SDK's does.
    """
    if memory["fits"]:
        return
    fullest = max(memory["by_tile"], key=lambda interval: sum(interval["bytes"].values()))
    tile = ipu * tiles + fullest["first"]
    content = sorted(memory["by_content"].items(), key=lambda item: (-item[1], item[0]))
    used, available = memory["max_tile_bytes"], memory["tile_bytes"]
    named = ", ".join(f"{name} {size:,} B" for name, size in content[:3])
    message = (
        f"Out of memory on tile {tile}: {used} bytes used, {available} available ({used - available} too "
        f"many), on IPU {ipu}. Largest contents: {named} on the IPU."
    )
    if memory["largest"]:
        listed = "; ".join(f"{item['scope']} ({item['bytes']:,} B)" for item in memory["largest"][:3])
        message += f" Largest values: {listed}."
    if profile_path:
        message += f" Profile saved to: {profile_path}"
    raise GraphMemoryAllocationError(
        message,
        where=f"IPU {ipu} tile {tile}",
        profile_path=profile_path,
        hint=hint,
    )


def remedy_hint(report: Mapping[str, Any]) -> str | None:
    """The changes in a compiled program's report that the model found to help; None if it tried none."""
    if "remedies" not in report:
        return None
    tried, bounded = [], []
    for remedy in report["remedies"]:
        how = f" ({remedy['setting']})" if remedy["setting"] else ""
        most = remedy["max_tile_bytes"]
        if most is None:
            bounded.append(remedy["what"])
        else:
            tried.append(f"{remedy['what']}{how}: {most:,} B on the fullest tile")
    if tried:
        return f"To fit, by the model: {'; or '.join(tried[:MOST_REMEDIES])}."
    if bounded:
        return f"It may fit if you {', or '.join(bounded)}."
    need = report.get("largest_need", {})
    trained = " with its gradient and optimizer state" if need.get("trained", True) else ""
    named = f"{need['name']!r}{trained} takes {need['bytes']:,} B. " if need else ""
    return f"No setting makes it fit: {named}Cut the largest tensors into parts on several IPUs."


def check_report_fits(report: Mapping[str, Any], *, profile_path: str = "") -> None:
    """Raise for the first IPU of a compiled program's tile report that holds too much. See `check_fits`."""
    for entry in report.get("ipus", ()):
        tiles = chip(entry["target"]).tiles
        hint = remedy_hint(report)
        check_fits(entry["memory"], ipu=entry["ipu"], tiles=tiles, profile_path=profile_path, hint=hint)


SCOPES = 8
"""Number of scopes that a report names for each primitive."""


def check_planned(bounds: Iterable[Mapping[str, Mapping[str, Any]]]) -> None:
    """Raise if any of several reports' ``bounds`` (by primitive: ``count``, ``cycles``, ``scopes``) is not empty.

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
