"""Does the program fit? Out of memory names the tile, the bytes, the largest contents, and what would help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podrun.errors import GraphMemoryAllocationError

ADVICE = {
    "not_always_live": "recompute activations, use a smaller micro-batch, or pipeline over more IPUs",
    "always_live": "pipeline over more IPUs, or keep the optimizer state off chip",
    "temporary": "lower availableMemoryProportion, or split the largest product serially",
    "exchange_code": "use fewer, larger operations, or outline repeated layers",
    "vertex_state": "use fewer, larger operations, or outline repeated layers",
    "control_code": "outline repeated layers",
    "vertex_code": "use fewer kinds of operations",
}
"""What helps against each category."""


def check_fits(report: Mapping[str, Any], *, ipu: int = 0, profile_path: str = "") -> None:
    """Raise if the fullest tile of a report of `podrun.device.tiles.cost.cost_jaxpr` holds too much.

    Raises:
        GraphMemoryAllocationError: the program does not fit; the message has the SDK's shape.
    """
    memory = report["memory"]
    if memory["fits"]:
        return
    fullest = max(memory["by_tile"], key=lambda interval: sum(interval["bytes"].values()))
    content = sorted(fullest["bytes"].items(), key=lambda item: (-item[1], item[0]))
    over = memory["max_tile_bytes"] - memory["tile_bytes"]
    named = ", ".join(f"{name} {size:,.0f} B" for name, size in content[:3])
    largest = "; ".join(f"{item['scope']} ({item['bytes']:,} B on the IPU)" for item in memory["largest"][:3])
    message = (
        f"Out of memory on IPU {ipu}, tile {fullest['first']}: {memory['max_tile_bytes']:,} bytes used, "
        f"{memory['tile_bytes']:,} available ({over:,} too many). Largest on the tile: {named}."
    )
    if largest:
        message += f" Largest values alive at the peak: {largest}."
    raise GraphMemoryAllocationError(
        message,
        where=f"IPU {ipu} tile {fullest['first']}",
        profile_path=profile_path,
        hint=f"To fit: {ADVICE[content[0][0]]}.",
    )
