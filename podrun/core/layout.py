"""Which IPUs, replicas, instances and machines belong together: all of podrun's arithmetic on them.

IPUs, replicas, instances and machines are numbered from 0 and lie in order. IPU *k* of replica *r* is IPU
``r * ipus_per_replica + k`` of its job; machine *m* holds four consecutive IPUs; an instance owns consecutive replicas.
Everything here is a pure function of these numbers. Other rooms add only what an error message needs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from podrun.core.cluster import IPUS_PER_MACHINE
from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass

RankGroups = tuple[tuple[int, ...], ...]
"""Disjoint groups that together hold every replica once."""


@dataclass(frozen=True, slots=True)
class IpuRange:
    """IPUs ``[first, first + count)`` of a partition."""

    first: int
    count: int

    @property
    def stop(self) -> int:
        """One past the last IPU."""
        return self.first + self.count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.stop))

    def overlap(self, other: IpuRange) -> IpuRange:
        """The IPUs that are in both ranges; a range with ``count`` 0 if there are none."""
        first = max(self.first, other.first)
        return IpuRange(first, max(min(self.stop, other.stop) - first, 0))

    def machines(self, ipus_per_machine: int = IPUS_PER_MACHINE) -> range:
        """The machines that hold any of these IPUs."""
        return range(self.first // ipus_per_machine, (self.stop - 1) // ipus_per_machine + 1)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a program lies on a partition.

    ``replicas`` in all; ``ipus_per_replica`` each; ``machines`` in all, each holding ``replicas_per_machine`` of them.
    Machine *m* holds partition IPUs ``[4m, 4m+4)`` (fewer on a partition smaller than a machine).

    A replica of more than four IPUs spans ``machines_per_replica`` machines; then ``replicas_per_machine`` is 1.
    Machine *m* is at position ``m % machines_per_replica`` of replica ``m // machines_per_replica`` and interprets
    the lists of IPUs ``[4p, 4p+4)``, *p* its position; Send and Receive go between machines where the peer's list is
    on another one.
    """

    replicas: int
    ipus_per_replica: int
    machines: int
    replicas_per_machine: int
    machines_per_replica: int = 1

    @classmethod
    def of(cls, replicas: int, ipus_per_replica: int) -> Layout:
        """The layout of replicas that fill machines in order.

        Raises UsageError if the numbers are below 1, if ``ipus_per_replica`` is no power of two, or if the replicas
        do not fill machines evenly.
        """
        if replicas < 1 or ipus_per_replica < 1:
            raise UsageError(
                f"a program needs at least one replica of one IPU, not {replicas} of {ipus_per_replica}"
            )
        if not is_power_of_two(ipus_per_replica):
            raise UsageError(
                f"a replica cannot have {ipus_per_replica} IPUs: IPUs are given in powers of two",
                hint=f"Give each replica {1 << ipus_per_replica.bit_length()} IPUs.",
            )
        if ipus_per_replica > IPUS_PER_MACHINE:
            spanned = ipus_per_replica // IPUS_PER_MACHINE
            return cls(replicas, ipus_per_replica, replicas * spanned, 1, spanned)
        total, per_machine = replicas * ipus_per_replica, IPUS_PER_MACHINE // ipus_per_replica
        if total <= IPUS_PER_MACHINE:
            return cls(replicas, ipus_per_replica, machines=1, replicas_per_machine=replicas)
        if total % IPUS_PER_MACHINE:
            below = replicas // per_machine * per_machine
            raise UsageError(
                f"{replicas} replicas of {ipus_per_replica} IPU(s) do not fill machines of {IPUS_PER_MACHINE} IPUs "
                "evenly",
                hint=f"Use {below} or {below + per_machine} replicas.",
            )
        return cls(replicas, ipus_per_replica, total // IPUS_PER_MACHINE, per_machine)

    @property
    def ipus(self) -> int:
        """IPUs that the program covers."""
        return self.replicas * self.ipus_per_replica

    @property
    def ipus_per_position(self) -> int:
        """IPUs of one replica that lie on one machine."""
        return self.ipus_per_replica // self.machines_per_replica

    @property
    def machines_per_position(self) -> int:
        """Machines at the same position of their replicas; each holds one slice of the arenas at that position."""
        return self.machines // self.machines_per_replica

    @property
    def is_consistent(self) -> bool:
        """Whether the numbers are consistent with each other and with the size of a machine."""
        if min(self.replicas, self.ipus_per_replica, self.machines, self.machines_per_replica) < 1:
            return False
        if self.machines_per_replica == 1:
            held = self.replicas_per_machine * self.ipus_per_replica
            return self.replicas_per_machine * self.machines == self.replicas and held <= IPUS_PER_MACHINE
        return (
            self.replicas_per_machine == 1
            and self.machines == self.replicas * self.machines_per_replica
            and self.ipus_per_replica == IPUS_PER_MACHINE * self.machines_per_replica
        )

    def position_of(self, ipu: int) -> int | None:
        """The position of the machine that holds IPU ``ipu`` of a replica; None if replicas lie on one machine."""
        return ipu // self.ipus_per_position if self.machines_per_replica > 1 else None


@dataclass(frozen=True, slots=True)
class InstancePart:
    """The replicas that one instance owns: ``local_replicas`` from ``first_replica`` on."""

    first_replica: int
    local_replicas: int
    ipus_per_replica: int

    @classmethod
    def of(cls, instance: int, instances: int, replicas: int, ipus_per_replica: int) -> InstancePart:
        """The part of one of ``instances`` instances that own equally many of ``replicas`` replicas."""
        share = replicas // instances
        return cls(instance * share, share, ipus_per_replica)

    @property
    def ipus(self) -> IpuRange:
        """The IPUs of these replicas in their job."""
        return IpuRange(
            self.first_replica * self.ipus_per_replica, self.local_replicas * self.ipus_per_replica
        )

    def fits(self, replicas: int) -> bool:
        """Whether the part lies within ``replicas`` replicas."""
        return self.first_replica + self.local_replicas <= replicas

    def is_one_of_equal_parts(self, replicas: int) -> bool:
        """Whether ``replicas`` replicas divide into parts of this size, of which this is one."""
        return replicas % self.local_replicas == 0 and self.first_replica % self.local_replicas == 0


def replicas_on(machine: IpuRange, owned: IpuRange, ipus_per_replica: int) -> slice | None:
    """Which replicas of ``owned``, counted from its first, lie on a machine, whole or in part.

    None if the owner or the machine holds a part of a replica that could lie on one machine.
    """
    here = machine.overlap(owned)
    first, stop = here.first - owned.first, here.stop - owned.first
    if ipus_per_replica > machine.count:
        if owned.count % ipus_per_replica:
            return None
        return slice(first // ipus_per_replica, first // ipus_per_replica + 1)
    if first % ipus_per_replica or stop % ipus_per_replica:
        return None
    return slice(first // ipus_per_replica, stop // ipus_per_replica)


def slice_of(rank: int, ranks: int, size: int) -> slice:
    """The slice of ``size`` elements that ``rank`` of ``ranks`` owns; sizes differ by at most one."""
    return slice(rank * size // ranks, (rank + 1) * size // ranks)


def is_power_of_two(number: int) -> bool:
    """True for 1, 2, 4, 8, ...; false for 0 and below."""
    return number > 0 and number & (number - 1) == 0


# --- Groups of replicas -----------------------------------------------------------------------------------------------


class GroupKind(enum.Enum):
    """How replicas are grouped, as PopART's ``CommGroupType`` says it."""

    ALL = "all"
    """One group of all."""
    CONSECUTIVE = "consecutive"
    """Neighbours: stride 1."""
    ORTHOGONAL = "orthogonal"
    """As far apart as possible: stride ``replicas / group_size``."""
    NONE = "none"
    """Every replica is a group of its own."""


def replica_groups(replicas: int, kind: GroupKind, group_size: int = 0) -> RankGroups:
    """The groups of ``replicas`` replicas. ALL and NONE ignore ``group_size``.

    With 8 replicas and groups of 2, CONSECUTIVE gives ``(0, 1), (2, 3), (4, 5), (6, 7)`` and ORTHOGONAL ``(0, 4),
    (1, 5), (2, 6), (3, 7)``. Raises UsageError for a size that does not divide the replicas.
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


def strided_groups(replicas: int, stride: int, group_size: int) -> RankGroups:
    """Groups of ``group_size`` replicas that are ``stride`` apart, as popxl's ``ReplicaGrouping`` describes them.

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
