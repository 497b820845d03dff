"""Operations by the names of the modules ``tensorflow.compiler.plugin.poplar.ops.gen_*_ops``, which tests and layers of
the SDK call: random masks, rows of tensors, collectives, and what stands for activations and markers.

`library_operations` has those that speak with the host, `recurrent_call` the recurrent layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from podrun.tensorflow.addons.recurrent_call import LIBRARY_LAYERS
from podrun.tensorflow.sdk.carried_state import (
    fifo,
    get_current_iteration_counter,
    ipu_stateful_gradient_accumulate,
    ipu_stateful_gradient_accumulate_with_momentum,
    printed_tensor,
)
from podrun.tensorflow.sdk.cases_of_tests import clear_compiled_programs
from podrun.tensorflow.sdk.events_of_tests import event_trace
from podrun.tensorflow.sdk.layer_ops import (
    approximate_gelu,
    ipu_hard_sigmoid,
    ipu_swish,
    seeded_dropout,
    stable_softmax,
)
from podrun.tensorflow.sdk.library_operations import BY_MODULE
from podrun.tensorflow.sdk.replica_ops import (
    assume_equal_across_replicas,
    cross_replica_mean,
    cross_replica_sum,
    exchanged_between_replicas,
    gathered_from_replicas,
    ipu_replication_normalise,
    reduced_and_scattered,
    remap,
    replication_index,
)
from podrun.tensorflow.sdk.row_slices import copied_rows


def _dropped_with_seed(
    x: tf.Tensor,
    seed: tf.Tensor | Sequence[int],
    rate: float,
    scale: float,
    noise_shape: Sequence[int] | None = None,
    name: str | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """``gen_poprand_ops.ipu_dropout_with_seed``: what is kept, with the probability ``rate``, times ``scale``; the
    seed; and a reference that only the gradient of the SDK reads. `rand_ops.dropout` calls it with what its own
    ``rate`` leaves, and one divided by that.
    """
    x, seed = tf.convert_to_tensor(x), tf.convert_to_tensor(seed, tf.int32)
    kept = seeded_dropout(x, 1.0 - rate, noise_shape, seed)
    factor = tf.constant(scale * rate, x.dtype)
    return kept * factor, tf.identity(seed), tf.zeros([], x.dtype)


def _dropped(
    x: tf.Tensor,
    rate: float,
    scale: float,
    noise_shape: Sequence[int] | None = None,
    name: str | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """``gen_poprand_ops.ipu_dropout``: the same with a seed that is drawn."""
    seed = tf.random.uniform([2], tf.int32.min, tf.int32.max, tf.int32)
    return _dropped_with_seed(x, seed, rate, scale, noise_shape)


def _dropped_again(
    input: tf.Tensor,
    seed: tf.Tensor,
    reference: tf.Tensor,
    rate: float,
    scale: float,
    noise_shape: Sequence[int] | None = None,
    name: str | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """``ipu_dropout_with_seed_and_reference``: the mask of an operation before, by its seed."""
    masked, seed, _ = _dropped_with_seed(input, seed, rate, scale, noise_shape)
    return masked, seed


def _rows_read(
    input: tf.Tensor, indices: tf.Tensor, indices_are_sorted: bool = False, name: str | None = None
) -> tf.Tensor:
    """``ipu_multi_slice``: ``[*indices.shape, columns]``."""
    return tf.gather(tf.convert_to_tensor(input), indices)


def _by_rows(x: tf.Tensor, indices: tf.Tensor, updates: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Indices ``[n, 1]`` and updates ``[n, ...]`` of one row of ``x`` each."""
    return tf.reshape(indices, [-1, 1]), tf.reshape(updates, [-1, *x.shape[1:]])


def _rows_written(
    input: tf.Tensor,
    indices: tf.Tensor,
    updates: tf.Tensor,
    indices_are_sorted: bool = False,
    name: str | None = None,
) -> tf.Tensor:
    """``ipu_multi_update``: rows of the input replaced."""
    x = tf.convert_to_tensor(input)
    return tf.tensor_scatter_nd_update(x, *_by_rows(x, indices, tf.convert_to_tensor(updates, x.dtype)))


def _rows_added(
    input: tf.Tensor,
    indices: tf.Tensor,
    updates: tf.Tensor,
    scale: tf.Tensor | float,
    indices_are_sorted: bool = False,
    name: str | None = None,
) -> tf.Tensor:
    """``ipu_multi_update_add``: rows of the input with ``scale`` times the updates of their indices."""
    x = tf.convert_to_tensor(input)
    scaled = tf.convert_to_tensor(updates, x.dtype) * tf.cast(scale, x.dtype)
    return tf.tensor_scatter_nd_add(x, *_by_rows(x, indices, scaled))


def _copied_one_after_the_other(
    src: tf.Tensor,
    num_elems: tf.Tensor,
    src_offsets: tf.Tensor,
    dst_offsets: tf.Tensor,
    total_elements: int,
    name: str | None = None,
) -> tf.Tensor:
    """``ipu_sequence_slice_unpack``: as `copied_rows`, in a new tensor of so many rows."""
    src = tf.convert_to_tensor(src)
    dst = tf.zeros([total_elements, *src.shape[1:]], src.dtype)
    return copied_rows(dst, src, num_elems, src_offsets, dst_offsets, zero_unused=True)


def _exchanged(
    input: tf.Tensor,
    split_dimension: int,
    concat_dimension: int,
    number_of_replicas: int,
    name: str | None = None,
) -> tf.Tensor:
    """``ipu_all_to_all``: part *i* of every replica's tensor, on replica *i*."""
    return exchanged_between_replicas(input, split_dimension, concat_dimension, number_of_replicas)


def _gathered(
    input: tf.Tensor | Sequence[tf.Tensor], replication_factor: int, name: str | None = None
) -> tf.Tensor | list[tf.Tensor]:
    """``ipu_all_gather``: the tensors of the replicas of a group, in a new first axis."""
    return gathered_from_replicas(input, replication_factor)


def _scattered(
    inputs: Sequence[tf.Tensor],
    replication_factor: int,
    op: str = "COLLECTIVE_OP_ADD",
    name: str | None = None,
) -> list[tf.Tensor]:
    """``ipu_reduce_scatter``, which takes and gives lists."""
    return [reduced_and_scattered(item, replication_factor, op) for item in inputs]


def _printed(input: tf.Tensor, tensor_name: str = "", name: str | None = None) -> tf.Tensor:
    """``ipu_print_tensor``: the tensor, which the device prints when it is computed."""
    return printed_tensor(input, tensor_name or name or "")


def _nothing_to_wait_for(name: str | None = None) -> tf.Operation:
    """``device_sync``: a program has ended when its results are there."""
    return tf.no_op(name)


def _named(module: str) -> dict[str, Callable[..., Any]]:
    return {operation.__name__: operation for operation in BY_MODULE[module]}


_MARKERS: dict[str, Callable[..., Any]] = {
    "ipu_replication_normalise": ipu_replication_normalise,
    "ipu_replication_index": replication_index,
    "ipu_stateful_gradient_accumulate": ipu_stateful_gradient_accumulate,
    "ipu_stateful_gradient_accumulate_with_momentum": ipu_stateful_gradient_accumulate_with_momentum,
    "ipu_assume_equal_across_replicas": assume_equal_across_replicas,
    "ipu_fifo": fifo,
    "ipu_print_tensor": _printed,
    "ipu_remap": remap,
    "ipu_remap_deduce": remap,
    "execution_counter": get_current_iteration_counter,
    "device_sync": _nothing_to_wait_for,
    "ipu_clear_all_xla_compilation_caches": clear_compiled_programs,
    "ipu_event_trace": event_trace,
}
LIBRARY_OPERATIONS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "gen_ipu_ops": _MARKERS,
    "gen_poputil_ops": _MARKERS,
    "gen_sendrecv_ops": _named("gen_sendrecv_ops"),
    "gen_pop_datastream_ops": _named("gen_pop_datastream_ops"),
    "gen_popnn_ops": {
        **LIBRARY_LAYERS,
        **_named("gen_popnn_ops"),
        "ipu_gelu": approximate_gelu,
        "ipu_hard_sigmoid": ipu_hard_sigmoid,
        "ipu_softmax": stable_softmax,
        "ipu_stable_softmax": stable_softmax,
        "ipu_swish": ipu_swish,
    },
    "gen_poprand_ops": {
        "ipu_dropout": _dropped,
        "ipu_dropout_with_seed": _dropped_with_seed,
        "ipu_dropout_with_seed_and_reference": _dropped_again,
    },
    "gen_popops_ops": {
        "ipu_multi_slice": _rows_read,
        "ipu_multi_update": _rows_written,
        "ipu_multi_update_add": _rows_added,
        "ipu_sequence_slice": copied_rows,
        "ipu_sequence_slice_unpack": _copied_one_after_the_other,
        "ipu_all_gather": _gathered,
        "ipu_all_to_all": _exchanged,
        "ipu_reduce_scatter": _scattered,
        "ipu_cross_replica_sum": cross_replica_sum,
        "ipu_cross_replica_mean": cross_replica_mean,
    },
}
"""Module of ``tensorflow.compiler.plugin.poplar.ops`` -> its operations that are here."""
