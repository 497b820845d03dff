"""Factorizations, inverses and solutions of linear equations.

Factorizations compute in float32. Where LAPACK reports through ``info`` that a matrix has no factors, the numbers are
NaN here and ``info`` is 0: a compiled program does not stop for data.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from podrun.numerics.precision import widen
from podrun.poptorch.operators.table import Call, Operand, aten


def _transposed(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def _no_info(x: Array) -> Array:
    return jnp.zeros(x.shape[:-2], jnp.int32)


def _cholesky(x: Array, upper: bool) -> Array:
    wide = widen(x)
    lower = lax.linalg.cholesky(_transposed(wide) if upper else wide, symmetrize_input=False)
    return _transposed(lower) if upper else lower


@aten("cholesky")
def cholesky(call: Call, x: Array, upper: bool = False) -> Array:
    """``L`` of ``x = L @ L.T``, or ``U`` of ``x = U.T @ U``; the gradient is that of a symmetric matrix."""
    return _cholesky((widen(x) + _transposed(widen(x))) / 2, upper)


@aten("_linalg_check_errors")
def unchecked(call: Call, info: Array, name: str, is_matrix: bool) -> tuple[()]:
    """No-op: torch would stop here for a matrix without factors, and a compiled program gives NaN."""
    return ()


@aten("linalg_cholesky_ex")
def cholesky_with_info(
    call: Call, x: Array, upper: bool = False, check_errors: bool = False
) -> tuple[Array, Array]:
    """`cholesky` and LAPACK's ``info``, which is 0 here."""
    return cholesky(call, x, upper), _no_info(x)


@aten("cholesky_inverse")
def inverse_of_cholesky(call: Call, factor: Array, upper: bool = False) -> Array:
    """The inverse of the matrix that has this factor."""
    return solve_by_cholesky(call, jnp.eye(factor.shape[-1], dtype=jnp.float32), factor, upper)


@aten("cholesky_solve")
def solve_by_cholesky(call: Call, b: Array, factor: Array, upper: bool = False) -> Array:
    """x of ``a @ x = b`` where ``factor`` is that of a."""
    lower = _transposed(widen(factor)) if upper else widen(factor)
    lead = jnp.broadcast_shapes(lower.shape[:-2], b.shape[:-2])
    lower = jnp.broadcast_to(lower, lead + lower.shape[-2:])
    b = jnp.broadcast_to(widen(b), lead + b.shape[-2:])
    half = lax.linalg.triangular_solve(lower, b, left_side=True, lower=True)
    return lax.linalg.triangular_solve(lower, half, left_side=True, lower=True, transpose_a=True)


@aten("linalg_qr")
def qr(call: Call, x: Array, mode: str = "reduced") -> tuple[Array, Array]:
    """Orthonormal columns and a triangle whose product is x."""
    if mode == "r":
        return jnp.zeros(call.results[0].shape), jnp.linalg.qr(widen(x), mode="r")
    return tuple(jnp.linalg.qr(widen(x), mode=mode))


@aten("geqrf")
def qr_as_reflections(call: Call, x: Array) -> tuple[Array, Array]:
    """QR as LAPACK keeps it: the triangle, below it the vectors of reflections, and their factors."""
    packed, factors = jnp.linalg.qr(widen(x), mode="raw")
    return _transposed(packed), factors


@aten("linalg_householder_product")
def product_of_reflections(call: Call, vectors: Array, factors: Array) -> Array:
    """The first columns of the product of reflections ``I - factor * v @ v.T``."""
    count, columns = factors.shape[-1], vectors.shape[-1]
    rows = jnp.arange(vectors.shape[-2])
    product = jnp.broadcast_to(jnp.eye(vectors.shape[-2], columns), vectors.shape)
    for i in reversed(range(count)):
        v = jnp.where(rows > i, widen(vectors)[..., i], 0) + (rows == i)
        along = jnp.einsum("...r,...rc->...c", v, product)
        product = product - widen(factors)[..., i, None, None] * v[..., :, None] * along[..., None, :]
    return product


@aten("_linalg_svd")
def singular_values(
    call: Call, x: Array, full_matrices: bool = False, compute_uv: bool = True, driver: str | None = None
) -> tuple[Array, ...]:
    """Singular vectors and values. Values alone have a gradient if the vectors are not used."""
    if not compute_uv:
        left, _, right = call.results
        values = jnp.linalg.svd(widen(x), compute_uv=False)
        return jnp.zeros(left.shape), values, jnp.zeros(right.shape)
    return tuple(jnp.linalg.svd(widen(x), full_matrices=full_matrices))


@aten("_linalg_eigh")
def symmetric_eigenvalues(
    call: Call, x: Array, uplo: str = "L", compute_v: bool = True
) -> tuple[Array, Array]:
    """Eigenvalues, the least first, and eigenvectors of a symmetric matrix of which one triangle is read."""
    wide = widen(x)
    half = jnp.tril(wide) if uplo.upper() == "L" else _transposed(jnp.triu(wide))
    whole = half + _transposed(jnp.tril(half, -1))
    values, vectors = jnp.linalg.eigh(whole, symmetrize_input=False)
    return values, (vectors if compute_v else jnp.zeros(call.results[1].shape))


@aten("linalg_inv_ex")
def inverse(call: Call, x: Array, check_errors: bool = False) -> tuple[Array, Array]:
    """The inverse of a matrix."""
    return jnp.linalg.inv(widen(x)), _no_info(x)


@aten("linalg_pinv.atol_rtol_tensor")
def pseudo_inverse(
    call: Call, x: Array, atol: Operand | None = None, rtol: Operand | None = None, hermitian: bool = False
) -> Array:
    """The inverse on the singular values that exceed ``max(atol, rtol * greatest)``."""
    wide = widen(x)
    if rtol is None:
        least = float(np.finfo(np.float32).eps) * max(x.shape[-2:])
        rtol = least if atol is None else jnp.where(jnp.asarray(atol) > 0, 0.0, least)
    if atol is not None:
        greatest = jnp.linalg.norm(lax.stop_gradient(wide), 2, (-2, -1))
        rtol = jnp.maximum(jnp.asarray(atol) / jnp.where(greatest == 0, 1, greatest), rtol)
    return jnp.linalg.pinv(wide, rtol=rtol, hermitian=hermitian)


def _lu(x: Array, pivot: bool = True) -> tuple[Array, Array, Array]:
    """Both factors in one matrix, LAPACK's pivots counted from 1, and the order of rows."""
    if pivot:
        packed, pivots, order = lax.linalg.lu(widen(x))
        return packed, pivots + 1, order
    packed = widen(x)
    count = min(x.shape[-2:])
    rows, columns = jnp.arange(x.shape[-2])[:, None], jnp.arange(x.shape[-1])
    for i in range(count):
        factor = packed[..., :, i] / packed[..., i, i][..., None]
        less = packed - factor[..., None] * packed[..., i, :][..., None, :]
        packed = jnp.where((rows > i) & (columns > i), less, packed)
        packed = jnp.where((rows > i) & (columns == i), factor[..., None], packed)
    lead = x.shape[:-2]
    order = jnp.broadcast_to(jnp.arange(x.shape[-2], dtype=jnp.int32), (*lead, x.shape[-2]))
    return packed, order[..., :count] + 1, order


def _triangles(packed: Array) -> tuple[Array, Array]:
    rows, columns = packed.shape[-2:]
    count = min(rows, columns)
    lower = jnp.tril(packed[..., :, :count], -1) + jnp.eye(rows, count)
    return lower, jnp.triu(packed[..., :count, :])


def _order_of(pivots: Array, rows: int) -> Array:
    return lax.linalg.lu_pivots_to_permutation(pivots.astype(jnp.int32) - 1, rows)


def _permutation(order: Array) -> Array:
    return _transposed(jax.nn.one_hot(order, order.shape[-1], dtype=jnp.float32))


@aten("linalg_lu_factor_ex")
def lu_factors(
    call: Call, x: Array, pivot: bool = True, check_errors: bool = False
) -> tuple[Array, Array, Array]:
    """Both factors in one matrix, and which rows were exchanged."""
    packed, pivots, _ = _lu(x, pivot)
    return packed, pivots, _no_info(x)


@aten("linalg_lu")
def lu(call: Call, x: Array, pivot: bool = True) -> tuple[Array, Array, Array]:
    """``P``, ``L`` and ``U`` of ``x = P @ L @ U``."""
    packed, _, order = _lu(x, pivot)
    return (_permutation(order) if pivot else jnp.zeros(call.results[0].shape)), *_triangles(packed)


@aten("lu_unpack")
def unpack_lu(
    call: Call, packed: Array, pivots: Array, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Array, ...]:
    """``P``, ``L`` and ``U`` of what `lu_factors` gave."""
    empty = [jnp.zeros(result.shape) for result in call.results]
    order = _permutation(_order_of(pivots, packed.shape[-2])) if unpack_pivots else empty[0]
    return order, *(_triangles(widen(packed)) if unpack_data else empty[1:])


@aten("linalg_lu_solve")
def solve_by_lu(
    call: Call, packed: Array, pivots: Array, b: Array, left: bool = True, adjoint: bool = False
) -> Array:
    """x of ``a @ x = b`` (``left``) or ``x @ a = b`` where ``packed`` and ``pivots`` are a's."""
    if not left:
        return _transposed(solve_by_lu(call, packed, pivots, _transposed(b), True, not adjoint))
    lead = jnp.broadcast_shapes(packed.shape[:-2], b.shape[:-2])
    order = jnp.broadcast_to(_order_of(pivots, packed.shape[-2]), (*lead, packed.shape[-2]))
    packed = jnp.broadcast_to(widen(packed), lead + packed.shape[-2:])
    b = jnp.broadcast_to(widen(b), lead + b.shape[-2:])
    solve = lax.linalg.triangular_solve
    if not adjoint:
        b = jnp.take_along_axis(b, order[..., None], -2)
        half = solve(packed, b, left_side=True, lower=True, unit_diagonal=True)
        return solve(packed, half, left_side=True, lower=False)
    half = solve(packed, b, left_side=True, lower=False, transpose_a=True)
    half = solve(packed, half, left_side=True, lower=True, unit_diagonal=True, transpose_a=True)
    return jnp.take_along_axis(half, jnp.argsort(order, -1)[..., None], -2)


@aten("_linalg_det")
def determinant(call: Call, x: Array) -> tuple[Array, Array, Array]:
    """The determinant, and the factors that torch keeps."""
    packed, pivots, _ = _lu(lax.stop_gradient(x))
    return jnp.linalg.det(widen(x)), packed, pivots


@aten("_linalg_slogdet")
def log_determinant(call: Call, x: Array) -> tuple[Array, Array, Array, Array]:
    """Sign of the determinant, logarithm of its absolute value, and the factors that torch keeps."""
    packed, pivots, _ = _lu(lax.stop_gradient(x))
    return *jnp.linalg.slogdet(widen(x)), packed, pivots


@aten("_linalg_solve_ex")
def solve(
    call: Call, a: Array, b: Array, left: bool = True, check_errors: bool = False
) -> tuple[Array, Array, Array, Array]:
    """x of ``a @ x = b`` (``left``) or ``x @ a = b``, and the factors that torch keeps."""
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    a, b = widen(a), widen(b)[..., None] if vector else widen(b)
    lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = jnp.broadcast_to(a, lead + a.shape[-2:]), jnp.broadcast_to(b, lead + b.shape[-2:])
    from_left = left or vector
    solution = jnp.linalg.solve(a, b) if from_left else jnp.linalg.solve(_transposed(a), _transposed(b))
    solution = solution if from_left else _transposed(solution)
    kept = call.results[1]
    packed, pivots, _ = _lu(
        lax.stop_gradient(
            jnp.broadcast_to(a, (*kept.shape[:-2], *a.shape[-2:]))
            if a.ndim == len(kept.shape)
            else a[(0,) * (a.ndim - len(kept.shape))]
        )
    )
    return (
        (solution[..., 0] if vector else solution),
        packed,
        pivots,
        jnp.zeros(call.results[3].shape, jnp.int32),
    )


@aten("linalg_solve_triangular")
def solve_triangle(
    call: Call, a: Array, b: Array, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    """x of ``a @ x = b`` (``left``) or ``x @ a = b`` for a triangle a."""
    lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return lax.linalg.triangular_solve(
        jnp.broadcast_to(widen(a), lead + a.shape[-2:]),
        jnp.broadcast_to(widen(b), lead + b.shape[-2:]),
        left_side=left,
        lower=not upper,
        unit_diagonal=unitriangular,
    )


@aten("triangular_solve")
def solve_triangle_and_keep(
    call: Call,
    b: Array,
    a: Array,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[Array, Array]:
    """x of ``a @ x = b`` (``a.T @ x = b``) for a triangle a, and a."""
    solution = solve_triangle(
        call, _transposed(a) if transpose else a, b, upper != transpose, True, unitriangular
    )
    return solution, jnp.broadcast_to(a, call.results[1].shape)


@aten("linalg_matrix_exp")
def matrix_exponential(call: Call, x: Array) -> Array:
    """``I + x + x @ x / 2 + ...``."""
    wide = widen(x)
    flat = wide.reshape(-1, *wide.shape[-2:])
    powers: Array = jax.vmap(jax.scipy.linalg.expm)(flat)
    return powers.reshape(wide.shape)


@aten("linalg_lstsq")
def least_squares(
    call: Call, a: Array, b: Array, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Array, Array, Array, Array]:
    """The solution of ``a @ x = b`` with the least error (of those the least one), for matrices of full rank.

    Also the sums of squared errors where there are more rows than columns (not by ``gelsy``, the default driver), the
    rank, and no singular values.
    """
    rows, columns = a.shape[-2:]
    wide, right = widen(a), widen(b)
    vector = call.results[0].shape != (*call.results[0].shape[:-2], columns, b.shape[-1]) or b.ndim < a.ndim
    right = right[..., None] if vector else right
    if rows >= columns:
        q, r = jnp.linalg.qr(wide)
        best = jax.scipy.linalg.solve_triangular(r, _transposed(q) @ right)
    else:
        q, r = jnp.linalg.qr(_transposed(wide))
        best = q @ jax.scipy.linalg.solve_triangular(r, right, trans=1)
    error = jnp.sum(jnp.square(wide @ best - right), -2)
    shape = call.results[1].shape
    residuals = jnp.zeros(shape) if 0 in shape else error.reshape(shape)
    rank = jnp.full(call.results[2].shape, min(rows, columns), jnp.int32)
    solution = best[..., 0] if vector else best
    return solution.reshape(call.results[0].shape), residuals, rank, jnp.zeros(call.results[3].shape)
