"""Anchors that are worked out on the host from others: accumulators as they stand after each micro-batch, and the
loss scaling that a micro-batch was run with.

The machines fold replicas and micro-batches, so a replica's own accumulator is nowhere in their memory. It is the
running sum (or mean) of the replica's gradients, though, and those can be anchored:

* ``Accum___w``: the sum of ``Gradient___w`` over the batch so far, in the accumulator's type; the mean of them where
  the session asks for a running mean;
* ``Accl___w`` of combined SGD with momentum: what the batch started from, plus the scaled sum so far;
* ``finalLossScale``: the optimizer's loss scaling times the factor of automatic loss scaling; ``lossScaling_FLOAT``
  (or ``FLOAT16``, the loss's type): the optimizer's alone; ``finalInverseLossScale_0``, ...: what undoes it in updates.

So the program gives gradients of all micro-batches, and the return types of PopART are applied here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from podrun.compiler.program import FACTOR, AnchorSpec
from podrun.core.executable import Retrieval, TensorSpec, numpy_dtype
from podrun.session import names
from podrun.session.exceptions import popart_unimplemented
from podrun.session.optimizers.rules import Rule
from podrun.session.optimizers.sgd import SGD1, SgdRule
from podrun.session.program.loss_scaling import FINAL
from podrun.session.program.update_steps import UpdateStep

ACCUM = names.PREFIXES["Accum"]
ACCL = names.PREFIXES["Accl"]
REDUCED = names.PREFIXES["FinalReducedGrad"]
SCALING = names.default_scalar("lossScaling")

Arrays = Mapping[str, np.ndarray]


class Derived(Protocol):
    """An anchor made of others."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The anchors it is made of: program anchors, needed for every micro-batch."""

    def value(self, anchors: Arrays, rule: Rule) -> np.ndarray:
        """``[batches, micro-batches, replicas, *shape]`` from its sources, which have the same leading axes."""


@dataclass(frozen=True, slots=True)
class Accumulator:
    """``Accum___w``."""

    weight: TensorSpec

    @property
    def sources(self) -> tuple[str, ...]:
        return (names.gradient(self.weight.name),)

    def value(self, anchors: Arrays, rule: Rule) -> np.ndarray:
        gradients = anchors[names.gradient(self.weight.name)]
        dtype = numpy_dtype(rule.gradient_dtype(self.weight))
        if not rule.context.running:
            sums: np.ndarray = np.add.accumulate(gradients.astype(dtype), axis=1, dtype=dtype)
            return sums
        means = np.zeros_like(gradients, dtype)
        held = np.zeros_like(means[:, 0])
        for k in range(gradients.shape[1]):
            wide = held.astype(np.float32) * np.float32(k / (k + 1))
            held = (wide + gradients[:, k].astype(np.float32) / np.float32(k + 1)).astype(dtype)
            means[:, k] = held
        return means


@dataclass(frozen=True, slots=True)
class CombinedVelocity:
    """``Accl___w`` of combined SGD.

    With accumulation replicas add their own gradients and reduce afterwards. PopART scales these by the number of
    replicas meanwhile, so that the sum over replicas is that number times the velocity: replica r shows
    ``start + replicas * scale * (its own sum so far)``, and the mean over replicas is the velocity. Without
    accumulation every micro-batch's gradient is reduced first, and all replicas show the velocity itself.
    """

    weight: TensorSpec
    automatic: bool
    replicas: int = 1
    accumulation: int = 1

    @property
    def gradient(self) -> str:
        """The anchor whose sum is added."""
        reduced = self.replicas > 1 and self.accumulation == 1
        return (REDUCED if reduced else names.PREFIXES["Gradient"]) + self.weight.name

    @property
    def name(self) -> str:
        """Its own name, under which the program gives what the batch started from."""
        return ACCL + self.weight.name

    @property
    def sources(self) -> tuple[str, ...]:
        needed = (self.gradient, self.name)
        return (*needed, FACTOR) if self.automatic else needed

    def value(self, anchors: Arrays, rule: Rule) -> np.ndarray:
        gradients = anchors[self.gradient].astype(np.float32)
        scale: np.ndarray = np.asarray(np.float32(rule.scalar(SGD1[3], self.weight.name).value))
        if self.automatic:
            scale = (scale / anchors[FACTOR]).reshape(*gradients.shape[:3], *[1] * (gradients.ndim - 3))
        total = np.add.accumulate(gradients, axis=1, dtype=np.float32)
        if self.accumulation > 1:
            # A running mean over replicas and micro-batches comes averaged, a sum does not.
            total *= np.float32(1 / self.accumulation if rule.context.running else self.replicas)
        start = anchors[self.name]
        value: np.ndarray = (start.astype(np.float32) + scale * total).astype(start.dtype)
        return value


@dataclass(frozen=True, slots=True)
class FinalLossScale:
    """``finalLossScale``."""

    @property
    def sources(self) -> tuple[str, ...]:
        return (SCALING, FACTOR)

    def value(self, anchors: Arrays, rule: Rule) -> np.ndarray:
        return anchors[SCALING] * anchors[FACTOR]


@dataclass(frozen=True, slots=True)
class GivenLossScale:
    """``lossScaling_FLOAT``: the optimizer's loss scaling in the loss's type."""

    dtype: str

    @property
    def sources(self) -> tuple[str, ...]:
        return (SCALING,)

    def value(self, anchors: Arrays, rule: Rule) -> np.ndarray:
        given: np.ndarray = anchors[SCALING].astype(self.dtype)
        return given


@dataclass(frozen=True, slots=True)
class InverseLossScale:
    """``finalInverseLossScale_0``: a streamed scalar that has the loss scaling in its denominator (None: 1 over the
    loss scaling), divided by the factor of automatic loss scaling."""

    scalar: str | None

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.scalar or SCALING, FACTOR)

    def value(self, anchors: Arrays, rule: Rule) -> np.ndarray:
        if self.scalar is not None:
            return anchors[self.scalar] / anchors[FACTOR]
        whole: np.ndarray = anchors[SCALING] * anchors[FACTOR] * np.float32(rule.context.divisor)
        return np.float32(1) / whole


def scaling_anchors(rule: Rule | None, weights: Iterable[str], loss_type: str) -> dict[str, Derived]:
    """The loss scaling's anchors under the names PopART has for them, of a session whose loss scaling is streamed.

    Source: PopART's automatic loss scaling transform (graphcore/popart), which numbers distinct inverse scales.
    """
    if rule is None or rule.optimizer.lossScaling.isConst():
        return {}
    prefix = names.PREFIXES["LossScaling"]
    found: dict[str, Derived] = {f"{prefix}FLOAT": GivenLossScale("float32")}
    if loss_type == "float16":
        found[f"{prefix}FLOAT16"] = GivenLossScale("float16")
    if rule.context.automatic:
        found[FINAL] = FinalLossScale()
        scalars = dict.fromkeys(name for weight in weights for name in rule.inverse_scales(weight))
        found |= {f"finalInverseLossScale_{i}": InverseLossScale(name) for i, name in enumerate(scalars)}
    return found


def derived_anchors(
    anchors: Iterable[str],
    weights: Mapping[str, TensorSpec],
    rule: Rule | None,
    grouped: Container[str] = (),
    loss_type: str = "float32",
) -> dict[str, Derived]:
    """Those of ``anchors`` that are worked out on the host. ``grouped``: weights that groups of replicas train apart.

    popart_exception for one that cannot be yet.
    """
    scalings = scaling_anchors(rule, weights, loss_type)
    found: dict[str, Derived] = {}
    for anchor in anchors:
        if rule is None:
            break
        if anchor in scalings:
            found[anchor] = scalings[anchor]
        if anchor.startswith(ACCUM) and anchor.removeprefix(ACCUM) in weights:
            found[anchor] = Accumulator(weights[anchor.removeprefix(ACCUM)])
        weight = anchor.removeprefix(ACCL)
        if (
            anchor.startswith(ACCL)
            and weight in weights
            and isinstance(rule, SgdRule)
            and rule.form(weight) == 1
        ):
            if weight in grouped:
                raise popart_unimplemented(
                    f"Anchor {anchor!r}: the velocity of combined SGD of a weight that groups of replicas train apart "
                    "cannot be anchored yet.",
                    hint="Use SGDAccumulatorAndMomentum.Separate and anchor Accl1___, or readWeights between runs.",
                )
            context = rule.context
            found[anchor] = CombinedVelocity(
                weights[weight], context.automatic, context.replicas, context.accumulation
            )
    return found


def program_anchors(
    wanted: Mapping[str, AnchorSpec], derived: Mapping[str, Derived], hidden: Iterable[str] = ()
) -> tuple[AnchorSpec, ...]:
    """What the program hands over: what is wanted, and for every micro-batch sources of derived anchors and what is
    only looked at (``hidden``)."""
    specs: dict[str, AnchorSpec] = {}
    for name, spec in wanted.items():
        if name not in derived:
            alike = specs.setdefault(spec.name, spec) == spec
            specs[spec.name] = spec if alike else AnchorSpec(spec.name, Retrieval.ALL)
    for item in derived.values():
        late = item.late if isinstance(item, UpdateStep) else ()
        specs |= {
            source: AnchorSpec(source, Retrieval.FINAL if source in late else Retrieval.ALL)
            for source in item.sources
        }
    specs |= {name: AnchorSpec(name, Retrieval.ALL) for name in hidden}
    return tuple(specs[name] for name in sorted(specs))


def returned(value: np.ndarray, spec: AnchorSpec) -> np.ndarray:
    """What a return type gives of values ``[batches, micro-batches, replicas, *shape]``."""
    flat: np.ndarray = value.reshape(-1, *value.shape[2:])
    if spec.retrieval is Retrieval.ALL:
        return value
    if spec.retrieval is Retrieval.EVERY_N:
        return flat[spec.period - 1 :: spec.period]
    chosen: np.ndarray = (
        flat if spec.retrieval is Retrieval.FINAL else np.add.accumulate(flat, axis=0, dtype=flat.dtype)
    )
    return np.asarray(chosen[-1])
