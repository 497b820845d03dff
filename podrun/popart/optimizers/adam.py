"""PopART's Adam, with AdaMax and LAMB; the formulas are `podrun.runtime.optimizers.adam`'s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from podrun.popart.enums import AdamMode, DataType, WeightDecayMode
from podrun.popart.optimizers.base import ClipNormSettings, Optimizer, OptimizerValueMap, state_type
from podrun.runtime.optimizers.adam import AdamForm, AdamRule
from podrun.runtime.optimizers.hyperparameters import UpdateContext
from podrun.runtime.optimizers.rules import Rule


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
    NOT_NEGATIVE = ("learningRate", "weightDecay", "beta1", "beta2", "maxWeightNorm")
    POSITIVE = ("eps",)
    ALIASES = {"maxWeightNorm": "maxWeightNorm"}  # noqa: RUF012

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

    def learningRates(self) -> OptimizerValueMap:
        """The learning rates of all weights."""
        return self._maps["learningRate"]

    def weightDecays(self) -> OptimizerValueMap:
        """The weight decays of all weights."""
        return self._maps["weightDecay"]

    def beta1s(self) -> OptimizerValueMap:
        """Decay rates of the first moment."""
        return self._maps["beta1"]

    def beta2s(self) -> OptimizerValueMap:
        """Decay rates of the second moment (PopART's own accessor gives those of the first)."""
        return self._maps["beta2"]

    def epss(self) -> OptimizerValueMap:
        """The ``eps`` (stability term) of all weights."""
        return self._maps["eps"]

    def maxWeightNorms(self) -> OptimizerValueMap:
        """Bounds on the norm of weights in LAMB."""
        return self._maps["maxWeightNorm"]
