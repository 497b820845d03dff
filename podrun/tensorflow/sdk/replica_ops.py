"""Operations between replicas, and operations that are the identity on an emulated IPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from podrun.tensorflow.capture.markers import mark, mark_like
from podrun.tensorflow.capture.program_graphs import in_program

_Tensors = TypeVar("_Tensors")
"""A tensor, or tensors in a structure."""


def cross_replica_sum(
    x: tf.Tensor, replica_group_size: int | None = None, name: str | None = None
) -> tf.Tensor:
    """The sum over all replicas, or over groups of neighbouring ones."""
    x = tf.convert_to_tensor(x)
    return mark_like("cross_replica_sum", x, group=replica_group_size) if in_program() else x


def cross_replica_mean(
    x: tf.Tensor, replica_group_size: int | None = None, name: str | None = None
) -> tf.Tensor:
    """The mean over all replicas, or over groups of neighbouring ones."""
    x = tf.convert_to_tensor(x)
    return mark_like("cross_replica_mean", x, group=replica_group_size) if in_program() else x


def assume_equal_across_replicas(tensors: _Tensors, inplace: bool = False) -> _Tensors:
    """The tensors themselves; the program says that they are equal in all replicas."""
    return tensors


def replication_index(name: str | None = None) -> tf.Tensor:
    """The number of the replica, int32."""
    (index,) = mark("replication_index", [], [tf.TensorSpec([], tf.int32)])
    return index


def ipu_replication_normalise(x: tf.Tensor, name: str | None = None) -> tf.Tensor:
    """``x`` divided by the number of replicas."""
    return mark_like("replica_sum_over_count", tf.convert_to_tensor(x))


def gathered_from_replicas(x: tf.Tensor, replication_factor: int, name: str | None = None) -> tf.Tensor:
    """``[replication_factor, ...]``: the values of the replicas of one's group, in order. Groups are
    ``replication_factor`` neighbouring replicas. A list gives a list.
    """
    if isinstance(x, (list, tuple)):
        return [gathered_from_replicas(item, replication_factor) for item in x]
    x = tf.convert_to_tensor(x)
    outcome = tf.TensorSpec([replication_factor, *x.shape], x.dtype)
    (result,) = mark("all_gather", [x], [outcome], group=replication_factor)
    return result


def exchanged_between_replicas(
    x: tf.Tensor,
    split_dimension: int,
    concat_dimension: int,
    replication_factor: int,
    name: str | None = None,
) -> tf.Tensor:
    """``x`` cut along one dimension, part *j* for replica *j*; what arrives is joined along another. ValueError for a
    dimension that the replicas do not divide; ``replication_factor`` is the number of all replicas, else the program
    ends with an InvalidArgumentError.
    """
    x = tf.convert_to_tensor(x)
    shape = x.shape.as_list()
    if shape[split_dimension] % replication_factor:
        raise ValueError(f"all_to_all: {replication_factor} replicas do not divide {shape[split_dimension]}.")
    shape[split_dimension] //= replication_factor
    shape[concat_dimension] *= replication_factor
    (result,) = mark(
        "all_to_all",
        [x],
        [tf.TensorSpec(shape, x.dtype)],
        split=split_dimension,
        concat=concat_dimension,
        group=replication_factor,
    )
    return result


REDUCTIONS = (
    "ADD", "MUL", "MIN", "MAX", "LOGICAL_AND", "LOGICAL_OR", "SQUARE_ADD", "LOCAL", "MEAN",
)  # fmt: skip
"""Names of reductions, behind ``COLLECTIVE_OP_``."""


def _reduction(op: str) -> str:
    name = str(op).upper().removeprefix("COLLECTIVE_OP_")
    if name not in REDUCTIONS:
        raise ValueError(f"{op} is no collective operation.")
    return name


def reduced_and_scattered(
    x: tf.Tensor | Sequence[Any],
    replication_factor: int,
    op: str = "COLLECTIVE_OP_ADD",
    name: str | None = None,
) -> tf.Tensor | list[tf.Tensor]:
    """This replica's part of ``x [n]``, reduced over its group of ``replication_factor`` neighbouring replicas:
    ``[ceil(n / replication_factor)]``, padded with zeros. ValueError for another rank. Tensors in a
    structure give a list, one alone gives its part.
    """
    flat = tf.nest.flatten(x)
    if len(flat) != 1:
        return [reduced_and_scattered(item, replication_factor, op) for item in flat]
    (x,) = flat
    x = tf.convert_to_tensor(x)
    if x.shape.rank != 1:
        raise ValueError(f"reduce_scatter takes tensors of rank 1, not {x.shape.rank}.")
    part = -(-int(x.shape[0]) // replication_factor)
    outcome = tf.TensorSpec([part], x.dtype)
    (result,) = mark("reduce_scatter", [x], [outcome], op=_reduction(op), group=replication_factor)
    return result


def barrier(
    tensors: _Tensors, insert_barrier_for_gradients: bool = False, name: str | None = None
) -> _Tensors:
    """The same tensors: the order of operations changes no value."""
    return tensors


def kept_or_recomputed(tensors: _Tensors, again: bool) -> _Tensors:
    """The same tensors. Gradients that need them compute them ``again``, or find them kept: this changes the memory and
    the time in reports, and no value.
    """
    if not in_program():
        return tensors
    result: _Tensors = tf.nest.map_structure(
        lambda t: mark_like("recompute", tf.convert_to_tensor(t), again=again), tensors
    )
    return result


def recompute_suggestion(x: _Tensors, name: str | None = None) -> _Tensors:
    """The same tensors, which are not kept for gradients but computed again."""
    return kept_or_recomputed(x, again=True)


def remap(x: _Tensors, name: str | None = None) -> _Tensors:
    """The same tensor: how it lies on tiles changes no value."""
    return x


def outlined_function(
    func: Callable[..., Any] | None = None,
    unique_sharding: bool = False,
    keep_input_layouts: bool | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """The function itself, as a decorator with or without arguments."""
    return func if func is not None else (lambda function: function)


def _convert_to_list(values: Any) -> list[Any]:
    """The values in a list; a tensor alone gives a list of one. Programs call it by this name."""
    return list(values) if isinstance(values, (list, tuple)) else [values]


def ipu_multi_conv(
    func: Callable[..., Any] | None = None, options: Mapping[str, str] | None = None
) -> Callable[..., Any]:
    """The function itself, whose convolutions must not depend on each other: FailedPreconditionError. TypeError for
    options that are no dictionary.
    """
    if options is not None and not isinstance(options, dict):
        raise TypeError("Poplar options need to be a dictionary.")

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            if not in_program():
                return function(*args, **kwargs)
            graph: tf.Graph = tf.compat.v1.get_default_graph()
            before = len(graph.get_operations())
            results = function(*args, **kwargs)
            _check_independent(graph.get_operations()[before:])
            return results

        return call

    return decorated if func is None else decorated(func)


def _check_independent(operations: Sequence[tf.Operation]) -> None:
    """FailedPreconditionError if a convolution among the operations depends on another one."""
    behind: set[tf.Operation] = set()
    for operation in operations:
        depends = any(t.op in behind for t in operation.inputs)
        convolves = operation.type.startswith(("Conv2D", "Conv3D", "DepthwiseConv2d"))
        if depends and convolves:
            raise tf.errors.FailedPreconditionError(
                None,
                operation,
                "A MultiConvolution operation requires all convolutions to be independent of each other, however a "
                f"data dependency was detected for {operation.name}.",
            )
        if depends or convolves:
            behind.add(operation)
