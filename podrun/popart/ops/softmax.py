"""Softmax and its kin. Before opset 13 they work on the input made a matrix at ``axis``; from 13 on along
one axis.

ONNX defines Softmax by a body of operators (ReduceMax, Sub, Exp, ReduceSum, Div), each of which rounds. For
float16 that is what is computed here: exponentials and their sum are halves. Other types, and the kin,
round once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from podrun.popart.ops.common import Array, axis_in, rounds_once
from podrun.popart.ops.registry import ONNX, Context, Node, operator

HALF_TERMS = 65504
"""Most exponentials (each at most 1) whose sum is sure to fit a half; longer sums stay float32."""


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _half_softmax(x: Array, axis: int) -> Array:
    """Softmax of float16 in the steps of ONNX's body; the gradient is float32 inside and rounded once."""
    wide = x.astype(jnp.float32)
    e = jnp.exp(wide - wide.max(axis=axis, keepdims=True)).astype(x.dtype).astype(jnp.float32)
    total = e.sum(axis=axis, keepdims=True)
    if x.shape[axis] <= HALF_TERMS:
        total = total.astype(x.dtype).astype(jnp.float32)
    return (e / total).astype(x.dtype)


@_half_softmax.defjvp
def _half_softmax_jvp(axis: int, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    y = _half_softmax(primals[0], axis)
    wide, t = y.astype(jnp.float32), tangents[0].astype(jnp.float32)
    along = wide * (t - (wide * t).sum(axis=axis, keepdims=True))
    return y, along.astype(y.dtype)


def _softmax(x: Array, axis: int) -> Array:
    return _half_softmax(x, axis) if x.dtype == jnp.float16 else jax.nn.softmax(x, axis=axis)


def _hardmax(x: Array, axis: int) -> Array:
    if not x.size:
        return x
    return jax.nn.one_hot(jnp.argmax(x, axis=axis), x.shape[axis], dtype=x.dtype, axis=axis)


def _register(name: str, function: Callable[..., Array], meaning: str, *, in_steps: bool = False) -> None:
    """Both forms of an operator; ``in_steps``: the function sees halves as they are and rounds them
    itself."""

    def along_axis(ctx: Context, node: Node, x: Array) -> Array:
        return function(x, axis=axis_in(node.get("axis", -1), x.ndim))

    def as_matrix(ctx: Context, node: Node, x: Array) -> Array:
        axis = (
            axis_in(node.get("axis", 1), x.ndim + 1)
            if x.ndim == node.get("axis", 1)
            else axis_in(node.get("axis", 1), x.ndim)
        )
        rows, columns = (int(np.prod(part, dtype=np.int64)) for part in (x.shape[:axis], x.shape[axis:]))
        return function(x.reshape(rows, columns), axis=1).reshape(x.shape)

    along_axis.__doc__ = f"{meaning} along ``axis``, the last by default (ONNX {name} 13)."
    as_matrix.__doc__ = f"{meaning} over all axes from ``axis``, 1 by default (ONNX {name} before 13)."
    for form, since in ((along_axis, (13,)), (as_matrix, (1, 11))):
        operator(ONNX, name, since=since)(_bfloat_once(form) if in_steps else rounds_once(form))


def _bfloat_once(form: Callable[..., Array]) -> Callable[..., Array]:
    """`rounds_once` for bfloat16 only."""
    once = rounds_once(form)

    @functools.wraps(form)
    def wrapped(ctx: Context, node: Node, x: Array) -> Array:
        return (form if x.dtype == jnp.float16 else once)(ctx, node, x)

    return wrapped


_register("Softmax", _softmax, "Exponentials that sum to 1", in_steps=True)
_register("LogSoftmax", jax.nn.log_softmax, "Logarithm of softmax")
_register("Hardmax", _hardmax, "1 at the first maximum, else 0,")
