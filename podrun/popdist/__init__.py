"""PopDist: which of the instances that ``podrun`` launched this process is, and PopART's settings for it.

Only names of the SDK's ``popdist``, ``mpi4py`` and ``horovod.popart`` may enter. The environment of a launch is read
here (`core`), data of instances are exchanged (`collectives`, `mpi`), and nothing of a front
end may enter: `popdist.popart` is `podrun.popart.sessions.instances`.
"""

from podrun.popdist.backends import (
    finalizeBackend,
    init,
    initializeBackend,
    isBackendInitialized,
    registerBackend,
    registerDefaultBackend,
)
from podrun.popdist.collectives import (
    allGather,
    allReduceSum,
    barrier,
    broadcast,
    execute_on_instances,
    synchronize,
)
from podrun.popdist.core import (
    checkNumIpusPerReplica,
    getDeviceId,
    getInstanceIndex,
    getLocalInstanceIndex,
    getNumInstances,
    getNumIpusPerReplica,
    getNumLocalReplicas,
    getNumTotalReplicas,
    getReplicaIndexOffset,
    isPopdistEnvSet,
    popdist_error,
)

__all__ = [
    "allGather",
    "allReduceSum",
    "barrier",
    "broadcast",
    "checkNumIpusPerReplica",
    "execute_on_instances",
    "finalizeBackend",
    "getDeviceId",
    "getInstanceIndex",
    "getLocalInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "getReplicaIndexOffset",
    "init",
    "initializeBackend",
    "isBackendInitialized",
    "isPopdistEnvSet",
    "popdist_error",
    "registerBackend",
    "registerDefaultBackend",
    "synchronize",
]
