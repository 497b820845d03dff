"""How a program lies on a system."""

from __future__ import annotations

from dataclasses import dataclass

from podrun.device.target import System
from podrun.device.tiles.batch import UPDATE_PASSES
from podrun.device.tiles.matmul import check_proportion
from podrun.errors import InvalidOptionError, UsageError


@dataclass(frozen=True, slots=True)
class Layout:
    """How a program lies on the system: IPUs per replica, micro-batch, accumulation, and how it saves
    memory.
    """

    micro_batch: int = 1
    accumulation: int = 1
    ipus_per_replica: int = 1
    recompute: bool = False
    optimizer: str = "momentum"
    state_off_chip: bool = False
    shard_state: bool = False
    partials_type: str = "float16"
    proportion: float = 0.6


def check_layout(system: System, layout: Layout) -> None:
    """See that ``system`` can run ``layout``, before anything is traced.

    Raises:
        InvalidOptionError: IPUs per replica that the system cannot hold or divide, an unknown optimizer, or
        a memory
            proportion outside (0, 1].
        UsageError: a micro-batch or accumulation below one.
    """
    per = layout.ipus_per_replica
    if per < 1 or system.ipus % per:
        raise InvalidOptionError(
            f"{per} IPUs per replica do not divide the {system.ipus} IPUs of {system.name}",
            hint="Give a power of two that is not larger than the system.",
        )
    if layout.optimizer not in UPDATE_PASSES:
        raise InvalidOptionError(
            f"unknown optimizer {layout.optimizer!r}", hint=f"Known: {', '.join(UPDATE_PASSES)}."
        )
    check_proportion(layout.proportion)
    check_counts(layout)


def check_counts(layout: Layout) -> None:
    """Raises UsageError for a micro-batch or accumulation below one."""
    for name, value in (("micro-batch", layout.micro_batch), ("accumulation", layout.accumulation)):
        if value < 1:
            raise UsageError(f"--{name} must be at least 1, not {value}", hint=f"As in --{name} 4.")
