"""Anchors that the host computes from others: accumulators after each micro-batch, loss scalings, steps of an update.

The machines fold replicas and micro-batches, so a replica's own accumulator is nowhere in their memory. It is the
running sum (or mean) of the replica's gradients, though, and those can be anchored:

* ``Accum___w``: the sum of ``Gradient___w`` over the batch so far, in the accumulator's type; the mean of them where
  the session asks for a running mean;
* ``Accl___w`` of combined SGD with momentum: what the batch started from, plus the scaled sum so far;
* ``finalLossScale``: the optimizer's loss scaling times the factor of automatic loss scaling; ``lossScaling_FLOAT``
  (or ``FLOAT16``, the loss's type): the optimizer's alone; ``finalInverseLossScale_0``, ...: what undoes it in updates.

So the program gives gradients of all micro-batches, and the return types of PopART are applied here.

**Inside the update of the Adam family**: ``AdamUpdater___w`` is the step before the learning rate (LAMB: before the
trust ratio too), ``LambR1Sq___w`` the squared norm of the weight and ``LambR2Sq___w`` that of the step. The machines
update slices of many weights at once, so a weight's own step is nowhere in their memory. It is made again here with the
rule's own formula from what the update sees: the weight, the reduced gradient, state and scalars, and the norms where
gradients are clipped. Source: PopART's decomposition of Adam (graphcore/popart,
willow/src/patterns/adamdecompose.cpp).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from podrun.compiler.program import FACTOR, RNG, AnchorSpec
from podrun.core.errors import InternalError, UnimplementedError, UsageError
from podrun.core.executable import Retrieval, TensorSpec, numpy_dtype
from podrun.core.names import NORM_ANCHOR
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.loss_scaling import FINAL
from podrun.runtime.optimizers.adam import AdamRule
from podrun.runtime.optimizers.rules import Rule, WeightUpdate
from podrun.runtime.optimizers.sgd import SGD1, SgdRule
from podrun.runtime.settings import RunPlan, RunSettings
from podrun.runtime.tensor_names import PREFIXES, default_scalar, gradient

if TYPE_CHECKING:
    import jax

UPDATER, WEIGHT_NORM, STEP_NORM = (PREFIXES[n] for n in ("AdamUpdater", "LambR1Sq", "LambR2Sq"))
_REDUCED = PREFIXES["FinalReducedGrad"]


def update_specs(rule: Rule | None, weight: TensorSpec) -> dict[str, TensorSpec]:
    """The anchors of a weight's update, by name."""
    if not isinstance(rule, AdamRule):
        return {}
    decay = rule.values.hyperparameter("weightDecay", weight.name)
    decays = rule.options.decoupled_decay and not (decay.constant and decay.value == 0)
    first = rule.state(weight)["Accl1___"][0]
    specs = {UPDATER: TensorSpec(UPDATER + weight.name, (weight if decays else first).dtype, weight.shape)}
    if rule.options.lamb:
        specs |= {
            prefix: TensorSpec(prefix + weight.name, "float32", ()) for prefix in (WEIGHT_NORM, STEP_NORM)
        }
    return {spec.name: spec for spec in specs.values()}


@dataclass(frozen=True, slots=True)
class UpdateStep:
    """One anchor of an update. ``sources``: all inputs of the update; ``clipped_by``: number and bound of the clipping
    group of the weight; ``late``: sources that are known once a batch.
    """

    spec: TensorSpec
    weight: str
    sources: tuple[str, ...]
    states: Mapping[str, str]
    clipped_by: tuple[int, float] | None
    late: tuple[str, ...] = ()

    def value(self, anchors: Mapping[str, np.ndarray], rule: Rule) -> np.ndarray:
        """``[batches, 1, replicas, *shape]``; with accumulation that of the last batch alone."""
        if not isinstance(rule, AdamRule):
            raise InternalError(f"{self.spec.name}: only rules of Adam's family have updates to return")
        seen = {name: self._updates(anchors[name], name in self.late) for name in self.sources}
        count, replicas = seen[self.weight].shape[:2]
        values = [
            [self._of({n: v[b, r] for n, v in seen.items()}, rule) for r in range(replicas)]
            for b in range(count)
        ]
        return np.asarray(values, self.spec.dtype)[:, None]

    def _updates(self, value: np.ndarray, late: bool) -> np.ndarray:
        """``[batches, replicas, *shape]``: the inputs of the update of each batch."""
        if late:
            return value[None]
        return value[-1:, -1] if self.late else value[:, -1]

    def _of(self, seen: Mapping[str, np.ndarray], rule: AdamRule) -> Any:
        def clip(value: Any) -> Any:
            if self.clipped_by is None:
                return value
            number, bound = self.clipped_by
            return value * np.float32(bound) / np.maximum(seen[f"{NORM_ANCHOR}{number}"], np.float32(bound))

        weight = seen[self.weight].astype(np.float32)
        if self.spec.name.startswith(WEIGHT_NORM):
            return np.sum(weight * weight, dtype=np.float32)
        state = {prefix: seen[name].astype(np.float32) for prefix, name in self.states.items()}
        gradient = seen[_REDUCED + self.weight].astype(np.float32)
        arrays = cast("tuple[jax.Array, jax.Array, dict[str, jax.Array]]", (weight, gradient, state))
        step, _ = rule.step(WeightUpdate(*arrays, rule.factors(self.weight, seen), clip))
        step = np.asarray(step)
        return np.sum(step * step, dtype=np.float32) if self.spec.name.startswith(STEP_NORM) else step


def update_anchors(
    plan: RunPlan, weights: Mapping[str, TensorSpec], rule: Rule | None, settings: RunSettings
) -> dict[str, UpdateStep]:
    """The anchors of updates among a session's anchors.

    UsageError for an anchor that has several values in a step of which only the last is known: with gradient
    accumulation every type but Final; without, if batches overlap in a pipeline.
    """
    steps: dict[str, UpdateStep] = {}
    if not isinstance(rule, AdamRule):
        return steps
    for weight in weights.values():
        for name, spec in update_specs(rule, weight).items():
            if name not in plan.returned:
                continue
            accumulates = settings.micro_batches > 1
            if settings.overlaps_batches or (
                accumulates and plan.returned[name].retrieval is not Retrieval.FINAL
            ):
                raise UsageError(
                    f"Anchor {name!r} changes once a batch: with gradient accumulation only its last value can be "
                    "returned, and none where the batches of a step overlap in a pipeline.",
                    hint=settings.words.last_value_only,
                )
            steps[name] = _step(spec, weight, rule, accumulates)
    return steps


def _step(spec: TensorSpec, weight: TensorSpec, rule: AdamRule, accumulates: bool) -> UpdateStep:
    states = {prefix: state.name for prefix, (state, _) in rule.state(weight).items()}
    once = [_REDUCED + weight.name]
    group = _clipping_group(weight.name, rule)
    if group is not None:
        once.append(f"{NORM_ANCHOR}{group[0]}")
    scalars = sorted(rule.scalars(weight.name).keys() - {RNG})
    sources: Sequence[str] = [weight.name, *states.values(), *scalars, *once]
    return UpdateStep(spec, weight.name, tuple(sources), states, group, tuple(once) if accumulates else ())


def _clipping_group(weight: str, rule: AdamRule) -> tuple[int, float] | None:
    for number, group in enumerate(rule.values.clipping):
        if group.weights is None or weight in group.weights:
            return number, group.max_norm
    return None


ACCUM = PREFIXES["Accum"]
ACCL = PREFIXES["Accl"]
REDUCED = PREFIXES["FinalReducedGrad"]
SCALING = default_scalar("lossScaling")

Arrays = Mapping[str, np.ndarray]


class Derived(Protocol):
    """An anchor that is computed from other anchors."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The anchors that it is computed from: program anchors, needed for every micro-batch."""

    def value(self, anchors: Arrays, rule: Rule) -> np.ndarray:
        """``[batches, micro-batches, replicas, *shape]`` from its sources, which have the same leading axes."""


@dataclass(frozen=True, slots=True)
class Accumulator:
    """The anchor ``Accum___<weight>``: gradients added up over micro-batches."""

    weight: TensorSpec

    @property
    def sources(self) -> tuple[str, ...]:
        return (gradient(self.weight.name),)

    def value(self, anchors: Arrays, rule: Rule) -> np.ndarray:
        gradients = anchors[gradient(self.weight.name)]
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
        return (REDUCED if reduced else PREFIXES["Gradient"]) + self.weight.name

    @property
    def name(self) -> str:
        """The name under which the program returns the value at the start of the batch."""
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
            # A running mean over replicas and micro-batches arrives averaged; a sum does not.
            total *= np.float32(1 / self.accumulation if rule.context.running else self.replicas)
        start = anchors[self.name]
        value: np.ndarray = (start.astype(np.float32) + scale * total).astype(start.dtype)
        return value


@dataclass(frozen=True, slots=True)
class FinalLossScale:
    """The anchor ``finalLossScale``: the loss scale of the batch."""

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
        scaling: np.ndarray = anchors[SCALING].astype(self.dtype)
        return scaling


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
    if rule is None or rule.values.loss_scaling.constant:
        return {}
    prefix = PREFIXES["LossScaling"]
    anchors: dict[str, Derived] = {f"{prefix}FLOAT": GivenLossScale("float32")}
    if loss_type == "float16":
        anchors[f"{prefix}FLOAT16"] = GivenLossScale("float16")
    if rule.context.automatic:
        anchors[FINAL] = FinalLossScale()
        scalars = dict.fromkeys(name for weight in weights for name in rule.inverse_scales(weight))
        anchors |= {f"finalInverseLossScale_{i}": InverseLossScale(name) for i, name in enumerate(scalars)}
    return anchors


def derived_anchors(
    anchors: Iterable[str],
    weights: Mapping[str, TensorSpec],
    rule: Rule | None,
    grouped: Container[str] = (),
    loss_type: str = "float32",
) -> dict[str, Derived]:
    """The anchors that the host computes. ``grouped``: weights that groups of replicas train apart.

    UsageError for anchors that podrun cannot compute yet.
    """
    scalings = scaling_anchors(rule, weights, loss_type)
    derived: dict[str, Derived] = {}
    for anchor in anchors:
        if rule is None:
            break
        if anchor in scalings:
            derived[anchor] = scalings[anchor]
        if anchor.startswith(ACCUM) and anchor.removeprefix(ACCUM) in weights:
            derived[anchor] = Accumulator(weights[anchor.removeprefix(ACCUM)])
        weight = anchor.removeprefix(ACCL)
        if (
            anchor.startswith(ACCL)
            and weight in weights
            and isinstance(rule, SgdRule)
            and rule.form(weight) == 1
        ):
            if weight in grouped:
                raise UnimplementedError(
                    f"Anchor {anchor!r}: the velocity of combined SGD of a weight that groups of replicas train apart "
                    "cannot be anchored yet.",
                    hint="Use SGDAccumulatorAndMomentum.Separate and anchor Accl1___, or readWeights between runs.",
                )
            context = rule.context
            derived[anchor] = CombinedVelocity(
                weights[weight], context.automatic, context.replicas, context.accumulation
            )
    return derived


def program_anchors(
    wanted: Mapping[str, AnchorSpec], derived: Mapping[str, Derived], hidden: Iterable[str] = ()
) -> tuple[AnchorSpec, ...]:
    """The anchors that the program returns: requested ones, and for every micro-batch the sources of derived anchors
    and the ones that are only looked at (``hidden``).
    """
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
    """What a return type selects from values ``[batches, micro-batches, replicas, *shape]``."""
    flat: np.ndarray = value.reshape(-1, *value.shape[2:])
    if spec.retrieval is Retrieval.ALL:
        return value
    if spec.retrieval is Retrieval.EVERY_N:
        return flat[spec.period - 1 :: spec.period]
    chosen: np.ndarray = (
        flat if spec.retrieval is Retrieval.FINAL else np.add.accumulate(flat, axis=0, dtype=flat.dtype)
    )
    return np.asarray(chosen[-1])
