"""Running sums and products along an axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from podrun.popart.ops.common import Array, axis_in, rounds_once
from podrun.popart.ops.registry import ONNX, Context, Node, operator


def _cumulate(ctx: Context, node: Node, x: Array, run: Callable[..., Any], start: int) -> Array:
    axis = axis_in(int(ctx.constant(1).reshape(())), x.ndim)
    reverse = bool(node.get("reverse", 0))
    if node.get("exclusive", 0):
        config = [(0, 0, 0)] * x.ndim
        config[axis] = (-1, 1, 0) if reverse else (1, -1, 0)
        x = lax.pad(x, np.asarray(start, x.dtype), config)
    return run(x, axis=axis, reverse=reverse)


@operator(ONNX, "CumSum", since=(11, 14))
@rounds_once
def cum_sum(ctx: Context, node: Node, x: Array, axis: Array) -> Array:
    """Running sum along an axis, ``exclusive`` of the element itself or not, from the end with
    ``reverse``.
    """
    return _cumulate(ctx, node, x, lax.cumsum, 0)


@operator(ONNX, "CumProd", since=(26,))
@rounds_once
def cum_prod(ctx: Context, node: Node, x: Array, axis: Array) -> Array:
    """Running product along an axis (ONNX CumProd), with the options of CumSum."""
    return _cumulate(ctx, node, x, lax.cumprod, 1)
