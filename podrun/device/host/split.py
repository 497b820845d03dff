"""Where a host process's part of a job lies: pure arithmetic on IPU ranges, replicas and machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podrun.device.connection import IpuRange
from podrun.device.program.operands import Array
from podrun.errors import ApplicationRuntimeError


@dataclass(frozen=True, slots=True)
class Site:
    """A machine as a client knows it: its index in the partition, endpoint, and IPUs."""

    machine: int
    endpoint: str
    ipus: IpuRange


def touched(sites: Sequence[Site], owned: IpuRange) -> list[Site]:
    """The machines that hold any of ``owned``, in order.

    Raises ApplicationRuntimeError if some IPU of ``owned`` is on none of them.
    """
    found = [s for s in sites if s.ipus.first < owned.stop and owned.first < s.ipus.stop]
    held = sum(min(s.ipus.stop, owned.stop) - max(s.ipus.first, owned.first) for s in found)
    if owned.count < 1 or held != owned.count:
        last = max((s.ipus.stop for s in sites), default=0)
        raise ApplicationRuntimeError(
            f"IPUs {owned.first}-{owned.stop - 1} are not all in the partition, which has IPUs 0-{last - 1}"
        )
    return found


def replica_slices(sites: Sequence[Site], owned: IpuRange, ipus_per_replica: int) -> list[slice]:
    """For each touched machine, which of the owner's replicas (counted from its first) lie there, whole or in part.

    Raises ApplicationRuntimeError if the owner or a machine holds a part of a replica that could lie on one machine.
    """
    slices = []
    for site in sites:
        first, stop = max(site.ipus.first, owned.first), min(site.ipus.stop, owned.stop)
        spanning = ipus_per_replica > site.ipus.count
        edges = (owned.count,) if spanning else (first - owned.first, stop - owned.first)
        if any(edge % ipus_per_replica for edge in edges):
            raise ApplicationRuntimeError(
                f"IPUs {owned.first}-{owned.stop - 1} are not whole replicas of {ipus_per_replica} "
                "IPUs on each machine"
            )
        replica = (first - owned.first) // ipus_per_replica
        slices.append(slice(replica, replica + 1 if spanning else (stop - owned.first) // ipus_per_replica))
    return slices


def part(array: Array, axis: int | None, replicas: slice) -> Array:
    """The view of ``array`` for some replicas; ``axis`` None: all see the same."""
    if axis is None:
        return array
    index = (slice(None),) * axis + (replicas,)
    return array[index]
