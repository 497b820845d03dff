"""``import horovod.popart as hvd``: `podrun.popart.sessions.instances`, and `podrun.popdist.horovod_instances`."""

from podrun.popart.sessions.instances import (
    DistributedOptimizer,
    DistributedTrainingSession,
    broadcast_weights,
)
from podrun.popdist.horovod_instances import (
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

__all__ = [
    "DistributedOptimizer",
    "DistributedTrainingSession",
    "broadcast_weights",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
