"""Stochastic gradient descent (source: graphcore/popart, willow/src/sgd.cpp and compoundscalarhelper.cpp).

With G' the gradient after unscaling, lr, wd, mm, dm, vs the learning rate, weight decay, momentum,
dampening and velocity scaling:

* without momentum (momentum constant 0): ``w <- w (1 - lr (1-dm) wd) - lr (1-dm) G'``;
* with: ``v <- mm v + (1-dm) vs (G' + wd w)``, ``w <- w - (lr/vs) v``; nesterov steps with ``vs (G' + wd w)
  + mm v``.

The combined form keeps one state ``Accl___w``, which holds the momentum and weight decay
terms of the *next* step already; the separate one keeps ``Accl1___w`` = v. Clipping acts on the gradient as it is
(scaled and not averaged), with momentum on the velocity that enters the step; the velocity that is kept is
not clipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.executable import TensorSpec
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.optimizers.hyperparameters import Hyperparameters, UpdateContext
from podrun.runtime.optimizers.rules import Compound, Rule, WeightUpdate, state_spec, unclipped

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class SgdForm:
    """``combined``: one state that holds velocity and the accumulated gradient. ``gradient_type`` and ``state_type`` of
    the separate form are NumPy's names of types; None: the weight's. ``clips_gradient``: clipping acts on the gradient,
    without its loss scaling and divided by the number of gradients that are added, and not on the step.
    """

    combined: bool = True
    clips_gradient: bool = False
    gradient_type: str | None = None
    state_type: str | None = None


def _one_minus(values: Mapping[str, float]) -> float:
    return 1.0 - values["dampening"]


def _unscale(values: Mapping[str, float], divisor: int) -> float:
    return values["lossScaling"] * divisor


SGD0 = (
    Compound(
        "scaledLearningRate0",
        ("learningRate", "dampening", "lossScaling"),
        lambda v, d: v["learningRate"] * _one_minus(v) / _unscale(v, d),
    ),
    Compound(
        "weightDecayScaleFactor0",
        ("learningRate", "dampening", "weightDecay"),
        lambda v, d: 1.0 - v["learningRate"] * _one_minus(v) * v["weightDecay"],
    ),
)
"""Scalars of an update without momentum."""


def _momentum_compounds(index: int, decay: str) -> tuple[Compound, ...]:
    return (
        Compound(
            f"scaledLearningRate{index}",
            ("learningRate", "velocityScaling"),
            lambda v, d: v["learningRate"] / v["velocityScaling"],
        ),
        Compound(
            decay,
            ("dampening", "weightDecay", "velocityScaling"),
            lambda v, d: _one_minus(v) * v["weightDecay"] * v["velocityScaling"],
        ),
        Compound(f"scaledMomentum{index}", ("momentum",), lambda v, d: v["momentum"]),
        Compound(
            f"dampeningScaleFactor{index}",
            ("dampening", "velocityScaling", "lossScaling"),
            lambda v, d: _one_minus(v) * v["velocityScaling"] / _unscale(v, d),
        ),
    )


SGD1 = _momentum_compounds(1, "scaledWeightDecay1")
SGD2 = _momentum_compounds(2, "weightDecayScaleFactor2")
"""Scalars with momentum: learning rate, weight decay, momentum and gradient factor, in this order."""


class SgdRule(Rule):
    """The three forms of SGD; which one is each weight's own (momentum constant 0, Combined or Separate)."""

    def __init__(self, values: Hyperparameters, context: UpdateContext, options: SgdForm) -> None:
        super().__init__(values, context)
        self.options = options

    def form_key(self) -> tuple[Any, ...]:
        return ("sgd", self.options)

    def form(self, weight: str) -> int:
        """0, 1 or 2: without momentum, combined, separate."""
        momentum = self.values.hyperparameter("momentum", weight)
        if momentum.constant and momentum.value == 0:
            return 0
        return 1 if self.options.combined else 2

    def nesterov(self, weight: str) -> bool:
        """True iff the step looks ahead."""
        momentum = self.values.hyperparameter("momentum", weight)
        looks_ahead = bool(self.values.hyperparameter("nesterov", weight).value)
        return looks_ahead and (momentum.value > 0 or not momentum.constant)

    def operators(self, weight: str) -> tuple[str, ...]:
        return (f"SGD{self.form(weight)}VarUpdate",)

    def variant(self, weight: str) -> tuple[Any, ...]:
        return (self.form(weight), self.nesterov(weight))

    def compounds(self, weight: str) -> Sequence[Compound]:
        return (SGD0, SGD1, SGD2)[self.form(weight)]

    def state(self, weight: TensorSpec) -> dict[str, tuple[TensorSpec, float]]:
        form = self.form(weight.name)
        if form == 0:
            return {}
        if form == 1:
            return {"Accl___": (state_spec("Accl___", weight), 0.0)}
        return {"Accl1___": (state_spec("Accl1___", weight, self.options.state_type), 0.0)}

    def initial_state(self, weight: TensorSpec, value: Any) -> dict[str, Any]:
        if self.form(weight.name) != 1:
            return {}
        decay = np.float32(self.scalar(SGD1[1], weight.name).value)
        return {"Accl___": (value.astype(np.float32) * decay).astype(value.dtype)} if decay else {}

    def gradient_dtype(self, weight: TensorSpec) -> str:
        return weight.dtype if self.options.combined else self.options.gradient_type or weight.dtype

    def update(self, now: WeightUpdate) -> tuple[Any, dict[str, Any]]:
        weight, gradient, clip, state = now.weight, now.gradient, now.clip, now.state
        if self.options.clips_gradient:
            # The bound of the norm is a constant of the program, and so is the loss scaling here.
            divisor = self.values.loss_scaling.value * self.context.divisor
            gradient, clip = clip(gradient / divisor) * divisor, unclipped
        form, looks_ahead = self.form(now.name), self.nesterov(now.name)
        rate, decay, *rest = now.factors.values()
        if form == 0:
            return weight * decay - rate * clip(gradient), {}
        momentum, scale = rest
        if form == 1:
            velocity = state["Accl___"] + scale * gradient
            step = scale * gradient + decay * weight + momentum * velocity if looks_ahead else velocity
            updated = weight - rate * clip(step)
            return updated, {"Accl___": momentum * velocity + decay * updated}
        driven = scale * gradient + decay * weight
        velocity = momentum * state["Accl1___"] + driven
        step = driven + momentum * velocity if looks_ahead else velocity
        return weight - rate * clip(step), {"Accl1___": velocity}
