"""Tensors from shapes alone: constants, ranges, and random numbers from a JAX key of each operator's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from podrun.numerics.norms import dropped
from podrun.numerics.precision import widen
from podrun.poptorch.operators.table import Call, Operand, PythonNumber, Sizes, aten, aten_expressions


@aten(
    *("zeros", "zeros_like", "new_zeros", "zero", "zero_", "empty.memory_format", "empty_like", "new_empty"),
    *("empty_strided", "new_empty_strided", "empty_permuted", "new_zeros.default"),
    kind="Constant",
)
def zeros(call: Call, *rest: object, **keywords: object) -> Array:
    """Zeros; elements that torch leaves undefined are zero, too."""
    return jnp.zeros(call.shape, call.dtype)


@aten("full", "full_like", "fill", "fill_", kind="Constant")
def full(call: Call, like: Array | Sizes, value: Operand, **keywords: object) -> Array:
    """One value in all elements."""
    return jnp.broadcast_to(jnp.asarray(value).astype(call.dtype), call.shape)


@aten("arange.start_step", kind="Constant")
def count_by(
    call: Call, start: PythonNumber, end: PythonNumber, step: PythonNumber = 1, **keywords: object
) -> Array:
    """``start``, ``start + step`` ... below ``end``."""
    return (start + step * jnp.arange(call.shape[0])).astype(call.dtype)


@aten("linspace", kind="Constant")
def evenly_spaced(
    call: Call, start: PythonNumber, end: PythonNumber, steps: int, **keywords: object
) -> Array:
    """``steps`` numbers from ``start`` to ``end``."""
    return jnp.linspace(start, end, steps).astype(call.dtype)


@aten("logspace", kind="Constant")
def evenly_spaced_powers(
    call: Call, start: PythonNumber, end: PythonNumber, steps: int, base: float = 10.0, **keywords: object
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


def _dropped(call: Call, x: Array, probability: float, shape: tuple[int, ...]) -> tuple[Array, Array]:
    return dropped(call.key(), x, probability, shape, below=True)


@aten("dropout", kind="Dropout")
def dropout(call: Call, x: Array, probability: float, train: bool) -> Array:
    """x with elements set to 0 at random while training."""
    return _dropped(call, x, probability, x.shape)[0] if train and probability else x


@aten("native_dropout", kind="Dropout")
def dropout_with_mask(
    call: Call, x: Array, probability: float, train: bool | None = True
) -> tuple[Array, Array]:
    """Dropout and where elements are kept."""
    return _dropped(call, x, probability, x.shape) if train else (x, jnp.ones(x.shape, bool))


@aten("feature_dropout", kind="Dropout")
def channel_dropout(call: Call, x: Array, probability: float, train: bool) -> Array:
    """x with whole channels set to 0 at random while training."""
    channels = x.shape[:2] + (1,) * (x.ndim - 2)
    return _dropped(call, x, probability, channels)[0] if train and probability else x


@aten("bernoulli.default", kind="RandomUniform")
def bernoulli(call: Call, probabilities: Array, **keywords: object) -> Array:
    """1 with the probability that each element gives."""
    return jax.random.bernoulli(call.key(), widen(probabilities)).astype(call.dtype)


@aten("bernoulli.p", "bernoulli.Tensor", kind="RandomUniform")
def bernoulli_of(call: Call, x: Array, probability: float | Array = 0.5, **keywords: object) -> Array:
    """1 with a given probability."""
    return jax.random.bernoulli(call.key(), probability, call.shape).astype(call.dtype)


@aten("randn", "randn_like", kind="RandomNormal")
def standard_normal(call: Call, *rest: object, **keywords: object) -> Array:
    """Normal numbers of mean 0 and deviation 1."""
    return jax.random.normal(call.key(), call.shape, jnp.float32).astype(call.dtype)


@aten("rand", "rand_like", kind="RandomUniform")
def standard_uniform(call: Call, *rest: object, **keywords: object) -> Array:
    """Numbers between 0 and 1."""
    return jax.random.uniform(call.key(), call.shape, jnp.float32).astype(call.dtype)


@aten("uniform", "uniform_", kind="RandomUniform")
def uniform(call: Call, x: Array, low: float = 0.0, high: float = 1.0, **keywords: object) -> Array:
    """Random numbers between two bounds."""
    return jax.random.uniform(call.key(), call.shape, jnp.float32, low, high).astype(call.dtype)


@aten("normal_functional", "normal_", kind="RandomNormal")
def normal_like(call: Call, x: Array, mean: float = 0.0, deviation: float = 1.0, **keywords: object) -> Array:
    """Normal numbers in the shape of x."""
    return mean + deviation * jax.random.normal(call.key(), call.shape, jnp.float32)


@aten("normal", kind="RandomNormal")
def normal(call: Call, mean: Operand, deviation: Operand = 1.0, *rest: object, **keywords: object) -> Array:
    """Normal numbers of given means and deviations."""
    return mean + deviation * jax.random.normal(call.key(), call.shape, jnp.float32)


@aten("exponential", "exponential_")
def exponential(call: Call, x: Array, rate: float = 1.0, **keywords: object) -> Array:
    """Random numbers, exponentially distributed with this rate."""
    return jax.random.exponential(call.key(), call.shape, jnp.float32) / rate


@aten("randint.low")
def integers_between(call: Call, low: int, high: int, *rest: object, **keywords: object) -> Array:
    """Integers between two bounds, the upper one left out."""
    return jax.random.randint(call.key(), call.shape, low, high).astype(call.dtype)


_WHOLE_NUMBERS = {"float32": 1 << 24, "float16": 1 << 11, "bfloat16": 1 << 8}
"""The greatest number below which a floating type holds all whole ones: two to the bits of its significand."""


@aten("random.default", "random.to", "random.from")
def integers_in_place(call: Call, x: Array, *bounds: int | None, **keywords: object) -> Array:
    """Integers for the elements of a tensor, from ``low`` (0) to below ``high``; by default up to the greatest one
    below which the type holds all.
    """
    low, high = (0, bounds[0]) if len(bounds) == 1 else (*bounds, None, None)[:2]
    low = low or 0
    if high is not None:
        return jax.random.randint(call.key(), call.shape, low, high).astype(call.dtype)
    if jnp.issubdtype(call.dtype, jnp.floating):
        last = _WHOLE_NUMBERS[call.dtype.name]
    else:
        last = 1 if call.dtype == jnp.bool_ else int(np.iinfo(call.dtype).max)
    bits: Array = jax.random.bits(call.key(), call.shape, jnp.uint32)
    numbers: Array = (bits % jnp.uint32(last - low + 1)).astype(jnp.int32) + low
    return numbers.astype(call.dtype)


@aten("randperm")
def permutation(call: Call, count: int, **keywords: object) -> Array:
    """The numbers below ``count`` in random order."""
    return jax.random.permutation(call.key(), count).astype(call.dtype)


@aten("multinomial")
def multinomial(
    call: Call, weights: Array, count: int, replacement: bool = False, **keywords: object
) -> Array:
    """Indices drawn with the probabilities that each row gives."""
    logs = jnp.log(widen(weights))
    if replacement:
        drawn = jax.random.categorical(call.key(), logs, shape=(count, *logs.shape[:-1]))
        return jnp.moveaxis(drawn, 0, -1).astype(call.dtype)
    noise = jax.random.gumbel(call.key(), logs.shape)
    return jnp.argsort(-(logs + noise), -1)[..., :count].astype(call.dtype)


aten_expressions(
    {
        "Constant": {
            "ones ones_like new_ones": lambda call, *rest, **keywords: jnp.ones(call.shape, call.dtype),
            "new_full": lambda call, like, size, value, **keywords: full(call, like, value),
            "scalar_tensor": lambda call, value, **keywords: jnp.asarray(value).astype(call.dtype),
            "arange.default": lambda call, end, **keywords: jnp.arange(end).astype(call.dtype),
            "arange.start": lambda call, start, end, **keywords: jnp.arange(start, end).astype(call.dtype),
        },
        "": {
            "randint.default": lambda call, high, *rest, **keywords: integers_between(call, 0, high),
            "randint_like.default": lambda call, x, high, **keywords: integers_between(call, 0, high),
            "randint_like.low_dtype": lambda call, x, low, high, **keywords: integers_between(
                call, low, high
            ),
        },
    }
)
