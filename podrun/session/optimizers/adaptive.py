"""AdaGrad, RMSProp, centred RMSProp and AdaDelta (source: graphcore/popart, willow/src/adaptive.cpp).

With g the gradient after unscaling (plus ``wd w`` in L2 mode): AdaGrad ``v1 += g^2``; RMSProp ``v1 = a v1 +
(1-a) g^2``; centred also ``v2 = a v2 + (1-a) g`` and the denominator uses ``v1 - v2^2``; AdaDelta steps ``x
= g sqrt(v2 + eps) / sqrt(v1 + eps)``, then ``v2 = a v2 + (1-a) x^2``. The others step ``x = g / (sqrt(v) +
eps)``. Momentum: ``v3 = m v3 + x`` and the step is v3. ``w <- w - lr (step + wd w in Decay mode)``. The
TensorFlow variant has eps under the root, v1 from ones, and the learning rate inside v3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from podrun.core.executable import TensorSpec
from podrun.session.enums import AdaptiveMode, DataType, WeightDecayMode
from podrun.session.exceptions import popart_exception
from podrun.session.optimizers.base import Optimizer, OptimizerValueMap, UpdateContext
from podrun.session.optimizers.rules import Clip, Compound, Rule, chosen_type, plain, state_spec

_RMS = (AdaptiveMode.RMSProp, AdaptiveMode.CenteredRMSProp)
_TWO = (AdaptiveMode.CenteredRMSProp, AdaptiveMode.AdaDelta)


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
    NOT_NEGATIVE = ("learningRate", "weightDecay", "alpha", "momentum")
    POSITIVE = ("eps",)

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
        debugContext: Any = "adaptive",
    ) -> None:
        super().__init__(values)
        if rmsprop_tf_variant and mode not in _RMS:
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
        return AdaptiveRule(self, context)

    def learningRates(self) -> OptimizerValueMap:
        """Learning rates."""
        return self._maps["learningRate"]

    def weightDecays(self) -> OptimizerValueMap:
        """Weight decays."""
        return self._maps["weightDecay"]

    def alphas(self) -> OptimizerValueMap:
        """Smoothing constants."""
        return self._maps["alpha"]

    def momentums(self) -> OptimizerValueMap:
        """Momenta."""
        return self._maps["momentum"]

    def epss(self) -> OptimizerValueMap:
        """Stability terms."""
        return self._maps["eps"]


_SCALARS = (
    plain("learningRate", "learningRate"),
    plain("weightDecay", "weightDecay"),
    plain("adaptiveAlpha", "alpha"),
    plain("adaptiveMomentum", "momentum"),
    plain("adaptiveEps", "eps"),
    plain("lossScaling", "lossScaling"),
)


class AdaptiveRule(Rule):
    """See the module docstring."""

    optimizer: Adaptive

    def compounds(self, weight: str) -> Sequence[Compound]:
        return _SCALARS

    def momentum(self, weight: str) -> bool:
        """True iff the step goes through v3."""
        value = self.optimizer.value("momentum", weight)
        return not value.isConst() or value.val() > 0

    def variant(self, weight: str) -> tuple[Any, ...]:
        return (self.momentum(weight),)

    def state(self, weight: TensorSpec) -> dict[str, tuple[TensorSpec, float]]:
        optimizer = self.optimizer
        start = 1.0 if optimizer.rmsprop_tf_variant else 0.0
        found = {"Accl1___": (state_spec("Accl1___", weight, optimizer.accl1_type), start)}
        if optimizer.mode in _TWO:
            found["Accl2___"] = (state_spec("Accl2___", weight, optimizer.accl2_type), 0.0)
        if self.momentum(weight.name):
            found["Accl3___"] = (state_spec("Accl3___", weight, optimizer.accl3_type), 0.0)
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
        tf = self.optimizer.rmsprop_tf_variant
        rate, decay, alpha = factors["learningRate"], factors["weightDecay"], factors["adaptiveAlpha"]
        g = gradient / (factors["lossScaling"] * self.context.divisor)
        if self.optimizer.weight_decay_mode is WeightDecayMode.L2Regularization:
            g = g + decay * weight
        x, new_state = self._step(g, state, alpha, factors["adaptiveEps"])
        if self.momentum(name):
            x = factors["adaptiveMomentum"] * state["Accl3___"] + (rate * x if tf else x)
            new_state["Accl3___"] = x
            rate = rate if not tf else 1.0
        if self.optimizer.weight_decay_mode is WeightDecayMode.Decay:
            # Inside v3 the TensorFlow variant already holds the learning rate; the decay term still needs it.
            x = x + (factors["learningRate"] if tf and self.momentum(name) else 1.0) * decay * weight
        return weight - rate * x, new_state

    def _step(self, g: Any, state: Mapping[str, Any], alpha: Any, eps: Any) -> tuple[Any, dict[str, Any]]:
        """The step before momentum, and the new moments."""
        import jax.numpy as jnp

        mode = self.optimizer.mode
        if mode is AdaptiveMode.AdaGrad:
            v1 = state["Accl1___"] + g * g
        else:
            v1 = alpha * state["Accl1___"] + (1 - alpha) * g * g
        if mode is AdaptiveMode.AdaDelta:
            x = g * jnp.sqrt(state["Accl2___"] + eps) / jnp.sqrt(v1 + eps)
            return x, {"Accl1___": v1, "Accl2___": alpha * state["Accl2___"] + (1 - alpha) * x * x}
        new_state, v = {"Accl1___": v1}, v1
        if mode is AdaptiveMode.CenteredRMSProp:
            new_state["Accl2___"] = alpha * state["Accl2___"] + (1 - alpha) * g
            v = v1 - new_state["Accl2___"] * new_state["Accl2___"]
        root = jnp.sqrt(v + eps) if self.optimizer.rmsprop_tf_variant else jnp.sqrt(v) + eps
        return g / root, new_state
