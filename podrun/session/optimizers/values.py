"""Hyper-parameters: a value with a flag whether it is fixed for the session's life, a default and specifics
per weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from podrun.session.conversions import boolean, number
from podrun.session.exceptions import popart_exception


class OptimizerValue:
    """A hyper-parameter's value and whether it is constant: ``OptimizerValue(0.1, False)``."""

    __slots__ = ("_const", "_value")

    def __init__(self, val: float | tuple[float, bool] = 0.0, isConst: bool = True) -> None:
        if isinstance(val, tuple):
            val, isConst = val
        self._value, self._const = float(val), bool(isConst)

    def val(self) -> float:
        """The value."""
        return self._value

    def isConst(self) -> bool:
        """True iff it cannot change after the session was made."""
        return self._const

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OptimizerValue) and (self._value, self._const) == (
            other._value,
            other._const,
        )

    def __hash__(self) -> int:
        return hash((self._value, self._const))

    def __repr__(self) -> str:
        return f"OptimizerValue({self._value}, {self._const})"


@dataclass
class OptimizerValueMap:
    """A default value and values of their own for some weights."""

    default: OptimizerValue
    specific: dict[str, OptimizerValue] = field(default_factory=dict)

    def get(self, weight: str) -> OptimizerValue:
        """The value for ``weight``."""
        return self.specific.get(weight, self.default)

    def getDefault(self) -> OptimizerValue:
        """The default."""
        return self.default

    def hasSpecific(self, weight: str | None = None) -> bool:
        """True iff ``weight`` (any weight) has a value of its own."""
        return bool(self.specific) if weight is None else weight in self.specific


def parse_value(owner: str, key: str, value: Any) -> OptimizerValue:
    """The value under ``key`` of an optimizer's dict: ``(number, isConst)``. popart_exception for anything
    else.
    """
    if isinstance(value, OptimizerValue):
        return value
    try:
        if not isinstance(value, (tuple, list)):
            raise TypeError(f"{value!r} is no pair")
        found, constant = value
        return OptimizerValue(number(found), boolean(constant))
    except (TypeError, ValueError) as error:
        raise popart_exception(
            f"{owner} key {key!r} takes a pair (value, isConst), for example (0.1, False); got {value!r}."
        ) from error


class ClipNormSettings:
    """Clip the norm of a group of tensors: ``ClipNormSettings(weightIds, maxNorm)`` or
    ``clipAllWeights(maxNorm)``.
    """

    def __init__(self, weightIds: Sequence[str], maxNorm: float) -> None:
        if isinstance(weightIds, str):
            raise TypeError("__init__(): incompatible function arguments. weightIds is a list of tensors.")
        self.weightIds = list(weightIds)
        self.maxNorm = float(maxNorm)
        self.all_weights = False

    @staticmethod
    def clipWeights(weightIds_: Sequence[str], maxNorm_: float) -> ClipNormSettings:
        """Clip the norm over these weights."""
        return ClipNormSettings(weightIds_, maxNorm_)

    @staticmethod
    def clipAllWeights(maxNorm_: float) -> ClipNormSettings:
        """Clip the norm over all weights."""
        settings = ClipNormSettings([], maxNorm_)
        settings.all_weights = True
        return settings

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClipNormSettings) and (self.weightIds, self.maxNorm, self.all_weights) == (
            other.weightIds,
            other.maxNorm,
            other.all_weights,
        )

    def __hash__(self) -> int:
        return hash((tuple(self.weightIds), self.maxNorm, self.all_weights))

    def __repr__(self) -> str:
        which = "all weights" if self.all_weights else str(self.weightIds)
        return f"ClipNormSettings({which}, {self.maxNorm})"
