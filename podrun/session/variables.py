"""Variables with a value for each group of replicas: which replicas share one, and its shapes in model, program, host.

`CommGroup`, `ReplicaGrouping` and `VariableSettings` say which replicas share a value. Replicas of a Consecutive group
are neighbours, those of an Orthogonal one lie as far apart as there are groups (graphcore/popart,
willow/include/popart/variablesettings.hpp and willow/src/variablesettings.cpp).

A model stores such a variable with its groups as the leading axis; every replica sees one row of it (shapeOnReplica and
shapeOnHost in the same file). Here the model is seen as one replica sees it, for lowering, and the host's shapes are
made from the program's and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from podrun.runtime.graph import Model
from podrun.session.enums import CommGroupType, VariableRetrievalMode
from podrun.session.exceptions import popart_exception, popart_unimplemented


@dataclass(frozen=True, slots=True)
class ReplicaGrouping:
    """Groups of ``groupSize`` replicas, ``stride`` apart, among ``numReplicas``."""

    numReplicas: int
    stride: int
    groupSize: int

    @property
    def numGroups(self) -> int:
        """How many groups there are."""
        return self.numReplicas // self.groupSize

    def group_of(self, replica: int) -> int:
        """The group that a replica belongs to."""
        block = self.stride * self.groupSize
        return replica // block * self.stride + replica % self.stride

    def members(self, group: int) -> list[int]:
        """Replicas of a group, in order."""
        return [replica for replica in range(self.numReplicas) if self.group_of(replica) == group]


class CommGroup:
    """Replicas that work together: ``CommGroup(CommGroupType.Consecutive, 4)``. Default: all of them.

    ``CommGroup(grouping)`` takes a ReplicaGrouping; popart_exception for a stride that no type stands for.
    """

    def __init__(
        self,
        type: CommGroupType | ReplicaGrouping | int = CommGroupType.All,
        replicaGroupSize: int = 0,
        *,
        grouping: ReplicaGrouping | None = None,
    ) -> None:
        if isinstance(type, ReplicaGrouping):
            grouping = type
        if grouping is not None:
            self.type, self.replicaGroupSize = _type_of(grouping)
        else:
            assert not isinstance(type, ReplicaGrouping)
            self.type, self.replicaGroupSize = CommGroupType(int(type)), replicaGroupSize

    def toReplicaGrouping(self, numReplicas: int) -> ReplicaGrouping:
        """The groups among ``numReplicas``. popart_exception if the group size does not divide them."""
        size = self.replicaGroupSize
        if self.type in (CommGroupType.Consecutive, CommGroupType.Orthogonal) and (
            size < 1 or numReplicas % size
        ):
            raise popart_exception(f"A group of {size} replicas does not divide the {numReplicas} replicas.")
        if self.type is CommGroupType.All:
            return ReplicaGrouping(numReplicas, 1, numReplicas)
        if self.type is CommGroupType.Ungrouped:
            return ReplicaGrouping(numReplicas, 1, 1)
        if self.type is CommGroupType.Consecutive:
            return ReplicaGrouping(numReplicas, 1, size)
        return ReplicaGrouping(numReplicas, numReplicas // size, size)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CommGroup) and (self.type, self.replicaGroupSize) == (
            other.type,
            other.replicaGroupSize,
        )

    def __hash__(self) -> int:
        return hash((self.type, self.replicaGroupSize))

    def __repr__(self) -> str:
        return f"CommGroup(type={self.type.name}, replicaGroupSize={self.replicaGroupSize})"


def _type_of(grouping: ReplicaGrouping) -> tuple[CommGroupType, int]:
    """The CommGroup type and size that mean the same as a grouping."""
    replicas, stride, size = grouping.numReplicas, grouping.stride, grouping.groupSize
    if size == replicas:
        return CommGroupType.All, 0
    if size == 1:
        return CommGroupType.Ungrouped, 0
    if stride == 1:
        return CommGroupType.Consecutive, size
    if stride * size == replicas:
        return CommGroupType.Orthogonal, size
    raise popart_exception(
        f"Groups of {size} of {replicas} replicas with stride {stride} have no CommGroupType: use stride 1 "
        f"(Consecutive) or {replicas // size} (Orthogonal)."
    )


class VariableSettings:
    """How replicas share a variable and which copies the host reads.

    ``VariableSettings(comm_group, retrieval_mode)`` or ``VariableSettings(stride, groupSize, mode)``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._domain = CommGroup()
        self._mode = VariableRetrievalMode.OnePerGroup
        self._stride: int | None = None
        self._group_size = 0
        numbers = []
        for value in (*args, *kwargs.values()):
            if isinstance(value, CommGroup):
                self._domain = value
            elif isinstance(value, VariableRetrievalMode):
                self._mode = value
            elif isinstance(value, int) and not isinstance(value, bool):
                numbers.append(value)
            else:
                raise TypeError(
                    "__init__(): incompatible function arguments. VariableSettings takes a CommGroup, a "
                    f"VariableRetrievalMode, or stride and groupSize; got {value!r}."
                )
        if numbers:
            if len(numbers) != 2:
                raise TypeError(
                    "__init__(): incompatible function arguments: stride and groupSize go together."
                )
            self._stride, self._group_size = numbers

    def getSharedVariableDomain(self) -> CommGroup:
        """The CommGroup."""
        return self._domain

    def getRetrievalMode(self) -> VariableRetrievalMode:
        """Which copies the host reads."""
        return self._mode

    def isUsingCommGroup(self) -> bool:
        """True iff made from a CommGroup, not from stride and group size."""
        return self._stride is None

    def getCommGroupType(self) -> CommGroupType:
        """The CommGroup's type."""
        return self._domain.type

    def getStride(self) -> int:
        """Distance between members of a group."""
        return 1 if self._stride is None else self._stride

    def getGroupSize(self) -> int:
        """The group size as given (0: all)."""
        return self._group_size if self._stride is not None else self._domain.replicaGroupSize

    def getReplicaGrouping(self, numReplicas: int) -> ReplicaGrouping:
        """The groups among ``numReplicas``."""
        if self._stride is None:
            return self._domain.toReplicaGrouping(numReplicas)
        block = self._stride * self._group_size
        if block < 1 or numReplicas % block:
            raise popart_exception(
                f"Stride {self._stride} and group size {self._group_size} do not divide {numReplicas} "
                "replicas."
            )
        return ReplicaGrouping(numReplicas, self._stride, self._group_size)

    def getRealGroupSize(self, replicaCount: int) -> int:
        """Replicas in a group."""
        return self.getReplicaGrouping(replicaCount).groupSize

    def getGroupCount(self, replicaCount: int) -> int:
        """Number of groups."""
        return self.getReplicaGrouping(replicaCount).numGroups

    def getGroupRepresentative(self, group: int) -> int:
        """The first replica of a group."""
        if self._stride is not None:
            return group // self._stride * self._stride * self._group_size + group % self._stride
        if self._domain.type is CommGroupType.Consecutive:
            return group * self._domain.replicaGroupSize
        return 0 if self._domain.type is CommGroupType.All else group

    def groups(self, replicaCount: int) -> list[list[int]]:
        """Replicas of each group."""
        grouping = self.getReplicaGrouping(replicaCount)
        return [grouping.members(group) for group in range(grouping.numGroups)]

    def numReplicasReturningVariable(self, replicaCount: int) -> int:
        """Copies that the host reads."""
        if self._mode is VariableRetrievalMode.AllReplicas:
            return replicaCount
        return self.getGroupCount(replicaCount)

    def shapeOnHost(self, replica_shape: list[int], replicaCount: int) -> list[int]:
        """The shape that the host reads or writes, for a variable of ``replica_shape`` on each replica."""
        copies = self.numReplicasReturningVariable(replicaCount)
        return [copies, *replica_shape] if copies > 1 else list(replica_shape)

    def shapeOnReplica(self, full_shape: list[int], replicaCount: int, name: str) -> list[int]:
        """Shape on one replica for an initial value of ``full_shape``. popart_exception if groups do not
        match.
        """
        groups = self.getGroupCount(replicaCount)
        if groups == 1:
            return list(full_shape)
        if not full_shape or full_shape[0] != groups:
            raise popart_exception(
                f"Variable {name!r} has {groups} groups, so its host shape starts with {groups}; it is "
                f"{full_shape}."
            )
        return list(full_shape[1:])

    def verify(self) -> None:
        """popart_exception if the settings contradict themselves."""
        size = self._domain.replicaGroupSize
        if self._domain.type in (CommGroupType.Consecutive, CommGroupType.Orthogonal) and size < 1:
            raise popart_exception(
                f"CommGroup {self._domain.type.name} needs a group size of at least 1, not {size}."
            )


Settings = Mapping[str, VariableSettings]


def settings_of(model: Model) -> dict[str, VariableSettings]:
    """The VariableSettings of a model's variables."""
    return {
        name: VariableSettings(
            CommGroup(CommGroupType[groups.kind], groups.size), VariableRetrievalMode[groups.retrieval]
        )
        for name, groups in model.groups.items()
    }


def group_of(settings: Settings, name: str, replicas: int) -> tuple[int, ...]:
    """The group of each replica; empty for a variable that all replicas share. popart_exception if the groups do not
    divide the replicas."""
    chosen = settings.get(name)
    if chosen is None or chosen.getGroupCount(replicas) == 1:
        return ()
    grouping = chosen.getReplicaGrouping(replicas)
    return tuple(grouping.group_of(replica) for replica in range(replicas))


def for_one_replica(model: Model, settings: Settings, replicas: int) -> tuple[Model, dict[str, np.ndarray]]:
    """The model as one replica sees it, and the grouped variables' values as the host gives them, ``[groups, *shape]``.

    popart_exception for a value whose leading axis is not the number of groups.
    """
    values = {n: v for n, v in model.graph.initializers.items() if group_of(settings, n, replicas)}
    for name, value in values.items():
        settings[name].shapeOnReplica(list(value.shape), replicas, name)
    return model.with_values({name: value[0] for name, value in values.items()}), values


def host_values(
    initial: Mapping[str, np.ndarray], grouped: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The initial values that the host sends: of one replica's parameters; for a grouped variable the values of all
    groups.

    popart_exception for a grouped variable whose value must be known while the program is built (a shape, say).
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
    settings: Settings, state_updates: Iterable[str], replicas: int, *, all_needed: bool
) -> dict[str, ReplicaStateRows]:
    """The running statistics of a program with several replicas. ``all_needed``: the session needs the values of all
    replicas, whatever the program reads.

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
        found[name] = ReplicaStateRows(each if all_needed else host, host, groups)
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
    """The host's copy of an array that the program gave for a variable: with AllReplicas, one value of each group.

    popart_exception if replicas that share a value were given different ones.
    """
    chosen = settings.get(name)
    if chosen is None or chosen.getRetrievalMode() is not VariableRetrievalMode.AllReplicas:
        return array
    groups = group_of(settings, name, replicas)
    each = held.size // (max(groups) + 1) if groups else held.size
    if array.nbytes != each * replicas * held.dtype.itemsize:
        return array  # The caller reports a wrong size.
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
