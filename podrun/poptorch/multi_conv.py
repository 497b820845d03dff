"""``poptorch.MultiConv``: convolutions that do not depend on each other, planned together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from podrun.poptorch.annotations import capturing
from podrun.poptorch.enums import MultiConvPlanType
from podrun.poptorch.errors import Error


class MultiConv(torch.nn.Module):
    """Convolutions called inside form one group: ``with poptorch.MultiConv(): y = a(x); z = b(x)``.

    The IPU computes the same numbers either way. Setters return the group itself and check their values; the tile model
    plans each convolution by itself. Error for a group inside another.
    """

    def __init__(self) -> None:
        super().__init__()
        self._settings: dict[str, Any] = {}

    def availableMemoryProportions(self, value: float | Sequence[float]) -> MultiConv:
        """Part of the tiles' memory for all convolutions, or for each. AssertionError for no numbers."""
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        assert values, "availableMemoryProportions takes a number or a list that is not empty"
        assert all(isinstance(each, float) for each in values), "availableMemoryProportions takes numbers"
        return self._set("availableMemoryProportions", values)

    def partialsTypes(self, value: torch.dtype | Sequence[torch.dtype]) -> MultiConv:
        """In which type convolutions add up: torch.float or torch.half. ValueError for another."""
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if not values or any(each not in (torch.float32, torch.float16) for each in values):
            raise ValueError("Invalid partials types: use torch.float or torch.half")
        return self._set("partialsTypes", values)

    def planType(self, value: MultiConvPlanType | None) -> MultiConv:
        """Whether the convolutions run at the same time. AssertionError for another type."""
        assert value is None or isinstance(value, MultiConvPlanType), (
            "planType takes a poptorch.MultiConvPlanType"
        )
        return self._set("planType", value)

    def perConvReservedTiles(self, value: int) -> MultiConv:
        """Tiles that each convolution has at least. AssertionError for what is no number."""
        assert isinstance(value, int), "perConvReservedTiles takes a number of tiles"
        assert not isinstance(value, bool), "perConvReservedTiles takes a number of tiles"
        return self._set("perConvReservedTiles", value)

    def cycleBackOff(self, value: float) -> MultiConv:
        """By how much the plan may be slower than the fastest. AssertionError for what is no number."""
        assert isinstance(value, float), "cycleBackOff takes a number"
        return self._set("cycleBackOff", value)

    def enableConvDithering(self, value: bool | Sequence[bool] | None) -> MultiConv:
        """Spread convolutions over tiles. ValueError for what is no flag."""
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        flags = all(isinstance(each, bool) for each in values) and bool(values)
        if value is not None and not flags:
            raise ValueError("enableConvDithering takes True, False or a list of these")
        return self._set("enableConvDithering", value)

    def _set(self, name: str, value: Any) -> MultiConv:
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
