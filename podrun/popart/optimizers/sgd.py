"""PopART's SGD and ConstSGD; the formulas are `podrun.runtime.optimizers.sgd`'s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from podrun.popart.optimizers.base import ClipNormSettings, Optimizer, accessor_of, state_type
from podrun.popart.values.enums import DataType, SGDAccumulatorAndMomentum
from podrun.popart.values.exceptions import popart_exception
from podrun.runtime.optimizers.hyperparameters import UpdateContext
from podrun.runtime.optimizers.rules import Rule
from podrun.runtime.optimizers.sgd import SgdForm, SgdRule
from podrun.runtime.optimizers.value_checks import SGD_LIMITS


class SGD(Optimizer):
    """Stochastic gradient descent: ``SGD({"defaultLearningRate": (0.1, False), "defaultMomentum": (0.9, True)})``."""

    NAME = "SGD"
    DEFAULTS = {  # noqa: RUF012 (read only; typed as a Mapping in the base)
        "learningRate": 0.1,
        "weightDecay": 0.0,
        "momentum": 0.0,
        "dampening": 0.0,
        "velocityScaling": 1.0,
        "nesterov": 0.0,
    }
    LIMITS = SGD_LIMITS
    GLOBAL = ("nesterov",)

    learningRates = accessor_of("learningRate")
    weightDecays = accessor_of("weightDecay")
    momentums = accessor_of("momentum")
    dampenings = accessor_of("dampening")
    velocityScalings = accessor_of("velocityScaling")
    nesterov = accessor_of("nesterov")

    def __init__(
        self,
        pyd: Mapping[str, Any],
        clip_norm_settings: Sequence[ClipNormSettings] = (),
        accumulatorAndMomentum: SGDAccumulatorAndMomentum = SGDAccumulatorAndMomentum.Combined,
        accumType: DataType = DataType.UNDEFINED,
        accl1Type: DataType = DataType.UNDEFINED,
        debugContext: object = "sgd",
    ) -> None:
        super().__init__(pyd, clip_norm_settings)
        self.accumulatorAndMomentum = accumulatorAndMomentum
        self.accumType = accumType
        self.accl1Type = accl1Type

    def _check(self, where: str, values: Mapping[str, Any]) -> None:
        super()._check(where, values)
        if values["nesterov"].val() and values["dampening"].val() > 0:
            raise popart_exception(f"SGD, {where}: nesterov momentum goes without dampening.")

    def _modes(self) -> tuple[Any, ...]:
        return (*super()._modes(), self.accumulatorAndMomentum, self.accumType, self.accl1Type)

    def rule(self, context: UpdateContext) -> Rule:
        return SgdRule(self, context, self.form())

    def form(self) -> SgdForm:
        """The form of the update rule."""
        combined = self.accumulatorAndMomentum is SGDAccumulatorAndMomentum.Combined
        gradients, velocity = state_type(self.accumType), state_type(self.accl1Type)
        return SgdForm(combined, gradient_type=gradients, state_type=velocity)


class ConstSGD(SGD):
    """SGD with a constant learning rate, weight decay and loss scaling, and no momentum."""

    def __init__(
        self,
        learning_rate: float,
        weight_decay: float = 0.0,
        loss_scaling: float = 1.0,
        clip_norm_settings: Sequence[ClipNormSettings] = (),
    ) -> None:
        super().__init__(
            {
                "defaultLearningRate": (learning_rate, True),
                "defaultWeightDecay": (weight_decay, True),
                "lossScaling": (loss_scaling, True),
            },
            clip_norm_settings,
        )
