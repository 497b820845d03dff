"""Quantisation (integers and small floats with scales and zero points) and type conversion."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from podrun.numerics.convolution import correlate
from podrun.numerics.precision import is_float, widen
from podrun.onnx_models.ops.common import Array, axis_in, onnx_dtype
from podrun.onnx_models.ops.pooling import window_of
from podrun.onnx_models.ops.registry import ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context

_RANGES = {"int2": (-2, 1), "uint2": (0, 3), "int4": (-8, 7), "uint4": (0, 15)}


def _range(dtype: np.dtype[Any]) -> tuple[int, int]:
    if dtype.name in _RANGES:
        return _RANGES[dtype.name]
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def _spread(v: Array, x: Array, axis: int, block: int) -> Array:
    """A scale or zero point for each element: one for all, one per index of ``axis``, or one per block along it."""
    if v.ndim == 0 or (v.size == 1 and v.ndim <= 1):
        return v.reshape(())
    if block:
        return jnp.repeat(v, block, axis=axis)[tuple(slice(0, d) for d in x.shape)]
    if v.ndim == 1:
        return v.reshape(tuple(-1 if a == axis else 1 for a in range(x.ndim)))
    return jnp.repeat(v, x.shape[axis] // v.shape[axis], axis=axis) if v.shape != x.shape else v


def _quotient(x: Array, by: Array) -> Array:
    """x / by, rounded once.

    XLA multiplies by the reciprocal where it sees one divisor for many values. Half way between two integers that
    rounds the other way, and only sometimes. This form hides the divisor from XLA.
    """
    return x / jnp.where(x == x, by, jnp.nan).astype(x.dtype)  # NaN divided by anything is NaN.


def _target(ctx: Context, node: Node, zero: Array | None) -> np.dtype[Any]:
    if zero is not None:
        kind: np.dtype[Any] = np.dtype(zero.dtype)
        return kind
    if node.get("output_dtype"):
        return onnx_dtype(node["output_dtype"], ctx)
    return np.dtype(np.uint8)


_QUANTIZE = (10, 13, 19, 21, 23, 24, 25, 28)


@operator(ONNX, "QuantizeLinear", since=_QUANTIZE)
def quantize_linear(ctx: Context, node: Node, x: Array, scale: Array, zero: Array = None) -> Array:
    """x / scale rounded to even, plus zero point, within the target's range (ONNX QuantizeLinear)."""
    axis, block = node.get("axis", 1), node.get("block_size", 0)
    axis = axis_in(axis, x.ndim) if x.ndim and (scale.ndim and scale.size > 1) else 0
    target = _target(ctx, node, zero)
    precision = onnx_dtype(node["precision"], ctx) if node.get("precision") else np.dtype(np.float32)
    if np.dtype(x.dtype) == np.dtype(np.float64):
        precision = np.dtype(np.float64)
    scales = _spread(scale, x, axis, block)
    ratio = _quotient(x.astype(precision), scales.astype(precision))
    if target.name.startswith("float4") or target.name.startswith("float6"):
        ratio = ratio + _spread(zero, x, axis, block).astype(precision) if zero is not None else ratio
        limit = float(jnp.finfo(target).max)  # type: ignore[no-untyped-call]
        return jnp.clip(ratio, -limit, limit).astype(target)
    if is_eight_bit_float(target):
        return to_float8(jnp, ratio, target, bool(node.get("saturate", 1)))
    low, high = _range(target)
    whole = jnp.round(ratio)
    if zero is not None:
        whole = whole + _spread(zero, x, axis, block).astype(whole.dtype)
    return jnp.clip(whole, low, high).astype(jnp.int32).astype(target)


@operator(ONNX, "DequantizeLinear", since=_QUANTIZE)
def dequantize_linear(ctx: Context, node: Node, x: Array, scale: Array, zero: Array = None) -> Array:
    """(x - zero point) * scale, in the scale's type or ``output_dtype`` (ONNX DequantizeLinear)."""
    axis, block = node.get("axis", 1), node.get("block_size", 0)
    axis = axis_in(axis, x.ndim) if x.ndim and (scale.ndim and scale.size > 1) else 0
    wide = jnp.float64 if np.dtype(scale.dtype) == np.dtype(np.float64) else jnp.float32
    value = x.astype(wide)
    if zero is not None and not is_float(x):
        value = value - _spread(zero, x, axis, block).astype(wide)
    y = value * _spread(scale, x, axis, block).astype(wide)
    return y.astype(onnx_dtype(node["output_dtype"], ctx) if node.get("output_dtype") else scale.dtype)


@operator(ONNX, "DynamicQuantizeLinear", since=(11,))
def dynamic_quantize_linear(ctx: Context, node: Node, x: Array) -> tuple[Array, Array, Array]:
    """x as uint8 over its own range widened to hold 0; the scale; the zero point (ONNX DynamicQuantizeLinear)."""
    high, low = jnp.maximum(jnp.max(x), 0), jnp.minimum(jnp.min(x), 0)
    scale = _quotient(jnp.where(high == low, 1.0, high - low).astype(x.dtype), np.asarray(255, x.dtype))
    zero = jnp.round(jnp.clip(_quotient(-low, scale), 0, 255))
    y = jnp.clip(jnp.round(_quotient(x, scale)) + zero, 0, 255)
    return y.astype(jnp.uint8), scale, zero.astype(jnp.uint8)


def _rows(zero: Array | None, like: Array, row_axis: int) -> Array:
    """A matrix operand as int32 less its zero point, which may be one per row (or column)."""
    value = like.astype(jnp.int32)
    if zero is None:
        return value
    zero = zero.astype(jnp.int32)
    if zero.ndim == 1 and zero.size > 1:
        zero = zero[:, None] if row_axis == 0 else zero
    return value - (zero.reshape(()) if zero.size == 1 else zero)


@operator(ONNX, "MatMulInteger", since=(10,))
def matmul_integer(
    ctx: Context, node: Node, a: Array, b: Array, a_zero: Array = None, b_zero: Array = None
) -> Array:
    """Product of 8-bit matrices less their zero points, in int32 (ONNX MatMulInteger)."""
    return jnp.matmul(_rows(a_zero, a, 0), _rows(b_zero, b, 1), preferred_element_type=jnp.int32)


def _requantized(total: Array, factor: Array, zero: Array, target: np.dtype[Any]) -> Array:
    if is_eight_bit_float(target):
        return to_float8(jnp, total.astype(jnp.float32) * factor, target, True)
    low, high = _range(target)
    whole = jnp.round(total.astype(factor.dtype) * factor) + zero.astype(factor.dtype)
    return jnp.clip(whole, low, high).astype(jnp.int32).astype(target)


@operator(ONNX, "QLinearMatMul", since=(10, 21))
def qlinear_matmul(
    ctx: Context,
    node: Node,
    a: Array,
    a_scale: Array,
    a_zero: Array,
    b: Array,
    b_scale: Array,
    b_zero: Array,
    y_scale: Array,
    y_zero: Array,
) -> Array:
    """Product of quantised matrices, quantised anew (ONNX QLinearMatMul)."""
    target = np.dtype(y_zero.dtype)
    factor = widen(a_scale) * widen(b_scale) / widen(y_scale)
    if is_float(a):
        total = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32))
    else:
        total = jnp.matmul(_rows(a_zero, a, 0), _rows(b_zero, b, 1), preferred_element_type=jnp.int32)
    return _requantized(total, factor, y_zero, target)


def _integer_conv(node: Node, x: Array, w: Array, x_zero: Array | None, w_zero: Array | None) -> Array:
    window = window_of(node, x.shape[2:], node.get("kernel_shape") or w.shape[2:])
    value = x.astype(jnp.int32) - (0 if x_zero is None else x_zero.astype(jnp.int32).reshape(()))
    weight = w.astype(jnp.int32)
    if w_zero is not None:
        zero = w_zero.astype(jnp.int32)
        weight = weight - (zero.reshape((-1,) + (1,) * (w.ndim - 1)) if zero.size > 1 else zero.reshape(()))
    return correlate(value, weight, node.get("group", 1), window)


@operator(ONNX, "ConvInteger", since=(10,))
def conv_integer(
    ctx: Context, node: Node, x: Array, w: Array, x_zero: Array = None, w_zero: Array = None
) -> Array:
    """Convolution of 8-bit tensors less their zero points, in int32 (ONNX ConvInteger)."""
    return _integer_conv(node, x, w, x_zero, w_zero)


@operator(ONNX, "QLinearConv", since=(10,))
def qlinear_conv(
    ctx: Context,
    node: Node,
    x: Array,
    x_scale: Array,
    x_zero: Array,
    w: Array,
    w_scale: Array,
    w_zero: Array,
    y_scale: Array,
    y_zero: Array,
    bias: Array = None,
) -> Array:
    """Convolution of quantised tensors, quantised anew; the int32 bias has scale x_scale * w_scale (ONNX
    QLinearConv).
    """
    total = _integer_conv(node, x, w, x_zero, w_zero)
    channels = (1, -1) + (1,) * (x.ndim - 2)
    if bias is not None:
        total = total + bias.reshape(channels)
    factor = x_scale * w_scale / y_scale
    factor = factor.reshape(channels) if factor.size > 1 else factor.reshape(())
    return _requantized(total, factor, y_zero.reshape(()), np.dtype(y_zero.dtype))


_CASTS = (1, 6, 9, 13, 19, 21, 23, 24, 25, 28)


@operator(ONNX, "Cast", since=_CASTS, folds=True)
def cast(ctx: Context, node: Node, x: Array) -> Array:
    """x in element type ``to`` (ONNX Cast); INT64 becomes INT32 on the device."""
    dtype = onnx_dtype(node["to"], ctx)
    return convert_dtype(ctx, x, dtype, bool(node.get("saturate", 1)), node.get("round_mode", "up"))


@operator(ONNX, "CastLike", since=(15, 19, 21, 23, 24, 25))
def cast_like(ctx: Context, node: Node, x: Array, like: Array) -> Array:
    """x in the element type of ``like`` (ONNX CastLike)."""
    return convert_dtype(
        ctx, x, np.dtype(like.dtype), bool(node.get("saturate", 1)), node.get("round_mode", "up")
    )


@operator(ONNX, "BitCast", since=(26,))
def bit_cast(ctx: Context, node: Node, x: Array) -> Array:
    """The bits of x read as element type ``to`` of the same width (ONNX BitCast)."""
    dtype = onnx_dtype(node["to"], ctx)
    if dtype == np.dtype(bool):
        return lax.bitcast_convert_type(x, np.uint8) != 0
    x = x.astype(np.uint8) if x.dtype == bool else x
    return lax.bitcast_convert_type(x, dtype)


def is_eight_bit_float(dtype: DTypeLike) -> bool:
    """True for the float8 types but e8m0, which has a rule of its own."""
    name = str(np.dtype(dtype).name)
    return name.startswith("float8") and name != "float8_e8m0fnu"


def convert_dtype(
    ctx: Context, x: Array, dtype: np.dtype[Any], saturate: bool = True, round_mode: str = "up"
) -> Array:
    """x as ``dtype``: floats truncate toward zero to integers; to bool, anything but 0 is true.

    To float8, what is too large becomes the largest finite value (``saturate``) or NaN or infinity, as the
    type has it. To 4 and 2 bit integers the low bits of the truncated value count.
    """
    xp = ctx.xp
    if x.dtype == dtype:
        return x
    if dtype == np.dtype(bool):
        return x != 0
    if is_eight_bit_float(dtype):
        return to_float8(xp, x, dtype, saturate)
    if dtype.name == "float8_e8m0fnu":
        return to_float8_exponent(x, saturate, round_mode)
    if dtype.name in ("int4", "uint4", "int2", "uint2"):
        return _low_bits(xp, x, dtype)
    if is_float(x) and dtype.kind in "iu":
        wide = x.astype(np.float32) if x.dtype.itemsize < 4 else x
        return xp.trunc(wide).astype(dtype)
    if x.dtype.itemsize == 1 and np.dtype(x.dtype).kind == "V":
        return x.astype(np.float32).astype(dtype)
    return x.astype(dtype)


def to_float8(xp: Any, x: Array, dtype: np.dtype[Any], saturate: bool) -> Array:
    """Nearest float8. Infinities saturate too; without ``saturate`` overflow gives NaN, or infinity where it exists."""
    greatest = float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
    wide = x.astype(np.float32)
    if saturate:
        return xp.clip(wide, -greatest, greatest).astype(dtype)
    return wide.astype(dtype)


def to_float8_exponent(x: Array, saturate: bool, round_mode: str) -> Array:
    """A power of two without sign (e8m0): the exponent of x, rounded up, down, or to the nearest by its mantissa."""
    bits = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.uint32)
    exponent = (bits >> 23) & 0xFF
    mantissa = bits & 0x7FFFFF
    if round_mode == "up":
        above = mantissa > 0
    elif round_mode == "nearest":
        above = mantissa >= 0x400000
    else:
        above = jnp.zeros(x.shape, bool)
    grown = exponent + above.astype(exponent.dtype)
    overflow = np.uint32(0xFE if saturate else 0xFF)
    grown = jnp.where((grown > 0xFE) & (exponent < 0xFF), overflow, jnp.minimum(grown, 0xFF))
    infinite = (exponent == 0xFF) & (mantissa == 0)
    grown = jnp.where(infinite, overflow, grown)
    grown = jnp.where((exponent == 0xFF) & (mantissa != 0), np.uint32(0xFF), grown)
    return lax.bitcast_convert_type(grown.astype(jnp.uint8), jnp.float8_e8m0fnu)


def _low_bits(xp: Any, x: Array, dtype: np.dtype[Any]) -> Array:
    """The low bits of x truncated to an integer, as a 4 or 2 bit integer."""
    bits = 4 if dtype.name.endswith("4") else 2
    whole = xp.trunc(x.astype(np.float32)).astype(np.int32) if is_float(x) else x.astype(np.int32)
    low = whole & ((1 << bits) - 1)
    if dtype.name.startswith("int"):
        low = xp.where(low >= 1 << (bits - 1), low - (1 << bits), low)
    return low.astype(dtype)
