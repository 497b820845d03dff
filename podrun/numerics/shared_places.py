"""Reading, writing and reducing elements at places that data determine, and sequences turned around.

``at`` is what an array is indexed with: a tuple of arrays of integers that broadcast, one for each leading axis
(`element_places`, `index_tuples`). Several updates may go to one place.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from podrun.core.errors import InputMismatch
from podrun.numerics.gradients import ArrayIndex, equals_carrier, product_carrier, with_gradient
from podrun.numerics.precision import greatest_of, is_float, lowest_of


def from_front(indices: Array, size: int) -> Array:
    """Indices with negative ones counted from the end."""
    return jnp.where(indices < 0, indices + size, indices)


def element_places(indices: Array, axis: int) -> tuple[Array, ...]:
    """For each axis the place of every element of ``indices``; along ``axis`` the indices themselves."""
    grid: list[Any] = list(jnp.ogrid[tuple(slice(0, n) for n in indices.shape)])
    grid[axis] = indices
    return tuple(grid)


def index_tuples(indices: Array, shape: tuple[int, ...]) -> tuple[Array, ...]:
    """Index tuples from the last axis of ``indices``, negative ones counted from the end."""
    return tuple(from_front(indices[..., i], shape[i]) for i in range(indices.shape[-1]))


def reversed_within(x: Array, lengths: Array, batch_axis: int, time_axis: int) -> Array:
    """x with the first ``lengths[b]`` steps of batch b back to front and the others in place."""
    steps = jax.lax.broadcasted_iota(lengths.dtype, x.shape, time_axis)
    shape = [1] * x.ndim
    shape[batch_axis] = x.shape[batch_axis]
    length = lengths.reshape(shape)
    source = jnp.where(steps < length, length - 1 - steps, steps)
    return jnp.take_along_axis(x, source, axis=time_axis)


def neutral_element(how: str, dtype: DTypeLike) -> np.ndarray:
    """What a reduction of `combined` leaves as it is: 0, 1, or the least or greatest value of a type."""
    if how in ("max", "min"):
        return lowest_of(dtype) if how == "max" else greatest_of(dtype)
    return np.asarray(1 if how == "mul" else 0, dtype)


def combined(
    x: Array, at: ArrayIndex, updates: Array, how: str, *, include: bool = True, whole_to_equals: bool = False
) -> Array:
    """x with updates put at (``none``), added to, multiplied into, or reduced with the elements at ``at``.

    ``how``: none, add, mul, max, min or mean (of the updates and the element); InputMismatch for others. Without
    ``include`` the elements that updates go to have no part in the result.

    The gradient of a product is exact where factors are 0, too. That of a greatest or least value is divided among
    those that equal it, as torch has it, or goes ``whole_to_equals`` as in PopART (ScatterReduceGrad).
    """
    if not include and how != "none":
        x = x.at[at].set(neutral_element(how, x.dtype))
    place = x.at[at]
    match how:
        case "none":
            return place.set(updates)
        case "add":
            return place.add(updates)
        case "mean":
            count = jnp.zeros(x.shape, x.dtype).at[at].add(1)
            number = count + 1 if include else jnp.maximum(count, 1)
            total = place.add(updates)
            return jnp.where(count > 0, total / number if is_float(x) else total // number, x)
        case "mul":
            if not is_float(x):
                return place.multiply(updates)
            product = lax.stop_gradient(x).at[at].multiply(lax.stop_gradient(updates))
            return with_gradient(product, product_carrier(x, at, updates))
        case "max" | "min":
            result = place.max(updates) if how == "max" else place.min(updates)
            if whole_to_equals and is_float(x):
                return with_gradient(result, equals_carrier(x, at, updates, result))
            return result
    raise InputMismatch(f"reduction '{how}' is none of none, add, mul, max, min, mean")
