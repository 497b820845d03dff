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
from podrun.onnx_models.ops.common import Array, same_dtype
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context


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


@operator(ONNX, "Add", since=(1, 6, 7, 13, 14), folds=True)
def onnx_add(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    """a + b, broadcast (ONNX Add)."""
    a, b = _aligned(node, a, b)
    return a + b


@operator(ONNX, "Sub", since=(1, 6, 7, 13, 14), folds=True)
def sub(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    """a - b, broadcast (ONNX Sub)."""
    a, b = _aligned(node, a, b)
    return a - b


@operator(ONNX, "Mul", since=(1, 6, 7, 13, 14), folds=True)
def mul(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    """a * b, broadcast (ONNX Mul)."""
    a, b = _aligned(node, a, b)
    return a * b


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


@operator(GRAPHCORE, "Fmod")
def fmod(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    """C's fmod: the remainder with the sign of a, broadcast (PopART Fmod)."""
    same_dtype(a, b)
    return jnp.fmod(a, b)


@operator(GRAPHCORE, "Remainder")
def remainder(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    """Python's %: the remainder with the sign of b, broadcast (PopART Remainder)."""
    same_dtype(a, b)
    return jnp.mod(a, b)


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


@operator(ONNX, "Neg", since=(1, 6, 13), folds=True)
def neg(ctx: Context, node: Node, x: Array) -> Array:
    """-x (ONNX Neg)."""
    return -x


@operator(ONNX, "Abs", since=(1, 6, 13), folds=True)
def abs_(ctx: Context, node: Node, x: Array) -> Array:
    """abs(x); the gradient at 0 is 0 (ONNX Abs)."""
    return absolute(x) if ctx.xp is jnp and is_float(x) else ctx.xp.abs(x)


@operator(ONNX, "Sign", since=(9, 13), folds=True)
def sign(ctx: Context, node: Node, x: Array) -> Array:
    """-1, 0 or 1 (ONNX Sign)."""
    return ctx.xp.sign(x)


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


@operator(GRAPHCORE, "Atan2")
def atan2(ctx: Context, node: Node, y: Array, x: Array) -> Array:
    """Angle of the point (x, y), broadcast (PopART Atan2)."""
    same_dtype(y, x)
    return jnp.arctan2(y, x)


def _unary(
    domain: str, name: str, since: tuple[int, ...], function: str, meaning: str, folds: bool = False
) -> None:
    """Register a function that NumPy and JAX share under one name; halves are computed in float32."""

    def apply(ctx: Context, node: Node, x: Array) -> Array:
        return getattr(ctx.xp, function)(x).astype(x.dtype)

    apply.__doc__ = f"{meaning}, element by element ({'ONNX' if domain == ONNX else 'PopART'} {name})."
    apply.__name__ = name.lower()
    operator(domain, name, since, folds=folds)(rounds_once(apply))


for _name, _since, _function, _meaning, _folds in (
    ("Exp", (1, 6, 13), "exp", "e to the power x", False),
    ("Log", (1, 6, 13), "log", "Natural logarithm", False),
    ("Sqrt", (1, 6, 13), "sqrt", "Square root", True),
    ("Floor", (1, 6, 13), "floor", "Greatest integer not above x", True),
    ("Ceil", (1, 6, 13), "ceil", "Least integer not below x", True),
    ("Round", (11, 22), "round", "Nearest integer, halves to even", True),
    ("Sin", (7, 22), "sin", "Sine", False),
    ("Cos", (7, 22), "cos", "Cosine", False),
    ("Tan", (7, 22), "tan", "Tangent", False),
    ("Asin", (7, 22), "arcsin", "Inverse sine", False),
    ("Acos", (7, 22), "arccos", "Inverse cosine", False),
    ("Atan", (7, 22), "arctan", "Inverse tangent", False),
    ("Sinh", (9, 22), "sinh", "Hyperbolic sine", False),
    ("Cosh", (9, 22), "cosh", "Hyperbolic cosine", False),
    ("Asinh", (9, 22), "arcsinh", "Inverse hyperbolic sine", False),
    ("Acosh", (9, 22), "arccosh", "Inverse hyperbolic cosine", False),
    ("Atanh", (9, 22), "arctanh", "Inverse hyperbolic tangent", False),
    ("Tanh", (1, 6, 13), "tanh", "Hyperbolic tangent", False),
):
    _unary(ONNX, _name, _since, _function, _meaning, _folds)

for _name, _function, _meaning in (
    ("Expm1", "expm1", "e to the power x, minus 1"),
    ("Log1p", "log1p", "Natural logarithm of 1 + x"),
    ("Round", "round", "Nearest integer"),
    ("NearbyInt", "round", "Nearest integer, halves to even"),
):
    _unary(GRAPHCORE, _name, (1,), _function, _meaning)


@operator(ONNX, "Reciprocal", since=(1, 6, 13))
def reciprocal(ctx: Context, node: Node, x: Array) -> Array:
    """1 / x (ONNX Reciprocal)."""
    return np.asarray(1, x.dtype) / x


@operator(ONNX, "Erf", since=(9, 13))
@rounds_once
def erf(ctx: Context, node: Node, x: Array) -> Array:
    """The error function (ONNX Erf); integers are rounded from the float value."""
    if is_float(x):
        return jax.scipy.special.erf(x)
    return jax.scipy.special.erf(x.astype(jnp.float32)).astype(x.dtype)


@operator(ONNX, "IsNaN", since=(9, 13, 20))
def isnan(ctx: Context, node: Node, x: Array) -> Array:
    """True where x is not a number (ONNX IsNaN)."""
    return jnp.isnan(x)


@operator(ONNX, "IsInf", since=(10, 20))
def isinf(ctx: Context, node: Node, x: Array) -> Array:
    """True where x is infinite of a sign asked for (ONNX IsInf)."""
    positive = jnp.isposinf(x) if node.get("detect_positive", 1) else jnp.zeros(x.shape, bool)
    negative = jnp.isneginf(x) if node.get("detect_negative", 1) else jnp.zeros(x.shape, bool)
    return positive | negative


def _comparison(name: str, since: tuple[int, ...], function: str, sign: str) -> None:
    def apply(ctx: Context, node: Node, a: Array, b: Array) -> Array:
        a, b = _aligned(node, a, b)
        return getattr(ctx.xp, function)(a, b)

    apply.__doc__ = f"True where a {sign} b, broadcast (ONNX {name})."
    apply.__name__ = name.lower()
    operator(ONNX, name, since, folds=True)(apply)


_Comparison = tuple[str, tuple[int, ...], str, str]
_comparisons: tuple[_Comparison, ...] = (
    ("Equal", (1, 7, 11, 13, 19), "equal", "=="),
    ("Greater", (1, 7, 9, 13), "greater", ">"),
    ("GreaterOrEqual", (12, 16), "greater_equal", ">="),
    ("Less", (1, 7, 9, 13), "less", "<"),
    ("LessOrEqual", (12, 16), "less_equal", "<="),
    ("And", (1, 7), "logical_and", "and"),
    ("Or", (1, 7), "logical_or", "or"),
    ("Xor", (1, 7), "logical_xor", "xor"),
)
for _title, _versions, _function, _sign in _comparisons:
    _comparison(_title, _versions, _function, _sign)


@operator(ONNX, "Not", since=(1,), folds=True)
def not_(ctx: Context, node: Node, x: Array) -> Array:
    """Logical negation (ONNX Not)."""
    return ctx.xp.logical_not(x)


def _bitwise(names: tuple[tuple[str, str], ...], function: str) -> None:
    for domain, name in names:

        def apply(ctx: Context, node: Node, *inputs: Array) -> Array:
            same_dtype(*inputs)
            return getattr(ctx.xp, function)(*inputs)

        apply.__doc__ = (
            f"{name} of integers, bit by bit, broadcast ({'ONNX' if domain == ONNX else 'PopART'} {name})."
        )
        apply.__name__ = name.lower()
        operator(domain, name, since=(18,) if domain == ONNX else (1,), folds=True)(apply)


_bitwise(((ONNX, "BitwiseAnd"), (GRAPHCORE, "BitwiseAnd")), "bitwise_and")
_bitwise(((ONNX, "BitwiseOr"), (GRAPHCORE, "BitwiseOr")), "bitwise_or")
_bitwise(((ONNX, "BitwiseXor"), (GRAPHCORE, "BitwiseXor")), "bitwise_xor")
_bitwise(((ONNX, "BitwiseNot"), (GRAPHCORE, "BitwiseNot")), "invert")


@operator(GRAPHCORE, "BitwiseXnor")
def bitwise_xnor(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    """Bits that agree (PopART BitwiseXnor)."""
    same_dtype(a, b)
    return jnp.invert(jnp.bitwise_xor(a, b))


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
