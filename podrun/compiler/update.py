"""The update: pieces that turn reduced gradients into new weights and optimizer state.

Element-wise rules work on this machine's slice of all weights of a group at once. Where such a rule keeps one
number for each weight (Adam's step counter), the piece takes the slice in rows of `ALIGNMENT` elements, each of
which lies in one weight, and the number is broadcast over its rows. (A piece that brought a flat slice into rows itself
could not write over it: XLA wants a result to lie as its operand does.) Other rules (norms over a weight) see
each weight whole, on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.compiler.arenas import ALIGNMENT, Memory, WeightGroup, scalar_dtype
from podrun.compiler.export import PieceFunction
from podrun.compiler.extra_state import place_state
from podrun.compiler.jaxprs import BufferValues, buffer
from podrun.compiler.program import RNG, JointRule, NormRule, UpdateRule
from podrun.compiler.replica_groups import GroupOf, group_count, rows
from podrun.core.errors import UnsupportedError, present
from podrun.core.executable import REPLICA_OFFSET, Computation, TensorSpec
from podrun.core.layout import Layout
from podrun.core.names import NORM_ANCHOR, SLICE, WHOLE, anchor_buffer, gradient_buffer

JOINT_UPDATE = "update.joint"
"""Name of the Computation that updates all weights at once."""


def update_piece(
    index: int, group: WeightGroup, memory: Memory, rule: UpdateRule, layout: Layout
) -> PieceFunction:
    """The piece that updates a group after its gradients were reduced over the machines."""
    if group.elementwise:
        return _sliced(index, group, memory, rule, layout)
    return _whole(index, group, memory, rule)


def _sliced(
    index: int, group: WeightGroup, memory: Memory, rule: UpdateRule, layout: Layout
) -> PieceFunction:
    count = group.size // layout.machines_per_position
    by_rows = any(field.scalar for field in group.states)
    slice_shape = (count // ALIGNMENT, ALIGNMENT) if by_rows else (count,)
    weights, gradients = SLICE + group.weight_arena, SLICE + group.gradient_arena
    inputs: dict[str, Any] = {
        weights: buffer(slice_shape, group.weights[0].dtype),
        gradients: buffer(slice_shape, group.gradient_dtype),
        **_scalars(group),
        REPLICA_OFFSET: buffer((), "int32"),
    }
    buffers = {}
    for field in group.states:
        buffers[field.prefix] = (WHOLE if field.scalar else SLICE) + field.arena
        shape = (memory.arenas[field.arena].size,) if field.scalar else slice_shape
        inputs[buffers[field.prefix]] = buffer(shape, field.dtype)
    counters = [field.prefix for field in group.states if field.scalar]

    def apply(
        weight: jax.Array, gradient: jax.Array, state: BufferValues, values: BufferValues
    ) -> tuple[Any, dict[str, Any]]:
        chosen = {n: values[n] for n in group.scalars}
        if RNG in chosen:
            chosen[RNG] = place_state(chosen[RNG], index, values[REPLICA_OFFSET])
        return rule.apply(group.weights[0].name, weight, gradient, state, chosen)

    def run(values: BufferValues) -> dict[str, Any]:
        state = {prefix: values[buffer] for prefix, buffer in buffers.items()}
        weight, gradient = values[weights], values[gradients]
        seen = state
        if counters:
            rows = _weight_of_rows(
                group, memory, values[REPLICA_OFFSET] // layout.replicas_per_machine, count
            )
            seen = {p: v[rows][:, None] if p in counters else v for p, v in state.items()}
        new, after = apply(weight, gradient, seen, values)
        results = {weights: _like(new, values[weights])}
        if counters:
            # The way a counter advances cannot depend on the elements: ask the rule with zeros in their place.
            length = len(group.weights)
            zeros = {p: v[:length] if p in counters else jnp.zeros(length, v.dtype) for p, v in state.items()}
            nothing = jnp.zeros(length, weight.dtype), jnp.zeros(length, gradient.dtype)
            counted = apply(*nothing, zeros, values)[1]
            after |= {p: state[p].at[:length].set(counted[p].astype(state[p].dtype)) for p in counters}
        return results | {buffers[p]: _like(after[p], state[p]) for p in buffers}

    return PieceFunction(f"update.{index}", run, inputs, (weights, *buffers.values()))


def joint_piece(
    memory: Memory, rule: JointRule, norms: Sequence[str] = (), replicas: int = 1
) -> PieceFunction:
    """The piece that updates all weights at once, for rules whose update of one weight depends on others
    (clipping by a norm over several). Every machine does it whole. ``norms``: the clipping groups whose norms are
    anchored, by their numbers; each of a machine's ``replicas`` gives that of its own group of replicas.
    """
    inputs, states_of = _whole_buffers(memory, memory.groups, rule)
    outputs = _written(states_of)
    group_of = _common_groups(memory, states_of)
    if norms and group_of:
        inputs[REPLICA_OFFSET] = buffer((), "int32")
    arrays = {*outputs, *(gradient_buffer(name) for name in states_of)}
    anchored = [_norm_buffer(number) for number in norms]

    def run(values: BufferValues) -> dict[str, Any]:
        if not group_of:
            updated = once(values)
            return updated | {name: jnp.broadcast_to(updated[name], (1, replicas)) for name in anchored}
        groups = range(group_count(group_of))
        per_group = [once({**values} | {name: values[name][g] for name in arrays}) for g in groups]
        updated = {
            name: jnp.stack([values_of[name] for values_of in per_group]) for name in (*outputs, *anchored)
        }
        for name in anchored:
            updated[name] = rows(updated[name], group_of, values[REPLICA_OFFSET], 1, replicas)[None]
        return updated

    def once(values: BufferValues) -> dict[str, Any]:
        weights = {name: values[name] for name in states_of}
        gradients = {name: values[gradient_buffer(name)] for name in states_of}
        states = {name: {p: values[b] for p, b in buffers.items()} for name, buffers in states_of.items()}
        new_weights, new_states = rule.apply_joint(weights, gradients, states, values)
        results = {name: _like(new_weights[name], values[name]) for name in states_of}
        for name, buffers in states_of.items():
            results |= {b: _like(new_states[name][p], values[b]) for p, b in buffers.items()}
        updated = (
            rule.norms(weights, gradients, states, values) if isinstance(rule, NormRule) and norms else {}
        )
        return results | {_norm_buffer(number): updated[number] for number in norms}

    return PieceFunction(JOINT_UPDATE, run, inputs, (*outputs, *anchored))


def _norm_buffer(number: str) -> str:
    return anchor_buffer(NORM_ANCHOR + number)


def _weight_of_rows(group: WeightGroup, memory: Memory, machine: jax.Array, count: int) -> Any:
    """For each row of this machine's slice, the position in the group of the weight it lies in."""
    begins = [member.offset // ALIGNMENT for member in memory.arenas[group.weight_arena].members]
    # A table instead of its rule, because XLA would evaluate a sum over it at compile time, for half a minute with 2
    # million rows.
    table = np.searchsorted(begins, np.arange(group.size // ALIGNMENT), side="right") - 1
    narrow = np.min_scalar_type(len(begins))  # It is as long as the weights, and part of the executable.
    per_machine = count // ALIGNMENT
    return jax.lax.dynamic_slice(jnp.asarray(table, narrow), (machine * per_machine,), (per_machine,))


def _scalars(group: WeightGroup) -> dict[str, Any]:
    return {name: scalar_buffer(name) for name in group.scalars}


def _whole_buffers(
    memory: Memory, groups: Iterable[WeightGroup], rule: UpdateRule
) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """The buffers, by prefix, that updates of whole weights read, and each weight's states."""
    inputs: dict[str, Any] = {}
    states_of: dict[str, dict[str, str]] = {}
    for group in groups:
        inputs |= _scalars(group)
        for weight in group.weights:
            inputs[weight.name] = buffer(weight.shape, weight.dtype)
            inputs[gradient_buffer(weight.name)] = buffer(weight.shape, group.gradient_dtype)
            specs = _states(memory, weight.name, rule)
            states_of[weight.name] = {prefix: spec.name for prefix, spec in specs.items()}
            inputs |= {s.name: buffer(s.shape, s.dtype) for s in specs.values()}
    return inputs, states_of


def _written(states_of: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
    """The buffers that updates write: each weight and its states."""
    return tuple(name for weight, states in states_of.items() for name in (weight, *states.values()))


def _states(memory: Memory, weight: str, rule: UpdateRule) -> dict[str, TensorSpec]:
    """The states of a weight as they are stored, by prefix."""
    spec = memory.variables[weight].spec
    names = {prefix: state.name for prefix, (state, _) in sorted(rule.state(spec).items())}
    return {prefix: memory.variables[name].spec for prefix, name in names.items()}


def _common_groups(memory: Memory, weights: Iterable[str]) -> GroupOf:
    """The groups of replicas that the weights have, which must be the same for all; empty if they have none."""
    groups = {weight: memory.group_of.get(weight, ()) for weight in weights}
    if len(set(groups.values())) > 1:
        odd = sorted(weight for weight, group_of in groups.items() if group_of)
        raise UnsupportedError(
            f"an optimizer that looks at all weights at once (gradient clipping) needs the same groups of replicas for "
            f"all of them, and {', '.join(odd[:5])} have groups that others have not: replicas would change what they "
            "share by factors of their own, and differ",
            hint="Give all trained weights the same VariableSettings.",
        )
    return next(iter(groups.values()), ())


def _like(value: jax.Array, old: jax.Array) -> Any:
    return jnp.asarray(value).astype(old.dtype).reshape(old.shape)


def _whole(index: int, group: WeightGroup, memory: Memory, rule: UpdateRule) -> PieceFunction:
    inputs, states_of = _whole_buffers(memory, [group], rule)

    def run(values: BufferValues) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for number, (weight, states) in enumerate(states_of.items()):
            chosen = {n: values[n] for n in group.scalars}
            if RNG in chosen:
                chosen[RNG] = place_state(chosen[RNG], index, number)
            groups = group_count(memory.group_of.get(weight, ()))
            if groups == 1:
                results |= once(weight, states, values, chosen)
                continue
            names = (weight, gradient_buffer(weight), *states.values())
            per_group = [
                once(weight, states, {name: values[name][g] for name in names}, chosen) for g in range(groups)
            ]
            results |= {name: jnp.stack([updated[name] for updated in per_group]) for name in per_group[0]}
        return results

    def once(
        weight: str, states: Mapping[str, str], values: BufferValues, chosen: BufferValues
    ) -> dict[str, Any]:
        """A weight, or one group's value of it."""
        state = {prefix: values[buffer] for prefix, buffer in states.items()}
        new, after = rule.apply(weight, values[weight], values[gradient_buffer(weight)], state, chosen)
        updated = {weight: _like(new, values[weight])}
        return updated | {states[p]: _like(after[p], state[p]) for p in states}

    return PieceFunction(f"update.{index}", run, inputs, _written(states_of))


def scalar_buffer(name: str) -> Any:
    """A streamed scalar, or the RNG state, as a piece takes it."""
    return buffer((2,), "uint32") if name == RNG else buffer((), scalar_dtype(name))


class SimilarUpdates:
    """The updates so far. `similar` finds an earlier one that differs in names alone, `renamed` adapts its export."""

    def __init__(self, memory: Memory, rule: UpdateRule | None) -> None:
        self._memory, self._rule = memory, rule
        self._first: dict[Any, PieceFunction] = {}

    def similar(self, group: WeightGroup, piece: PieceFunction) -> PieceFunction | None:
        """An earlier piece that computes the same from buffers of other names, in the same order."""
        if RNG in group.scalars:  # Every group rounds with random bits of its own.
            return None
        first = self._first.setdefault(self._key(group, piece), piece)
        return None if first is piece else first

    def _key(self, group: WeightGroup, piece: PieceFunction) -> Any:
        rule = present(self._rule, "a group of weights has an update rule")
        position = {name: index for index, name in enumerate(group.scalars)}
        return (
            _positions(rule.group_key(group.weights[0].name), position),
            tuple((w.shape, w.dtype, self._memory.group_of.get(w.name, ())) for w in group.weights),
            tuple((f.prefix, f.dtype, f.scalar) for f in group.states),
            tuple(member.offset for member in self._memory.arenas[group.weight_arena].members),
            (group.elementwise, group.size, group.gradient_dtype),
            tuple((spec.shape, str(spec.dtype)) for spec in piece.inputs.values()),
        )


def _positions(key: object, position: Mapping[str, int]) -> Any:
    """A group's key with the places of its streamed scalars instead of their names."""
    if isinstance(key, tuple):
        return tuple(_positions(part, position) for part in key)
    return ("scalar", position[key]) if isinstance(key, str) and key in position else key


def renamed(computation: Computation, first: PieceFunction, piece: PieceFunction) -> Computation:
    """The exported ``first`` on the buffers of ``piece``."""
    names = dict(zip((*first.inputs, *first.outputs), (*piece.inputs, *piece.outputs), strict=True))
    return replace(
        computation,
        name=piece.name,
        inputs=tuple(names[name] for name in computation.inputs),
        outputs=tuple(names[name] for name in computation.outputs),
        donated=tuple(names[name] for name in computation.donated),
    )
