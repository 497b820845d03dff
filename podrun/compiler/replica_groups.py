"""Groups of replicas that share a weight.

How many there are, their axis in variables and state, and the rows of a replica.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from podrun.compiler.program import ParameterSpec, Program, UpdateRule
from podrun.core.errors import UsageError
from podrun.core.executable import TensorSpec

if TYPE_CHECKING:
    import jax

GroupOf = tuple[int, ...]
"""The group of each replica of the program, by its global index."""


def group_count(group_of: GroupOf) -> int:
    """The number of groups; 1 for a variable without groups."""
    return max(group_of, default=0) + 1


def stored(parameter: ParameterSpec) -> TensorSpec:
    """The spec of a parameter as the host and the machines have it: with a leading axis of groups, if it has any."""
    return _with_groups(parameter.spec, parameter.group_of)


def rule_state(rule: UpdateRule, parameter: ParameterSpec) -> dict[str, tuple[TensorSpec, float]]:
    """The rule's state for a weight as it is stored, by prefix.

    An element-wise rule sees all groups at once: states of the weight's shape get groups with it, and there is one
    counter for all groups. Other rules update each group by itself, and every state has one value for each group.
    """
    if not parameter.group_of:
        return rule.state(parameter.spec)
    if rule.elementwise:
        return rule.state(stored(parameter))
    entries = rule.state(parameter.spec)
    return {
        prefix: (_with_groups(s, parameter.group_of), initial) for prefix, (s, initial) in entries.items()
    }


def grouped_names(program: Program) -> dict[str, GroupOf]:
    """The parameters that are stored with a leading axis of groups. Those that replicas keep for themselves are not."""
    return {
        name: item.group_of
        for name, item in sorted(program.parameters.items())
        if item.group_of and name not in program.state_updates
    }


def rows(
    value: jax.Array, group_of: GroupOf, offset: jax.Array, micro_batches: int, replicas: int
) -> jax.Array:
    """What each replica of a machine sees of a stored variable: ``[micro_batches * replicas, *shape]``.

    ``offset``: the machine's first replica, as an int32 scalar. Halves take a way through float32, so that their
    gradients are summed there and rounded once.
    """
    import jax.numpy as jnp

    table = jnp.asarray(np.asarray(group_of, np.int32))
    index = jnp.tile(table[offset + jnp.arange(replicas, dtype=jnp.int32)], micro_batches)
    if value.dtype.itemsize < 4 and jnp.issubdtype(value.dtype, jnp.floating):
        return value.astype(jnp.float32)[index].astype(value.dtype)
    return value[index]


def check_parameter_groups(program: Program) -> None:
    """Raises UsageError for groups that are not of this program's replicas."""
    for name, parameter in sorted(program.parameters.items()):
        group_of = parameter.group_of
        if not group_of:
            continue
        if len(group_of) != program.replicas:
            raise UsageError(
                f"{name!r} has groups of {len(group_of)} replicas; the program has {program.replicas}",
                hint="Put every replica of the program in one group.",
            )
        if group_count(group_of) == 1:
            raise UsageError(
                f"{name!r} has one group, of all replicas", hint="Leave group_of empty for that."
            )
        sizes = {group_of.count(group) for group in range(group_count(group_of))}
        if len(sizes) != 1 or min(group_of) < 0 or 0 in sizes:
            raise UsageError(
                f"the groups of {name!r} must be numbered from 0 and equally large; replicas are in {list(group_of)}",
                hint="podrun.core.layout.replica_groups makes such groups.",
            )


def replicas_reduced(program: Program, weight: str) -> int:
    """Over how many replicas the gradient of a weight is reduced: all, or those of a group."""
    group_of = program.parameters[weight].group_of
    return program.replicas // group_count(group_of)


def _with_groups(spec: TensorSpec, group_of: GroupOf) -> TensorSpec:
    if not group_of:
        return spec
    return TensorSpec(spec.name, spec.dtype, (group_count(group_of), *spec.shape))
