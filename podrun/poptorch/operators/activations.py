"""Activation functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from podrun.numerics.gradients import absolute
from podrun.numerics.precision import widen
from podrun.poptorch.capture.graph import DTypeArgument
from podrun.poptorch.operators.table import Call, Operand, aten, aten_expressions, axis


@aten("relu")
def relu(call: Call, x: Array) -> Array:
    """The greater of x and 0; the gradient at 0 is 0."""
    return jax.nn.relu(x) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.maximum(x, 0)


@aten("sigmoid")
def sigmoid(call: Call, x: Array) -> Array:
    """``1 / (1 + exp(-x))``."""
    return jax.nn.sigmoid(widen(x).astype(jnp.promote_types(widen(x).dtype, jnp.float32)))


@aten("log_sigmoid")
def log_sigmoid(call: Call, x: Array) -> Array:
    """``log(sigmoid(x))``, without overflow."""
    return jax.nn.log_sigmoid(widen(x))


@aten("log_sigmoid_forward")
def log_sigmoid_and_buffer(call: Call, x: Array) -> tuple[Array, Array]:
    """`log_sigmoid`, and what torch's own backward pass reads on the CPU: ``exp(-abs(x))``."""
    return log_sigmoid(call, x), jnp.exp(-absolute(x)).reshape(call.results[1].shape)


@aten("hardtanh")
def hard_tanh(call: Call, x: Array, least: float = -1, most: float = 1) -> Array:
    """x between two bounds; no gradient at or outside them."""
    inside = (x > least) & (x < most)
    return jnp.where(inside, x, lax.stop_gradient(jnp.clip(x, least, most)).astype(x.dtype))


@aten("rrelu_with_noise", "rrelu_with_noise_functional")
def randomised_relu_and_noise(
    call: Call,
    x: Array,
    noise: Array,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    *rest: object,
) -> tuple[Array, Array]:
    """Leaky ReLU whose slope is random while training, the mean of its bounds otherwise; and the noise, as it is."""
    slope: Operand = (lower + upper) / 2
    if training:
        slope = jax.random.uniform(call.key(), x.shape, minval=lower, maxval=upper)
    return jnp.where(x > 0, x, x * slope).astype(x.dtype), noise


@aten("_safe_softmax", kind="Softmax")
def safe_softmax(call: Call, x: Array, dim: int, dtype: DTypeArgument | None = None) -> Array:
    """Softmax; zeros where a whole row is minus infinity."""
    wide = _as_float(call, x)
    empty = jnp.all(jnp.isneginf(wide), dim, keepdims=True) if x.ndim else jnp.isneginf(wide)
    shares = jax.nn.softmax(jnp.where(empty, 0, wide), dim) if x.ndim else jnp.ones_like(wide)
    return jnp.where(empty, 0, shares)


@aten("elu")
def elu(call: Call, x: Array, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Array:
    """``scale * x`` where x is positive, ``scale * alpha * (exp(input_scale * x) - 1)`` elsewhere."""
    negative = jnp.where(x > 0, 0, x)
    return jnp.where(x > 0, x * scale, scale * alpha * jnp.expm1(negative * input_scale)).astype(x.dtype)


@aten("softplus")
def softplus(call: Call, x: Array, beta: float = 1, threshold: float = 20) -> Array:
    """``log(1 + exp(beta * x)) / beta``; x itself where ``beta * x`` exceeds the threshold."""
    x = widen(x)
    large = x * beta > threshold
    return jnp.where(large, x, jax.nn.softplus(jnp.where(large, 0, x) * beta) / beta)


@aten("threshold")
def threshold(call: Call, x: Array, least: float, value: float) -> Array:
    """x where it exceeds ``least``, ``value`` elsewhere."""
    return jnp.where(x > least, x, jnp.asarray(value, x.dtype))


@aten("softshrink")
def soft_shrink(call: Call, x: Array, width: float = 0.5) -> Array:
    """x moved by ``width`` towards 0."""
    return jnp.where(x > width, x - width, jnp.where(x < -width, x + width, 0))


@aten("glu")
def gated_linear_unit(call: Call, x: Array, dim: int = -1) -> Array:
    """The first half times the sigmoid of the second."""
    first, second = jnp.split(widen(x), 2, axis(dim, x.ndim))
    return first * jax.nn.sigmoid(second)


@aten("_softmax", "softmax.int", kind="Softmax")
def softmax(call: Call, x: Array, dim: int, *rest: object) -> Array:
    """``exp(x) / sum(exp(x))`` along a dimension, in float32."""
    return jax.nn.softmax(_as_float(call, x), dim) if x.ndim else jnp.ones_like(x)


@aten("_log_softmax", "log_softmax.int", kind="LogSoftmax")
def log_softmax(call: Call, x: Array, dim: int, *rest: object) -> Array:
    """``x - log(sum(exp(x)))`` along a dimension, in float32."""
    return jax.nn.log_softmax(_as_float(call, x), dim) if x.ndim else jnp.zeros_like(x)


def _as_float(call: Call, x: Array) -> Array:
    return widen(x) if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)


aten_expressions(
    {
        "": {
            "relu6": lambda call, x: jnp.clip(x, 0, 6),
            "silu": lambda call, x: jax.nn.silu(widen(x)),
            "mish": lambda call, x: jax.nn.mish(widen(x)),
            "gelu": lambda call, x, approximate="none": jax.nn.gelu(
                widen(x), approximate=approximate == "tanh"
            ),
            "hardswish": lambda call, x: x * jnp.clip(x + 3, 0, 6) / 6,
            "hardsigmoid": lambda call, x: jnp.clip(x + 3, 0, 6) / 6,
            "leaky_relu": lambda call, x, slope=0.01: jnp.where(x > 0, x, x * slope),
            "_prelu_kernel": lambda call, x, weight: jnp.where(x > 0, x, x * weight),
            "celu": lambda call, x, alpha=1.0: jax.nn.celu(x, alpha),
            "selu": lambda call, x: jax.nn.selu(x),
            # 0 where x is within ``width`` of 0.
            "hardshrink": lambda call, x, width=0.5: jnp.where(jnp.abs(x) > width, x, 0),
        },
    }
)
