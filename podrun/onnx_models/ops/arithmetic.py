"""Binary and variadic arithmetic with NumPy-style broadcasting (ONNX "Broadcasting in ONNX")."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from podrun.onnx_models.ops.common import Array, absolute, is_float, same_dtype, with_gradient
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, Context, Node, operator


def _aligned(node: Node, a: Array, b: Array) -> tuple[Array, Array]:
    """Before opset 7 ``broadcast=1`` lines b up with a at ``axis``, not at the end; later, NumPy's rule."""
    same_dtype(a, b)
    if node.domain == ONNX and node.opset < 7:
        if not node.get("broadcast", 0):
            if a.shape != b.shape:
                raise ValueError(f"shapes {a.shape} and {b.shape} differ and broadcast is off")
        elif "axis" in node.attributes:
            axis = node["axis"] % max(a.ndim, 1)
            b = b.reshape(b.shape + (1,) * (a.ndim - axis - b.ndim))
    return a, b


@operator(ONNX, "Add", since=(1, 6, 7, 13, 14), folds=True)
def add(ctx: Context, node: Node, a: Array, b: Array) -> Array:
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
