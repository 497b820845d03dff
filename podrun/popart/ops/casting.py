"""Type conversion, with the rules of the small floats and of the small integers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.popart.ops.common import Array, is_float, onnx_dtype
from podrun.popart.ops.registry import ONNX, Context, Node, operator

_CASTS = (1, 6, 9, 13, 19, 21, 23, 24, 25, 28)


@operator(ONNX, "Cast", since=_CASTS, folds=True)
def cast(ctx: Context, node: Node, x: Array) -> Array:
    """x in element type ``to`` (ONNX Cast); INT64 becomes INT32 on the device."""
    dtype = onnx_dtype(node["to"], ctx)
    return convert(ctx, x, dtype, bool(node.get("saturate", 1)), node.get("round_mode", "up"))


@operator(ONNX, "CastLike", since=(15, 19, 21, 23, 24, 25))
def cast_like(ctx: Context, node: Node, x: Array, like: Array) -> Array:
    """x in the element type of ``like`` (ONNX CastLike)."""
    return convert(ctx, x, np.dtype(like.dtype), bool(node.get("saturate", 1)), node.get("round_mode", "up"))


@operator(ONNX, "BitCast", since=(26,))
def bit_cast(ctx: Context, node: Node, x: Array) -> Array:
    """The bits of x read as element type ``to`` of the same width (ONNX BitCast)."""
    dtype = onnx_dtype(node["to"], ctx)
    if dtype == np.dtype(bool):
        return lax.bitcast_convert_type(x, np.uint8) != 0
    x = x.astype(np.uint8) if x.dtype == bool else x
    return lax.bitcast_convert_type(x, dtype)


def is_eight_bit_float(dtype: Any) -> bool:
    """True for the float8 types but e8m0, which has a rule of its own."""
    name = str(np.dtype(dtype).name)
    return name.startswith("float8") and name != "float8_e8m0fnu"


def convert(
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
    """Nearest float8. Infinities saturate too; without ``saturate`` overflow gives NaN, or infinity where
    it exists.
    """
    greatest = float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
    wide = x.astype(np.float32)
    if saturate:
        return xp.clip(wide, -greatest, greatest).astype(dtype)
    return wide.astype(dtype)


def to_float8_exponent(x: Array, saturate: bool, round_mode: str) -> Array:
    """A power of two without sign (e8m0): the exponent of x, rounded up, down, or to the nearest by its
    mantissa.
    """
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
