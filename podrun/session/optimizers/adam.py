"""Adam, AdaMax, LAMB (source: graphcore/popart, willow/src/adam.cpp and patterns/adamdecompose.cpp).

With g the gradient after unscaling (plus ``wd w`` in L2 mode), ``t`` counted before use: ``m <- b1 m +
(1-b1) g``; ``v <- b2 v + (1-b2) g^2`` (AdaMax: ``v <- max(b2 v, |g|)``); corrected ``m / (1 - b1^t)`` and
``v / (1 - b2^t)`` (AdaMax: only m; NoBias modes: neither); ``x = m / (sqrt(v) + eps)`` (AdaMax: no root),
plus ``wd w`` in Decay mode; ``w <- w - lr r x`` with r = 1, or for LAMB ``min(|w|, maxWeightNorm) / |x|``
(1 where a norm is 0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from podrun.core.executable import TensorSpec
from podrun.session.enums import AdamMode, DataType, WeightDecayMode
from podrun.session.optimizers.base import ClipNormSettings, Optimizer, OptimizerValueMap, UpdateContext
from podrun.session.optimizers.rules import Clip, Compound, Rule, chosen_type, plain, state_spec

_LAMB = (AdamMode.Lamb, AdamMode.LambNoBias)
_UNCORRECTED = (AdamMode.AdamNoBias, AdamMode.LambNoBias)


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
        debugContext: Any = "adam",
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
        return AdamRule(self, context)

    def learningRates(self) -> OptimizerValueMap:
        """Learning rates."""
        return self._maps["learningRate"]

    def weightDecays(self) -> OptimizerValueMap:
        """Weight decays."""
        return self._maps["weightDecay"]

    def beta1s(self) -> OptimizerValueMap:
        """Decay rates of the first moment."""
        return self._maps["beta1"]

    def beta2s(self) -> OptimizerValueMap:
        """Decay rates of the second moment (PopART's own accessor gives those of the first)."""
        return self._maps["beta2"]

    def epss(self) -> OptimizerValueMap:
        """Stability terms."""
        return self._maps["eps"]

    def maxWeightNorms(self) -> OptimizerValueMap:
        """Bounds on the norm of weights in LAMB."""
        return self._maps["maxWeightNorm"]


_SCALARS = (
    plain("learningRate", "learningRate"),
    plain("weightDecay", "weightDecay"),
    plain("adamBeta1", "beta1"),
    plain("adamBeta2", "beta2"),
    plain("adamEps", "eps"),
    plain("lossScaling", "lossScaling"),
)


class AdamRule(Rule):
    """See the module docstring."""

    optimizer: Adam

    def __init__(self, optimizer: Adam, context: UpdateContext) -> None:
        super().__init__(optimizer, context)
        self.elementwise = self.elementwise and optimizer.mode not in _LAMB

    def compounds(self, weight: str) -> Sequence[Compound]:
        norm = (plain("maxWeightNorm", "maxWeightNorm"),) if self.optimizer.mode in _LAMB else ()
        return (*_SCALARS, *norm)

    def state(self, weight: TensorSpec) -> dict[str, tuple[TensorSpec, float]]:
        found = {
            "Accl1___": (state_spec("Accl1___", weight, self.optimizer.accl1_type), 0.0),
            "Accl2___": (state_spec("Accl2___", weight, self.optimizer.accl2_type), 0.0),
        }
        if self.optimizer.mode not in _UNCORRECTED:
            found["Step___"] = (TensorSpec("Step___" + weight.name, "float32", ()), 0.0)
        return found

    def gradient_dtype(self, weight: TensorSpec) -> str:
        return chosen_type(weight, self.optimizer.accum_type)

    def update(
        self,
        name: str,
        weight: Any,
        gradient: Any,
        state: Mapping[str, Any],
        factors: Mapping[str, Any],
        clip: Clip,
    ) -> tuple[Any, dict[str, Any]]:
        x, new_state = self.step(weight, gradient, state, factors, clip)
        if self.optimizer.mode in _LAMB:
            x = x * _trust_ratio(weight, x, factors["maxWeightNorm"])
        return weight - factors["learningRate"] * x, new_state

    def step(
        self, weight: Any, gradient: Any, state: Mapping[str, Any], factors: Mapping[str, Any], clip: Clip
    ) -> tuple[Any, dict[str, Any]]:
        """The step before the learning rate and LAMB's ratio, and the new state."""
        import jax.numpy as jnp

        mode = self.optimizer.mode
        decay = factors["weightDecay"]
        b1, b2, loss_scaling = factors["adamBeta1"], factors["adamBeta2"], factors["lossScaling"]
        # A scaled state keeps the loss scaling in g, m and (squared) v; eps and the L2 term follow.
        kept = loss_scaling if self.optimizer.scaled_optimizer_state else jnp.float32(1.0)
        g = gradient * (kept / (loss_scaling * self.context.divisor))
        if self.optimizer.weight_decay_mode is WeightDecayMode.L2Regularization:
            g = g + kept * decay * weight
        g = clip(g)
        m = b1 * state["Accl1___"] + (1 - b1) * g
        if mode is AdamMode.AdaMax:
            v = jnp.maximum(b2 * state["Accl2___"], jnp.abs(g))
        else:
            v = b2 * state["Accl2___"] + (1 - b2) * g * g
        new_state = {"Accl1___": m, "Accl2___": v}
        if mode not in _UNCORRECTED:
            step = state["Step___"] + 1
            new_state["Step___"] = step
            m = m / (1 - b1**step)
            v = v if mode is AdamMode.AdaMax else v / (1 - b2**step)
        x = m / ((v if mode is AdamMode.AdaMax else jnp.sqrt(v)) + kept * factors["adamEps"])
        if self.optimizer.weight_decay_mode is WeightDecayMode.Decay:
            x = x + decay * weight
        return x, new_state


def _trust_ratio(weight: Any, step: Any, bound: Any) -> Any:
    """LAMB's ratio of the weight's norm (at most ``bound``) to the step's; 1 where one of them is 0."""
    import jax.numpy as jnp

    of_weight, of_step = jnp.sqrt(jnp.sum(weight * weight)), jnp.sqrt(jnp.sum(step * step))
    usable = (of_weight > 0) & (of_step > 0) & (bound > 0)
    return jnp.where(usable, jnp.minimum(of_weight, bound) / jnp.where(usable, of_step, 1.0), 1.0)
