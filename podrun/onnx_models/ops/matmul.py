"""Matrix products, einsum and determinants.

Halves are multiplied with float32 partials; the result is rounded once.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.onnx_models.ops.common import Array, is_float, is_half, rounds_once, same_dtype
from podrun.onnx_models.ops.registry import ONNX, Context, Node, operator


def product(node: Node, a: Array, b: Array) -> Array:
    """``a @ b`` with partials as the hardware keeps them: float32 for halves (rounded once), exact for
    integers.
    """
    if is_half(a):
        partials = node.get("__partials_type", "FLOAT")
        if partials == "HALF":
            return half_partials(a, b)
        return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype)
    return jnp.matmul(a, b)


AMP_TERMS = 16
"""Products that the accumulating matrix product unit sums before it rounds a half partial (float16
inputs).
"""


def half_partials(a: Array, b: Array) -> Array:
    """``a @ b`` whose running sum is rounded to half after every `AMP_TERMS` products."""
    if a.ndim == 1 or b.ndim == 1:
        left = a[None, :] if a.ndim == 1 else a
        right = b[:, None] if b.ndim == 1 else b
        result = half_partials(left, right)
        result = result[..., 0, :] if a.ndim == 1 else result
        return result[..., 0] if b.ndim == 1 else result
    depth = a.shape[-1]
    total: Any = None
    for start in range(0, depth, AMP_TERMS):
        stop = min(start + AMP_TERMS, depth)
        part = jnp.matmul(a[..., start:stop], b[..., start:stop, :], preferred_element_type=jnp.float32)
        total = part.astype(a.dtype) if total is None else (total.astype(jnp.float32) + part).astype(a.dtype)
    return total


@operator(ONNX, "MatMul", since=(1, 9, 13))
def matmul(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    """Matrix product as numpy.matmul: ``[..., m, k] @ [..., k, n]``, leading axes broadcast (ONNX MatMul)."""
    same_dtype(a, b)
    return product(node, a, b)


@operator(ONNX, "Gemm", since=(1, 6, 7, 9, 11, 13))
def gemm(ctx: Context, node: Node, a: Array, b: Array, c: Array = None) -> Array:
    """``alpha`` * A @ B + ``beta`` * C, A and B transposed if so said, C broadcast (ONNX Gemm)."""
    same_dtype(*(x for x in (a, b, c) if x is not None))
    a = a.T if node.get("transA", 0) else a
    dtype = a.dtype
    wide = jnp.float32 if is_half(a) else dtype
    if node.get("__partials_type") == "HALF" and is_half(a):
        y = half_partials(a, b.T if node.get("transB", 0) else b).astype(wide)
    elif node.get("transB", 0):
        # B A^T transposed: XLA on CPUs takes fifteen times as long for A B^T where A has one row and K is
        # large
        y = lax.dot_general(
            b, a, (((1,), (1,)), ((), ())), preferred_element_type=wide if is_float(a) else None
        ).T
    else:
        y = jnp.matmul(a, b, preferred_element_type=wide if is_float(a) else None)
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    if alpha != 1.0:
        y = y * np.asarray(alpha).astype(wide)
    if c is not None and beta != 0.0:
        c = c.astype(wide)
        y = y + (c if beta == 1.0 else c * np.asarray(beta).astype(wide))
    return y.astype(dtype)


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
