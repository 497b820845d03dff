"""Anchors inside the update of the Adam family, worked out on the host: ``AdamUpdater___w`` is the step before the
learning rate (LAMB: before the trust ratio too), ``LambR1Sq___w`` the squared norm of the weight and ``LambR2Sq___w``
that of the step.

The machines update slices of many weights at once, so a weight's own step is nowhere in their memory. It is made again
here with the rule's own formula from what the update sees: the weight, the reduced gradient, state and scalars, and the
norms where gradients are clipped.

Source: PopART's decomposition of Adam (graphcore/popart, willow/src/patterns/adamdecompose.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.compiler.program import RNG
from podrun.core.executable import TensorSpec
from podrun.core.names import NORM_ANCHOR
from podrun.session import names
from podrun.session.enums import AdamMode, AnchorReturnTypeId, WeightDecayMode
from podrun.session.exceptions import popart_exception
from podrun.session.optimizers.adam import AdamRule
from podrun.session.options.session_options import SessionOptions
from podrun.session.step_data.dataflow import DataFlow

if TYPE_CHECKING:
    from podrun.session.optimizers.rules import Rule

UPDATER, WEIGHT_NORM, STEP_NORM = (names.PREFIXES[n] for n in ("AdamUpdater", "LambR1Sq", "LambR2Sq"))
_REDUCED = names.PREFIXES["FinalReducedGrad"]
_LAMB = (AdamMode.Lamb, AdamMode.LambNoBias)


def update_specs(rule: Rule | None, weight: TensorSpec) -> dict[str, TensorSpec]:
    """The anchors of a weight's update, by name."""
    if not isinstance(rule, AdamRule):
        return {}
    decay = rule.optimizer.value("weightDecay", weight.name)
    decays = rule.optimizer.weight_decay_mode is WeightDecayMode.Decay and not (
        decay.isConst() and decay.val() == 0
    )
    first = rule.state(weight)["Accl1___"][0]
    found = {UPDATER: TensorSpec(UPDATER + weight.name, (weight if decays else first).dtype, weight.shape)}
    if rule.optimizer.mode in _LAMB:
        found |= {
            prefix: TensorSpec(prefix + weight.name, "float32", ()) for prefix in (WEIGHT_NORM, STEP_NORM)
        }
    return {spec.name: spec for spec in found.values()}


@dataclass(frozen=True, slots=True)
class UpdateStep:
    """One of the anchors. ``sources``: all that the update sees; ``clipped_by``: the number and bound of the clipping
    group that the weight is in; ``late``: sources that are known once a batch."""

    spec: TensorSpec
    weight: str
    sources: tuple[str, ...]
    states: Mapping[str, str]
    clipped_by: tuple[int, float] | None
    late: tuple[str, ...] = ()

    def value(self, anchors: Mapping[str, np.ndarray], rule: Rule) -> np.ndarray:
        """``[batches, 1, replicas, *shape]``; with accumulation that of the last batch alone."""
        assert isinstance(rule, AdamRule)
        seen = {name: self._updates(anchors[name], name in self.late) for name in self.sources}
        count, replicas = seen[self.weight].shape[:2]
        each = [
            [self._of({n: v[b, r] for n, v in seen.items()}, rule) for r in range(replicas)]
            for b in range(count)
        ]
        return np.asarray(each, self.spec.dtype)[:, None]

    def _updates(self, value: np.ndarray, late: bool) -> np.ndarray:
        """``[batches, replicas, *shape]``: what the update of each batch sees."""
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
        step, _ = rule.step(weight, gradient, state, rule.factors(self.weight, seen), clip)
        step = np.asarray(step)
        return np.sum(step * step, dtype=np.float32) if self.spec.name.startswith(STEP_NORM) else step


def update_anchors(
    flow: DataFlow, weights: Mapping[str, TensorSpec], rule: Rule | None, options: SessionOptions
) -> dict[str, UpdateStep]:
    """The anchors of updates among a session's.

    popart_exception for one that a step has several values of but that is only known for the last: with gradient
    accumulation anything but Final; without, where batches overlap in a pipeline.
    """
    found = {}
    for weight in weights.values():
        for name, spec in update_specs(rule, weight).items():
            if name not in flow.anchors():
                continue
            assert isinstance(rule, AdamRule)
            accumulates = options.micro_batches > 1
            if options.overlaps_batches or (
                accumulates and flow.art(name).id() is not AnchorReturnTypeId.Final
            ):
                raise popart_exception(
                    f"Anchor {name!r} changes once a batch: with gradient accumulation only its last value can be "
                    "returned, and none where the batches of a step overlap in a pipeline.",
                    hint='Use AnchorReturnType("Final"), with enableGradientAccumulation in a pipeline.',
                )
            found[name] = _step(spec, weight, rule, accumulates)
    return found


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
    for number, settings in enumerate(rule.optimizer.clip_norm_settings):
        if settings.all_weights or weight in settings.weightIds:
            return number, settings.maxNorm
    return None
