"""``import horovod.tensorflow as hvd`` for TensorFlow programs: `podrun.tensorflow.sdk.host_collectives`."""

from podrun.tensorflow.sdk.host_collectives import (
    Adasum,
    Average,
    BroadcastGlobalVariablesHook,
    Sum,
    broadcast_global_variables,
    broadcast_variables,
)
from podrun.tensorflow.sdk.host_collectives import end_instances as shutdown
from podrun.tensorflow.sdk.host_collectives import horovod_allreduce as allreduce
from podrun.tensorflow.sdk.host_collectives import host_gradient_optimizer as DistributedOptimizer
from podrun.tensorflow.sdk.host_collectives import init_instances as init
from podrun.tensorflow.sdk.host_collectives import instance_count as size
from podrun.tensorflow.sdk.host_collectives import instance_rank as rank
from podrun.tensorflow.sdk.host_collectives import instances_on_host as local_size
from podrun.tensorflow.sdk.host_collectives import no_mpi as mpi_built
from podrun.tensorflow.sdk.host_collectives import no_mpi as mpi_enabled
from podrun.tensorflow.sdk.host_collectives import no_mpi as mpi_threads_supported
from podrun.tensorflow.sdk.host_collectives import rank_on_host as local_rank
from podrun.tensorflow.sdk.host_collectives import tensor_allgather as allgather
from podrun.tensorflow.sdk.host_collectives import tensor_broadcast as broadcast

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "DistributedOptimizer",
    "Sum",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "init",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "rank",
    "shutdown",
    "size",
]
