"""PopDist: which of the instances that ``podrun`` launched this process is, and PopART's settings for it.

The names of the SDK's ``popdist`` module may enter, and nothing else. The environment of a launch enters, and session
options, devices and results of collectives leave for programs. `popdist.popart` is `podrun.popdist.popart`.
"""

from podrun.popdist.collectives import (
    allGather,
    allReduceSum,
    barrier,
    broadcast,
    execute_on_instances,
    finalizeBackend,
    init,
    initializeBackend,
    isBackendInitialized,
    registerBackend,
    registerDefaultBackend,
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
