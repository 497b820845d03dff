"""Unary mathematics, comparisons and logic."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.onnx_models.ops.arithmetic import _aligned as aligned
from podrun.onnx_models.ops.common import Array, is_float, rounds_once, same_dtype, with_gradient
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, Context, Node, operator


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
        a, b = aligned(node, a, b)
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
def where(ctx: Context, node: Node, condition: Array, a: Array, b: Array) -> Array:
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


def _clipped(ctx: Context, x: Array, low: Any, high: Any) -> Array:
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
