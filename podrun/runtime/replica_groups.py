"""Variables with a value for each group of replicas: which replicas share one, and its shapes in model, program, host.

Replicas of a Consecutive group are neighbours, those of an Orthogonal one lie as far apart as there are groups
(graphcore/popart, willow/include/popart/variablesettings.hpp and willow/src/variablesettings.cpp).

A model stores such a variable with its groups as the leading axis; every replica sees one row of it. Here the model is
seen as one replica sees it, for lowering, and the host's shapes are made from the program's and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from podrun.core.errors import UnimplementedError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.graph import Model, VariableGroups

ONE_PER_GROUP, ALL_REPLICAS, ALL_REDUCE_REPLICAS = "OnePerGroup", "AllReplicas", "AllReduceReplicas"
"""The copies of a variable that the host reads (`VariableGroups.retrieval`)."""

Groups = Mapping[str, VariableGroups]


def group_of(settings: Groups, name: str, replicas: int) -> tuple[int, ...]:
    """The group of each replica; empty for a variable that all replicas share. UsageError if the groups do not
    divide the replicas."""
    chosen = settings.get(name)
    if chosen is None or chosen.count(replicas) == 1:
        return ()
    stride, size = chosen.stride_and_size(replicas)
    return tuple(replica // (stride * size) * stride + replica % stride for replica in range(replicas))


def for_one_replica(model: Model, settings: Groups, replicas: int) -> tuple[Model, dict[str, np.ndarray]]:
    """The model as one replica sees it, and the grouped variables' values as the host gives them, ``[groups, *shape]``.

    UsageError for a value whose leading axis is not the number of groups.
    """
    values = {n: v for n, v in model.graph.initializers.items() if group_of(settings, n, replicas)}
    for name, value in values.items():
        count = settings[name].count(replicas)
        if not value.shape or value.shape[0] != count:
            raise UsageError(
                f"Variable {name!r} has {count} groups, so its host shape starts with {count}; it is "
                f"{list(value.shape)}."
            )
    return model.with_values({name: value[0] for name, value in values.items()}), values


def host_values(
    initial: Mapping[str, np.ndarray], grouped: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The initial values that the host sends: of one replica's parameters; for a grouped variable the values of all
    groups.

    UsageError for a grouped variable whose value must be known while the program is built (a shape, say).
    """
    return {
        name: grouped[name].astype(value.dtype) if name in grouped else value
        for name, value in initial.items()
    }


@dataclass(frozen=True, slots=True)
class ReplicaStateRows:
    """How a variable that replicas keep for themselves (running statistics) is stored: the row of each replica in the
    program, in the host's copy and in the model. Empty: one value for all.

    The host's copy has a row for each group, and with AllReplicas for each replica. The program has a row for each
    replica too where anything needs them all, even if the host's copy has groups.
    """

    program: tuple[int, ...]
    host: tuple[int, ...]
    model: tuple[int, ...]


def regrouped(value: np.ndarray, stored: tuple[int, ...], wanted: tuple[int, ...]) -> np.ndarray:
    """A variable ``[rows, *shape]`` (or ``shape``) with other rows: each has the value of its first replica."""
    if stored == wanted:
        return value
    if not wanted:
        return np.ascontiguousarray(value[stored[0]])
    firsts = [wanted.index(row) for row in range(max(wanted) + 1)]
    if not stored:
        return np.broadcast_to(value, (len(firsts), *value.shape)).copy()
    return np.ascontiguousarray(value[[stored[replica] for replica in firsts]])


def replica_state_rows(
    settings: Groups, state_updates: Iterable[str], replicas: int, *, all_needed: bool
) -> dict[str, ReplicaStateRows]:
    """The running statistics of a program with several replicas. ``all_needed``: the session needs the values of all
    replicas, whatever the program reads.

    UnimplementedError for statistics that are to be reduced over replicas when they are read.
    """
    if replicas == 1:
        return {}
    rows, every_replica = {}, tuple(range(replicas))
    for name in sorted(state_updates):
        retrieval = settings[name].retrieval if name in settings else ONE_PER_GROUP
        if retrieval == ALL_REDUCE_REPLICAS:
            raise UnimplementedError(
                f"Variable {name!r} holds running statistics, which replicas do not share: they cannot be read with "
                "VariableRetrievalMode.AllReduceReplicas.",
                hint="Use OnePerGroup or AllReplicas.",
            )
        groups = group_of(settings, name, replicas)
        host = every_replica if retrieval == ALL_REPLICAS else groups
        rows[name] = ReplicaStateRows(every_replica if all_needed else host, host, groups)
    return rows


def check_variables(
    grouped: Mapping[str, np.ndarray], parameters: Mapping[str, object], needed: Mapping[str, object]
) -> None:
    """UsageError for a grouped variable that is baked into the program."""
    for name in sorted(grouped):
        if name not in parameters and name in needed:
            raise UsageError(
                f"Variable {name!r} has a value for each group of replicas, but the model needs its value to find "
                "shapes, which must be the same on all replicas."
            )


def retrieved(settings: Groups, name: str, value: np.ndarray, replicas: int) -> np.ndarray:
    """A variable as the host reads it: ``[replicas, *shape]`` with AllReplicas, else as it is stored."""
    chosen = settings.get(name)
    if chosen is None or chosen.retrieval != ALL_REPLICAS:
        return value
    return regrouped(value, group_of(settings, name, replicas), tuple(range(replicas)))


def given(
    settings: Groups, name: str, array: np.ndarray, held: np.ndarray, replicas: int, call: str
) -> np.ndarray:
    """The host's copy of an array that the program gave for a variable: with AllReplicas, one value of each group.

    UsageError, which names ``call``, if replicas that share a value were given different ones.
    """
    chosen = settings.get(name)
    if chosen is None or chosen.retrieval != ALL_REPLICAS:
        return array
    groups = group_of(settings, name, replicas)
    size = held.size // (max(groups) + 1) if groups else held.size
    if array.nbytes != size * replicas * held.dtype.itemsize:
        return array  # The caller reports a wrong size.
    rows = np.ascontiguousarray(array).reshape(-1).view(held.dtype).reshape(replicas, size)
    members = [groups.index(g) for g in range(max(groups) + 1)] if groups else [0]
    for replica, row in enumerate(rows):
        first = members[groups[replica] if groups else 0]
        if row.tobytes() != rows[first].tobytes():
            raise UsageError(
                f"{call}: replicas {first} and {replica} share the value of {name!r}, but the array has "
                "different values for them."
            )
    return np.ascontiguousarray(rows[members]).reshape(held.shape)
