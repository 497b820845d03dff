"""Does the program fit? Out of memory names the tile, the bytes, the largest contents, and what would
help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podrun.device.target import chip as find_chip
from podrun.errors import GraphMemoryAllocationError

_CODE = "use fewer, larger operations, or outline repeated layers"
ADVICE = {
    "weights": "pipeline over more IPUs, or keep weights off chip (weightTensorLocationSettings)",
    "optimizer_state": "keep optimizer state off chip or shard it over replicas "
    "(optimizerStateTensorLocationSettings), or pipeline over more IPUs",
    "accumulators": "shard accumulators over replicas or keep them off chip (accumulatorTensorLocationSettings), "
    "or pipeline over more IPUs",
    "streams": "use a smaller micro-batch, or anchor fewer tensors",
    "stash": "recompute activations (autoRecomputation), or use a smaller micro-batch",
    "constants": "make large constants inputs or weights",
    "arguments": "pipeline over more IPUs, or use a smaller micro-batch",
    "activations": "recompute activations (autoRecomputation), use a smaller micro-batch, or pipeline over more IPUs",
    "temporary": "lower availableMemoryProportion, or split the largest product serially",
    "exchange_code": _CODE,
    "vertex_state": _CODE,
    "control_code": "outline repeated layers",
    "vertex_code": "use fewer kinds of operations",
}
"""What helps against each content (`podrun.device.tiles.memory`)."""


def check_fits(memory: Mapping[str, Any], *, ipu: int = 0, tiles: int = 0, profile_path: str = "") -> None:
    """Raise if the fullest tile of a report's ``memory`` holds too much.

    ``ipu`` of ``tiles`` tiles each: tiles are numbered through all IPUs, as in the SDK's message.

    Raises:
        GraphMemoryAllocationError: the program does not fit; the message begins as the SDK's does.
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
        hint=f"To fit: {ADVICE[content[0][0]]}.",
    )


def check_program(report: Mapping[str, Any], *, profile_path: str = "") -> None:
    """Raise for the first IPU of a compiled program's tile report that holds too much. See `check_fits`."""
    for entry in report.get("ipus", ()):
        tiles = find_chip(entry["target"]).tiles
        check_fits(entry["memory"], ipu=entry["ipu"], tiles=tiles, profile_path=profile_path)
