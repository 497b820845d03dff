"""Activation functions and the softmax family. Halves are computed in float32 and rounded once."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from podrun.numerics.precision import rounds_once
from podrun.onnx_models.ops.common import Array, Formula, axis_in, register_formulas
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context


@operator(ONNX, "PRelu", since=(1, 6, 7, 9, 16))
def prelu(ctx: Context, node: Node, x: Array, slope: Array) -> Array:
    """x, times ``slope`` where negative; slope is broadcast, before version 7 along the channels (ONNX PRelu)."""
    if node.opset < 7 and slope.ndim == 1 and x.ndim > 1 and slope.size > 1:
        slope = slope.reshape((1, -1) + (1,) * (x.ndim - 2))
    return jnp.where(x < 0, x * slope, x)


def _elu(x: Array, *, alpha: Array = 1.0) -> Array:
    return jnp.where(x > 0, x, alpha * jnp.expm1(jnp.minimum(x, 0)))


def _selu(
    x: Array, *, alpha: Array = 1.67326319217681884765625, gamma: Array = 1.05070102214813232421875
) -> Array:
    return gamma * _elu(x, alpha=alpha)


def _shrunk(x: Array, *, lambd: Array = 0.5, bias: Array = 0.0) -> Array:
    return jnp.where(x < -lambd, x + bias, jnp.where(x > lambd, x - bias, jnp.zeros((), x.dtype)))


register_formulas(
    ONNX,
    {
        "Sigmoid": Formula("1 / (1 + exp(-x))", jax.nn.sigmoid, (1, 6, 13)),
        "Elu": Formula("x, or ``alpha`` * (exp(x) - 1) where negative", _elu, (1, 6, 22)),
        "Celu": Formula(
            "max(x, 0) + min(0, ``alpha`` * (exp(x / alpha) - 1))",
            lambda x, *, alpha=1.0: jnp.maximum(x, 0) + alpha * jnp.expm1(jnp.minimum(x, 0) / alpha),
            (12, 28),
        ),
        "Selu": Formula("``gamma`` times Elu with ``alpha``", _selu, (1, 6, 22)),
        "HardSigmoid": Formula(
            "``alpha`` * x + ``beta`` within [0, 1]",
            lambda x, *, alpha=0.2, beta=0.5: jnp.clip(alpha * x + beta, 0, 1),
            (1, 6, 22),
        ),
        "HardSwish": Formula(
            "x times HardSigmoid with alpha 1/6 and beta 1/2",
            lambda x, *, alpha=1 / 6, beta=0.5: x * jnp.clip(x * alpha + beta, 0, 1),
            (14, 22),
        ),
        "Softplus": Formula("log(1 + exp(x))", jax.nn.softplus, (1, 22)),
        "Softsign": Formula("x / (1 + abs(x))", lambda x: x / (1 + jnp.abs(x)), (1, 22)),
        "Mish": Formula("x * tanh(softplus(x))", lambda x: x * jnp.tanh(jax.nn.softplus(x)), (18, 22)),
        "Gelu": Formula(
            'x times the normal distribution function at x, exactly or by ``approximate="tanh"``',
            lambda x, *, approximate="none": jax.nn.gelu(x, approximate=approximate == "tanh"),
            (20,),
        ),
        "Swish": Formula(
            "x * sigmoid(``alpha`` * x)", lambda x, *, alpha=1.0: x * jax.nn.sigmoid(alpha * x), (24,)
        ),
        "SwiGLU": Formula(
            "Swish(a) * b", lambda a, b, *, alpha=1.0: a * jax.nn.sigmoid(alpha * a) * b, (28,)
        ),
    },
    around=rounds_once,
)
register_formulas(
    GRAPHCORE,
    {
        "Swish": Formula("x * sigmoid(x)", lambda x: x * jax.nn.sigmoid(x)),
        "Gelu": Formula(
            "Gelu by its tanh approximation, as poplibs computes it",
            lambda x: jax.nn.gelu(x, approximate=True),
        ),
        "GeluErf": Formula("Gelu by the error function", lambda x: jax.nn.gelu(x, approximate=False)),
    },
    around=rounds_once,
)
register_formulas(
    ONNX,
    {
        "Relu": Formula(
            "max(x, 0); the gradient at 0 is 0",
            lambda x: jnp.where(x > 0, x, jnp.zeros((), x.dtype)),
            (1, 6, 13, 14),
        ),
        "LeakyRelu": Formula(
            "x, times ``alpha`` where negative",
            lambda x, *, alpha=0.01: jnp.where(x >= 0, x, x * alpha),
            (1, 6, 16),
        ),
        "ThresholdedRelu": Formula(
            "x where greater than ``alpha``, else 0",
            lambda x, *, alpha=1.0: jnp.where(x > alpha, x, jnp.zeros((), x.dtype)),
            (10, 22),
        ),
        "Shrink": Formula("x moved toward 0 by ``bias`` where abs(x) > ``lambd``, else 0", _shrunk, (9,)),
    },
)


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
