"""How halves are computed: in float32 inside an operator, with one rounding at its end, as the hardware does; and how
the sums of matrix products are kept.

Two conventions are in use. A front end whose operators see the types of their results widens inputs with `widen` and
rounds what comes back itself; one whose operators do not puts `rounds_once` around them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from podrun.core.errors import present

F = TypeVar("F", bound=Callable[..., Any])
MaybeArray = TypeVar("MaybeArray", Array, Array | None)


def is_array(x: object) -> bool:
    """Whether a value has a dtype and a shape."""
    return hasattr(x, "dtype") and hasattr(x, "shape")


def is_half(x: Array) -> bool:
    """True for float16 and bfloat16 arrays (and the 8-bit floats, which follow the same rule)."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4


def is_float(x: Array) -> bool:
    """True for arrays of any floating type."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def widen(x: MaybeArray) -> MaybeArray:
    """Float32 of a half array; any other, and None, unchanged."""
    return x.astype(jnp.float32) if x is not None and is_half(x) else x


def lowest_of(dtype: DTypeLike) -> np.ndarray:
    """The identity of max for a type: minus infinity, or the least integer."""
    floating = jnp.issubdtype(dtype, jnp.floating)
    return np.asarray(-np.inf if floating else np.iinfo(dtype).min, dtype)


def greatest_of(dtype: DTypeLike) -> np.ndarray:
    """The identity of min for a type: infinity, or the greatest integer."""
    floating = jnp.issubdtype(dtype, jnp.floating)
    return np.asarray(np.inf if floating else np.iinfo(dtype).max, dtype)


def rounds_once(function: F) -> F:
    """Compute halves (float16 or bfloat16) in float32, and round each result once to the type of the first half.

    Arguments that are no arrays are handed on as they are. Float32 results become the half type; results of other
    types (masks, indices) stay.
    """

    @functools.wraps(function)
    def wrapped(*arguments: Any) -> Any:
        half = next((x.dtype for x in arguments if is_array(x) and is_half(x)), None)
        if half is None:
            return function(*arguments)
        results = function(*[widen(x) if is_array(x) else x for x in arguments])
        one = not isinstance(results, tuple)
        rounded = tuple(
            r.astype(half) if r is not None and r.dtype == jnp.float32 else r
            for r in ((results,) if one else results)
        )
        return rounded[0] if one else rounded

    return wrapped  # type: ignore[return-value]


AMP_TERMS = 16
"""Products that the accumulating matrix product unit sums before it rounds a half partial (float16 inputs)."""


def half_partials(a: Array, b: Array) -> Array:
    """``a @ b`` whose running sum is rounded to half after every `AMP_TERMS` products."""
    if a.ndim == 1 or b.ndim == 1:
        left = a[None, :] if a.ndim == 1 else a
        right = b[:, None] if b.ndim == 1 else b
        result = half_partials(left, right)
        result = result[..., 0, :] if a.ndim == 1 else result
        return result[..., 0] if b.ndim == 1 else result
    depth = a.shape[-1]
    total: Array | None = None
    for start in range(0, depth, AMP_TERMS):
        stop = min(start + AMP_TERMS, depth)
        part = jnp.matmul(a[..., start:stop], b[..., start:stop, :], preferred_element_type=jnp.float32)
        total = part.astype(a.dtype) if total is None else (total.astype(jnp.float32) + part).astype(a.dtype)
    return present(total, "a product adds up at least one term")


def type_of_sums(a: Array, b: Array) -> Any:
    """The type in which sums are kept: float32 for floating-point operands, or their own type."""
    return jnp.float32 if jnp.issubdtype(jnp.promote_types(a.dtype, b.dtype), jnp.floating) else None


def product_with_rows(a: Array, b: Array) -> Array:
    """``a @ b.T`` for a ``[..., k]`` and b ``[m, k]``, in float32 for halves."""
    sums = type_of_sums(a, b)
    if a.dtype != b.dtype:
        a, b = (operand.astype(jnp.promote_types(a.dtype, b.dtype)) for operand in (a, b))
    if a.size == a.shape[-1]:
        # XLA on CPUs takes fifteen times as long for A B^T where A has one row.
        product = lax.dot_general(b, a.reshape(1, -1), (((1,), (1,)), ((), ())), preferred_element_type=sums)
        return product.reshape(*a.shape[:-1], b.shape[0])
    return lax.dot_general(a, b, (((a.ndim - 1,), (1,)), ((), ())), preferred_element_type=sums)


def eight_bit_floats(xp: Any, x: Any, metadata: Any) -> Any:
    """The bytes of numbers as 8-bit floats of IPUs. ``metadata``: a byte whose bit 7 is set for the format 1.4.3 (else
    1.5.2), and whose low 6 bits are a scale: a byte with the value v stands for v * 2^scale. Too large numbers become
    the greatest. ``xp``: NumPy or JAX's.
    """
    scaled = x.astype(xp.float32) * xp.exp2(-_scale_in(xp, metadata))
    kinds = []
    for kind in (jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz):
        greatest = float(jnp.finfo(kind).max)  # type: ignore[no-untyped-call]
        kinds.append(xp.clip(scaled, -greatest, greatest).astype(kind).view(xp.uint8))
    return xp.where(_is_143(xp, metadata), *kinds)


def from_eight_bit_floats(xp: Any, data: Any, metadata: Any) -> Any:
    """The numbers of such bytes, in float32."""
    kinds = [data.view(kind).astype(xp.float32) for kind in (jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz)]
    return xp.where(_is_143(xp, metadata), *kinds) * xp.exp2(_scale_in(xp, metadata))


def _is_143(xp: Any, metadata: Any) -> Any:
    return xp.asarray(metadata).astype(xp.int32) >= 128


def _scale_in(xp: Any, metadata: Any) -> Any:
    low = xp.asarray(metadata).astype(xp.int32) & 0x3F
    return xp.where(low >= 32, low - 64, low).astype(xp.float32)
