"""Type conversion."""

from __future__ import annotations

import numpy as np

from podrun.popart.ops.common import Array, is_float, onnx_dtype
from podrun.popart.ops.registry import ONNX, Context, Node, operator


@operator(ONNX, "Cast", since=(1, 6, 9, 13, 19, 21, 23, 24, 25, 28), folds=True)
def cast(ctx: Context, node: Node, x: Array) -> Array:
    """x in element type ``to`` (ONNX Cast); INT64 becomes INT32 on the device."""
    return convert(ctx, x, onnx_dtype(node["to"], ctx))


def convert(ctx: Context, x: Array, dtype: np.dtype) -> Array:  # type: ignore[type-arg]
    """x as ``dtype``: floats truncate toward zero to integers; to bool, anything but 0 is true."""
    if x.dtype == dtype:
        return x
    if dtype == np.dtype(bool):
        return x != 0
    if is_float(x) and np.dtype(dtype).kind in "iu" and ctx.xp is np:
        return np.trunc(x.astype(np.float64)).astype(dtype)
    return x.astype(dtype)
