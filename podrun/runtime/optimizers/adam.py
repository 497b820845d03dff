"""Adam, AdaMax, LAMB (source: graphcore/popart, willow/src/adam.cpp and patterns/adamdecompose.cpp).

With g the gradient after unscaling (plus ``wd w`` in L2 mode), ``t`` counted before use: ``m <- b1 m +
(1-b1) g``; ``v <- b2 v + (1-b2) g^2`` (AdaMax: ``v <- max(b2 v, |g|)``); corrected ``m / (1 - b1^t)`` and
``v / (1 - b2^t)`` (AdaMax: only m; NoBias modes: neither); ``x = m / (sqrt(v) + eps)`` (AdaMax: no root),
plus ``wd w`` in Decay mode; ``w <- w - lr r x`` with r = 1, or for LAMB ``min(|w|, maxWeightNorm) / |x|``
(1 where a norm is 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from podrun.core.executable import TensorSpec
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.optimizers.hyperparameters import Hyperparameters, UpdateContext
from podrun.runtime.optimizers.rules import Compound, Rule, WeightUpdate, plain, state_spec, unclipped

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, slots=True)
class AdamForm:
    """``corrected``: moments are divided by ``1 - beta^t``. ``largest``: AdaMax. ``lamb``: the step is scaled to the
    weight's norm. ``decoupled_decay``: weight decay acts on the step, and not on the gradient. ``scaled_state``: the
    moments keep the loss scaling. ``clips_gradient``: clipping acts on the gradient
    before weight decay is added. Types are NumPy's names; None: the weight's.
    """

    corrected: bool = True
    largest: bool = False
    lamb: bool = False
    decoupled_decay: bool = False
    scaled_state: bool = False
    clips_gradient: bool = False
    gradient_type: str | None = None
    first_type: str | None = "float32"
    second_type: str | None = "float32"


_SCALARS = (
    plain("learningRate", "learningRate"),
    plain("weightDecay", "weightDecay"),
    plain("adamBeta1", "beta1"),
    plain("adamBeta2", "beta2"),
    plain("adamEps", "eps"),
    plain("lossScaling", "lossScaling"),
)


class AdamRule(Rule):
    """The update rule of Adam and its relatives (see the module docstring)."""

    def __init__(self, values: Hyperparameters, context: UpdateContext, options: AdamForm) -> None:
        super().__init__(values, context)
        self.options = options
        self.elementwise = self.elementwise and not options.lamb

    def form_key(self) -> tuple[Any, ...]:
        return ("adam", self.options)

    def operators(self, weight: str) -> tuple[str, ...]:
        return ("AdamUpdater", "AdamVarUpdate")

    def compounds(self, weight: str) -> Sequence[Compound]:
        norm = (plain("maxWeightNorm", "maxWeightNorm"),) if self.options.lamb else ()
        return (*_SCALARS, *norm)

    def state(self, weight: TensorSpec) -> dict[str, tuple[TensorSpec, float]]:
        starts = {
            "Accl1___": (state_spec("Accl1___", weight, self.options.first_type), 0.0),
            "Accl2___": (state_spec("Accl2___", weight, self.options.second_type), 0.0),
        }
        if self.options.corrected:
            starts["Step___"] = (TensorSpec("Step___" + weight.name, "float32", ()), 0.0)
        return starts

    def gradient_dtype(self, weight: TensorSpec) -> str:
        return self.options.gradient_type or weight.dtype

    def update(self, now: WeightUpdate) -> tuple[Any, dict[str, Any]]:
        if self.options.clips_gradient:
            scale = now.factors["lossScaling"] * self.context.divisor
            now = replace(now, gradient=now.clip(now.gradient / scale) * scale, clip=unclipped)
        x, new_state = self.step(now)
        if self.options.lamb:
            x = x * _trust_ratio(now.weight, x, now.factors["maxWeightNorm"])
        return now.weight - now.factors["learningRate"] * x, new_state

    def step(self, now: WeightUpdate) -> tuple[Any, dict[str, Any]]:
        """The step before the learning rate and LAMB's ratio, and the new state."""
        import jax.numpy as jnp

        largest, state, factors = self.options.largest, now.state, now.factors
        decay = factors["weightDecay"]
        b1, b2, loss_scaling = factors["adamBeta1"], factors["adamBeta2"], factors["lossScaling"]
        # A scaled state keeps the loss scaling in g, m and (squared) v; eps and the L2 term follow.
        kept = loss_scaling if self.options.scaled_state else jnp.float32(1.0)
        g = now.gradient * (kept / (loss_scaling * self.context.divisor))
        if not self.options.decoupled_decay:
            g = g + kept * decay * now.weight
        g = now.clip(g)
        m = b1 * state["Accl1___"] + (1 - b1) * g
        second = b2 * state["Accl2___"]
        v = jnp.maximum(second, jnp.abs(g)) if largest else second + (1 - b2) * g * g
        new_state = {"Accl1___": m, "Accl2___": v}
        if self.options.corrected:
            step = state["Step___"] + 1
            new_state["Step___"] = step
            m = m / (1 - b1**step)
            v = v if largest else v / (1 - b2**step)
        x = m / ((v if largest else jnp.sqrt(v)) + kept * factors["adamEps"])
        if self.options.decoupled_decay:
            x = x + decay * now.weight
        return x, new_state


def _trust_ratio(weight: jax.Array, step: jax.Array, bound: jax.Array) -> Any:
    """LAMB's ratio of the weight's norm (at most ``bound``) to the step's; 1 where one of them is 0."""
    import jax.numpy as jnp

    of_weight, of_step = jnp.sqrt(jnp.sum(weight * weight)), jnp.sqrt(jnp.sum(step * step))
    usable = (of_weight > 0) & (of_step > 0) & (bound > 0)
    return jnp.where(usable, jnp.minimum(of_weight, bound) / jnp.where(usable, of_step, 1.0), 1.0)
