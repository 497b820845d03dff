"""``import horovod.popart as hvd``: `podrun.popart.instances`."""

from podrun.popart.instances import (
    DistributedOptimizer,
    DistributedTrainingSession,
    broadcast_weights,
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
