"""PopART's Adaptive: AdaGrad, RMSProp and AdaDelta; the formulas are `podrun.runtime.optimizers.adaptive`'s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podrun.popart.optimizers.base import Optimizer, accessor_of, state_type
from podrun.popart.values.enums import AdaptiveMode, DataType, WeightDecayMode
from podrun.popart.values.exceptions import popart_exception
from podrun.runtime.optimizers.adaptive import AdaptiveForm, AdaptiveKind, AdaptiveRule
from podrun.runtime.optimizers.hyperparameters import UpdateContext
from podrun.runtime.optimizers.rules import Rule
from podrun.runtime.optimizers.value_checks import ADAPTIVE_LIMITS

_KINDS = {
    AdaptiveMode.AdaGrad: AdaptiveKind.ADAGRAD,
    AdaptiveMode.RMSProp: AdaptiveKind.RMSPROP,
    AdaptiveMode.CenteredRMSProp: AdaptiveKind.CENTERED_RMSPROP,
    AdaptiveMode.AdaDelta: AdaptiveKind.ADADELTA,
}


class Adaptive(Optimizer):
    """The adaptive family: ``Adaptive({"defaultLearningRate": (0.01, True)}, mode=AdaptiveMode.RMSProp)``."""

    NAME = "Adaptive"
    DEFAULTS = {  # noqa: RUF012
        "learningRate": 0.01,
        "weightDecay": 0.0,
        "alpha": 0.99,
        "momentum": 0.0,
        "eps": 1e-6,
    }
    LIMITS = ADAPTIVE_LIMITS

    learningRates = accessor_of("learningRate")
    weightDecays = accessor_of("weightDecay")
    alphas = accessor_of("alpha")
    momentums = accessor_of("momentum")
    epss = accessor_of("eps")

    def __init__(
        self,
        values: Mapping[str, Any],
        mode: AdaptiveMode = AdaptiveMode.RMSProp,
        weight_decay_mode: WeightDecayMode = WeightDecayMode.Decay,
        accum_type: DataType = DataType.UNDEFINED,
        accl1_type: DataType = DataType.FLOAT,
        accl2_type: DataType = DataType.FLOAT,
        accl3_type: DataType = DataType.UNDEFINED,
        rmsprop_tf_variant: bool = False,
        debugContext: object = "adaptive",
    ) -> None:
        super().__init__(values)
        if rmsprop_tf_variant and mode not in (AdaptiveMode.RMSProp, AdaptiveMode.CenteredRMSProp):
            raise popart_exception(
                f"Adaptive: the TensorFlow variant is for RMSProp and CenteredRMSProp, not {mode.name}."
            )
        self.mode = mode
        self.weight_decay_mode = weight_decay_mode
        # PopART gives accl2 the type of accl1; programs see that, so it is kept.
        self.accum_type, self.accl1_type, self.accl2_type = accum_type, accl1_type, accl1_type
        self.accl3_type = accl3_type
        self.rmsprop_tf_variant = rmsprop_tf_variant

    def _modes(self) -> tuple[Any, ...]:
        types = (self.accum_type, self.accl1_type, self.accl2_type, self.accl3_type)
        return (*super()._modes(), self.mode, self.weight_decay_mode, types, self.rmsprop_tf_variant)

    def rule(self, context: UpdateContext) -> Rule:
        form = AdaptiveForm(
            kind=_KINDS[self.mode],
            decoupled_decay=self.weight_decay_mode is WeightDecayMode.Decay,
            tensorflow=self.rmsprop_tf_variant,
            gradient_type=state_type(self.accum_type),
            first_type=state_type(self.accl1_type),
            second_type=state_type(self.accl2_type),
            third_type=state_type(self.accl3_type),
        )
        return AdaptiveRule(self, context, form)
