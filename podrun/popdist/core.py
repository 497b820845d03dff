"""The place of this instance among all: read from the POPDIST_* variables that ``podrun`` sets.

Outside of ``podrun`` a program is one instance with one replica of one IPU.
"""

from __future__ import annotations

from collections.abc import Mapping

from podrun.core.environment import (
    PODRUN_FIRST_IPU,
    POPDIST_LOCAL_INSTANCE_INDEX,
    POPDIST_NUM_IPUS_PER_REPLICA,
    POPDIST_NUM_LOCAL_REPLICAS,
    POPDIST_NUM_TOTAL_REPLICAS,
    POPDIST_REPLICA_INDEX_OFFSET,
    POPDIST_UNIFORM_REPLICAS_PER_INSTANCE,
    environment,
)
from podrun.core.errors import ErrorCause, UsageError
from podrun.core.layout import InstancePart, IpuRange, is_power_of_two
from podrun.core.quick_dataclass import dataclass

_BY_HAND = (
    "podrun sets these variables: launch with podrun --num-replicas N, or unset POPDIST_NUM_TOTAL_REPLICAS."
)


class popdist_error(UsageError):
    """A popdist call that cannot be answered, or an environment that contradicts itself. ``cause``: see
    `podrun.core.errors.ErrorCause`.
    """

    def __init__(self, message: str, *, cause: ErrorCause | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class InstanceLayout:
    """The environment's statements about this instance.

    ``part``: its replicas. ``uniform``: whether all instances own equally many. ``first_ipu``: the program's first IPU
    in the partition; not 0 only if several programs share it.
    """

    total_replicas: int
    part: InstancePart
    local_instance: int = 0
    uniform: bool = True
    first_ipu: int = 0

    @property
    def job(self) -> IpuRange:
        """IPUs of the whole program in the partition."""
        return self._moved(InstancePart(0, self.total_replicas, self.part.ipus_per_replica).ipus)

    @property
    def ipus(self) -> IpuRange:
        """IPUs of this instance in the partition."""
        return self._moved(self.part.ipus)

    def _moved(self, ipus: IpuRange) -> IpuRange:
        return IpuRange(self.first_ipu + ipus.first, ipus.count)


def layout(environ: Mapping[str, str] | None = None) -> InstanceLayout | None:
    """The layout in the environment, or None outside of ``podrun``. popdist_error if it contradicts itself."""
    environ = environment(environ)
    if POPDIST_NUM_TOTAL_REPLICAS not in environ:
        return None
    instances = InstanceLayout(
        total_replicas=_number(environ, POPDIST_NUM_TOTAL_REPLICAS, 1),
        part=InstancePart(
            _number(environ, POPDIST_REPLICA_INDEX_OFFSET, 0, least=0),
            _number(environ, POPDIST_NUM_LOCAL_REPLICAS, 1),
            _number(environ, POPDIST_NUM_IPUS_PER_REPLICA, 1),
        ),
        local_instance=_number(environ, POPDIST_LOCAL_INSTANCE_INDEX, 0, least=0),
        uniform=environ.get(POPDIST_UNIFORM_REPLICAS_PER_INSTANCE, "1") not in ("0", "false", "no"),
        first_ipu=_number(environ, PODRUN_FIRST_IPU, 0, least=0),
    )
    part = instances.part
    if not part.fits(instances.total_replicas):
        raise popdist_error(
            f"POPDIST_REPLICA_INDEX_OFFSET={part.first_replica} and POPDIST_NUM_LOCAL_REPLICAS={part.local_replicas} "
            f"go beyond POPDIST_NUM_TOTAL_REPLICAS={instances.total_replicas}.",
            hint=_BY_HAND,
        )
    if instances.uniform and not part.is_one_of_equal_parts(instances.total_replicas):
        raise popdist_error(
            f"POPDIST_UNIFORM_REPLICAS_PER_INSTANCE=1, but POPDIST_NUM_LOCAL_REPLICAS={part.local_replicas} does not "
            f"divide POPDIST_NUM_TOTAL_REPLICAS={instances.total_replicas} or "
            f"POPDIST_REPLICA_INDEX_OFFSET={part.first_replica}.",
            hint=_BY_HAND,
        )
    return instances


def _number(environ: Mapping[str, str], name: str, default: int, least: int = 1) -> int:
    text = environ.get(name, str(default))
    try:
        value = int(text)
    except ValueError as error:
        raise popdist_error(f"{name} must be a number, not {text!r}.", hint=_BY_HAND) from error
    if value < least:
        raise popdist_error(f"{name} must be at least {least}, not {value}.", hint=_BY_HAND)
    return value


_ALONE = InstanceLayout(1, InstancePart(0, 1, 1))


def _here() -> InstanceLayout:
    return layout() or _ALONE


def isPopdistEnvSet() -> bool:
    """True iff launched by ``podrun``."""
    return layout() is not None


def getNumTotalReplicas() -> int:
    """Replicas over all instances; 1 outside of ``podrun``."""
    return _here().total_replicas


def getNumLocalReplicas() -> int:
    """Replicas of this instance; 1 outside of ``podrun``."""
    return _here().part.local_replicas


def getNumIpusPerReplica() -> int:
    """IPUs of each replica; 1 outside of ``podrun``."""
    return _here().part.ipus_per_replica


def getReplicaIndexOffset() -> int:
    """This instance's first replica among all."""
    return _here().part.first_replica


def getLocalInstanceIndex() -> int:
    """This instance's number on its host."""
    return _here().local_instance


def _uniform(call: str) -> InstanceLayout:
    here = _here()
    if not here.uniform:
        raise popdist_error(
            f"{call} needs equally many replicas in all instances (POPDIST_UNIFORM_REPLICAS_PER_INSTANCE=1).",
            hint=_BY_HAND,
        )
    return here


def getNumInstances() -> int:
    """Number of instances. popdist_error if they have different numbers of replicas."""
    here = _uniform("getNumInstances()")
    return here.total_replicas // here.part.local_replicas


def getInstanceIndex() -> int:
    """This instance's number among all. popdist_error if they have different numbers of replicas."""
    here = _uniform("getInstanceIndex()")
    return here.part.first_replica // here.part.local_replicas


def checkNumIpusPerReplica(numIpus: int) -> bool:
    """True iff replicas have ``numIpus`` IPUs here."""
    return _here().part.ipus_per_replica == numIpus


def getDeviceId(ipusPerReplica: int = 0) -> int:
    """Id of the device with this instance's IPUs (single IPUs are numbered first, then pairs, and so on).

    popdist_error if the instance's IPUs form no device: not a power of two, or not aligned.
    """
    here = _here()
    if ipusPerReplica and isPopdistEnvSet() and not checkNumIpusPerReplica(ipusPerReplica):
        raise popdist_error(
            f"The program wants {ipusPerReplica} IPUs per replica, but was launched with "
            f"{here.part.ipus_per_replica}: podrun --ipus-per-replica {ipusPerReplica}."
        )
    per_replica = here.part.ipus_per_replica if isPopdistEnvSet() else ipusPerReplica or 1
    size, first = here.part.local_replicas * per_replica, here.part.first_replica * per_replica
    partition = 1
    while partition < here.total_replicas * per_replica:
        partition *= 2
    if not is_power_of_two(size) or first % size:
        raise popdist_error(
            f"IPUs {first} to {first + size - 1} of this instance are no device of their own.",
            hint="Launch with --num-instances so that each has a power of two of IPUs.",
        )
    base = sum(partition >> level for level in range(size.bit_length() - 1))
    return base + first // size
