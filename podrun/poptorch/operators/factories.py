"""Operators that make tensors from numbers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from podrun.poptorch.operators.table import Array, Call, aten


@aten(
    *("zeros", "zeros_like", "new_zeros", "zero", "zero_", "empty.memory_format", "empty_like", "new_empty"),
    *("empty_strided", "new_empty_strided", "empty_permuted", "new_zeros.default"),
    kind="Constant",
)
def zeros(call: Call, *rest: object, **keywords: object) -> Array:
    """Zeros; what torch leaves undefined is zero, too."""
    return jnp.zeros(call.shape, call.dtype)


@aten("ones", "ones_like", "new_ones", kind="Constant")
def ones(call: Call, *rest: object, **keywords: object) -> Array:
    """Ones."""
    return jnp.ones(call.shape, call.dtype)


@aten("new_full", kind="Constant")
def full_of_size(call: Call, like: Array, size: Any, value: Any, **keywords: object) -> Array:
    """One value everywhere, in the type of another tensor."""
    return full(call, like, value)


@aten("full", "full_like", "fill", "fill_", kind="Constant")
def full(call: Call, like: Any, value: Any, **keywords: object) -> Array:
    """One value everywhere."""
    return jnp.broadcast_to(jnp.asarray(value).astype(call.dtype), call.shape)


@aten("scalar_tensor", kind="Constant")
def scalar(call: Call, value: Any, **keywords: object) -> Array:
    """A number as a tensor."""
    return jnp.asarray(value).astype(call.dtype)


@aten("arange.default", kind="Constant")
def count_to(call: Call, end: Any, **keywords: object) -> Array:
    """0, 1, 2 ... below ``end``."""
    return jnp.arange(end).astype(call.dtype)


@aten("arange.start", kind="Constant")
def count_from(call: Call, start: Any, end: Any, **keywords: object) -> Array:
    """``start``, ``start + 1`` ... below ``end``."""
    return jnp.arange(start, end).astype(call.dtype)


@aten("arange.start_step", kind="Constant")
def count_by(call: Call, start: Any, end: Any, step: Any = 1, **keywords: object) -> Array:
    """``start``, ``start + step`` ... below ``end``."""
    return (start + step * jnp.arange(call.shape[0])).astype(call.dtype)


@aten("linspace", kind="Constant")
def evenly_spaced(call: Call, start: Any, end: Any, steps: int, **keywords: object) -> Array:
    """``steps`` numbers from ``start`` to ``end``."""
    return jnp.linspace(start, end, steps).astype(call.dtype)


@aten("logspace", kind="Constant")
def evenly_spaced_powers(
    call: Call, start: Any, end: Any, steps: int, base: float = 10.0, **keywords: object
) -> Array:
    """``base`` to the power of ``steps`` numbers from ``start`` to ``end``."""
    return jnp.logspace(start, end, steps, base=base).astype(call.dtype)


@aten("eye.default", "eye.m", kind="Constant")
def identity_matrix(call: Call, *rest: object, **keywords: object) -> Array:
    """Ones on the diagonal, zeros elsewhere."""
    rows, columns = call.shape
    return jnp.eye(rows, columns, dtype=call.dtype)


@aten("tril_indices", kind="Constant")
def lower_triangle_indices(call: Call, rows: int, columns: int, offset: int = 0, **keywords: object) -> Array:
    """Row and column of each element of a lower triangle."""
    return jnp.stack(jnp.tril_indices(rows, offset, columns)).astype(call.dtype)


@aten("triu_indices", kind="Constant")
def upper_triangle_indices(call: Call, rows: int, columns: int, offset: int = 0, **keywords: object) -> Array:
    """Row and column of each element of an upper triangle."""
    return jnp.stack(jnp.triu_indices(rows, offset, columns)).astype(call.dtype)
