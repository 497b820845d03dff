"""``poptorch.MultiConv``: convolutions that form one group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from podrun.poptorch.api.annotations import capturing
from podrun.poptorch.api.enums import MultiConvPlanType
from podrun.poptorch.api.signatures import checks_methods
from podrun.poptorch.errors import ArgumentError, Error


@checks_methods("availableMemoryProportions", "partialsTypes", "enableConvDithering")
class MultiConv(torch.nn.Module):
    """Convolutions called inside form one group: ``with poptorch.MultiConv(): y = a(x); z = b(x)``.

    The IPU computes the same numbers either way. Setters return the group itself and check their values; the tile model
    plans each convolution by itself. Error for a group inside another.
    """

    def __init__(self) -> None:
        super().__init__()
        self._settings: dict[str, Any] = {}

    def availableMemoryProportions(self, value: float | Sequence[float]) -> MultiConv:
        """Set the part of the tiles' memory for all convolutions, or for each. AssertionError unless they are
        numbers.
        """
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if not values:
            raise ArgumentError("availableMemoryProportions takes a number or a list that is not empty")
        if not all(isinstance(proportion, float) for proportion in values):
            raise ArgumentError("availableMemoryProportions takes numbers")
        return self._set("availableMemoryProportions", values)

    def partialsTypes(self, value: torch.dtype | Sequence[torch.dtype]) -> MultiConv:
        """Set the type in which convolutions add up: torch.float or torch.half. ValueError for another."""
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if not values or any(dtype not in (torch.float32, torch.float16) for dtype in values):
            raise ValueError("Invalid partials types: use torch.float or torch.half")
        return self._set("partialsTypes", values)

    def planType(self, value: MultiConvPlanType | None) -> MultiConv:
        """Set whether the convolutions run at the same time. AssertionError for another type."""
        return self._set("planType", value)

    def perConvReservedTiles(self, value: int) -> MultiConv:
        """Set the least number of tiles of each convolution. AssertionError unless it is a number."""
        if isinstance(value, bool):
            raise ArgumentError("perConvReservedTiles takes a number of tiles")
        return self._set("perConvReservedTiles", value)

    def cycleBackOff(self, value: float) -> MultiConv:
        """Set by how much the plan may be slower than the fastest. AssertionError unless it is a number."""
        if not isinstance(value, float):
            raise ArgumentError("cycleBackOff takes a number")
        return self._set("cycleBackOff", value)

    def enableConvDithering(self, value: bool | Sequence[bool] | None) -> MultiConv:
        """Spread convolutions over tiles. ValueError unless it is a flag."""
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        flags = all(isinstance(flag, bool) for flag in values) and bool(values)
        if value is not None and not flags:
            raise ValueError("enableConvDithering takes True, False or a list of these")
        return self._set("enableConvDithering", value)

    def _set(self, name: str, value: object) -> MultiConv:
        if value is None:
            self._settings.pop(name, None)
        else:
            self._settings[name] = value
        return self

    def __enter__(self) -> MultiConv:
        annotations = capturing()
        if annotations is not None:
            if annotations.multi_convolution is not None:
                raise Error("a poptorch.MultiConv cannot be inside another")
            annotations.multi_convolution = self
        return self

    def __exit__(self, *error: object) -> None:
        annotations = capturing()
        if annotations is not None:
            annotations.multi_convolution = None
