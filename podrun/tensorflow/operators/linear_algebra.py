"""Linear algebra on batches of matrices, in float32 as TensorFlow has it: halves are widened and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.core.errors import UnimplementedError
from podrun.runtime.graph import Node
from podrun.tensorflow.operators.table import computes

Array = Any


def _wide(function: Callable[..., Any], *inputs: Array) -> Any:
    dtype = inputs[0].dtype
    results = function(*(jnp.asarray(x).astype(jnp.float32) for x in inputs))
    if isinstance(results, (tuple, list)):
        return tuple(r.astype(dtype) for r in results)
    return results.astype(dtype)


def _turned(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


@computes("Cholesky")
def _cholesky(ctx: Any, node: Node, x: Array) -> Array:
    return _wide(jnp.linalg.cholesky, x)


@computes("MatrixInverse", attributes="adjoint")
def _inverse(ctx: Any, node: Node, x: Array) -> Array:
    return _wide(jnp.linalg.inv, _turned(x) if node["adjoint"] else x)


@computes("MatrixDeterminant")
def _determinant(ctx: Any, node: Node, x: Array) -> Array:
    return _wide(jnp.linalg.det, x)


@computes("LogMatrixDeterminant")
def _log_determinant(ctx: Any, node: Node, x: Array) -> Any:
    return _wide(lambda a: tuple(jnp.linalg.slogdet(a)), x)


@computes("MatrixSolve", attributes="adjoint")
def _solve(ctx: Any, node: Node, a: Array, b: Array) -> Array:
    return _wide(jnp.linalg.solve, _turned(a) if node["adjoint"] else a, b)


@computes("MatrixTriangularSolve", attributes="lower adjoint")
def _triangular(ctx: Any, node: Node, a: Array, b: Array) -> Array:
    def solve(left: Array, right: Array) -> Array:
        shape = jnp.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        left = jnp.broadcast_to(left, (*shape, *left.shape[-2:]))
        right = jnp.broadcast_to(right, (*shape, *right.shape[-2:]))
        return jax.scipy.linalg.solve_triangular(
            left, right, trans=1 if node["adjoint"] else 0, lower=node["lower"]
        )

    return _wide(solve, a, b)


@computes("Qr", attributes="full_matrices")
def _qr(ctx: Any, node: Node, x: Array) -> Any:
    mode = "complete" if node["full_matrices"] else "reduced"
    return _wide(lambda a: tuple(jnp.linalg.qr(a, mode)), x)


@computes("Svd", attributes="compute_uv full_matrices")
def _svd(ctx: Any, node: Node, x: Array) -> Any:
    """Singular values, then (if asked) left and right vectors in columns."""
    if not node["compute_uv"]:
        values = _wide(lambda a: jnp.linalg.svd(a, compute_uv=False), x)
        return values, jnp.zeros((0,), x.dtype), jnp.zeros((0,), x.dtype)
    left, values, right = _wide(lambda a: tuple(jnp.linalg.svd(a, node["full_matrices"])), x)
    return values, left, _turned(right)


@computes("SelfAdjointEigV2", attributes="compute_v")
def _eigen(ctx: Any, node: Node, x: Array) -> Any:
    values, vectors = _wide(lambda a: tuple(jnp.linalg.eigh(a)), x)
    return values, vectors


def _check_main(ctx: Any, node: Node, index: int) -> None:
    """UnimplementedError for another diagonal than the main one."""
    if np.any(np.asarray(ctx.constant(index)) != 0):
        raise UnimplementedError(f"{node.describe()}: only the main diagonal is implemented.")


@computes("MatrixDiag", "MatrixDiagV2", "MatrixDiagV3", attributes="align")
def _diagonal(ctx: Any, node: Node, x: Array, *options: Array) -> Array:
    if options:
        _check_main(ctx, node, 1)
    return x[..., None] * jnp.eye(x.shape[-1], dtype=x.dtype)


@computes("MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3", attributes="align")
def _diagonal_part(ctx: Any, node: Node, x: Array, *options: Array) -> Array:
    if options:
        _check_main(ctx, node, 1)
    return jnp.diagonal(x, axis1=-2, axis2=-1)


@computes("MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3", attributes="align")
def _set_diagonal(ctx: Any, node: Node, x: Array, diagonal: Array, *options: Array) -> Array:
    if options:
        _check_main(ctx, node, 2)
    size = diagonal.shape[-1]
    place = jnp.arange(size)
    return x.at[..., place, place].set(diagonal)


@computes("Diag")
def _tensor_diagonal(ctx: Any, node: Node, x: Array) -> Array:
    return jnp.diag(x.reshape(-1)).reshape(*x.shape, *x.shape)


@computes("DiagPart")
def _tensor_diagonal_part(ctx: Any, node: Node, x: Array) -> Array:
    half = x.shape[: x.ndim // 2]
    size = int(np.prod(half))
    return jnp.diagonal(x.reshape(size, size)).reshape(half)


@computes("Cross")
def _cross(ctx: Any, node: Node, a: Array, b: Array) -> Array:
    return jnp.cross(a, b)
