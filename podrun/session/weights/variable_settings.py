"""Variables with a value for each group of replicas, on their way from a model to a program and back to the host.

A model stores such a variable with its groups as the leading axis; every replica sees one row of it
(graphcore/popart, willow/src/variablesettings.cpp, shapeOnReplica and shapeOnHost). Here the model is seen as one
replica sees it, for lowering, and the host's shapes are made from the program's and the other way round.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from podrun.onnx_models.light_model import LightModel
from podrun.onnx_models.tensor_proto import to_proto
from podrun.session.attributes import VARIABLE_KEY
from podrun.session.enums import CommGroupType, VariableRetrievalMode
from podrun.session.exceptions import popart_exception, popart_unimplemented
from podrun.session.weights.variables import CommGroup, VariableSettings

if TYPE_CHECKING:
    from onnx import ModelProto

Settings = Mapping[str, VariableSettings]


def settings_of(model: ModelProto) -> dict[str, VariableSettings]:
    """The VariableSettings that the builder stored with a model, by variable."""
    found = {}
    for entry in model.metadata_props:
        if entry.key == VARIABLE_KEY:
            for name, (kind, size, mode) in json.loads(entry.value).items():
                domain = CommGroup(CommGroupType(kind), size)
                found[name] = VariableSettings(domain, VariableRetrievalMode(mode))
    return found


def group_of(settings: Settings, name: str, replicas: int) -> tuple[int, ...]:
    """The group of each replica; empty for a variable that all replicas share. popart_exception if the groups do not
    divide the replicas."""
    chosen = settings.get(name)
    if chosen is None or chosen.getGroupCount(replicas) == 1:
        return ()
    grouping = chosen.getReplicaGrouping(replicas)
    return tuple(grouping.group_of(replica) for replica in range(replicas))


def for_one_replica(
    model: LightModel, settings: Settings, replicas: int
) -> tuple[LightModel, dict[str, np.ndarray]]:
    """The model as one replica sees it, and the grouped variables' values as the host gives them, ``[groups, *shape]``.

    popart_exception for a value whose leading axis is not the number of groups.
    """
    values = {}
    for tensor in model.proto.graph.initializer:
        if group_of(settings, tensor.name, replicas):
            value = model.value(tensor)
            settings[tensor.name].shapeOnReplica(list(value.shape), replicas, tensor.name)
            values[tensor.name] = value
    if not values:
        return model, values
    seen = model.copy().proto
    rows = dict(model.values)
    for tensor in seen.graph.initializer:
        if tensor.name in rows:
            rows[tensor.name] = values[tensor.name][0]
            del tensor.dims[0]
        elif tensor.name in values:
            tensor.CopyFrom(to_proto(tensor.name, values[tensor.name][0]))
    # What the builder inferred while it saw all groups at once does not hold on one replica.
    del seen.graph.value_info[:]
    for value_info in seen.graph.input:
        if value_info.name in values:
            del value_info.type.tensor_type.shape.dim[0]
    for output in seen.graph.output:
        output.type.tensor_type.ClearField("shape")
    return LightModel(seen, rows), values


def host_values(
    initial: Mapping[str, np.ndarray], grouped: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The initial values that the host sends: of one replica's parameters, those with groups whole.

    popart_exception for a grouped variable whose value the program has to know while it is built (a shape, say).
    """
    return {
        name: grouped[name].astype(value.dtype) if name in grouped else value
        for name, value in initial.items()
    }


@dataclass(frozen=True, slots=True)
class Kept:
    """How a variable that replicas keep for themselves (running statistics) is stored: the row that each replica has
    of it, in the program, in the host's copy and in the model. Empty: one value for all.

    The host's copy has a row for each group, and with AllReplicas for each replica; the program has one for each
    replica too where somebody needs them all, though the host's copy is of groups.
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


def kept_by_replicas(
    settings: Settings, state_updates: Iterable[str], replicas: int, *, all_needed: bool
) -> dict[str, Kept]:
    """The running statistics of a program with several replicas. ``all_needed``: the session has to know the values of
    all replicas, whatever the program reads.

    popart_unimplemented for statistics that are to be reduced over replicas when they are read.
    """
    if replicas == 1:
        return {}
    found, each = {}, tuple(range(replicas))
    for name in sorted(state_updates):
        chosen = settings.get(name, VariableSettings())
        if chosen.getRetrievalMode() is VariableRetrievalMode.AllReduceReplicas:
            raise popart_unimplemented(
                f"Variable {name!r} holds running statistics, which replicas do not share: they cannot be read with "
                "VariableRetrievalMode.AllReduceReplicas.",
                hint="Use OnePerGroup or AllReplicas.",
            )
        groups = group_of(settings, name, replicas)
        host = each if chosen.getRetrievalMode() is VariableRetrievalMode.AllReplicas else groups
        found[name] = Kept(each if all_needed else host, host, groups)
    return found


def check_variables(
    grouped: Mapping[str, np.ndarray], parameters: Mapping[str, object], needed: Mapping[str, object]
) -> None:
    """popart_exception for a grouped variable that is baked into the program."""
    for name in sorted(grouped):
        if name not in parameters and name in needed:
            raise popart_exception(
                f"Variable {name!r} has a value for each group of replicas, but the model needs its value to find "
                "shapes, which must be the same on all replicas."
            )


def retrieved(settings: Settings, name: str, value: np.ndarray, replicas: int) -> np.ndarray:
    """A variable as the host reads it: ``[replicas, *shape]`` with AllReplicas, else as it is stored."""
    chosen = settings.get(name)
    if chosen is None or chosen.getRetrievalMode() is not VariableRetrievalMode.AllReplicas:
        return value
    return regrouped(value, group_of(settings, name, replicas), tuple(range(replicas)))


def given(settings: Settings, name: str, array: np.ndarray, held: np.ndarray, replicas: int) -> np.ndarray:
    """What the host keeps of an array that it was given for a variable: with AllReplicas, one of each group.

    popart_exception if replicas that share a value were given different ones.
    """
    chosen = settings.get(name)
    if chosen is None or chosen.getRetrievalMode() is not VariableRetrievalMode.AllReplicas:
        return array
    groups = group_of(settings, name, replicas)
    each = held.size // (max(groups) + 1) if groups else held.size
    if array.nbytes != each * replicas * held.dtype.itemsize:
        return array  # Of another size: the caller says so.
    rows = np.ascontiguousarray(array).reshape(-1).view(held.dtype).reshape(replicas, each)
    members = [groups.index(g) for g in range(max(groups) + 1)] if groups else [0]
    for replica, row in enumerate(rows):
        first = members[groups[replica] if groups else 0]
        if row.tobytes() != rows[first].tobytes():
            raise popart_exception(
                f"writeWeights: replicas {first} and {replica} share the value of {name!r}, but the array has "
                "different values for them."
            )
    return np.ascontiguousarray(rows[members]).reshape(held.shape)
