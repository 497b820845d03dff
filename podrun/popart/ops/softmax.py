"""Softmax and its kin. Before opset 13 they work on the input made a matrix at ``axis``; from 13 on along
one axis.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from podrun.popart.ops.common import Array, axis_in, rounds_once
from podrun.popart.ops.registry import ONNX, Context, Node, operator


def _hardmax(x: Array, axis: int) -> Array:
    return jax.nn.one_hot(jnp.argmax(x, axis=axis), x.shape[axis], dtype=x.dtype, axis=axis)


def _register(name: str, function: Callable[..., Array], meaning: str) -> None:
    def along_axis(ctx: Context, node: Node, x: Array) -> Array:
        return function(x, axis=axis_in(node.get("axis", -1), x.ndim))

    def as_matrix(ctx: Context, node: Node, x: Array) -> Array:
        axis = (
            axis_in(node.get("axis", 1), x.ndim + 1)
            if x.ndim == node.get("axis", 1)
            else axis_in(node.get("axis", 1), x.ndim)
        )
        rows = int(np.prod(x.shape[:axis], dtype=np.int64))
        return function(x.reshape(rows, -1), axis=1).reshape(x.shape)

    along_axis.__doc__ = f"{meaning} along ``axis``, the last by default (ONNX {name} 13)."
    as_matrix.__doc__ = f"{meaning} over all axes from ``axis``, 1 by default (ONNX {name} before 13)."
    operator(ONNX, name, since=(13,))(rounds_once(along_axis))
    operator(ONNX, name, since=(1, 11))(rounds_once(as_matrix))


_register("Softmax", jax.nn.softmax, "Exponentials that sum to 1")
_register("LogSoftmax", jax.nn.log_softmax, "Logarithm of softmax")
_register("Hardmax", _hardmax, "1 at the first maximum, else 0,")
