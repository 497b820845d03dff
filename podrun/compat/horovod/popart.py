"""``import horovod.popart as hvd``: `podrun.popdist.popart`."""

from podrun.popdist.popart import (
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
