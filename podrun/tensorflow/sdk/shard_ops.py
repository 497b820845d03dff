"""``within_replica_ops``: collectives between the IPUs of one replica, on lists with a tensor for each shard.

The tensors are of one program, so these are concatenations and sums in the order of shards. ``ipu.sharding``: on which
IPU of a replica operations are, as `ipu_shard` placed them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import reduce

import tensorflow as tf

from podrun.tensorflow.capture.places import at_place, places_in
from podrun.tensorflow.graph.importer import needed_operations

_COMBINED: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "ADD": lambda a, b: a + b,
    "MUL": lambda a, b: a * b,
    "MIN": tf.minimum,
    "MAX": tf.maximum,
    "LOGICAL_AND": tf.logical_and,
    "LOGICAL_OR": tf.logical_or,
    "SQUARE_ADD": lambda a, b: a + b,
    "MEAN": lambda a, b: a + b,
}


def _checked_shards(shards: Sequence[tf.Tensor], *, same_shape: bool) -> list[tf.Tensor]:
    """The tensors. ValueError for an empty list, mixed types or ranks, and two of one shard."""
    tensors = [tf.convert_to_tensor(item) for item in shards]
    if not tensors:
        raise ValueError("input_shards must have a tensor for each shard.")
    if len({t.dtype for t in tensors}) > 1:
        raise ValueError("All input_shards must have the same type.")
    if len({t.shape.rank for t in tensors}) > 1:
        raise ValueError("All input_shards must have the same rank.")
    if same_shape and tensors[0].shape.rank != 1:
        raise ValueError("input_shards must be of rank 1.")
    places = [places_in(t.graph).get(t.op.name) for t in tensors if hasattr(t, "graph")]
    ipus = [place.ipu for place in places if place is not None]
    if len(set(ipus)) < len(ipus):
        raise ValueError("Two of the input_shards are on the same shard.")
    return tensors


def _combined(tensors: Sequence[tf.Tensor], op: str) -> tf.Tensor:
    """The shards' flat tensors combined, shorter ones padded with zeros."""
    name = op.upper().removeprefix("COLLECTIVE_OP_")
    if name not in _COMBINED:
        raise ValueError(f"{op} is no collective operation between shards.")
    longest = max(int(t.shape[0]) for t in tensors)
    padded = [tf.pad(t, [[0, longest - int(t.shape[0])]]) for t in tensors]
    padded = [t * t for t in padded] if name == "SQUARE_ADD" else padded
    total = reduce(_COMBINED[name], padded)
    return total / len(tensors) if name == "MEAN" else total


def shards_all_gathered(input_shards: Sequence[tf.Tensor], axis: int = 0) -> list[tf.Tensor]:
    """For each shard the concatenation of all."""
    tensors = _checked_shards(input_shards, same_shape=False)
    return _on_shards(tf.concat(tensors, axis), len(tensors))


def shards_reduced(input_shards: Sequence[tf.Tensor], op: str) -> list[tf.Tensor]:
    """For each shard the elementwise reduction of all, ``[n]``."""
    tensors = _checked_shards(input_shards, same_shape=True)
    return _on_shards(_combined(tensors, op), len(tensors))


def shards_reduce_scattered(input_shards: Sequence[tf.Tensor], op: str) -> list[tf.Tensor]:
    """For shard *i* part *i* of the elementwise reduction of all, ``[ceil(n / shards)]``."""
    tensors = _checked_shards(input_shards, same_shape=True)
    total, count = _combined(tensors, op), len(tensors)
    part = -(-int(total.shape[0]) // count)
    total = tf.pad(total, [[0, part * count - int(total.shape[0])]])
    parts = []
    for shard in range(count):
        with at_place(shard):
            parts.append(tf.identity(total[shard * part : (shard + 1) * part]))
    return parts


def _on_shards(tensor: tf.Tensor, count: int) -> list[tf.Tensor]:
    results = []
    for shard in range(count):
        with at_place(shard):
            results.append(tf.identity(tensor))
    return results


SHARDING = "_XlaSharding"
"""The attribute of operations that names their IPU."""


def get_sharding(op: tf.Operation) -> list[int] | None:
    """The IPU of an operation, in a list; None for an operation that was placed nowhere in particular."""
    if has_attr(op, SHARDING):
        kind = importlib.import_module("tensorflow.compiler.xla.xla_data_pb2").OpSharding
        return list(kind.FromString(op.get_attr(SHARDING)).tile_assignment_devices)
    place = places_in(op.graph).get(op.name)
    return None if place is None or place.ipu is None else [place.ipu]


def has_attr(o: tf.Operation, attr_name: str) -> bool:
    """Whether an operation has an attribute."""
    return attr_name in o.node_def.attr


def get_shard_from_colocation(op: tf.Operation) -> bytes | None:
    """The attribute that names an IPU, of what an operation is to be with, or of what it reads; None without any."""
    for group in op.colocation_groups():
        name = group.decode()[len("loc:@") :]
        try:
            beside = op.graph.get_operation_by_name(name)
        except KeyError:
            continue
        if has_attr(beside, SHARDING):
            return bytes(beside.get_attr(SHARDING))
    sources = (t.op for t in op.inputs)
    return next((bytes(o.get_attr(SHARDING)) for o in sources if has_attr(o, SHARDING)), None)


def dependencies(roots: Sequence[tf.Tensor | tf.Operation]) -> set[tf.Operation]:
    """The operations of ``roots``, and all that these need."""
    return needed_operations(roots)


def propagate_sharding(g: tf.Graph) -> None:
    """Nothing: gradients and updates are modelled on the IPU of what they belong to."""


def enable_sharded_gradient_tape() -> None:
    """Nothing: a tape's gradients are modelled on the IPU of what they belong to."""
