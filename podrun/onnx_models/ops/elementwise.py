"""Element by element: arithmetic with NumPy-style broadcasting (ONNX "Broadcasting in ONNX"), mathematics, logic."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.core.errors import InputMismatch
from podrun.numerics.gradients import absolute, with_gradient
from podrun.numerics.precision import is_float, rounds_once
from podrun.onnx_models.ops.common import Array, Formula, register_formulas, same_dtype
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context, OperatorFunction


def _aligned(node: Node, a: Array, b: Array) -> tuple[Array, Array]:
    """Before opset 7 ``broadcast=1`` lines b up with a at ``axis``, not at the end; later, NumPy's rule."""
    same_dtype(a, b)
    if node.domain == ONNX and node.opset < 7:
        if not node.get("broadcast", 0):
            if a.shape != b.shape:
                raise InputMismatch(f"shapes {a.shape} and {b.shape} differ and broadcast is off")
        elif "axis" in node.attributes:
            axis = node["axis"] % max(a.ndim, 1)
            b = b.reshape(b.shape + (1,) * (a.ndim - axis - b.ndim))
    return a, b


def _lined_up(apply: OperatorFunction) -> OperatorFunction:
    return lambda ctx, node, a, b: apply(ctx, node, *_aligned(node, a, b))


def _of_one_type(apply: OperatorFunction) -> OperatorFunction:
    def checked(ctx: Context, node: Node, *inputs: Array) -> Array:
        same_dtype(*inputs)
        return apply(ctx, node, *inputs)

    return checked


_ARITHMETIC = (1, 6, 7, 13, 14)
register_formulas(
    ONNX,
    {
        "Add": Formula("a + b, broadcast", lambda a, b: a + b, _ARITHMETIC, folds=True),
        "Sub": Formula("a - b, broadcast", lambda a, b: a - b, _ARITHMETIC, folds=True),
        "Mul": Formula("a * b, broadcast", lambda a, b: a * b, _ARITHMETIC, folds=True),
        "Equal": Formula("True where a == b, broadcast", "equal", (1, 7, 11, 13, 19), folds=True),
        "Greater": Formula("True where a > b, broadcast", "greater", (1, 7, 9, 13), folds=True),
        "GreaterOrEqual": Formula("True where a >= b, broadcast", "greater_equal", (12, 16), folds=True),
        "Less": Formula("True where a < b, broadcast", "less", (1, 7, 9, 13), folds=True),
        "LessOrEqual": Formula("True where a <= b, broadcast", "less_equal", (12, 16), folds=True),
        "And": Formula("True where a and b, broadcast", "logical_and", (1, 7), folds=True),
        "Or": Formula("True where a or b, broadcast", "logical_or", (1, 7), folds=True),
        "Xor": Formula("True where a or b, but not both, broadcast", "logical_xor", (1, 7), folds=True),
    },
    around=_lined_up,
)
register_formulas(
    GRAPHCORE,
    {
        "Fmod": Formula("C's fmod: the remainder with the sign of a, broadcast", jnp.fmod),
        "Remainder": Formula("Python's %: the remainder with the sign of b, broadcast", jnp.mod),
        "Atan2": Formula("Angle of the point (x, y), broadcast", jnp.arctan2),
        "BitwiseXnor": Formula("Bits that agree", lambda a, b: jnp.invert(jnp.bitwise_xor(a, b))),
    },
    around=_of_one_type,
)
register_formulas(
    ONNX,
    {
        "Neg": Formula("-x", lambda x: -x, (1, 6, 13), folds=True),
        "Sign": Formula("-1, 0 or 1", "sign", (9, 13), folds=True),
        "Not": Formula("Logical negation", "logical_not", folds=True),
        "Reciprocal": Formula("1 / x", lambda x: np.asarray(1, x.dtype) / x, (1, 6, 13)),
        "IsNaN": Formula("True where x is not a number", jnp.isnan, (9, 13, 20)),
    },
)


@operator(ONNX, "Div", since=(1, 6, 7, 13, 14), folds=True)
def div(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    """a / b, broadcast; integers truncate toward zero (ONNX Div)."""
    a, b = _aligned(node, a, b)
    if is_float(a):
        return a / b
    return truncated_division(ctx.xp, a, b)


def truncated_division(xp: Any, a: Array, b: Array) -> Array:
    """Integer division toward zero, as C does; NumPy's and Python's rounds down."""
    quotient = a // b
    if np.issubdtype(np.dtype(a.dtype), np.unsignedinteger):
        return quotient
    exact = quotient * b == a
    return xp.where((quotient < 0) & ~exact, quotient + 1, quotient).astype(a.dtype)


@operator(ONNX, "Pow", since=(1, 7, 12, 13, 15), folds=True)
def pow_(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    """a to the power b, broadcast, in a's type (ONNX Pow; from version 12 the types may differ)."""
    if node.opset < 7:
        a, b = _aligned(node, a, b)
    xp = ctx.xp
    if is_float(a):
        return (
            xp.power(a, b.astype(a.dtype))
            if not np.issubdtype(b.dtype, np.integer)
            else xp.power(a, b).astype(a.dtype)
        )
    if is_float(b):
        wide = np.float64 if ctx.x64 or xp is np else np.float32
        return xp.power(a.astype(wide), b.astype(wide)).astype(a.dtype)
    return xp.power(a, b.astype(a.dtype)).astype(a.dtype)


@operator(ONNX, "Mod", since=(10, 13, 28), folds=True)
def mod(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    """Remainder: with ``fmod`` the sign of a (C's fmod), else of b (Python's %; integers only) (ONNX Mod)."""
    same_dtype(a, b)
    if node.get("fmod", 0):
        return ctx.xp.fmod(a, b)
    return ctx.xp.mod(a, b)


@operator(ONNX, "Sum", since=(1, 6, 8, 13), folds=True)
def sum_(ctx: Context, node: Node, *inputs: Array) -> Array:
    """Sum of all inputs, broadcast (ONNX Sum)."""
    same_dtype(*inputs)
    total = inputs[0]
    for x in inputs[1:]:
        total = total + x
    return total


@operator(ONNX, "Mean", since=(1, 6, 8, 13))
def mean(ctx: Context, node: Node, *inputs: Array) -> Array:
    """Mean of all inputs, broadcast (ONNX Mean)."""
    total = sum_(ctx, node, *inputs)
    return total / np.asarray(len(inputs), total.dtype)


@operator(ONNX, "Max", since=(1, 6, 8, 12, 13), folds=True)
def max_(ctx: Context, node: Node, *inputs: Array) -> Array:
    """Greatest of all inputs, broadcast (ONNX Max)."""
    same_dtype(*inputs)
    return _to_equals(ctx, functools.reduce(ctx.xp.maximum, inputs), inputs)


@operator(ONNX, "Min", since=(1, 6, 8, 12, 13), folds=True)
def min_(ctx: Context, node: Node, *inputs: Array) -> Array:
    """Least of all inputs, broadcast (ONNX Min)."""
    same_dtype(*inputs)
    return _to_equals(ctx, functools.reduce(ctx.xp.minimum, inputs), inputs)


def _to_equals(ctx: Context, result: Array, inputs: tuple[Array, ...]) -> Array:
    """A maximum or minimum whose gradient goes whole to each of the inputs that equal it (PopART MaxArgGrad)."""
    if not ctx.training or ctx.xp is np or not is_float(result) or len(inputs) == 1:
        return result
    zero = jnp.zeros((), result.dtype)
    return with_gradient(result, functools.reduce(jnp.add, (jnp.where(x == result, x, zero) for x in inputs)))


@operator(ONNX, "Abs", since=(1, 6, 13), folds=True)
def abs_(ctx: Context, node: Node, x: Array) -> Array:
    """abs(x); the gradient at 0 is 0 (ONNX Abs)."""
    return absolute(x) if ctx.xp is jnp and is_float(x) else ctx.xp.abs(x)


@operator(GRAPHCORE, "Scale")
def scale(ctx: Context, node: Node, x: Array) -> Array:
    """x times the attribute ``scale`` (PopART Scale)."""
    return x * np.asarray(node["scale"], x.dtype)


@operator(GRAPHCORE, "ScaledAdd")
def scaled_add(
    ctx: Context, node: Node, a: Array, b: Array, scale0: Array = None, scale1: Array = None
) -> Array:
    """scale0 * a + scale1 * b; scales are inputs or attributes (PopART ScaledAdd)."""
    same_dtype(a, b)
    first = np.asarray(node.get("scale0", 1.0), a.dtype) if scale0 is None else scale0.astype(a.dtype)
    second = np.asarray(node.get("scale1", 1.0), a.dtype) if scale1 is None else scale1.astype(a.dtype)
    return first * a + second * b


_TRIGONOMETRIC, _HYPERBOLIC = (7, 22), (9, 22)


def _in_its_type(apply: OperatorFunction) -> OperatorFunction:
    """Halves are computed in float32; the result has the type of x."""
    return rounds_once(lambda ctx, node, x: apply(ctx, node, x).astype(x.dtype))


register_formulas(
    ONNX,
    {
        "Exp": Formula("e to the power x", "exp", (1, 6, 13)),
        "Log": Formula("Natural logarithm", "log", (1, 6, 13)),
        "Sqrt": Formula("Square root", "sqrt", (1, 6, 13), folds=True),
        "Floor": Formula("Greatest integer not above x", "floor", (1, 6, 13), folds=True),
        "Ceil": Formula("Least integer not below x", "ceil", (1, 6, 13), folds=True),
        "Round": Formula("Nearest integer, halves to even", "round", (11, 22), folds=True),
        "Sin": Formula("Sine", "sin", _TRIGONOMETRIC),
        "Cos": Formula("Cosine", "cos", _TRIGONOMETRIC),
        "Tan": Formula("Tangent", "tan", _TRIGONOMETRIC),
        "Asin": Formula("Inverse sine", "arcsin", _TRIGONOMETRIC),
        "Acos": Formula("Inverse cosine", "arccos", _TRIGONOMETRIC),
        "Atan": Formula("Inverse tangent", "arctan", _TRIGONOMETRIC),
        "Sinh": Formula("Hyperbolic sine", "sinh", _HYPERBOLIC),
        "Cosh": Formula("Hyperbolic cosine", "cosh", _HYPERBOLIC),
        "Asinh": Formula("Inverse hyperbolic sine", "arcsinh", _HYPERBOLIC),
        "Acosh": Formula("Inverse hyperbolic cosine", "arccosh", _HYPERBOLIC),
        "Atanh": Formula("Inverse hyperbolic tangent", "arctanh", _HYPERBOLIC),
        "Tanh": Formula("Hyperbolic tangent", "tanh", (1, 6, 13)),
    },
    around=_in_its_type,
)
register_formulas(
    GRAPHCORE,
    {
        "Expm1": Formula("e to the power x, minus 1", "expm1"),
        "Log1p": Formula("Natural logarithm of 1 + x", "log1p"),
        "Round": Formula("Nearest integer", "round"),
        "NearbyInt": Formula("Nearest integer, halves to even", "round"),
    },
    around=_in_its_type,
)


@operator(ONNX, "Erf", since=(9, 13))
@rounds_once
def erf(ctx: Context, node: Node, x: Array) -> Array:
    """The error function (ONNX Erf); integers are rounded from the float value."""
    if is_float(x):
        return jax.scipy.special.erf(x)
    return jax.scipy.special.erf(x.astype(jnp.float32)).astype(x.dtype)


@operator(ONNX, "IsInf", since=(10, 20))
def isinf(ctx: Context, node: Node, x: Array) -> Array:
    """True where x is infinite of a sign asked for (ONNX IsInf)."""
    positive = jnp.isposinf(x) if node.get("detect_positive", 1) else jnp.zeros(x.shape, bool)
    negative = jnp.isneginf(x) if node.get("detect_negative", 1) else jnp.zeros(x.shape, bool)
    return positive | negative


_BITS = (
    ("BitwiseAnd", "Bits set in both", "bitwise_and"),
    ("BitwiseOr", "Bits set in either", "bitwise_or"),
    ("BitwiseXor", "Bits that differ", "bitwise_xor"),
    ("BitwiseNot", "Bits that are not set", "invert"),
)
for _domain, _since in ((ONNX, (18,)), (GRAPHCORE, (1,))):
    register_formulas(
        _domain,
        {name: Formula(meaning, function, _since, folds=True) for name, meaning, function in _BITS},
        around=_of_one_type,
    )


@operator(ONNX, "BitShift", since=(11, 28))
def bit_shift(ctx: Context, node: Node, x: Array, by: Array) -> Array:
    """x shifted by ``by`` bits to the side ``direction`` says, broadcast (ONNX BitShift)."""
    same_dtype(x, by)
    return jnp.left_shift(x, by) if node["direction"] == "LEFT" else jnp.right_shift(x, by)


@operator(ONNX, "Where", since=(9, 16), folds=True)
def onnx_where(ctx: Context, node: Node, condition: Array, a: Array, b: Array) -> Array:
    """a where the condition holds, else b, broadcast (ONNX Where)."""
    same_dtype(a, b)
    return ctx.xp.where(condition, a, b)


@operator(ONNX, "Clip", since=(1, 6))
def clip_attributes(ctx: Context, node: Node, x: Array) -> Array:
    """x bounded by the attributes ``min`` and ``max`` (ONNX Clip before 11)."""
    return _clipped(ctx, x, node.get("min"), node.get("max"))


@operator(ONNX, "Clip", since=(11, 12, 13))
def clip(ctx: Context, node: Node, x: Array, low: Array = None, high: Array = None) -> Array:
    """x bounded by the scalars ``low`` and ``high``; where low > high, high wins (ONNX Clip)."""
    return _clipped(ctx, x, low, high)


def _clipped(ctx: Context, x: Array, low: object, high: object) -> Array:
    """x within bounds, which may be arrays of one element; no gradient where it equals a bound (PopART ClipGrad)."""
    bounds = [None if b is None else jnp.asarray(b, x.dtype).reshape(()) for b in (low, high)]
    low, high = bounds
    result = x if low is None else jnp.maximum(x, low)
    result = result if high is None else jnp.minimum(result, high)
    if not ctx.training or not is_float(x):
        return result
    inside: Array = jnp.ones((), bool)
    for bound in bounds:
        inside = inside if bound is None else inside & (result != bound)
    return with_gradient(result, jnp.where(inside, x, jnp.zeros((), x.dtype)))
