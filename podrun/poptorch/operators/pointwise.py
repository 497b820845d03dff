"""Arithmetic, comparisons, elementary and special functions, element by element."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, scipy
from jax.scipy import special, stats

from podrun.numerics.gradients import absolute
from podrun.numerics.precision import is_array, widen
from podrun.poptorch.operators.table import Call, Operand, aten, aten_expressions


def _is_tensor(operand: Operand) -> TypeGuard[Array]:
    return is_array(operand)


def promoted(call: Call, *operands: Operand) -> list[Array]:
    """Operands in the type that torch computes in: the result's, or for a comparison the operands' common one."""
    if call.dtype != jnp.bool_:
        return [jnp.asarray(operand).astype(call.dtype) for operand in operands]
    common = functools.reduce(
        jnp.promote_types, [operand.dtype for operand in operands if _is_tensor(operand)]
    )
    if any(isinstance(operand, float) for operand in operands) and not jnp.issubdtype(common, jnp.floating):
        common = jnp.dtype(jnp.float32)
    return [jnp.asarray(operand).astype(common) for operand in operands]


def _elementwise(function: Callable[..., Array]) -> Callable[..., Array]:
    def apply(call: Call, *operands: Operand) -> Array:
        return function(*promoted(call, *operands))

    return apply


_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "abs": absolute,
    "neg": jnp.negative,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "log10": jnp.log10,
    "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt,
    "square": jnp.square,
    "reciprocal": lambda x: 1 / x,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": jnp.tan,
    "asin": jnp.arcsin,
    "acos": jnp.arccos,
    "atan": jnp.arctan,
    "sinh": jnp.sinh,
    "cosh": jnp.cosh,
    "tanh": jnp.tanh,
    "asinh": jnp.arcsinh,
    "acosh": jnp.arccosh,
    "atanh": jnp.arctanh,
    "atan2": jnp.arctan2,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "special_erfcx": lambda x: jnp.exp(jnp.square(x)) * lax.erfc(x),
    "lgamma": lax.lgamma,
    "sinc": jnp.sinc,
    "ceil": jnp.ceil,
    "floor": jnp.floor,
    "trunc": jnp.trunc,
    "frac": lambda x: x - jnp.trunc(x),
    "sign": jnp.sign,
    "sgn": jnp.sign,
    "signbit": jnp.signbit,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "fmax": lambda a, b: jnp.where((a >= b) | jnp.isnan(b), a, b),
    "fmin": lambda a, b: jnp.where((a <= b) | jnp.isnan(b), a, b),
    "hypot": jnp.hypot,
    "copysign": jnp.copysign,
    "logaddexp": jnp.logaddexp,
    "logaddexp2": jnp.logaddexp2,
    "xlogy": lambda x, y: jnp.where(x == 0, 0, x * jnp.log(jnp.where(x == 0, 1, y))).astype(x.dtype),
    "heaviside": jnp.heaviside,
    "nextafter": jnp.nextafter,
    "mul": lambda a, b: a & b if a.dtype == jnp.bool_ else a * b,
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "gt": jnp.greater,
    "le": jnp.less_equal,
    "ge": jnp.greater_equal,
    "logical_and": lambda a, b: (a != 0) & (b != 0),
    "logical_or": lambda a, b: (a != 0) | (b != 0),
    "logical_xor": lambda a, b: (a != 0) ^ (b != 0),
    "logical_not": lambda a: a == 0,
    "isnan": jnp.isnan,
    "isinf": jnp.isinf,
    "isfinite": jnp.isfinite,
    "isposinf": jnp.isposinf,
    "isneginf": jnp.isneginf,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "bitwise_not": jnp.bitwise_not,
    "bitwise_left_shift": jnp.left_shift,
    "bitwise_right_shift": jnp.right_shift,
    "__and__": jnp.bitwise_and,
    "__or__": jnp.bitwise_or,
    "__xor__": jnp.bitwise_xor,
    "__lshift__": jnp.left_shift,
    "__rshift__": jnp.right_shift,
    "remainder": jnp.mod,
    "fmod": jnp.fmod,
}

for _name, _function in _FUNCTIONS.items():
    aten(_name)(_elementwise(_function))


def _scaled_by(number: Operand, x: Array, dtype: np.dtype[Any]) -> Array:
    return x if isinstance(number, (int, float)) and number == 1 else x * jnp.asarray(number, dtype)


@aten("add")
def add(call: Call, a: Operand, b: Operand, alpha: Operand = 1) -> Array:
    """``a + alpha * b``."""
    a, b = promoted(call, a, b)
    return a | b if call.dtype == jnp.bool_ else a + _scaled_by(alpha, b, call.dtype)


@aten("sub", "subtract")
def subtract(call: Call, a: Operand, b: Operand, alpha: Operand = 1) -> Array:
    """``a - alpha * b``."""
    a, b = promoted(call, a, b)
    return a - _scaled_by(alpha, b, call.dtype)


@aten("div", "true_divide", "divide")
def divide(call: Call, a: Operand, b: Operand, rounding_mode: str | None = None) -> Array:
    """``a / b``, rounded towards minus infinity (``floor``), towards zero (``trunc``) or not at all."""
    a, b = promoted(call, a, b)
    if rounding_mode is None:
        return a / b
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    if jnp.issubdtype(call.dtype, jnp.floating):
        return jnp.trunc(a / b)
    return lax.div(*jnp.broadcast_arrays(a, b))


LARGEST_PRODUCT_POWER = 8
"""Whole exponents up to which a power is written as products: exact where torch is, and differentiable at 0."""


@aten("pow")
def power(call: Call, base: Operand, exponent: Operand) -> Array:
    """``base ** exponent``."""
    if isinstance(exponent, (int, float)) and _is_tensor(base):
        if float(exponent).is_integer() and abs(exponent) <= LARGEST_PRODUCT_POWER:
            return lax.integer_pow(base.astype(call.dtype), int(exponent))
        if exponent == 0.5:
            return jnp.sqrt(base.astype(call.dtype))
    base, exponent = promoted(call, base, exponent)
    return jnp.power(base, exponent)


@aten("addcmul")
def add_scaled_product(call: Call, x: Array, a: Array, b: Array, value: Operand = 1) -> Array:
    """``x + value * a * b``."""
    x, a, b = promoted(call, x, a, b)
    return x + _scaled_by(value, a, call.dtype) * b


@aten("addcdiv")
def add_quotient(call: Call, x: Array, a: Array, b: Array, value: Operand = 1) -> Array:
    """``x + value * a / b``."""
    x, a, b = promoted(call, x, a, b)
    return x + _scaled_by(value, a, call.dtype) / b


@aten("lerp")
def interpolate(call: Call, a: Array, b: Array, weight: Operand) -> Array:
    """``a + weight * (b - a)``, from the nearer end as torch does."""
    weight = jnp.asarray(weight).astype(call.dtype)
    return jnp.where(jnp.abs(weight) < 0.5, a + weight * (b - a), b - (b - a) * (1 - weight))


@aten("clamp", "clip")
def clamp(call: Call, x: Array, min: Operand | None = None, max: Operand | None = None) -> Array:
    """x, no less than ``min`` and no more than ``max``; where x is at a bound, the gradient goes to x."""
    x = x.astype(call.dtype)
    if min is not None:
        least = jnp.asarray(min).astype(x.dtype)
        x = jnp.where(x < least, least, x)
    if max is not None:
        most = jnp.asarray(max).astype(x.dtype)
        x = jnp.where(x > most, most, x)
    return x


@aten("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(call: Call, condition: Array, a: Operand, b: Operand) -> Array:
    """a where the condition holds, b elsewhere."""
    return jnp.where(condition, jnp.asarray(a).astype(call.dtype), jnp.asarray(b).astype(call.dtype))


@aten("nan_to_num")
def nan_to_num(
    call: Call, x: Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Array:
    """Numbers in the place of NaN and infinities."""
    return jnp.nan_to_num(x, nan=nan or 0.0, posinf=posinf, neginf=neginf)


@aten("logit", "special_logit")
def logit(call: Call, x: Array, eps: float | None = None) -> Array:
    """``log(x / (1 - x))``, x kept ``eps`` away from 0 and 1."""
    x = x if eps is None else jnp.clip(x, eps, 1 - eps)
    return jnp.log(x / (1 - x))


@aten("isclose")
def is_close(
    call: Call, a: Array, b: Array, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Array:
    """Whether a and b differ by at most ``atol + rtol * |b|``."""
    return jnp.isclose(a, b, rtol, atol, equal_nan)


def _of_one(function: Callable[[Array], Array]) -> Callable[[Call, Array], Array]:
    def apply(call: Call, x: Array) -> Array:
        return function(widen(x).astype(jnp.promote_types(widen(x).dtype, jnp.float32)))

    return apply


def _trigamma(x: Array) -> Array:
    """The derivative of digamma. JAX's is right for positive numbers; others are reflected."""
    positive = jnp.where(x < 0, 1 - x, x)
    value = special.polygamma(jnp.int32(1), positive)
    return jnp.where(x < 0, (jnp.pi / jnp.sin(jnp.pi * x)) ** 2 - value, value)


@jax.custom_jvp
def _digamma(x: Array) -> Array:
    return special.digamma(x)


@_digamma.defjvp
def _digamma_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _digamma(primals[0]), _trigamma(primals[0]) * tangents[0]


for _names, _function in (
    (("i0", "special_i0", "special_modified_bessel_i0"), special.i0),
    (("special_i0e",), special.i0e),
    (("special_i1", "special_modified_bessel_i1"), special.i1),
    (("special_i1e",), special.i1e),
    (("special_ndtri",), special.ndtri),
    (("special_log_ndtr",), stats.norm.logcdf),
    (("special_ndtr",), special.ndtr),
    (("digamma", "special_psi"), _digamma),
):
    aten(*_names)(_of_one(_function))


@aten("angle")
def angle(call: Call, x: Array) -> Array:
    """0, pi for negative numbers."""
    turned = jnp.where(x < 0, jnp.asarray(jnp.pi, call.dtype), jnp.zeros((), call.dtype))
    return jnp.where(jnp.isnan(x), x, turned) if jnp.issubdtype(x.dtype, jnp.floating) else turned


@aten("polygamma")
def polygamma(call: Call, order: int, x: Array) -> Array:
    """Derivatives of the logarithm of the gamma function, the first of them for order 0."""
    wide = widen(x).astype(jnp.float32)
    if order < 2:
        return _trigamma(wide) if order else _digamma(wide)
    return special.polygamma(jnp.int32(order), wide)


@aten("frexp")
def mantissa_and_exponent(call: Call, x: Array) -> tuple[Array, Array]:
    """m and e of ``x = m * 2**e``, m between 0.5 and 1; no gradient goes to the exponent."""
    mantissa, exponent = jnp.frexp(jax.lax.stop_gradient(widen(x)))
    scale = jnp.exp2(-exponent.astype(jnp.float32))
    return jnp.where(jnp.isfinite(x), widen(x) * scale, mantissa), exponent


@aten("ldexp")
def times_power_of_two(call: Call, x: Array, exponent: Array) -> Array:
    """``x * 2**exponent``."""
    x, exponent = promoted(call, x, exponent)
    return x * jnp.exp2(exponent)


aten_expressions(
    {
        "": {
            # To the nearest number with so many decimals, halves to the even one.
            "round": lambda call, x, decimals=0: jnp.round(x, decimals),
            "rsub": lambda call, a, b, alpha=1: subtract(call, b, a, alpha),
            "floor_divide": lambda call, a, b: divide(call, a, b, "floor"),
            "clamp_min": lambda call, x, least: clamp(call, x, least),
            "clamp_max": lambda call, x, most: clamp(call, x, None, most),
            "masked_fill": lambda call, x, mask, value: jnp.where(
                mask, jnp.asarray(value).astype(x.dtype), x
            ),
            # ``-x log(x)``; 0 at 0.
            "special_entr": lambda call, x: scipy.special.entr(x),
            "special_zeta": lambda call, x, q: special.zeta(*promoted(call, x, q)),
            "igamma special_gammainc": lambda call, a, x: special.gammainc(*promoted(call, a, x)),
            "igammac special_gammaincc": lambda call, a, x: special.gammaincc(*promoted(call, a, x)),
        },
    }
)
