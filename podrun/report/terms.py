"""What the words of a report mean, and units that keep its figures readable."""

from __future__ import annotations

from collections.abc import Mapping

BATCH: Mapping[str, str] = {
    "compute": "micro-batches on the tiles, their exchange and a pipeline's bubble included",
    "copies": "activations and gradients between IPUs",
    "streaming": "tensors to and from streaming memory",
    "update": "the optimizer's step",
    "all_reduce": "gradients between replicas",
    "collectives": "the model's own, and gathering of sharded weights",
}
"""Causes of a batch's time (`podrun.compiler.costs.timeline`)."""
CYCLES: Mapping[str, str] = {
    "compute": "vertices at work, on the slowest tile",
    "exchange": "between tiles of an IPU",
    "rearrange": "on a tile, into the order that an operation wants",
    "launch": "starting compute sets",
    "sync": "barriers before exchanges",
}
"""Causes of cycles on the tiles (`podrun.device.tiles.plan`)."""
OPERATORS: Mapping[str, str] = {
    "matmul": "matrix products; convolutions of kernel 1, or whose kernel became part of the product",
    "conv": "convolutions, a product for each position of the kernel",
}
"""Families of operations whose names do not say all (`podrun.device.tiles.matmul`)."""
CONTENTS: Mapping[str, str] = {
    "accumulators": "gradients summed over micro-batches",
    "streams": "buffers of inputs and anchors",
    "stash": "kept for the backward work of micro-batches in flight",
    "activations": "other values, at their fullest moment",
    "temporary": "data of the step that runs then",
    "vertex_code": "programs of vertices",
    "vertex_state": "vertices' own data",
    "exchange_code": "what each tile sends when",
    "control_code": "the sequence of steps",
}
"""What an IPU's memory holds (`podrun.device.tiles.memory`)."""


def unit_of_time(seconds: float) -> tuple[str, float]:
    """Unit for times up to ``seconds``, and how many of it a second has."""
    return ("us", 1e6) if seconds < 1e-3 else ("ms", 1e3)


def counted(number: int, what: str) -> str:
    """``1 replica``, ``16 replicas``, ``16 micro-batches``."""
    many = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number:,} {what if number == 1 else many}"
