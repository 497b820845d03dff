"""Gradient descent as a Program's update, for benchmarks that are not about optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podrun.executable import TensorSpec


@dataclass(frozen=True)
class Descent:
    """w - rate * g."""

    rate: float
    elementwise: bool = True

    def group_key(self, weight: str) -> tuple[Any, ...]:
        return ()

    def state(self, weight: TensorSpec) -> dict[str, tuple[TensorSpec, float]]:
        return {}

    def scalars(self, weight: str) -> dict[str, float]:
        return {}

    def apply(self, name: str, w: Any, g: Any, state: Mapping[str, Any], scalars: Mapping[str, Any]) -> Any:
        return w - self.rate * g, {}
