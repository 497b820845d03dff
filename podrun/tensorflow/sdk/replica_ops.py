"""Operations between replicas, and operations that are the identity on an emulated IPU."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from podrun.tensorflow.capture.markers import mark, mark_like
from podrun.tensorflow.capture.program_graphs import in_program


def cross_replica_sum(x: Any, replica_group_size: int | None = None, name: str | None = None) -> Any:
    """The sum over all replicas, or over groups of neighbouring ones."""
    x = tf.convert_to_tensor(x)
    return mark_like("cross_replica_sum", x, group=replica_group_size) if in_program() else x


def cross_replica_mean(x: Any, replica_group_size: int | None = None, name: str | None = None) -> Any:
    """The mean over all replicas, or over groups of neighbouring ones."""
    x = tf.convert_to_tensor(x)
    return mark_like("cross_replica_mean", x, group=replica_group_size) if in_program() else x


def assume_equal_across_replicas(tensors: Any, inplace: bool = False) -> Any:
    """The tensors."""
    return tensors


def replication_index(name: str | None = None) -> Any:
    """The number of the replica, int32."""
    (index,) = mark("replication_index", [], [tf.TensorSpec([], tf.int32)])
    return index


def ipu_replication_normalise(x: Any, name: str | None = None) -> Any:
    """``x`` divided by the number of replicas."""
    return mark_like("replica_sum_over_count", tf.convert_to_tensor(x))


def gathered_from_replicas(x: Any, replication_factor: int, name: str | None = None) -> Any:
    """``[replicas, ...]``: the values of all replicas, in order."""
    if isinstance(x, (list, tuple)):
        return [gathered_from_replicas(item, replication_factor) for item in x]
    (result,) = mark("all_gather", [x], [tf.TensorSpec([replication_factor, *x.shape], x.dtype)])
    return result


def barrier(tensors: Any, insert_barrier_for_gradients: bool = False, name: str | None = None) -> Any:
    """The tensors."""
    return tensors


def remap(x: Any, name: str | None = None) -> Any:
    """The tensor."""
    return x


def passed_print_tensor(input: Any, name: str = "") -> Any:
    """The tensor; nothing is printed."""
    return input


def outlined_function(
    func: Any = None, unique_sharding: bool = False, keep_input_layouts: Any = None, name: str | None = None
) -> Any:
    """The function itself, as a decorator with or without arguments."""
    return func if func is not None else (lambda function: function)


def ipu_multi_conv(func: Any = None, options: Any = None) -> Any:
    """The function itself. TypeError for options that are no dictionary."""
    if options is not None and not isinstance(options, dict):
        raise TypeError("Poplar options need to be a dictionary.")
    return func if func is not None else (lambda function: function)
