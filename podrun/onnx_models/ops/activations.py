"""Activation functions and the softmax family. Halves are computed in float32 and rounded once."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from podrun.numerics.precision import rounds_once
from podrun.onnx_models.ops.common import Array, axis_in
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context


@operator(ONNX, "Relu", since=(1, 6, 13, 14))
def onnx_relu(ctx: Context, node: Node, x: Array) -> Array:
    """max(x, 0); the gradient at 0 is 0 (ONNX Relu)."""
    return jnp.where(x > 0, x, jnp.zeros((), x.dtype))


@operator(ONNX, "Sigmoid", since=(1, 6, 13))
@rounds_once
def onnx_sigmoid(ctx: Context, node: Node, x: Array) -> Array:
    """1 / (1 + exp(-x)) (ONNX Sigmoid)."""
    return jax.nn.sigmoid(x)


@operator(ONNX, "LeakyRelu", since=(1, 6, 16))
def onnx_leaky_relu(ctx: Context, node: Node, x: Array) -> Array:
    """x, times ``alpha`` where negative (ONNX LeakyRelu)."""
    return jnp.where(x >= 0, x, x * np.asarray(node.get("alpha", 0.01), x.dtype))


@operator(ONNX, "PRelu", since=(1, 6, 7, 9, 16))
def prelu(ctx: Context, node: Node, x: Array, slope: Array) -> Array:
    """x, times ``slope`` where negative; slope is broadcast, before version 7 along the channels (ONNX PRelu)."""
    if node.opset < 7 and slope.ndim == 1 and x.ndim > 1 and slope.size > 1:
        slope = slope.reshape((1, -1) + (1,) * (x.ndim - 2))
    return jnp.where(x < 0, x * slope, x)


@operator(ONNX, "Elu", since=(1, 6, 22))
@rounds_once
def onnx_elu(ctx: Context, node: Node, x: Array) -> Array:
    """x, or ``alpha`` * (exp(x) - 1) where negative (ONNX Elu)."""
    return jnp.where(x > 0, x, np.asarray(node.get("alpha", 1.0), x.dtype) * jnp.expm1(jnp.minimum(x, 0)))


@operator(ONNX, "Celu", since=(12, 28))
@rounds_once
def onnx_celu(ctx: Context, node: Node, x: Array) -> Array:
    """max(x, 0) + min(0, ``alpha`` * (exp(x / alpha) - 1)) (ONNX Celu)."""
    alpha = np.asarray(node.get("alpha", 1.0), x.dtype)
    return jnp.maximum(x, 0) + alpha * jnp.expm1(jnp.minimum(x, 0) / alpha)


@operator(ONNX, "Selu", since=(1, 6, 22))
@rounds_once
def onnx_selu(ctx: Context, node: Node, x: Array) -> Array:
    """``gamma`` * x, or gamma * ``alpha`` * (exp(x) - 1) where negative (ONNX Selu)."""
    alpha = np.asarray(node.get("alpha", 1.67326319217681884765625), x.dtype)
    gamma = np.asarray(node.get("gamma", 1.05070102214813232421875), x.dtype)
    return gamma * jnp.where(x > 0, x, alpha * jnp.expm1(jnp.minimum(x, 0)))


@operator(ONNX, "ThresholdedRelu", since=(10, 22))
def thresholded_relu(ctx: Context, node: Node, x: Array) -> Array:
    """x where greater than ``alpha``, else 0 (ONNX ThresholdedRelu)."""
    return jnp.where(x > np.asarray(node.get("alpha", 1.0), x.dtype), x, jnp.zeros((), x.dtype))


@operator(ONNX, "HardSigmoid", since=(1, 6, 22))
@rounds_once
def onnx_hard_sigmoid(ctx: Context, node: Node, x: Array) -> Array:
    """``alpha`` * x + ``beta`` within [0, 1] (ONNX HardSigmoid)."""
    alpha, beta = (np.asarray(node.get(n, d), x.dtype) for n, d in (("alpha", 0.2), ("beta", 0.5)))
    return jnp.clip(alpha * x + beta, 0, 1)


@operator(ONNX, "HardSwish", since=(14, 22))
@rounds_once
def onnx_hard_swish(ctx: Context, node: Node, x: Array) -> Array:
    """x times HardSigmoid with alpha 1/6 and beta 1/2 (ONNX HardSwish)."""
    return x * jnp.clip(x * np.asarray(1 / 6, x.dtype) + np.asarray(0.5, x.dtype), 0, 1)


@operator(ONNX, "Softplus", since=(1, 22))
@rounds_once
def onnx_softplus(ctx: Context, node: Node, x: Array) -> Array:
    """log(1 + exp(x)) (ONNX Softplus)."""
    return jax.nn.softplus(x)


@operator(ONNX, "Softsign", since=(1, 22))
@rounds_once
def softsign(ctx: Context, node: Node, x: Array) -> Array:
    """x / (1 + abs(x)) (ONNX Softsign)."""
    return x / (1 + jnp.abs(x))


@operator(ONNX, "Mish", since=(18, 22))
@rounds_once
def onnx_mish(ctx: Context, node: Node, x: Array) -> Array:
    """x * tanh(softplus(x)) (ONNX Mish)."""
    return x * jnp.tanh(jax.nn.softplus(x))


@operator(ONNX, "Shrink", since=(9,))
def shrink(ctx: Context, node: Node, x: Array) -> Array:
    """x moved toward 0 by ``bias`` where abs(x) > ``lambd``, else 0 (ONNX Shrink)."""
    lambd = np.asarray(node.get("lambd", 0.5)).astype(x.dtype)
    bias = np.asarray(node.get("bias", 0.0)).astype(x.dtype)
    return jnp.where(x < -lambd, x + bias, jnp.where(x > lambd, x - bias, jnp.zeros((), x.dtype)))


@operator(ONNX, "Gelu", since=(20,))
@rounds_once
def onnx_gelu(ctx: Context, node: Node, x: Array) -> Array:
    """x times the normal distribution function at x, exactly or by ``approximate="tanh"`` (ONNX Gelu)."""
    return jax.nn.gelu(x, approximate=node.get("approximate", "none") == "tanh")


@operator(ONNX, "Swish", since=(24,))
@rounds_once
def swish(ctx: Context, node: Node, x: Array) -> Array:
    """x * sigmoid(``alpha`` * x) (ONNX Swish)."""
    return x * jax.nn.sigmoid(np.asarray(node.get("alpha", 1.0), x.dtype) * x)


@operator(GRAPHCORE, "Swish")
@rounds_once
def graphcore_swish(ctx: Context, node: Node, x: Array) -> Array:
    """x * sigmoid(x) (PopART Swish)."""
    return x * jax.nn.sigmoid(x)


@operator(GRAPHCORE, "Gelu")
@rounds_once
def graphcore_gelu(ctx: Context, node: Node, x: Array) -> Array:
    """Gelu by its tanh approximation, as poplibs computes it (PopART Gelu)."""
    return jax.nn.gelu(x, approximate=True)


@operator(GRAPHCORE, "GeluErf")
@rounds_once
def gelu_erf(ctx: Context, node: Node, x: Array) -> Array:
    """Gelu by the error function (PopART GeluErf)."""
    return jax.nn.gelu(x, approximate=False)


@operator(ONNX, "SwiGLU", since=(28,))
@rounds_once
def swiglu(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    """Swish(a) * b (ONNX SwiGLU)."""
    return a * jax.nn.sigmoid(np.asarray(node.get("alpha", 1.0), a.dtype) * a) * b


HALF_TERMS = 65504
"""Most exponentials (each at most 1) whose sum is sure to fit a half; longer sums stay float32."""


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _half_softmax(x: Array, axis: int) -> Array:
    """Softmax of float16 in the steps of ONNX's body; the gradient is float32 inside and rounded once."""
    wide = x.astype(jnp.float32)
    e = jnp.exp(wide - wide.max(axis=axis, keepdims=True)).astype(x.dtype).astype(jnp.float32)
    total = e.sum(axis=axis, keepdims=True)
    if x.shape[axis] <= HALF_TERMS:
        total = total.astype(x.dtype).astype(jnp.float32)
    return (e / total).astype(x.dtype)


@_half_softmax.defjvp
def _half_softmax_jvp(axis: int, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    y = _half_softmax(primals[0], axis)
    wide, t = y.astype(jnp.float32), tangents[0].astype(jnp.float32)
    along = wide * (t - (wide * t).sum(axis=axis, keepdims=True))
    return y, along.astype(y.dtype)


def _softmax(x: Array, axis: int) -> Array:
    return _half_softmax(x, axis) if x.dtype == jnp.float16 else jax.nn.softmax(x, axis=axis)


def _hardmax(x: Array, axis: int) -> Array:
    if not x.size:
        return x
    return jax.nn.one_hot(jnp.argmax(x, axis=axis), x.shape[axis], dtype=x.dtype, axis=axis)


def _register(name: str, function: Callable[..., Array], meaning: str, *, in_steps: bool = False) -> None:
    """Both forms of an operator; ``in_steps``: the function sees halves as they are and rounds them itself."""

    def along_axis(ctx: Context, node: Node, x: Array) -> Array:
        return function(x, axis=axis_in(node.get("axis", -1), x.ndim))

    def as_matrix(ctx: Context, node: Node, x: Array) -> Array:
        axis = (
            axis_in(node.get("axis", 1), x.ndim + 1)
            if x.ndim == node.get("axis", 1)
            else axis_in(node.get("axis", 1), x.ndim)
        )
        rows, columns = (int(np.prod(part, dtype=np.int64)) for part in (x.shape[:axis], x.shape[axis:]))
        return function(x.reshape(rows, columns), axis=1).reshape(x.shape)

    along_axis.__doc__ = f"{meaning} along ``axis``, the last by default (ONNX {name} 13)."
    as_matrix.__doc__ = f"{meaning} over all axes from ``axis``, 1 by default (ONNX {name} before 13)."
    for form, since in ((along_axis, (13,)), (as_matrix, (1, 11))):
        operator(ONNX, name, since=since)(_bfloat_once(form) if in_steps else rounds_once(form))


def _bfloat_once(form: Callable[..., Array]) -> Callable[..., Array]:
    """`rounds_once` for bfloat16 only."""
    once = rounds_once(form)

    @functools.wraps(form)
    def wrapped(ctx: Context, node: Node, x: Array) -> Array:
        return (form if x.dtype == jnp.float16 else once)(ctx, node, x)

    return wrapped


_register("Softmax", _softmax, "Exponentials that sum to 1", in_steps=True)
_register("LogSoftmax", jax.nn.log_softmax, "Logarithm of softmax")
_register("Hardmax", _hardmax, "1 at the first maximum, else 0,")
