"""Linear algebra on batches of matrices, in float32 as TensorFlow has it: halves are widened and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType

import jax
import jax.numpy as jnp
import numpy as np

from podrun.core.quick_dataclass import dataclass
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context
from podrun.tensorflow.operators.table import Array, computes


def _wide(function: Callable[..., Array], *inputs: Array) -> Array:
    dtype = inputs[0].dtype
    results = function(*(jnp.asarray(x).astype(jnp.float32) for x in inputs))
    if isinstance(results, (tuple, list)):
        return tuple(r.astype(dtype) for r in results)
    return results.astype(dtype)


def _turned(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


@computes("Cholesky")
def _cholesky(ctx: Context, node: Node, x: Array) -> Array:
    return _wide(jnp.linalg.cholesky, x)


@computes("MatrixInverse", attributes="adjoint")
def _inverse(ctx: Context, node: Node, x: Array) -> Array:
    return _wide(jnp.linalg.inv, _turned(x) if node["adjoint"] else x)


@computes("MatrixDeterminant")
def _determinant(ctx: Context, node: Node, x: Array) -> Array:
    return _wide(jnp.linalg.det, x)


@computes("LogMatrixDeterminant")
def _log_determinant(ctx: Context, node: Node, x: Array) -> tuple[Array, ...]:
    return tuple(_wide(jnp.linalg.slogdet, x))


@computes("MatrixSolve", attributes="adjoint")
def _solve(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    return _wide(jnp.linalg.solve, _turned(a) if node["adjoint"] else a, b)


@computes("MatrixTriangularSolve", attributes="lower adjoint")
def _triangular(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    def solve(left: Array, right: Array) -> Array:
        shape = jnp.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        left = jnp.broadcast_to(left, (*shape, *left.shape[-2:]))
        right = jnp.broadcast_to(right, (*shape, *right.shape[-2:]))
        return jax.scipy.linalg.solve_triangular(
            left, right, trans=1 if node["adjoint"] else 0, lower=node["lower"]
        )

    return _wide(solve, a, b)


@computes("Qr", attributes="full_matrices")
def _qr(ctx: Context, node: Node, x: Array) -> tuple[Array, ...]:
    mode = "complete" if node["full_matrices"] else "reduced"
    return tuple(_wide(lambda a: jnp.linalg.qr(a, mode), x))


@computes("Svd", attributes="compute_uv full_matrices")
def _svd(ctx: Context, node: Node, x: Array) -> tuple[Array, ...]:
    """Singular values, then (if asked) left and right vectors in columns."""
    if not node["compute_uv"]:
        values = _wide(lambda a: jnp.linalg.svd(a, compute_uv=False), x)
        return values, jnp.zeros((0,), x.dtype), jnp.zeros((0,), x.dtype)
    left, values, right = _wide(lambda a: tuple(jnp.linalg.svd(a, node["full_matrices"])), x)
    return values, left, _turned(right)


@computes("SelfAdjointEigV2", attributes="compute_v")
def _eigen(ctx: Context, node: Node, x: Array) -> tuple[Array, ...]:
    """Eigenvalues and eigenvectors of a symmetric matrix. Its lower triangle alone is read, so gradients go there."""
    whole = jnp.tril(x) + _turned(jnp.tril(x, -1))
    values, vectors = _wide(lambda a: tuple(jnp.linalg.eigh(a, symmetrize_input=False)), whole)
    return values, vectors


@dataclass(frozen=True, slots=True)
class _Band:
    """The diagonals ``low`` to ``high`` of a matrix, the highest in the first row, each as long as the longest: which
    entries stand for elements, and where these are in the matrix.
    """

    valid: np.ndarray
    rows: np.ndarray
    columns: np.ndarray

    @classmethod
    def of(cls, low: int, high: int, sizes: tuple[int, int], align: str) -> _Band:
        """``align``: on which side diagonals above and below the main one are shorter, such as RIGHT_LEFT."""
        above, below = (word == "LEFT" for word in align.split("_"))
        numbers = np.arange(high, low - 1, -1)[:, None]
        lengths = np.minimum(sizes[0] + np.minimum(numbers, 0), sizes[1] - np.maximum(numbers, 0))
        left = ((numbers >= 0) & above) | ((numbers <= 0) & below)
        places = np.arange(lengths.max())[None] - np.where(left, 0, lengths.max() - lengths)
        valid = (places >= 0) & (places < lengths)
        rows, columns = places + np.maximum(-numbers, 0), places + np.maximum(numbers, 0)
        return cls(valid, np.where(valid, rows, 0), np.where(valid, columns, 0))

    @property
    def at(self) -> tuple[EllipsisType, np.ndarray, np.ndarray]:
        """The index of the elements in the matrix."""
        return (..., self.rows[self.valid], self.columns[self.valid])


def _ends(ctx: Context, index: int) -> tuple[int, int]:
    """The lowest and highest of the diagonals that input ``index`` says; without it, the main one."""
    numbers = [int(v) for v in np.atleast_1d(ctx.constant(index))]
    return numbers[0], numbers[-1]


def _aligned(node: Node) -> str:
    """Where short diagonals are put: the second version of the operations starts them all on the left."""
    return str(node.get("align", "LEFT_LEFT"))


@computes("MatrixDiag", "MatrixDiagV2", "MatrixDiagV3", attributes="align")
def _diagonal(ctx: Context, node: Node, x: Array, *options: Array) -> Array:
    low, high = _ends(ctx, 1) if options else (0, 0)
    longest = x.shape[-1]
    least = (longest - min(high, 0), longest + max(low, 0))
    asked = tuple(int(np.asarray(ctx.constant(i)).item()) for i in (2, 3)) if options else (-1, -1)
    if asked == (-1, -1):
        sizes = (max(least), max(least))
    else:
        sizes = (asked[0] if asked[0] >= 0 else least[0], asked[1] if asked[1] >= 0 else least[1])
    band = _Band.of(low, high, sizes, _aligned(node))
    rows = x if low < high else x[..., None, :]
    padding = options[3] if options else jnp.zeros((), x.dtype)
    whole = jnp.broadcast_to(jnp.asarray(padding, x.dtype), (*rows.shape[:-2], *sizes))
    return whole.at[band.at].set(rows[..., band.valid])


@computes("MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3", attributes="align")
def _diagonal_part(ctx: Context, node: Node, x: Array, *options: Array) -> Array:
    if not options:
        return jnp.diagonal(x, axis1=-2, axis2=-1)
    low, high = _ends(ctx, 1)
    band = _Band.of(low, high, x.shape[-2:], _aligned(node))
    padding = jnp.asarray(options[1], x.dtype)
    rows = jnp.where(band.valid, x[..., band.rows, band.columns], padding)
    return rows if low < high else rows[..., 0, :]


@computes("MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3", attributes="align")
def _set_diagonal(ctx: Context, node: Node, x: Array, diagonal: Array, *options: Array) -> Array:
    low, high = _ends(ctx, 2) if options else (0, 0)
    band = _Band.of(low, high, x.shape[-2:], _aligned(node))
    rows = diagonal if low < high else diagonal[..., None, :]
    return x.at[band.at].set(rows[..., band.valid])


@computes("Diag")
def _tensor_diagonal(ctx: Context, node: Node, x: Array) -> Array:
    return jnp.diag(x.reshape(-1)).reshape(*x.shape, *x.shape)


@computes("DiagPart")
def _tensor_diagonal_part(ctx: Context, node: Node, x: Array) -> Array:
    half = x.shape[: x.ndim // 2]
    size = int(np.prod(half))
    return jnp.diagonal(x.reshape(size, size)).reshape(half)


@computes("Cross")
def _cross(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    return jnp.cross(a, b)
