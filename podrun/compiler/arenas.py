"""Arenas: where weights, gradients and optimizer state lie.

Weights that one rule updates alike (`UpdateRule.group_key`) and that agree in dtypes share one layout: a
weight arena, a gradient arena, and one arena for each state that has an element for each element of the
weight. A collective then works on one buffer, and each machine updates its slice of all weights of the group
at once. Parameters that nothing updates lie in arenas of their own, so that machines on one host can share
them. Members begin at multiples of `ALIGNMENT` elements; so does every machine's slice.

**Replica groups.** A variable with a value for each group of replicas is stored with the groups as its leading axis,
``[groups, *shape]``, on every machine; so is its gradient accumulator, and its optimizer state. A replica works with
its group's row. The gradient of taking rows adds each replica's gradient to its group's row, in order of micro-batches
and replicas, so one reduction over all machines sums within groups only: elsewhere the rows are zeros. All of it lies
in arenas like any other variable, so machines share its update by slices and results do not depend on how the job is
run. Replica state (such as running statistics) is not stored so: there groups only say from which row of the host's
value a replica starts, and whose value the host reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from podrun.compiler.extra_state import (
    averaging_arenas,
    rounding_variables,
    scaling_arenas,
    scaling_variables,
)
from podrun.compiler.program import FACTOR, RNG, Program, UpdateRule
from podrun.compiler.replica_groups import GroupOf, group_count, grouped_names, rule_state, stored
from podrun.core.errors import UnimplementedError, UsageError
from podrun.core.executable import Arena, ArenaMember, TensorSpec, Variable, VariableRole
from podrun.core.layout import Layout
from podrun.core.names import REDUCED_ANCHOR, gradient_buffer
from podrun.core.quick_dataclass import dataclass

ALIGNMENT = 64
"""Elements. 64 bytes are what XLA:CPU wants to use host memory without a copy; elements have at least one byte."""


@dataclass(frozen=True, slots=True)
class StateField:
    """One kind of optimizer state of a group, by its reserved prefix.

    ``scalar``: one number for each weight (a step counter), not one for each element.
    """

    prefix: str
    dtype: str
    initial: float
    scalar: bool
    arena: str
    gathered: bool = False
    """True iff every machine needs all of it after an update, because an anchor shows it."""


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights updated together. ``weights`` in arena order; ``scalars`` are the streamed hyper-parameters."""

    weights: tuple[TensorSpec, ...]
    weight_arena: str
    gradient_arena: str
    gradient_dtype: str
    states: tuple[StateField, ...]
    scalars: tuple[str, ...]
    elementwise: bool
    size: int
    """Elements of the weight, gradient and element-wise state arenas."""
    home: int
    """The IPU of a replica that holds the weights and updates them."""
    whole_gradient: bool = False
    """True iff every machine needs the whole reduced gradient, not its slice, because an anchor shows it."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Everything that lasts on the machines, and the groups the update works on."""

    groups: tuple[WeightGroup, ...]
    arenas: dict[str, Arena]
    variables: dict[str, Variable]
    group_of: dict[str, GroupOf] = field(default_factory=dict)
    """The groups of variables that have a value for each group of replicas, as a leading axis."""


def trained(program: Program) -> tuple[TensorSpec, ...]:
    """The weights that the program updates, by name, as they are stored."""
    if program.loss is None or program.update is None:
        return ()
    return tuple(stored(p) for name, p in sorted(program.parameters.items()) if p.trainable)


def plan_memory(
    program: Program, layout: Layout, homes: Mapping[str, int], turns: Mapping[str, int] | None = None
) -> Memory:
    """Lay out every parameter, state and scalar; ``homes`` gives the IPU of those that are not on IPU 0.

    ``turns``: which weights are updated at the same time, if not all are. Raises UsageError for names that clash.
    """
    planner = _Planner(program, layout, homes, turns or {})
    memory = planner.plan()
    clash = sorted(set(memory.variables) & set(program.inputs))
    if clash:
        raise UsageError(
            f"both a variable and an input are called: {', '.join(clash)}", hint="Rename the input."
        )
    return memory


def gradient_dtype(rule: UpdateRule, weight: TensorSpec) -> str:
    """The dtype in which gradients of ``weight`` are accumulated and reduced: the weight's, unless the rule
    names one.
    """
    declared = getattr(rule, "gradient_dtype", None)
    return weight.dtype if declared is None else str(declared(weight))


@dataclass(frozen=True, slots=True)
class _Planner:
    program: Program
    layout: Layout
    homes: Mapping[str, int]
    turns: Mapping[str, int]

    def plan(self) -> Memory:
        groups: list[WeightGroup] = []
        arenas: dict[str, Arena] = {}
        variables: dict[str, Variable] = {}
        for index, weights in enumerate(self._grouped()):
            rule = self.program.update_rule
            groups.append(self._group(index, weights, rule))
            arenas |= self._group_arenas(groups[-1], rule)
            variables |= self._group_variables(groups[-1], rule)
        for arena, members in self._untrained():
            arenas[arena.name] = arena
            variables |= {s.name: Variable(s, VariableRole.WEIGHT, None, arena.name) for s in members}
        for name in sorted(self.program.state_updates):
            parameter, position = self.program.parameters[name], self._position(self._home(name))
            variables[name] = Variable(
                parameter.spec,
                VariableRole.WEIGHT,
                per_replica=name not in self.program.shared_state,
                position=position,
                rows=parameter.group_of,
            )
        arenas |= scaling_arenas(self.program, ALIGNMENT)
        names = tuple(weight.name for group in groups for weight in group.weights)
        arenas |= averaging_arenas(self.program, names, ALIGNMENT)
        variables |= scaling_variables(self.program) | rounding_variables(self.program)
        variables |= _scalar_variables(self.program, groups)
        return Memory(tuple(groups), arenas, variables, self._group_of(groups))

    def _group_of(self, groups: Iterable[WeightGroup]) -> dict[str, GroupOf]:
        """Groups of replicas by variable: those of weights, and of the state that has an axis of groups with them."""
        group_of = grouped_names(self.program)
        for weight in (weight for group in groups for weight in group.weights if weight.name in group_of):
            rule = self.program.update_rule
            for spec, _ in self._state(rule, weight).values():
                if spec.shape[:1] == (group_count(group_of[weight.name]),) and not (
                    rule.elementwise and spec.shape != weight.shape
                ):
                    group_of[spec.name] = group_of[weight.name]
        return group_of

    def _state(self, rule: UpdateRule, weight: TensorSpec) -> dict[str, tuple[TensorSpec, float]]:
        return rule_state(rule, self.program.parameters[weight.name])

    def _home(self, name: str) -> int:
        return self.homes.get(name, 0)

    def _position(self, home: int) -> int | None:
        return self.layout.position_of(home)

    def _grouped(self) -> list[list[TensorSpec]]:
        """Weights by the properties that a shared layout requires to be equal, in order of their first weight's
        name.
        """
        groups: dict[Any, list[TensorSpec]] = {}
        for weight in trained(self.program):
            rule = self.program.update_rule
            states = tuple(
                (p, spec.dtype, initial) for p, (spec, initial) in sorted(self._state(rule, weight).items())
            )
            scalars = tuple(sorted(rule.scalars(weight.name)))
            dtypes = (weight.dtype, gradient_dtype(rule, weight))
            groups_of_replicas = self.program.parameters[weight.name].group_of
            key = (
                self._home(weight.name),
                self.turns.get(weight.name, 0),
                rule.group_key(weight.name),
                dtypes,
                states,
                scalars,
                groups_of_replicas,
            )
            groups.setdefault(key, []).append(weight)
        return list(groups.values())

    def _group(self, index: int, weights: list[TensorSpec], rule: UpdateRule) -> WeightGroup:
        first = weights[0]
        return WeightGroup(
            weights=tuple(weights),
            weight_arena=f"weights.{index}",
            gradient_arena=f"gradients.{index}",
            gradient_dtype=gradient_dtype(rule, first),
            states=tuple(self._field(index, p, weights, rule) for p in sorted(self._state(rule, first))),
            scalars=tuple(sorted(rule.scalars(first.name))),
            elementwise=rule.elementwise,
            size=self._padded(members_of((weight.name, weight.shape) for weight in weights)),
            home=self._home(first.name),
            whole_gradient=any(
                anchor.name == REDUCED_ANCHOR + weight.name
                for anchor in self.program.anchors
                for weight in weights
            ),
        )

    def _field(self, index: int, prefix: str, weights: list[TensorSpec], rule: UpdateRule) -> StateField:
        specs = [self._state(rule, weight)[prefix] for weight in weights]
        spec, initial = specs[0]
        whole = all(state.shape == weight.shape for (state, _), weight in zip(specs, weights, strict=True))
        if rule.elementwise and not whole and any(state.shape != () for state, _ in specs):
            raise UnimplementedError(
                f"optimizer state {spec.name!r} has the shape {list(spec.shape)}; an element-wise "
                f"rule can have states of the weight's shape or scalars only"
            )
        anchored = {anchor.name for anchor in self.program.anchors}
        return StateField(
            prefix,
            spec.dtype,
            initial,
            scalar=rule.elementwise and not whole,
            arena=f"state.{index}.{prefix}",
            gathered=any(state.name in anchored for state, _ in specs),
        )

    def _group_arenas(self, group: WeightGroup, rule: UpdateRule) -> dict[str, Arena]:
        """The arenas of a group. Only an arena that every machine updates alike, slice by slice, can be one shared
        copy.
        """
        position = self._position(group.home)
        weights = members_of((weight.name, weight.shape) for weight in group.weights)
        gradients = members_of((gradient_buffer(weight.name), weight.shape) for weight in group.weights)
        dtype = group.weights[0].dtype
        arenas = [
            Arena(group.weight_arena, dtype, group.size, weights, group.elementwise, position=position),
            Arena(
                group.gradient_arena, group.gradient_dtype, group.size, gradients, False, position=position
            ),
        ]
        for state in group.states:
            specs = [self._state(rule, weight)[state.prefix][0] for weight in group.weights]
            members = members_of(
                ((s.name, s.shape) for s in specs), alignment=1 if state.scalar else ALIGNMENT
            )
            by_slices = group.elementwise and not state.scalar
            sliced = by_slices and not state.gathered
            size = self._padded(members)
            arenas.append(Arena(state.arena, state.dtype, size, members, by_slices, sliced, position))
        return {arena.name: arena for arena in arenas}

    def _untrained(self) -> Iterable[tuple[Arena, list[TensorSpec]]]:
        """Arenas of the parameters that the program never writes, by position and dtype."""
        written = {spec.name for spec in trained(self.program)} | set(self.program.state_updates)
        chosen: dict[tuple[int, str], list[TensorSpec]] = {}
        for name, parameter in sorted(self.program.parameters.items()):
            if name not in written:
                place = self._position(self._home(name)) or 0
                chosen.setdefault((place, parameter.spec.dtype), []).append(stored(parameter))
        for (place, dtype), specs in sorted(chosen.items()):
            members = members_of((spec.name, spec.shape) for spec in specs)
            spanning = self.layout.machines_per_replica > 1
            name = f"constants.{place}.{dtype}" if spanning else f"constants.{dtype}"
            position = place if spanning else None
            yield Arena(name, dtype, self._padded(members), members, position=position), specs

    def _group_variables(self, group: WeightGroup, rule: UpdateRule) -> dict[str, Variable]:
        weights = [
            Variable(weight, VariableRole.WEIGHT, None, group.weight_arena) for weight in group.weights
        ]
        states = [
            Variable(spec, VariableRole.OPTIMIZER_STATE, state.initial, state.arena)
            for state in group.states
            for spec in (self._state(rule, weight)[state.prefix][0] for weight in group.weights)
        ]
        return {variable.spec.name: variable for variable in (*weights, *states)}

    def _padded(self, members: tuple[ArenaMember, ...]) -> int:
        return arena_size(members, self.layout.machines_per_position)


def _scalar_variables(program: Program, groups: Iterable[WeightGroup]) -> dict[str, Variable]:
    values: dict[str, float | None] = {}
    if isinstance(program.loss_scaling, str) and program.loss is not None:
        values[program.loss_scaling] = None
    for group in groups:
        for weight in group.weights:
            values |= program.update_rule.scalars(weight.name)
    values.pop(FACTOR, None)
    values.pop(RNG, None)
    specs = [(TensorSpec(name, scalar_dtype(name), ()), values[name]) for name in sorted(values)]
    return {spec.name: Variable(spec, VariableRole.SCALAR, value) for spec, value in specs}


def scalar_dtype(name: str) -> str:
    """The dtype of a streamed scalar, which PopART writes at the end of its name (``...___FLOAT16``)."""
    return "float16" if name.endswith("___FLOAT16") else "float32"


def members_of(
    tensors: Iterable[tuple[str, tuple[int, ...]]], *, alignment: int = ALIGNMENT
) -> tuple[ArenaMember, ...]:
    """Tensors end to end, each at a multiple of ``alignment`` elements."""
    members, offset = [], 0
    for name, shape in tensors:
        members.append(ArenaMember(name, offset, shape))
        offset += _round_up(max(1, math.prod(shape)), alignment)
    return tuple(members)


def arena_size(members: tuple[ArenaMember, ...], slices: int = 1) -> int:
    """Elements of an arena that ends with its last member, in so many equal slices that begin at multiples of
    `ALIGNMENT`; 0 without members.
    """
    if not members:
        return 0
    return _round_up(members[-1].offset + max(1, math.prod(members[-1].shape)), ALIGNMENT * slices)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
