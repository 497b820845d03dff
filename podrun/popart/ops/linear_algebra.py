"""Einsum and determinants."""

from __future__ import annotations

import jax.numpy as jnp

from podrun.popart.ops.common import Array, rounds_once, same_dtype
from podrun.popart.ops.registry import ONNX, Context, Node, operator


@operator(ONNX, "Einsum", since=(12, 28))
@rounds_once
def einsum(ctx: Context, node: Node, *inputs: Array) -> Array:
    """Einstein summation by ``equation`` (ONNX Einsum)."""
    same_dtype(*inputs)
    return jnp.einsum(node["equation"].replace(" ", ""), *inputs)


@operator(ONNX, "Det", since=(11, 22))
@rounds_once
def det(ctx: Context, node: Node, x: Array) -> Array:
    """Determinants of the square matrices in the last two axes (ONNX Det)."""
    return jnp.linalg.det(x)
