"""What the update of a program's weights costs on each IPU: its jaxpr on one replica, and the tile model's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from podrun.compiler.arenas import Memory, WeightGroup
from podrun.compiler.collective_times import update_spec
from podrun.compiler.jaxprs import abstract, buffer
from podrun.compiler.program import Program, UpdateRule, joint
from podrun.compiler.update import scalar_buffer
from podrun.costmodel.cost import cost_jaxpr
from podrun.costmodel.target import Chip


def update_reports(program: Program, memory: Memory, target: Chip) -> dict[int, dict[str, Any]]:
    """The tile model's report of the update on each IPU that has weights."""
    reports = {}
    for ipu, groups in groups_by_ipu(memory).items():
        rule = program.update_rule
        # New weights and state take the place of the old ones.
        reports[ipu] = cost_jaxpr(_update_jaxpr(program, rule, groups), target, results_stay=False)
    return reports


def groups_by_ipu(memory: Memory) -> dict[int, list[WeightGroup]]:
    """The groups whose weights lie on each IPU of a replica."""
    by_ipu: dict[int, list[WeightGroup]] = {}
    for group in memory.groups:
        by_ipu.setdefault(group.home, []).append(group)
    return dict(sorted(by_ipu.items()))


TracedList = Sequence[jax.Array]
TracedNames = Mapping[str, jax.Array]
TracedStates = Sequence[TracedNames]
UpdatedWeight = tuple[jax.Array, Mapping[str, jax.Array]]


def _update_jaxpr(program: Program, rule: UpdateRule, groups: Sequence[WeightGroup]) -> ClosedJaxpr:
    """The update of every weight of the groups, on one replica.

    A joint update (clipping by norms) is taken as PopART does it: the squares of the IPU's own gradients are summed,
    the factor comes from elsewhere, and each gradient is multiplied by it.
    """
    weights = [
        (update_spec(program, weight.name), group.gradient_dtype)
        for group in groups
        for weight in group.weights
    ]

    def run(
        now: TracedList, gradients: TracedList, states: TracedStates, scalars: TracedNames
    ) -> list[UpdatedWeight]:
        return [
            rule.apply(spec.name, w, g, s, {n: scalars[n] for n in rule.scalars(spec.name)})
            for (spec, _), w, g, s in zip(weights, now, gradients, states, strict=True)
        ]

    def clipped(
        now: TracedList, gradients: TracedList, states: TracedStates, scalars: TracedNames, factor: jax.Array
    ) -> tuple[jax.Array | int, list[UpdatedWeight]]:
        norm = sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in gradients)
        return norm, run(now, [g * factor.astype(g.dtype) for g in gradients], states, scalars)

    now = [abstract(spec) for spec, _ in weights]
    gradients = [buffer(spec.shape, dtype) for spec, dtype in weights]
    states = [{p: abstract(s) for p, (s, _) in sorted(rule.state(spec).items())} for spec, _ in weights]
    names = sorted({name for spec, _ in weights for name in rule.scalars(spec.name)})
    scalars = {name: scalar_buffer(name) for name in names}
    if joint(rule) is not None:
        return jax.make_jaxpr(clipped)(now, gradients, states, scalars, buffer((), "float32"))
    return jax.make_jaxpr(run)(now, gradients, states, scalars)
