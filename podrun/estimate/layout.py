"""How a program lies on a system, and what each IPU then holds: the estimate's half of the memory model.

`podrun.costmodel.tile_memory` adds up, for this and for the compiler alike. The compiler knows the program's segments;
here layers stand for them. In a training pipeline every value that backward work reads is stashed for each micro-batch
in flight. With recomputation only what enters the IPU is stashed, and the rest of its layers' values exist once. A
single IPU runs the whole batch, and its liveness is that of the batch (with recomputation: of the recomputed one).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podrun.core.errors import InvalidOptionError, UsageError
from podrun.costmodel.batch import UPDATE_PASSES
from podrun.costmodel.matmul import check_proportion
from podrun.costmodel.target import Chip, System
from podrun.costmodel.tile_memory import (
    ACCUMULATORS,
    STASH,
    STATE,
    STREAMS,
    WEIGHTS,
    Demand,
    Location,
    fits,
    fullest_tile,
    in_flight,
)
from podrun.estimate.layers import Layer


@dataclass(frozen=True, slots=True)
class ProgramLayout:
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


def check_layout(system: System, layout: ProgramLayout) -> None:
    """Check that ``system`` can run ``layout``, before anything is traced.

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


def check_counts(layout: ProgramLayout) -> None:
    """Raises UsageError for a micro-batch or accumulation below one."""
    for name, value in (("micro-batch", layout.micro_batch), ("accumulation", layout.accumulation)):
        if value < 1:
            raise UsageError(f"--{name} must be at least 1, not {value}", hint=f"As in --{name} 4.")


STATES = {"sgd": 0, "momentum": 1, "lars": 1, "adam": 2, "lamb": 2}
"""Values of optimizer state per weight, float32."""
STATE_WIDTH = 4


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Answers for one traced model and layout. ``step``: the report's memory of what one IPU would run
    alone, the forward pass, the training step, or the recomputed training step.
    """

    chip: Chip
    layers: Sequence[Layer]
    step: Mapping[str, Any]
    train: bool
    ipus: int
    accumulation: int
    recompute: bool
    states: int
    state_location: Location
    input_bytes: int

    def fits(self, ipu: int, first: int, end: int) -> bool:
        """True iff the fullest tile of IPU ``ipu`` holds its share of layers ``[first, end)``."""
        return fits(self.chip, self.demand(ipu, first, end))

    def tile_bytes(self, ipu: int, first: int, end: int) -> int:
        """Bytes on the fullest tile of IPU ``ipu`` if it has layers ``[first, end)``."""
        return fullest_tile(self.chip, self.demand(ipu, first, end))

    def demand(self, ipu: int, first: int, end: int) -> Demand:
        """The memory that IPU ``ipu`` needs if it has layers ``[first, end)``."""
        own = self.layers[first:end]
        lasting = {WEIGHTS: sum(layer.weight_bytes for layer in own)}
        lasting[STREAMS] = 0 if first else self.input_bytes
        entering = self.layers[first - 1].crossing_bytes if first else 0
        leaving = own[-1].crossing_bytes
        if self.train:
            lasting[STATE] = sum(self.states * self._state_bytes(layer) for layer in own)
            lasting[ACCUMULATORS] = lasting[WEIGHTS] if self.accumulation > 1 else 0
        if self.ipus == 1:
            live = self.step["not_always_live_peak_bytes"] - self.step["temporary_bytes"]
            return Demand(lasting, live, self.step["temporary_bytes"], self.step["code"])
        # An upper bound: layers that are like one before them need less exchange code.
        code = {
            "vertex_code": int(self.step["code"].get("vertex_code", 0)),
            "other_code": sum(layer.code_bytes for layer in own),
        }
        work = max(layer.work_bytes for layer in own)
        temporary = max(layer.temporary_bytes for layer in own)
        saved = sum(layer.saved_bytes for layer in own)
        if not self.train:
            lasting[STASH] = entering + leaving
        else:
            flight = in_flight(self.ipus, ipu)
            # An input that is kept is in its stream's buffer once.
            first_inputs = (flight - 1) * self.input_bytes if not first else 0
            crossing = flight * entering + leaving + (leaving if ipu < self.ipus - 1 else 0)
            last = ipu == self.ipus - 1
            lasting[STASH] = first_inputs + crossing + (0 if self.recompute or last else flight * saved)
            work += saved if self.recompute or last else 0
        return Demand(lasting, work, temporary, code)

    def _state_bytes(self, layer: Layer) -> int:
        return self.state_location.on_chip(layer.weights, STATE_WIDTH)
