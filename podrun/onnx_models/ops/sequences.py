"""Sequences and optionals of ONNX: tuples of arrays, and None.

They live while tracing; on the device there are only tensors.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from podrun.core.errors import InputMismatch
from podrun.onnx_models.ops.common import Array, axis_in, ints
from podrun.onnx_models.ops.registry import ONNX, operator
from podrun.onnx_models.ops.shaping import split_sizes
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context


@operator(ONNX, "SequenceEmpty", since=(11,))
def sequence_empty(ctx: Context, node: Node) -> tuple[Any]:
    """An empty sequence."""
    return ((),)


@operator(ONNX, "SequenceConstruct", since=(11,))
def sequence_construct(ctx: Context, node: Node, *inputs: Array) -> tuple[Any]:
    """A sequence of the inputs."""
    return (tuple(inputs),)


def _position(ctx: Context, index: int, length: int, most: int) -> int:
    place = int(ctx.constant(index).reshape(()))
    place = place + length if place < 0 else place
    if not 0 <= place <= most:
        raise InputMismatch(f"position {place} is outside a sequence of {length}")
    return place


@operator(ONNX, "SequenceAt", since=(11,))
def sequence_at(ctx: Context, node: Node, items: tuple[Array, ...], position: Array) -> Array:
    """The element at a position known while tracing."""
    return items[_position(ctx, 1, len(items), len(items) - 1)]


@operator(ONNX, "SequenceInsert", since=(11,))
def sequence_insert(
    ctx: Context, node: Node, items: tuple[Array, ...], x: Array, position: Array = None
) -> tuple[Any]:
    """The sequence with x put in before a position, by default at the end."""
    place = len(items) if position is None else _position(ctx, 2, len(items), len(items))
    return ((*items[:place], x, *items[place:]),)


@operator(ONNX, "SequenceErase", since=(11,))
def sequence_erase(ctx: Context, node: Node, items: tuple[Array, ...], position: Array = None) -> tuple[Any]:
    """The sequence without the element at a position, by default the last."""
    place = len(items) - 1 if position is None else _position(ctx, 1, len(items), len(items) - 1)
    return ((*items[:place], *items[place + 1 :]),)


@operator(ONNX, "SequenceLength", since=(11,))
def sequence_length(ctx: Context, node: Node, items: tuple[Array, ...]) -> Array:
    """The number of elements, always known while tracing."""
    return np.asarray(len(items), np.int64)


@operator(ONNX, "ConcatFromSequence", since=(11,))
def concat_from_sequence(ctx: Context, node: Node, items: tuple[Array, ...]) -> Array:
    """Elements one after the other along ``axis``, or stacked with ``new_axis``."""
    join = jnp.stack if node.get("new_axis", 0) else jnp.concatenate
    return join(items, axis=node["axis"])


@operator(ONNX, "SplitToSequence", since=(11, 24))
def split_to_sequence(ctx: Context, node: Node, x: Array, split: Array = None) -> tuple[Any]:
    """x cut along ``axis`` into a sequence: in pieces of one, of a size, or of sizes."""
    axis = axis_in(node.get("axis", 0), x.ndim)
    total = x.shape[axis]
    if split is None:
        pieces = jnp.split(x, total, axis=axis)
        return (tuple(pieces if node.get("keepdims", 1) else (p.squeeze(axis) for p in pieces)),)
    sizes = ctx.constant(1)
    parts = ints(sizes) if sizes.ndim else split_sizes_of(total, int(sizes))
    return (tuple(jnp.split(x, [int(e) for e in np.cumsum(parts)[:-1]], axis=axis)),)


def split_sizes_of(total: int, size: int) -> tuple[int, ...]:
    """Pieces of ``size``, the last one smaller if it does not fit."""
    return (
        tuple(split_sizes(total, -(-total // size)))
        if total % size == 0
        else (*(size,) * (total // size), total % size)
    )


@operator(ONNX, "SequenceMap", since=(17,))
def sequence_map(ctx: Context, node: Node, *inputs: Any) -> tuple[Any, ...]:
    """``body`` on each element of the first input (and the like elements of other sequences), outputs as sequences."""
    body = node["body"]
    results = [
        ctx.run(body, [x[k] if isinstance(x, tuple) else x for x in inputs], iteration=k)
        for k in range(len(inputs[0]))
    ]
    return tuple(tuple(r[o] for r in results) for o in range(len(body.outputs)))


@operator(ONNX, "Optional", since=(15, 28))
def optional(ctx: Context, node: Node, x: object = None) -> tuple[Any]:
    """An optional that holds x, or nothing."""
    return (x,)


@operator(ONNX, "OptionalHasElement", since=(15, 18, 28))
def optional_has_element(ctx: Context, node: Node, x: object = None) -> Array:
    """Whether the optional holds a value, which is always known while tracing."""
    return np.asarray(x is not None)


@operator(ONNX, "OptionalGetElement", since=(15, 18, 28))
def optional_get_element(ctx: Context, node: Node, x: object) -> tuple[Any]:
    """The value of an optional. Raises ValueError if it is empty."""
    if x is None:
        raise InputMismatch("the optional is empty")
    return (x,)
