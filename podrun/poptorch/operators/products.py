"""Products of matrices, distances, attention and covariances.

Products multiply halves with float32 partials and round the result once. The backward pass of a product reads its
operands as they are: nothing here transposes or widens a weight first, because the copy would be kept for the backward
pass, once for each micro-batch of a pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from podrun.numerics.gradients import absolute
from podrun.numerics.norms import dropped
from podrun.numerics.precision import product_with_rows, type_of_sums, widen
from podrun.poptorch.operators.table import Call, PythonNumber, Sizes, aten, aten_expressions


def product(a: Array, b: Array) -> Array:
    """``a @ b``, in float32 for halves."""
    return jnp.matmul(a, b, preferred_element_type=type_of_sums(a, b))


@aten("linear", kind="MatMul")
def linear(call: Call, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """``x @ weight.T + bias``."""
    projected = product_with_rows(x, weight) if weight.ndim > 1 else product(x, weight)
    return projected if bias is None else projected + widen(bias)


def _sum_of(call: Call, x: Array, term: Array, beta: PythonNumber, alpha: PythonNumber) -> Array:
    """``beta * x + alpha * made``; x is not read where beta is 0."""
    if alpha != 1:
        term = alpha * term
    if beta == 0:
        return term
    wide: Array = widen(x)
    return (wide if beta == 1 else beta * wide) + term


@aten("addmm", "addmv", "baddbmm", kind="MatMul")
def add_product(
    call: Call, x: Array, a: Array, b: Array, beta: PythonNumber = 1, alpha: PythonNumber = 1
) -> Array:
    """``beta * x + alpha * a @ b``."""
    return _sum_of(call, x, product(a, b), beta, alpha)


@aten("addbmm", kind="MatMul")
def add_sum_of_products(
    call: Call, x: Array, a: Array, b: Array, beta: PythonNumber = 1, alpha: PythonNumber = 1
) -> Array:
    """``beta * x + alpha * sum(a[i] @ b[i])``."""
    return _sum_of(call, x, jnp.sum(product(a, b), 0), beta, alpha)


@aten("addr", kind="MatMul")
def add_outer_product(
    call: Call, x: Array, a: Array, b: Array, beta: PythonNumber = 1, alpha: PythonNumber = 1
) -> Array:
    """``beta * x + alpha * outer(a, b)``."""
    return _sum_of(call, x, jnp.outer(widen(a), widen(b)), beta, alpha)


@aten("einsum", kind="MatMul")
def einsum(call: Call, equation: str, operands: Sequence[Array], path: Sizes | None = None) -> Array:
    """Sums of products, as an equation says."""
    return jnp.einsum(equation.replace(" ", ""), *[widen(operand) for operand in operands])


@aten("bilinear", kind="MatMul")
def bilinear_form(call: Call, a: Array, b: Array, weight: Array, bias: Array | None = None) -> Array:
    """``a @ weight[k] @ b`` for each k."""
    forms = jnp.einsum("...i,kij,...j->...k", widen(a), widen(weight), widen(b))
    return forms if bias is None else forms + widen(bias)


@aten("cdist", "_cdist_forward", kind="MatMul")
def distances(call: Call, a: Array, b: Array, p: float = 2.0, mode: int | None = None) -> Array:
    """Distances of all rows of a to all rows of b, in the p-norm; the gradient at 0 is 0."""
    difference = absolute(widen(a)[..., :, None, :] - widen(b)[..., None, :, :])
    if p == float("inf"):
        return jnp.max(difference, -1)
    if p == 0:
        return jnp.sum((difference != 0).astype(difference.dtype), -1)
    sums = jnp.sum(jnp.square(difference) if p == 2 else jnp.power(difference, p), -1)
    safe = jnp.where(sums == 0, 1, sums)
    return jnp.where(sums == 0, 0, jnp.sqrt(safe) if p == 2 else jnp.power(safe, 1 / p))


@aten("pdist", "_pdist_forward", kind="MatMul")
def distances_of_pairs(call: Call, x: Array, p: float = 2.0) -> Array:
    """Distances of each row to those behind it, in the p-norm."""
    first, second = jnp.triu_indices(x.shape[0], 1)
    return distances(call, x[first][:, None], x[second][:, None], p)[:, 0, 0]


@aten("scaled_dot_product_attention", kind="MatMul")
def attention(
    call: Call,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """``softmax(scale * query @ key.T + mask) @ value``. A boolean mask is True where attention is allowed."""
    if enable_gqa:
        key, value = (jnp.repeat(heads, query.shape[-3] // heads.shape[-3], -3) for heads in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.einsum("...qd,...kd->...qk", query, key, preferred_element_type=jnp.float32) * scale
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == jnp.bool_ else scores + widen(mask)
    weights = jax.nn.softmax(scores, -1)
    if mask is not None and mask.dtype == jnp.bool_:
        weights = jnp.where(jnp.any(mask, -1, keepdims=True), weights, 0)
    if dropout:
        weights = dropped(call.key(), weights, dropout, weights.shape, below=True)[0]
    return product(weights, value)


@aten("cov", kind="MatMul")
def covariance(
    call: Call, x: Array, correction: int = 1, fweights: Array | None = None, aweights: Array | None = None
) -> Array:
    """Covariances of the rows of x, whose columns are observations."""
    return jnp.cov(widen(x), ddof=correction, fweights=fweights, aweights=aweights).reshape(call.shape)


@aten("corrcoef", kind="MatMul")
def correlation(call: Call, x: Array) -> Array:
    """Correlations of the rows of x, within -1 and 1."""
    if not call.shape:
        return jnp.ones((), jnp.float32) + 0 * jnp.sum(x)
    covariances = jnp.cov(widen(x))
    scale = jnp.sqrt(jnp.diagonal(covariances))
    return jnp.clip(covariances / scale[:, None] / scale, -1, 1)


aten_expressions(
    {
        "MatMul": {
            "mm bmm matmul mv dot vdot linalg_matmul": lambda call, a, b: product(a, b),
            "inner": lambda call, a, b: jnp.inner(widen(a), widen(b)),
            "outer ger": lambda call, a, b: jnp.outer(a, b),
            "kron": lambda call, a, b: jnp.kron(a, b),
        },
    }
)
