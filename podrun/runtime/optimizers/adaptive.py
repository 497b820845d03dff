"""AdaGrad, RMSProp, centred RMSProp and AdaDelta (source: graphcore/popart, willow/src/adaptive.cpp).

With g the gradient after unscaling (plus ``wd w`` in L2 mode): AdaGrad ``v1 += g^2``; RMSProp ``v1 = a v1 +
(1-a) g^2``; centred also ``v2 = a v2 + (1-a) g`` and the denominator uses ``v1 - v2^2``; AdaDelta steps ``x
= g sqrt(v2 + eps) / sqrt(v1 + eps)``, then ``v2 = a v2 + (1-a) x^2``. The others step ``x = g / (sqrt(v) +
eps)``. Momentum: ``v3 = m v3 + x`` and the step is v3. ``w <- w - lr (step + wd w in Decay mode)``. The
TensorFlow variant has eps under the root, v1 from ones, and the learning rate inside v3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from podrun.core.executable import TensorSpec
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.optimizers.hyperparameters import Hyperparameters, UpdateContext
from podrun.runtime.optimizers.rules import Compound, Rule, WeightUpdate, plain, state_spec

if TYPE_CHECKING:
    import jax


class AdaptiveKind(Enum):
    """The members of the family."""

    ADAGRAD = "adagrad"
    RMSPROP = "rmsprop"
    CENTERED_RMSPROP = "centered rmsprop"
    ADADELTA = "adadelta"


_TWO = (AdaptiveKind.CENTERED_RMSPROP, AdaptiveKind.ADADELTA)


@dataclass(frozen=True, slots=True)
class AdaptiveForm:
    """``decoupled_decay``: weight decay acts on the step, and not on the gradient. ``tensorflow``: TensorFlow's form.
    Types are NumPy's names; None: the weight's.
    """

    kind: AdaptiveKind = AdaptiveKind.RMSPROP
    decoupled_decay: bool = True
    tensorflow: bool = False
    gradient_type: str | None = None
    first_type: str | None = "float32"
    second_type: str | None = "float32"
    third_type: str | None = None


_SCALARS = (
    plain("learningRate", "learningRate"),
    plain("weightDecay", "weightDecay"),
    plain("adaptiveAlpha", "alpha"),
    plain("adaptiveMomentum", "momentum"),
    plain("adaptiveEps", "eps"),
    plain("lossScaling", "lossScaling"),
)


class AdaptiveRule(Rule):
    """The update rule of AdaGrad, RMSProp and AdaDelta (see the module docstring)."""

    def __init__(self, values: Hyperparameters, context: UpdateContext, options: AdaptiveForm) -> None:
        super().__init__(values, context)
        self.options = options

    def form_key(self) -> tuple[Any, ...]:
        return ("adaptive", self.options)

    def compounds(self, weight: str) -> Sequence[Compound]:
        return _SCALARS

    def momentum(self, weight: str) -> bool:
        """True iff the step goes through v3."""
        value = self.values.hyperparameter("momentum", weight)
        return not value.constant or value.value > 0

    def variant(self, weight: str) -> tuple[Any, ...]:
        return (self.momentum(weight),)

    def state(self, weight: TensorSpec) -> dict[str, tuple[TensorSpec, float]]:
        options = self.options
        start = 1.0 if options.tensorflow else 0.0
        starts = {"Accl1___": (state_spec("Accl1___", weight, options.first_type), start)}
        if options.kind in _TWO:
            starts["Accl2___"] = (state_spec("Accl2___", weight, options.second_type), 0.0)
        if self.momentum(weight.name):
            starts["Accl3___"] = (state_spec("Accl3___", weight, options.third_type), 0.0)
        return starts

    def gradient_dtype(self, weight: TensorSpec) -> str:
        return self.options.gradient_type or weight.dtype

    def update(self, now: WeightUpdate) -> tuple[Any, dict[str, Any]]:
        state, factors = now.state, now.factors
        tf = self.options.tensorflow
        rate: jax.Array | float = factors["learningRate"]
        decay, alpha = factors["weightDecay"], factors["adaptiveAlpha"]
        g = now.gradient / (factors["lossScaling"] * self.context.divisor)
        if not self.options.decoupled_decay:
            g = g + decay * now.weight
        x, new_state = self._step(g, state, alpha, factors["adaptiveEps"])
        if self.momentum(now.name):
            x = factors["adaptiveMomentum"] * state["Accl3___"] + (rate * x if tf else x)
            new_state["Accl3___"] = x
            rate = rate if not tf else 1.0
        if self.options.decoupled_decay:
            # Inside v3 the TensorFlow variant already holds the learning rate; the decay term still needs it.
            x = x + (factors["learningRate"] if tf and self.momentum(now.name) else 1.0) * decay * now.weight
        return now.weight - rate * x, new_state

    def _step(
        self, g: jax.Array, state: Mapping[str, Any], alpha: Any, eps: Any
    ) -> tuple[Any, dict[str, Any]]:
        """The step before momentum, and the new moments."""
        import jax.numpy as jnp

        kind = self.options.kind
        if kind is AdaptiveKind.ADAGRAD:
            v1 = state["Accl1___"] + g * g
        else:
            v1 = alpha * state["Accl1___"] + (1 - alpha) * g * g
        if kind is AdaptiveKind.ADADELTA:
            x = g * jnp.sqrt(state["Accl2___"] + eps) / jnp.sqrt(v1 + eps)
            return x, {"Accl1___": v1, "Accl2___": alpha * state["Accl2___"] + (1 - alpha) * x * x}
        new_state, v = {"Accl1___": v1}, v1
        if kind is AdaptiveKind.CENTERED_RMSPROP:
            new_state["Accl2___"] = alpha * state["Accl2___"] + (1 - alpha) * g
            v = v1 - new_state["Accl2___"] * new_state["Accl2___"]
        root = jnp.sqrt(v + eps) if self.options.tensorflow else jnp.sqrt(v) + eps
        return g / root, new_state
