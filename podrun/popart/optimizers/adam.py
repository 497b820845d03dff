"""PopART's Adam, with AdaMax and LAMB; the formulas are `podrun.runtime.optimizers.adam`'s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from podrun.popart.optimizers.base import ClipNormSettings, Optimizer, accessor_of, state_type
from podrun.popart.values.enums import AdamMode, DataType, WeightDecayMode
from podrun.runtime.optimizers.adam import AdamForm, AdamRule
from podrun.runtime.optimizers.hyperparameters import UpdateContext
from podrun.runtime.optimizers.rules import Rule
from podrun.runtime.optimizers.value_checks import ADAM_LIMITS


class Adam(Optimizer):
    """Adam and its relations: ``Adam({"defaultLearningRate": (0.001, False)}, mode=AdamMode.Lamb)``."""

    NAME = "Adam"
    DEFAULTS = {  # noqa: RUF012
        "learningRate": 0.1,
        "weightDecay": 0.0,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-6,
        "maxWeightNorm": 10.0,
    }
    LIMITS = ADAM_LIMITS
    ALIASES = {"maxWeightNorm": "maxWeightNorm"}  # noqa: RUF012

    learningRates = accessor_of("learningRate")
    weightDecays = accessor_of("weightDecay")
    beta1s = accessor_of("beta1")
    beta2s = accessor_of("beta2")  # PopART's own gives those of beta1.
    epss = accessor_of("eps")
    maxWeightNorms = accessor_of("maxWeightNorm")

    def __init__(
        self,
        values: Mapping[str, Any],
        mode: AdamMode = AdamMode.Adam,
        weight_decay_mode: WeightDecayMode = WeightDecayMode.Decay,
        accum_type: DataType = DataType.UNDEFINED,
        accl1_type: DataType = DataType.FLOAT,
        accl2_type: DataType = DataType.FLOAT,
        clip_norm_settings: Sequence[ClipNormSettings] = (),
        scaled_optimizer_state: bool = False,
        debugContext: object = "adam",
    ) -> None:
        super().__init__(values, clip_norm_settings)
        self.mode = mode
        self.weight_decay_mode = weight_decay_mode
        self.accum_type, self.accl1_type, self.accl2_type = accum_type, accl1_type, accl2_type
        self.scaled_optimizer_state = scaled_optimizer_state

    def _modes(self) -> tuple[Any, ...]:
        types = (self.accum_type, self.accl1_type, self.accl2_type)
        return (*super()._modes(), self.mode, self.weight_decay_mode, types, self.scaled_optimizer_state)

    def rule(self, context: UpdateContext) -> Rule:
        return AdamRule(self, context, self.form())

    def form(self) -> AdamForm:
        """The form of the update rule."""
        return AdamForm(
            corrected=self.mode not in (AdamMode.AdamNoBias, AdamMode.LambNoBias),
            largest=self.mode is AdamMode.AdaMax,
            lamb=self.mode in (AdamMode.Lamb, AdamMode.LambNoBias),
            decoupled_decay=self.weight_decay_mode is WeightDecayMode.Decay,
            scaled_state=self.scaled_optimizer_state,
            gradient_type=state_type(self.accum_type),
            first_type=state_type(self.accl1_type),
            second_type=state_type(self.accl2_type),
        )
