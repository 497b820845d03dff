"""The operators of classical machine learning (domain ai.onnx.ml) that take numbers and have static shapes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from podrun.popart.ops.common import Array
from podrun.popart.ops.registry import Context, Node, operator

ML = "ai.onnx.ml"


@operator(ML, "ArrayFeatureExtractor", since=(1,))
def array_feature_extractor(ctx: Context, node: Node, x: Array, y: Array) -> Array:
    """The columns of x that y names, ``[..., n]`` to ``[..., k]``; a vector becomes one row (ONNX-ML)."""
    chosen = jnp.take(x, y.reshape(-1), axis=-1)
    return chosen.reshape(1, -1) if x.ndim == 1 else chosen


@operator(ML, "Binarizer", since=(1,))
def binarizer(ctx: Context, node: Node, x: Array) -> Array:
    """1 where x is greater than ``threshold``, else 0, in x's type (ONNX-ML Binarizer)."""
    return (x > np.asarray(node.get("threshold", 0.0)).astype(x.dtype)).astype(x.dtype)
