"""``ipu.sharding``: on which IPU of a replica operations are, as `ipu_shard` placed them."""

from __future__ import annotations

import tensorflow as tf

from podrun.tensorflow.capture.places import places_in

_INDEX_ATTRIBUTE = "sharding"


def get_sharding(op: tf.Operation) -> tuple[int, ...] | None:
    """The IPU of an operation, as a tuple; None for an operation that was placed nowhere in particular."""
    place = places_in(op.graph).get(op.name)
    return None if place is None or place.ipu is None else (place.ipu,)


def has_attr(o: tf.Operation, attr_name: str) -> bool:
    """Whether an operation has an attribute. Of an operation that is on an IPU ``sharding`` is one."""
    if attr_name == _INDEX_ATTRIBUTE:
        return get_sharding(o) is not None
    return attr_name in o.node_def.attr


def propagate_sharding(g: tf.Graph) -> None:
    """Nothing: gradients and updates are modelled on the IPU of what they belong to."""


def enable_sharded_gradient_tape() -> None:
    """Nothing: a tape's gradients are modelled on the IPU of what they belong to."""
