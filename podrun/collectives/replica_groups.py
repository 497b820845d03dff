"""Groups of replicas as the SDK names them: all, consecutive ones, or every so-many-th one.

With 8 replicas and groups of 2: consecutive ``(0, 1), (2, 3), (4, 5), (6, 7)``; orthogonal ``(0, 4), (1, 5), (2, 6),
(3, 7)``. What `podrun.collectives.Communicator.split` takes, and what ``ReplicaGrouping(num_replicas, stride,
group_size)`` of popxl and PopART's variable settings describe.
"""

from __future__ import annotations

import enum

from podrun.errors import UsageError

Groups = tuple[tuple[int, ...], ...]
"""Disjoint groups that together hold every replica once."""


class GroupKind(enum.Enum):
    """CommGroupType, by its meaning."""

    ALL = "all"
    """One group of all."""
    CONSECUTIVE = "consecutive"
    """Neighbours: stride 1."""
    ORTHOGONAL = "orthogonal"
    """As far apart as can be: stride ``replicas / group_size``."""
    NONE = "none"
    """Every replica by itself."""


def replica_groups(replicas: int, kind: GroupKind, group_size: int = 0) -> Groups:
    """The groups of ``replicas`` replicas. ``group_size`` is not looked at for ALL and NONE.

    Raises UsageError for a size that does not divide the replicas.
    """
    if kind is GroupKind.ALL:
        return strided_groups(replicas, 1, replicas)
    if kind is GroupKind.NONE:
        return strided_groups(replicas, 1, 1)
    if group_size < 1 or replicas % group_size:
        raise UsageError(f"{replicas} replicas do not fall into {kind.value} groups of {group_size}")
    return strided_groups(
        replicas, 1 if kind is GroupKind.CONSECUTIVE else replicas // group_size, group_size
    )


def strided_groups(replicas: int, stride: int, group_size: int) -> Groups:
    """Groups of ``group_size`` replicas that are ``stride`` apart.

    Raises UsageError if blocks of ``stride * group_size`` replicas do not fill the whole.
    """
    block = stride * group_size
    if replicas < 1 or stride < 1 or group_size < 1 or replicas % block:
        raise UsageError(
            f"{replicas} replicas do not fall into groups of {group_size} with stride {stride}",
            hint="The number of replicas must be a multiple of stride times group size.",
        )
    return tuple(
        tuple(range(start + offset, start + offset + block, stride))
        for start in range(0, replicas, block)
        for offset in range(stride)
    )
