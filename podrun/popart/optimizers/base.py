"""What all optimizers share: hyper-parameters, their checks and comparisons, and making an update rule.

A hyper-parameter is a value with a flag whether it is fixed for the session's life, a default and specifics per weight.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

from podrun.core.quick_dataclass import dataclass
from podrun.popart.values.enums import DataType
from podrun.popart.values.exceptions import incompatible, popart_exception, surfaced
from podrun.popart.values.tensor_info import boolean, number, numpy_name
from podrun.runtime.optimizers.hyperparameters import Clipping, Hyperparameter, UpdateContext
from podrun.runtime.optimizers.value_checks import (
    ValueLimits,
    check_bounds,
    check_forms,
    check_loss_scaling,
    check_replaced,
    check_weights,
)

if TYPE_CHECKING:
    from podrun.runtime.optimizers.rules import Rule


def state_type(dtype: DataType) -> str | None:
    """NumPy's name of a type; None for UNDEFINED, which stands for the weight's."""
    return None if dtype is DataType.UNDEFINED else numpy_name(dtype)


class OptimizerValue:
    """A hyper-parameter's value and whether it is constant: ``OptimizerValue(0.1, False)``."""

    __slots__ = ("_const", "_value")

    def __init__(self, val: float | tuple[float, bool] = 0.0, isConst: bool = True) -> None:
        if isinstance(val, tuple):
            val, isConst = val
        self._value, self._const = float(val), bool(isConst)

    def val(self) -> float:
        """The value of the hyper-parameter."""
        return self._value

    def isConst(self) -> bool:
        """True iff it cannot change once the session is made."""
        return self._const

    def plain(self) -> Hyperparameter:
        """The value in the form that update rules read."""
        return Hyperparameter(self._value, self._const)

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
    """A default value, and specific values for some weights."""

    default: OptimizerValue
    specific: dict[str, OptimizerValue] = field(default_factory=dict)

    def get(self, weight: str) -> OptimizerValue:
        """The value for ``weight``."""
        return self.specific.get(weight, self.default)

    def getDefault(self) -> OptimizerValue:
        """The value for weights that have none of their own."""
        return self.default

    def hasSpecific(self, weight: str | None = None) -> bool:
        """True iff ``weight`` (any weight) has a value of its own."""
        return bool(self.specific) if weight is None else weight in self.specific


def accessor_of(name: str) -> Callable[[Optimizer], OptimizerValueMap]:
    """PopART's method that gives the values of a hyper-parameter for all weights."""

    def values(self: Optimizer) -> OptimizerValueMap:
        return self._maps[name]

    values.__doc__ = f"The values of ``{name}`` for all weights."
    return values


def parse_value(owner: str, key: str, value: object) -> OptimizerValue:
    """The value under ``key`` of an optimizer's dict: ``(number, isConst)``. popart_exception for anything else."""
    if isinstance(value, OptimizerValue):
        return value
    try:
        if not isinstance(value, (tuple, list)):
            raise TypeError(f"{value!r} is no pair")
        raw, constant = value
        return OptimizerValue(number(raw), boolean(constant))
    except (TypeError, ValueError) as error:
        raise popart_exception(
            f"{owner} key {key!r} takes a pair (value, isConst), for example (0.1, False); got {value!r}."
        ) from error


class ClipNormSettings:
    """Clip the norm of a group of tensors: ``ClipNormSettings(weightIds, maxNorm)`` or ``clipAllWeights(maxNorm)``."""

    def __init__(self, weightIds: Sequence[str], maxNorm: float) -> None:
        if isinstance(weightIds, str):
            raise incompatible("__init__", "weightIds is a list of tensors.")
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
        covered = "all weights" if self.all_weights else str(self.weightIds)
        return f"ClipNormSettings({covered}, {self.maxNorm})"


class Optimizer(abc.ABC):
    """Base of SGD, Adam and Adaptive.

    ``NAME`` heads messages, ``DEFAULTS`` are the hyper-parameters by the names of insertSpecific.
    """

    NAME: ClassVar[str]
    DEFAULTS: ClassVar[Mapping[str, float]]
    LIMITS: ClassVar[ValueLimits]
    ALIASES: ClassVar[Mapping[str, str]] = {}
    GLOBAL: ClassVar[Sequence[str]] = ()
    """Hyper-parameters without ``default`` in their constructor name that weights may still set for themselves."""

    def __init__(
        self, values: Mapping[str, Any], clip_norm_settings: Sequence[ClipNormSettings] = ()
    ) -> None:
        if not isinstance(values, Mapping):
            raise incompatible(
                "__init__",
                f"{self.NAME} takes a dict, not {values!r}: "
                f'popart.{self.NAME}({{"defaultLearningRate": (0.01, False)}}).',
            )
        keys = self._constructor_keys()
        parsed = {}
        for key, value in values.items():
            if key not in keys:
                raise popart_exception(
                    f"Invalid {self.NAME} key, {key}, the allowed keys are {', '.join(sorted(keys))}."
                )
            parsed[keys[key]] = parse_value(self.NAME, key, value)
        self.lossScaling = parsed.pop("lossScaling", OptimizerValue(1.0, True))
        self._maps = {
            name: OptimizerValueMap(parsed.get(name, OptimizerValue(default, True)))
            for name, default in self.DEFAULTS.items()
        }
        self.clip_norm_settings = list(clip_norm_settings)
        self._check("the defaults", {name: values.default for name, values in self._maps.items()})
        with surfaced():
            check_loss_scaling(self.NAME, self.loss_scaling)
        self._check_clipping()

    def _constructor_keys(self) -> dict[str, str]:
        keys = {}
        for name in self.DEFAULTS:
            key = name if name in self.GLOBAL else f"default{name[0].upper()}{name[1:]}"
            keys[key] = name
        return {**keys, **self.ALIASES, "lossScaling": "lossScaling"}

    def insertSpecific(self, tensorId: str, values: Mapping[str, Any]) -> None:
        """Set hyper-parameters of one weight; those left out keep the optimizer's present defaults."""
        unknown = [key for key in values if key not in self.DEFAULTS]
        if unknown:
            raise popart_exception(
                f"Invalid key {unknown[0]} in {self.NAME}::insertSpecific for weight {tensorId!r}. Permitted keys "
                f"are {', '.join(sorted(self.DEFAULTS))}."
            )
        specific = {
            name: parse_value(self.NAME, name, values[name]) if name in values else values_map.default
            for name, values_map in self._maps.items()
        }
        self._check(f"weight {tensorId!r}", specific)
        for name, value in specific.items():
            self._maps[name].specific[tensorId] = value

    def hasSpecific(self, tensorId: str | None = None) -> bool:
        """True iff a weight has values of its own."""
        return any(values.hasSpecific(tensorId) for values in self._maps.values())

    def getLossScalingVal(self) -> float:
        """The loss scaling."""
        return self.lossScaling.val()

    def _check(self, where: str, values: Mapping[str, OptimizerValue]) -> None:
        with surfaced():
            self.LIMITS.check(where, {name: value.plain() for name, value in values.items()})

    def _check_clipping(self) -> None:
        groups = self.clip_norm_settings
        if any(not isinstance(group, ClipNormSettings) for group in groups):
            raise incompatible("__init__", "clip_norm_settings is a list of ClipNormSettings.")
        if len(groups) > 1 and any(group.all_weights for group in groups):
            raise popart_exception(
                "ClipNormSettings.clipAllWeights covers all weights, so it must be the only group."
            )
        with surfaced():
            check_bounds(group.maxNorm for group in groups)

    # -- for the session --------------------------------------------------------------------------

    def value(self, name: str, weight: str) -> OptimizerValue:
        """A hyper-parameter of a weight."""
        return self._maps[name].get(weight)

    @property
    def loss_scaling(self) -> Hyperparameter:
        """See `podrun.runtime.optimizers.hyperparameters.Hyperparameters`."""
        return self.lossScaling.plain()

    @property
    def clipping(self) -> Sequence[Clipping]:
        """See `Hyperparameters`."""
        return [
            Clipping(group.maxNorm, None if group.all_weights else tuple(group.weightIds))
            for group in self.clip_norm_settings
        ]

    def hyperparameter(self, name: str, weight: str) -> Hyperparameter:
        """See `Hyperparameters`."""
        return self.value(name, weight).plain()

    def is_specific(self, name: str, weight: str) -> bool:
        """See `Hyperparameters`."""
        return self._maps[name].hasSpecific(weight)

    @abc.abstractmethod
    def rule(self, context: UpdateContext) -> Rule:
        """The update rule with this optimizer's values, for a session."""

    def _modes(self) -> tuple[Any, ...]:
        """Modes and types, apart from values, that must agree for one optimizer to replace another in a session."""
        return (tuple(self.clip_norm_settings),)

    def check_replaces(self, other: Optimizer) -> None:
        """popart_exception unless this optimizer may replace ``other`` in a running session."""
        with surfaced():
            check_forms((type(other).NAME, type(self).NAME), self._modes() == other._modes())
            check_replaced("lossScaling", other.loss_scaling, self.loss_scaling)
            for name, values in self._maps.items():
                before = other._maps[name]
                check_weights(before.specific, values.specific)
                check_replaced(name, before.default.plain(), values.default.plain())
                for weight, new in values.specific.items():
                    old = before.specific[weight]
                    check_replaced(f"{name} of weight {weight!r}", old.plain(), new.plain())
