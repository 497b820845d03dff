"""Stochastic rounding onto the halves as primitives of JAX: the formula, its bits and its derivatives.

A step in float16 has hundreds of roundings, each a chain of forty elementwise operations. XLA fuses such a chain into
everything that reads its result: of a graph network's step with 780 of them it compiled 10 MB of operations in 40 s. So
a rounding is an equation of its own and in StableHLO a call of a function of its own, named `ROUNDING`. Machines
replace the call by native code of the same bits, or keep XLA from inlining it (`podrun.device.xla.roundings`).

Bits are a hash of the element's number and of a state of two words, a row of a table; hash: a 32-bit mixer of two
multiplications (C. Wellons, "Prospecting for hash functions", 2018).

Operands of the primitives: a float32 value ``[*batch, *shape]``, a uint32 table of states ``[*batch, rows, 2]``, an
int32 row. ``rounded`` has a second table, whose row rounds the gradient, and ``through`` only that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir

from podrun.core.names import ROUNDING
from podrun.private_apis.jax import TracedPrimitive, new_primitive

HALF = np.dtype(np.float16)
WORDS = 2
"""Of a state."""


class StateRow(NamedTuple):
    """A state of the random generator: a row of a table ``[rows, 2]``."""

    table: jax.Array
    row: int = 0


def own_row(state: jax.Array) -> StateRow:
    """A state ``[2]`` as the row of a table of its own."""
    return StateRow(state[..., None, :])


def on_grid(value: jax.Array, state: jax.Array) -> Any:
    """float32 rounded stochastically onto the halves, still float32. NaN and infinities stay.

    ``state``: uint32 ``[2]``, the state of the random generator.
    """
    return _on_grid_p.bind(value, *_operands(own_row(state)))


def rounded(value: jax.Array, state: StateRow, back: StateRow) -> Any:
    """`on_grid` with ``state`` for the value, and with ``back``, a state of the same row, for its gradient."""
    return _rounded_p.bind(value, state.table, back.table, np.int32(state.row))


def through(value: jax.Array, back: StateRow) -> Any:
    """The float32 value itself; its gradient is rounded with ``back``."""
    return _through_p.bind(value, *_operands(back))


def _operands(state: StateRow) -> tuple[Any, Any]:
    return state.table, np.int32(state.row)


def mixed(x: jax.Array) -> Any:
    """A hash of each element, uint32."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _formula(value: jax.Array, table: jax.Array, row: jax.Array) -> Any:
    inner = value.shape[table.ndim - 2 :]
    size = math.prod(inner)
    state = lax.dynamic_index_in_dim(table, row, table.ndim - 2, keepdims=False)
    count = lax.iota(np.uint32, max(size, 1))[:size].reshape(inner)
    low, high = (state[..., i].reshape(state.shape[:-1] + (1,) * len(inner)) for i in range(WORDS))
    uniform = (mixed(mixed(count ^ low) + high) >> 8).astype(jnp.float32) * np.float32(2.0**-24)
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    exponent = jnp.maximum(((bits >> 23) & 255).astype(jnp.int32), 127 - 14)
    ulp = lax.bitcast_convert_type(((exponent - 10) << 23).astype(jnp.uint32), jnp.float32)
    nearest = jnp.floor(value / ulp + uniform) * ulp
    return jnp.where(jnp.isfinite(value), nearest, value).astype(HALF).astype(jnp.float32)


_formula.__name__ = ROUNDING
_compiled = jax.jit(_formula)


def _rounded_at_once(value: jax.Array, table: jax.Array, back: jax.Array, row: jax.Array) -> Any:
    return _compiled(value, table, row)


def _unchanged(value: jax.Array, back: jax.Array, row: jax.Array) -> Any:
    return value


_on_grid_p, _rounded_p, _through_p = map(new_primitive, ("on_grid", "rounded_on_grid", "through_grid"))


def _batched(primitive: TracedPrimitive) -> Callable[..., tuple[Any, int]]:
    """Each member of a batch has the bits that it would have alone, with its own state or the one of all."""

    def rule(operands: Sequence[jax.Array], axes: Sequence[int | None]) -> tuple[Any, int]:
        *values, row = operands
        size = next(v.shape[axis] for v, axis in zip(operands, axes, strict=True) if axis is not None)
        leading = [
            jnp.broadcast_to(v, (size, *v.shape)) if axis is None else jnp.moveaxis(v, axis, 0)
            for v, axis in zip(values, axes[:-1], strict=True)
        ]
        return primitive.bind(*leading, row), 0

    return rule


def _slope_of_rounded(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[Any, Any]:
    value, table, back, row = primals
    return _on_grid_p.bind(value, table, row), _tangent(tangents[0], back, row)


def _slope_of_through(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[Any, Any]:
    value, back, row = primals
    return _through_p.bind(value, back, row), _tangent(tangents[0], back, row)


def _tangent(tangent: jax.Array | ad.Zero, back: jax.Array, row: jax.Array) -> Any:
    return tangent if isinstance(tangent, ad.Zero) else _through_p.bind(tangent, back, row)


def _transposed(
    cotangent: jax.Array | ad.Zero, value: object, back: jax.Array, row: jax.Array
) -> tuple[Any, None, None]:
    zero = isinstance(cotangent, ad.Zero)
    return (cotangent if zero else _on_grid_p.bind(cotangent, back, row)), None, None


def _straight(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[Any, Any]:
    """On average a rounding changes nothing."""
    return _on_grid_p.bind(*primals), tangents[0]


for _primitive, _evaluated, _slope in (
    (_on_grid_p, _compiled, _straight),
    (_rounded_p, _rounded_at_once, _slope_of_rounded),
    (_through_p, _unchanged, _slope_of_through),
):
    _primitive.def_abstract_eval(lambda value, *_: jax.core.ShapedArray(value.shape, value.dtype))
    _primitive.def_impl(_evaluated)
    batching.primitive_batchers[_primitive] = _batched(_primitive)
    ad.primitive_jvps[_primitive] = _slope
    mlir.register_lowering(_primitive, mlir.lower_fun(_evaluated, multiple_results=False))
ad.primitive_transposes[_through_p] = _transposed
