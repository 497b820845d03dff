"""Who this instance is among all: read from the POPDIST_* variables that ``podrun`` sets.

Outside of ``podrun`` a program is one instance with one replica of one IPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from podrun.device.connection import IpuRange
from podrun.errors import UsageError

TOTAL = "POPDIST_NUM_TOTAL_REPLICAS"
LOCAL = "POPDIST_NUM_LOCAL_REPLICAS"
IPUS = "POPDIST_NUM_IPUS_PER_REPLICA"
OFFSET = "POPDIST_REPLICA_INDEX_OFFSET"
LOCAL_INSTANCE = "POPDIST_LOCAL_INSTANCE_INDEX"
UNIFORM = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"
_BY_HAND = (
    "podrun sets these variables: launch with podrun --num-replicas N, or unset POPDIST_NUM_TOTAL_REPLICAS."
)


class popdist_error(UsageError):
    """A popdist call that cannot be answered, or an environment that contradicts itself."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Replicas in all, of this instance, IPUs of each, the first replica of this instance, and whether all
    instances have equally many.
    """

    total_replicas: int
    local_replicas: int
    ipus_per_replica: int
    replica_offset: int
    local_instance: int
    uniform: bool

    @property
    def job(self) -> IpuRange:
        """IPUs of the whole program."""
        return IpuRange(0, self.total_replicas * self.ipus_per_replica)

    @property
    def owned(self) -> IpuRange:
        """IPUs of this instance."""
        return IpuRange(
            self.replica_offset * self.ipus_per_replica, self.local_replicas * self.ipus_per_replica
        )


def layout(environ: Mapping[str, str] | None = None) -> Layout | None:
    """The layout that the environment describes, or None outside of ``podrun``. popdist_error if it cannot
    be.
    """
    environ = os.environ if environ is None else environ
    if TOTAL not in environ:
        return None
    found = Layout(
        _number(environ, TOTAL, 1),
        _number(environ, LOCAL, 1),
        _number(environ, IPUS, 1),
        _number(environ, OFFSET, 0, least=0),
        _number(environ, LOCAL_INSTANCE, 0, least=0),
        environ.get(UNIFORM, "1") not in ("0", "false", "no"),
    )
    if found.replica_offset + found.local_replicas > found.total_replicas:
        raise popdist_error(
            f"{OFFSET}={found.replica_offset} and {LOCAL}={found.local_replicas} go beyond {TOTAL}="
            f"{found.total_replicas}.",
            hint=_BY_HAND,
        )
    if found.uniform and (
        found.total_replicas % found.local_replicas or found.replica_offset % found.local_replicas
    ):
        raise popdist_error(
            f"{UNIFORM}=1, but {LOCAL}={found.local_replicas} does not divide {TOTAL}={found.total_replicas} "
            f"or {OFFSET}={found.replica_offset}.",
            hint=_BY_HAND,
        )
    return found


def _number(environ: Mapping[str, str], name: str, default: int, least: int = 1) -> int:
    text = environ.get(name, str(default))
    try:
        value = int(text)
    except ValueError as error:
        raise popdist_error(f"{name} must be a number, not {text!r}.", hint=_BY_HAND) from error
    if value < least:
        raise popdist_error(f"{name} must be at least {least}, not {value}.", hint=_BY_HAND)
    return value


_ALONE = Layout(1, 1, 1, 0, 0, True)


def _here() -> Layout:
    return layout() or _ALONE


def isPopdistEnvSet() -> bool:
    """True iff launched by ``podrun``."""
    return layout() is not None


def getNumTotalReplicas() -> int:
    """Replicas over all instances; 1 outside of ``podrun``."""
    return _here().total_replicas


def getNumLocalReplicas() -> int:
    """Replicas of this instance; 1 outside of ``podrun``."""
    return _here().local_replicas


def getNumIpusPerReplica() -> int:
    """IPUs of each replica; 1 outside of ``podrun``."""
    return _here().ipus_per_replica


def getReplicaIndexOffset() -> int:
    """This instance's first replica among all."""
    return _here().replica_offset


def getLocalInstanceIndex() -> int:
    """This instance's number on its host."""
    return _here().local_instance


def _uniform(call: str) -> Layout:
    here = _here()
    if not here.uniform:
        raise popdist_error(
            f"{call} needs equally many replicas in all instances ({UNIFORM}=1).", hint=_BY_HAND
        )
    return here


def getNumInstances() -> int:
    """Number of instances. popdist_error if they have different numbers of replicas."""
    here = _uniform("getNumInstances()")
    return here.total_replicas // here.local_replicas


def getInstanceIndex() -> int:
    """This instance's number among all. popdist_error if they have different numbers of replicas."""
    here = _uniform("getInstanceIndex()")
    return here.replica_offset // here.local_replicas


def checkNumIpusPerReplica(numIpus: int) -> bool:
    """True iff replicas have ``numIpus`` IPUs here."""
    return _here().ipus_per_replica == numIpus


def getDeviceId(ipusPerReplica: int = 0) -> int:
    """Id of the device that is this instance's (single IPUs are numbered first, then pairs, and so on).

    popdist_error if the instance's IPUs are no device: not a power of two, or not aligned.
    """
    here = _here()
    if ipusPerReplica and isPopdistEnvSet() and not checkNumIpusPerReplica(ipusPerReplica):
        raise popdist_error(
            f"The program wants {ipusPerReplica} IPUs per replica, but was launched with "
            f"{here.ipus_per_replica}: podrun --ipus-per-replica {ipusPerReplica}."
        )
    per_replica = here.ipus_per_replica if isPopdistEnvSet() else ipusPerReplica or 1
    size, first = here.local_replicas * per_replica, here.replica_offset * per_replica
    partition = 1
    while partition < here.total_replicas * per_replica:
        partition *= 2
    if size & (size - 1) or first % size:
        raise popdist_error(
            f"IPUs {first} to {first + size - 1} of this instance are no device of their own.",
            hint="Launch with --num-instances so that each has a power of two of IPUs.",
        )
    base = sum(partition >> level for level in range(size.bit_length() - 1))
    return base + first // size
