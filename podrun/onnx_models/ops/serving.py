"""Operators of ai.graphcore that conversion puts into models: 8-bit floats, and forms of ONNX's operators."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from podrun.core.errors import InputMismatch
from podrun.numerics.precision import widen
from podrun.onnx_models.ops.common import Array, axis_in, onnx_dtype
from podrun.onnx_models.ops.quantization import is_eight_bit_float, to_float8
from podrun.onnx_models.ops.registry import GRAPHCORE, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context


def _power(scale: Array) -> Array:
    if scale.size != 1 or np.dtype(scale.dtype).kind != "i":
        raise InputMismatch("the scale is one integer")
    return jnp.exp2(scale.reshape(()).astype(jnp.float32))


@operator(GRAPHCORE, "Pow2ScaleThenCast")
def pow2_scale_then_cast(ctx: Context, node: Node, x: Array, scale: Array) -> Array:
    """x * 2**scale in the 8-bit float ``to``, rounded once, limited to its range (PopART Pow2ScaleThenCast)."""
    dtype = onnx_dtype(node["to"], ctx)
    if not is_eight_bit_float(dtype):
        raise InputMismatch(f"{dtype.name} is no 8-bit float")
    return to_float8(jnp, x.astype(jnp.float32) * _power(scale), dtype, True)


@operator(GRAPHCORE, "CastThenPow2Scale")
def cast_then_pow2_scale(ctx: Context, node: Node, x: Array, scale: Array) -> Array:
    """x, an 8-bit float, times 2**scale in element type ``to``, float16 by default (PopART CastThenPow2Scale)."""
    if not is_eight_bit_float(x.dtype):
        raise InputMismatch(f"{np.dtype(x.dtype).name} is no 8-bit float")
    return (x.astype(jnp.float32) * _power(scale)).astype(onnx_dtype(node.get("to", 10), ctx))


@operator(GRAPHCORE, "ErfV2")
def erf_v2(ctx: Context, node: Node, x: Array) -> Array:
    """The error function to 1.5e-7 by a polynomial and one exponential (Abramowitz and Stegun, 7.1.26)."""
    wide = widen(x)
    size = jnp.abs(wide)
    t = 1 / (1 + 0.3275911 * size)
    series = jnp.zeros_like(t)
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = (series + factor) * t
    return (jnp.sign(wide) * (1 - series * jnp.exp(-size * size))).astype(x.dtype)


@operator(GRAPHCORE, "SoftmaxV2")
def softmax_v2(ctx: Context, node: Node, x: Array) -> Array:
    """Softmax along ``axis``, the last by default."""
    return jax.nn.softmax(x, axis=axis_in(int(node.get("axis", -1)), x.ndim))


@operator(GRAPHCORE, "WhereV2")
def where_v2(ctx: Context, node: Node, condition: Array, x: Array, y: Array) -> Array:
    """x where the condition holds, else y."""
    return jnp.where(condition != 0, x, y)


@operator(GRAPHCORE, "FastNorm")
def fast_norm(ctx: Context, node: Node, x: Array, scale: Array, shift: Array) -> Array:
    """Each row of ``x [rows, width]`` less its mean, over its deviation, times scale, plus shift; halves in float32."""
    wide = widen(x)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    normal = (wide - mean) * jax.lax.rsqrt(variance + np.float32(node.get("epsilon", 1e-5)))
    return (normal * widen(scale) + widen(shift)).astype(x.dtype)


@operator(GRAPHCORE, "AttentionMask")
def graphcore_attention_mask(ctx: Context, node: Node, numbers: Array) -> Array:
    """``[rows, 1, places, places]`` from the numbers of samples ``[rows, places]``: 0 between places of one sample,
    -10000 else. Places of padding have the number 0. ``dataType``: FLOAT or FLOAT16.
    """
    if numbers.ndim != 2 or np.dtype(numbers.dtype).kind not in "iu":
        raise InputMismatch(
            f"numbers of samples are [rows, places] of integers, not {numbers.dtype}{numbers.shape}"
        )
    same = (numbers[:, :, None] == numbers[:, None, :]) & (numbers[:, :, None] != 0)
    kind = {"FLOAT": jnp.float32, "FLOAT16": jnp.float16}[str(node.get("dataType", "FLOAT"))]
    return jnp.where(same, 0.0, -10000.0).astype(kind)[:, None]


def _places(lengths: Array, samples: int, most: int, total: int) -> Array:
    """Where the places of each sample lie, end to end: ``[samples, most]``; ``total`` behind a sample's end."""
    counts = lengths.reshape(samples, -1)[:, 0].astype(jnp.int32)
    begins = jnp.cumsum(counts) - counts
    steps = jnp.arange(most, dtype=jnp.int32)
    return jnp.where(steps[None] < counts[:, None], begins[:, None] + steps[None], total)


@operator(GRAPHCORE, "Unpack")
def graphcore_unpack(ctx: Context, node: Node, x: Array, lengths: Array) -> Array:
    """``[samples, maxSequenceLength, ...]`` from rows ``[rows, places, ...]`` in which samples lie end to end; zeros
    behind the end of each.
    """
    samples, most = int(lengths.shape[0]), int(node["maxSequenceLength"])
    total = x.shape[0] * x.shape[1]
    flat = x.reshape(total, *x.shape[2:])
    whole = jnp.concatenate([flat, jnp.zeros((1, *flat.shape[1:]), flat.dtype)])
    return whole[_places(lengths, samples, most, total)]


@operator(GRAPHCORE, "Pack")
def graphcore_pack(ctx: Context, node: Node, x: Array, lengths: Array) -> Array:
    """Rows ``[rows, rowLength, ...]`` in which samples ``[samples, most, ...]`` lie end to end, then zeros."""
    rows, length = int(node["rows"]), int(node["rowLength"])
    total = rows * length
    places = _places(lengths, x.shape[0], x.shape[1], total).reshape(-1)
    flat = jnp.zeros((total + 1, *x.shape[2:]), x.dtype).at[places].set(x.reshape(-1, *x.shape[2:]))
    return flat[:total].reshape(rows, length, *x.shape[2:])
