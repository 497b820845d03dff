"""Variables with a value for each group of replicas: which replicas share one, and its shapes in model, program, host.

`CommGroup`, `ReplicaGrouping` and `VariableSettings` say which replicas share a value. Replicas of a Consecutive group
are neighbours, those of an Orthogonal one lie as far apart as there are groups (graphcore/popart,
willow/include/popart/variablesettings.hpp and willow/src/variablesettings.cpp).

A model stores such a variable with its groups as the leading axis; every replica sees one row of it (shapeOnReplica and
shapeOnHost in the same file). Here the model is seen as one replica sees it, for lowering, and the host's shapes are
made from the program's and the other way round.
"""

from __future__ import annotations

from podrun.core.quick_dataclass import dataclass
from podrun.popart.values.enums import CommGroupType, VariableRetrievalMode
from podrun.popart.values.exceptions import incompatible, popart_exception


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
            self.type, self.replicaGroupSize = _type_of(type)
        elif grouping is not None:
            self.type, self.replicaGroupSize = _type_of(grouping)
        else:
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

    def __init__(self, *args: object, **kwargs: object) -> None:
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
                raise incompatible(
                    "__init__",
                    "VariableSettings takes a CommGroup, a "
                    f"VariableRetrievalMode, or stride and groupSize; got {value!r}.",
                )
        if numbers:
            if len(numbers) != 2:
                raise TypeError(
                    "__init__(): incompatible function arguments: stride and groupSize go together."
                )
            self._stride, self._group_size = numbers

    def getSharedVariableDomain(self) -> CommGroup:
        """The CommGroup whose replicas share the variable's value."""
        return self._domain

    def getRetrievalMode(self) -> VariableRetrievalMode:
        """Which copies the host reads."""
        return self._mode

    def isUsingCommGroup(self) -> bool:
        """True iff made from a CommGroup, not from stride and group size."""
        return self._stride is None

    def getCommGroupType(self) -> CommGroupType:
        """The type of the CommGroup whose replicas share the variable's value."""
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
                f"Stride {self._stride} and group size {self._group_size} do not divide {numReplicas} replicas."
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
        """Shape on one replica for an initial value of ``full_shape``. popart_exception if groups do not match."""
        groups = self.getGroupCount(replicaCount)
        if groups == 1:
            return list(full_shape)
        if not full_shape or full_shape[0] != groups:
            raise popart_exception(
                f"Variable {name!r} has {groups} groups, so its host shape starts with {groups}; it is {full_shape}."
            )
        return list(full_shape[1:])

    def verify(self) -> None:
        """popart_exception if the settings contradict themselves."""
        size = self._domain.replicaGroupSize
        if self._domain.type in (CommGroupType.Consecutive, CommGroupType.Orthogonal) and size < 1:
            raise popart_exception(
                f"CommGroup {self._domain.type.name} needs a group size of at least 1, not {size}."
            )
