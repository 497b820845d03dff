"""What each IPU of a layout holds, from the layers on it: the estimate's half of the memory model.

`podrun.device.tiles.memory` adds up, for this and for the compiler alike; the compiler knows the program's
segments, here layers stand for them. In a training pipeline every value that backward work reads is stashed
for each micro-batch in flight; with recomputation only what enters the IPU is, and the rest of its layers'
values are there once. On a single IPU the step is one, and its liveness (with recomputation: of the
recomputed step) is what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podrun.device.target import Chip
from podrun.device.tiles.memory import (
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
        """On the fullest tile of IPU ``ipu`` if it has layers ``[first, end)``."""
        return fullest_tile(self.chip, self.demand(ipu, first, end))

    def demand(self, ipu: int, first: int, end: int) -> Demand:
        """What IPU ``ipu`` has to hold if it has layers ``[first, end)``."""
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
