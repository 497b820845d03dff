"""SGD and ConstSGD (source: graphcore/popart, willow/src/sgd.cpp and compoundscalarhelper.cpp).

With G' the gradient after unscaling, lr, wd, mm, dm, vs the learning rate, weight decay, momentum,
dampening and velocity scaling:

* without momentum (momentum constant 0): ``w <- w (1 - lr (1-dm) wd) - lr (1-dm) G'``;
* with: ``v <- mm v + (1-dm) vs (G' + wd w)``, ``w <- w - (lr/vs) v``; nesterov steps with ``vs (G' + wd w)
  + mm v``.

`SGDAccumulatorAndMomentum.Combined` keeps one state ``Accl___w``, which holds the momentum and weight decay
terms of the *next* step already; `Separate` keeps ``Accl1___w`` = v. Clipping acts on the gradient as it is
(scaled and not averaged), with momentum on the velocity that enters the step; the velocity that is kept is
not clipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podrun.core.executable import TensorSpec
from podrun.session.enums import DataType, SGDAccumulatorAndMomentum
from podrun.session.exceptions import popart_exception
from podrun.session.optimizers.base import ClipNormSettings, Optimizer, OptimizerValueMap, UpdateContext
from podrun.session.optimizers.rules import Clip, Compound, Rule, chosen_type, state_spec


class SGD(Optimizer):
    """Stochastic gradient descent: ``SGD({"defaultLearningRate": (0.1, False), "defaultMomentum": (0.9,
    True)})``.
    """

    NAME = "SGD"
    DEFAULTS = {  # noqa: RUF012 (read only; typed as a Mapping in the base)
        "learningRate": 0.1,
        "weightDecay": 0.0,
        "momentum": 0.0,
        "dampening": 0.0,
        "velocityScaling": 1.0,
        "nesterov": 0.0,
    }
    NOT_NEGATIVE = ("learningRate", "weightDecay", "momentum", "dampening")
    POSITIVE = ("velocityScaling",)
    GLOBAL = ("nesterov",)

    def __init__(
        self,
        pyd: Mapping[str, Any],
        clip_norm_settings: Sequence[ClipNormSettings] = (),
        accumulatorAndMomentum: SGDAccumulatorAndMomentum = SGDAccumulatorAndMomentum.Combined,
        accumType: DataType = DataType.UNDEFINED,
        accl1Type: DataType = DataType.UNDEFINED,
        debugContext: Any = "sgd",
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
        return SgdRule(self, context)

    def learningRates(self) -> OptimizerValueMap:
        """Learning rates."""
        return self._maps["learningRate"]

    def weightDecays(self) -> OptimizerValueMap:
        """Weight decays."""
        return self._maps["weightDecay"]

    def momentums(self) -> OptimizerValueMap:
        """Momenta."""
        return self._maps["momentum"]

    def dampenings(self) -> OptimizerValueMap:
        """Dampenings."""
        return self._maps["dampening"]

    def velocityScalings(self) -> OptimizerValueMap:
        """Velocity scalings."""
        return self._maps["velocityScaling"]

    def nesterov(self) -> OptimizerValueMap:
        """Whether nesterov momentum is on (not 0)."""
        return self._maps["nesterov"]


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

    optimizer: SGD

    def form(self, weight: str) -> int:
        """0, 1 or 2: without momentum, combined, separate."""
        momentum = self.optimizer.value("momentum", weight)
        if momentum.isConst() and momentum.val() == 0:
            return 0
        return 1 if self.optimizer.accumulatorAndMomentum is SGDAccumulatorAndMomentum.Combined else 2

    def nesterov(self, weight: str) -> bool:
        """True iff the step looks ahead."""
        momentum = self.optimizer.value("momentum", weight)
        return bool(self.optimizer.value("nesterov", weight).val()) and (
            momentum.val() > 0 or not momentum.isConst()
        )

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
        return {"Accl1___": (state_spec("Accl1___", weight, self.optimizer.accl1Type), 0.0)}

    def initial_state(self, weight: TensorSpec, value: Any) -> dict[str, Any]:
        if self.form(weight.name) != 1:
            return {}
        decay = np.float32(self.scalar(SGD1[1], weight.name).value)
        return {"Accl___": (value.astype(np.float32) * decay).astype(value.dtype)} if decay else {}

    def gradient_dtype(self, weight: TensorSpec) -> str:
        separate = self.optimizer.accumulatorAndMomentum is SGDAccumulatorAndMomentum.Separate
        return chosen_type(weight, self.optimizer.accumType) if separate else weight.dtype

    def update(
        self,
        name: str,
        weight: Any,
        gradient: Any,
        state: Mapping[str, Any],
        factors: Mapping[str, Any],
        clip: Clip,
    ) -> tuple[Any, dict[str, Any]]:
        form = self.form(name)
        rate, decay, *rest = factors.values()
        if form == 0:
            return weight * decay - rate * clip(gradient), {}
        momentum, scale = rest
        if form == 1:
            velocity = state["Accl___"] + scale * gradient
            step = (
                scale * gradient + decay * weight + momentum * velocity if self.nesterov(name) else velocity
            )
            updated = weight - rate * clip(step)
            return updated, {"Accl___": momentum * velocity + decay * updated}
        driven = scale * gradient + decay * weight
        velocity = momentum * state["Accl1___"] + driven
        step = driven + momentum * velocity if self.nesterov(name) else velocity
        return weight - rate * clip(step), {"Accl1___": velocity}
