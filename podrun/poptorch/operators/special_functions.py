"""Special functions: Bessel functions, zeta and gamma functions, the normal distribution, parts of numbers."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.scipy import special, stats

from podrun.poptorch.operators.pointwise import promoted
from podrun.poptorch.operators.table import Array, Call, aten, widened


def _of_one(function: Callable[[Array], Array]) -> Callable[[Call, Array], Array]:
    def apply(call: Call, x: Array) -> Array:
        return function(widened(x).astype(jnp.promote_types(widened(x).dtype, jnp.float32)))

    return apply


for _names, _function in (
    (("i0", "special_i0"), special.i0),
    (("special_i0e",), special.i0e),
    (("special_i1",), special.i1),
    (("special_i1e",), special.i1e),
    (("special_ndtri",), special.ndtri),
    (("special_log_ndtr",), stats.norm.logcdf),
    (("special_ndtr",), special.ndtr),
    (("digamma", "special_psi"), special.digamma),
):
    aten(*_names)(_of_one(_function))


@aten("polygamma")
def polygamma(call: Call, order: int, x: Array) -> Array:
    """Derivatives of the logarithm of the gamma function, the first of them for order 0."""
    wide = widened(x).astype(jnp.float32)
    return special.digamma(wide) if order == 0 else special.polygamma(jnp.int32(order), wide)


@aten("special_zeta")
def zeta(call: Call, x: Array, q: Array) -> Array:
    """``sum((n + q) ** -x)`` over n from 0 on."""
    return special.zeta(*promoted(call, x, q))


@aten("igamma", "special_gammainc")
def lower_gamma(call: Call, a: Array, x: Array) -> Array:
    """The regularized lower incomplete gamma function."""
    return special.gammainc(*promoted(call, a, x))


@aten("igammac", "special_gammaincc")
def upper_gamma(call: Call, a: Array, x: Array) -> Array:
    """The regularized upper incomplete gamma function."""
    return special.gammaincc(*promoted(call, a, x))


@aten("frexp")
def mantissa_and_exponent(call: Call, x: Array) -> tuple[Array, Array]:
    """m and e of ``x = m * 2**e``, m between 0.5 and 1; no gradient goes to the exponent."""
    mantissa, exponent = jnp.frexp(jax.lax.stop_gradient(widened(x)))
    scale = jnp.exp2(-exponent.astype(jnp.float32))
    return jnp.where(jnp.isfinite(x), widened(x) * scale, mantissa), exponent


@aten("ldexp")
def times_power_of_two(call: Call, x: Array, exponent: Array) -> Array:
    """``x * 2**exponent``."""
    x, exponent = promoted(call, x, exponent)
    return x * jnp.exp2(exponent)
