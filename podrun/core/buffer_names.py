"""Names of the buffers that an executable's instructions and computations use, and of tensors with a meaning.

Front ends, compiler and machines agree on these names. A name is a prefix and the name of what the buffer holds, so
that a reader of an executable sees what a buffer is.
"""

from __future__ import annotations

WHOLE = "arena:"
"""``arena:NAME``: a whole arena."""
SLICE = "arena_slice:"
"""``arena_slice:NAME``: this machine's slice of an arena."""
INPUT = "in:"
"""``in:NAME``: what a LoadStream of input NAME fills."""
ANCHOR = "out:"
"""``out:NAME``: what a StoreStream hands over for anchor NAME."""
CROSSING = "value:"
"""``value:NUMBER`` or ``value:NAME``: a temporary that crosses between the pieces of a micro-batch."""
GRADIENT_SUM = "gradient:"
"""``gradient:WEIGHT``: the gradient accumulator of a weight, a member of a gradient arena."""
GRADIENT_COUNT = "averaged:"
"""``averaged:WEIGHT``: the number of micro-batches in the accumulator of a weight."""
STATISTICS = "statistics:"
"""``statistics:TENSOR``: what automatic loss scaling counts of a gradient."""
RETURNED = "updated:"
"""``updated:NAME``: a value from another machine, until it is put into its arena."""
EXCHANGE = "exchange:"
"""``exchange:PIECE:NUMBER``: the arena of one exchange inside a piece."""
KEYS = "keys"
"""Key data ``[replicas, 2]`` of one micro-batch, where a piece is split and cannot move the seed on by itself."""

GRADIENT_ANCHOR = "Gradient___"
"""Anchor: the gradient of a tensor, for each replica and micro-batch."""
UPDATED_ANCHOR = "UpdatedVar___"
"""Anchor: a weight after the update of its batch."""
REDUCED_ANCHOR = "FinalReducedGradient___"
"""Anchor: the gradient that a batch's update sees, reduced over replicas and micro-batches, still scaled."""
NORM_ANCHOR = "GlobalNorm___"
"""Anchor: the norm that a joint update clips by; the number of its group follows."""


def input_buffer(stream: str) -> str:
    """The buffer that a LoadStream of an input fills."""
    return f"{INPUT}{stream}"


def anchor_buffer(anchor: str) -> str:
    """The buffer whose content a StoreStream hands over for an anchor."""
    return f"{ANCHOR}{anchor}"


def gradient_buffer(weight: str) -> str:
    """The gradient accumulator of a weight: a member of its group's gradient arena."""
    return f"{GRADIENT_SUM}{weight}"


def count_buffer(weight: str) -> str:
    """How many micro-batches the accumulator of a weight holds: float32 ``[1]``."""
    return f"{GRADIENT_COUNT}{weight}"


def statistics_buffer(tensor: str) -> str:
    """The counts of one tracked gradient over a batch: float32 ``[2]``, below the edge and not."""
    return f"{STATISTICS}{tensor}"
