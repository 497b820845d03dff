"""Bytes on the fullest tile of each IPU of a replica: weights, state, activations kept and at work, code.

Training keeps on IPU *p* of *P* the activations of ``2 (P - 1 - p) + 1`` micro-batches (its forward and backward
stages lie that far apart). With recomputation only what enters the IPU's stage is kept for each of them, and its
inner activations once; on a single IPU checkpoints stand at every square root of the layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from podrun.device.target import Chip
from podrun.device.tiles.cost import TILE_IMBALANCE
from podrun.estimate.layers import Layer

STATES = {"sgd": 0, "momentum": 1, "lars": 1, "adam": 2, "lamb": 2}
"""Values of optimizer state per weight, float32."""


class MemoryModel:
    """Answers for one traced model and layout. ``forward`` and ``step`` are the tile model's reports."""

    def __init__(
        self,
        chip: Chip,
        layers: Sequence[Layer],
        forward: Mapping[str, Any],
        step: Mapping[str, Any],
        *,
        train: bool,
        ipus: int,
        accumulation: int,
        recompute: bool,
        state_values: int,
        input_bytes: int,
    ) -> None:
        self.chip, self.layers, self.train, self.ipus = chip, layers, train, ipus
        self.accumulation, self.recompute, self.state_values = accumulation, recompute, state_values
        self.input_bytes = input_bytes
        self.forward_peak = int(forward["memory"]["not_always_live_peak_bytes"])
        self.step_peak = int(step["memory"]["not_always_live_peak_bytes"])
        self.vertex_code = int(step["memory"]["code"].get("vertex_code", 0))
        saved = sum(layer.saved_bytes for layer in layers)
        self.at_work = max(0, self.step_peak - saved)
        """Of the step's peak what is not kept activations: gradients in flight, temporaries."""

    def tile_bytes(self, ipu: int, first: int, end: int) -> int:
        """On the fullest tile of IPU ``ipu`` if it has layers ``[first, end)``."""
        total = sum(self.parts(ipu, first, end).values())
        return int(total / self.chip.tiles * TILE_IMBALANCE)

    def fits(self, ipu: int, first: int, end: int) -> bool:
        """True iff the fullest tile holds its share."""
        return self.tile_bytes(ipu, first, end) <= self.chip.tile_bytes

    def parts(self, ipu: int, first: int, end: int) -> dict[str, int]:
        """Bytes on the whole IPU by content."""
        own = self.layers[first:end]
        weights = sum(layer.weight_bytes for layer in own)
        found = {"weights": weights, "code": self.vertex_code + sum(layer.code_bytes for layer in own)}
        entering = self.layers[first - 1].crossing_bytes if first else self.input_bytes
        if not self.train:
            found["activations"] = self.forward_peak + entering
            return found
        found["state"] = 4 * self.state_values * sum(layer.weights for layer in own)
        found["gradients"] = weights if self.accumulation > 1 else 0
        found["activations"], found["at work"] = self._activations(ipu, own, entering)
        return found

    def _activations(self, ipu: int, own: Sequence[Layer], entering: int) -> tuple[int, int]:
        saved = sum(layer.saved_bytes for layer in own)
        in_flight = 2 * (self.ipus - 1 - ipu) + 1
        work = self.at_work
        if not self.recompute:
            return saved * in_flight + entering * in_flight, work
        if self.ipus == 1:
            saved = min(saved, round(2 * saved / math.sqrt(max(1, len(own)))))
        return saved + entering * in_flight, work
