"""One step of an optimizer as an operator (domain ai.onnx.preview.training), for models that hold their own training.

Every operator takes a learning rate R, a count of updates T, and then n tensors of each kind: X1..Xn, their gradients
G1..Gn and their states. Sessions have their own optimizers (`podrun.session.optimizers`) and do not use these.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from podrun.onnx_models.ops.common import Array, rounds_once
from podrun.onnx_models.ops.registry import Context, Node, operator

TRAINING = "ai.onnx.preview.training"

Step = Callable[..., tuple[Array, ...]]


def _each(tensors: tuple[Array, ...], kinds: int, step: Step) -> tuple[Array, ...]:
    """``step`` on the i-th tensor of each kind; all first results, then all second ones, and so on."""
    if not tensors or len(tensors) % kinds:
        raise ValueError(f"{len(tensors)} tensors cannot be {kinds} for each weight")
    count = len(tensors) // kinds
    results = [step(*tensors[i::count]) for i in range(count)]
    return tuple(value for kind in zip(*results, strict=True) for value in kind)


@operator(TRAINING, "Adagrad", since=(1,))
@rounds_once
def adagrad(ctx: Context, node: Node, rate: Array, count: Array, *tensors: Array) -> tuple[Array, ...]:
    """X - r G / (sqrt(H) + epsilon) with H the running sum of G squared and r = R / (1 + T decay) (ONNX Adagrad)."""
    r = rate / (1 + count * node.get("decay_factor", 0.0))
    decay, epsilon = node.get("norm_coefficient", 0.0), node.get("epsilon", 0.0)

    def step(x: Array, g: Array, h: Array) -> tuple[Array, ...]:
        g = decay * x + g
        total = h + g * g
        return (x - r * g / (jnp.sqrt(total) + epsilon)).astype(x.dtype), total.astype(h.dtype)

    return _each(tensors, 3, step)


@operator(TRAINING, "Adam", since=(1,))
@rounds_once
def adam(ctx: Context, node: Node, rate: Array, count: Array, *tensors: Array) -> tuple[Array, ...]:
    """Adam with bias correction in the learning rate once T > 0, and weight decay before or after (ONNX Adam)."""
    alpha, beta = node.get("alpha", 0.9), node.get("beta", 0.999)
    epsilon = node.get("epsilon", 0.0)
    before, after = node.get("norm_coefficient", 0.0), node.get("norm_coefficient_post", 0.0)
    times = jnp.maximum(count, 1).astype(rate.dtype)
    corrected = rate * jnp.sqrt(1 - jnp.power(jnp.asarray(beta, rate.dtype), times))
    corrected = corrected / (1 - jnp.power(jnp.asarray(alpha, rate.dtype), times))
    r = jnp.where(count > 0, corrected, rate)

    def step(x: Array, g: Array, v: Array, h: Array) -> tuple[Array, ...]:
        g = before * x + g
        mean = alpha * v + (1 - alpha) * g
        square = beta * h + (1 - beta) * g * g
        new = (1 - after) * (x - r * mean / (jnp.sqrt(square) + epsilon))
        return new.astype(x.dtype), mean.astype(v.dtype), square.astype(h.dtype)

    return _each(tensors, 4, step)


@operator(TRAINING, "Momentum", since=(1,))
@rounds_once
def momentum(ctx: Context, node: Node, rate: Array, count: Array, *tensors: Array) -> tuple[Array, ...]:
    """SGD with momentum, ``mode`` standard or nesterov; ``beta`` weighs the gradient once T > 0 (ONNX Momentum)."""
    alpha, decay = node["alpha"], node["norm_coefficient"]
    if node["mode"] not in ("standard", "nesterov"):
        raise ValueError(f"mode is standard or nesterov, not {node['mode']!r}")
    beta = jnp.where(count > 0, jnp.asarray(node["beta"], rate.dtype), jnp.asarray(1, rate.dtype))

    def step(x: Array, g: Array, v: Array) -> tuple[Array, ...]:
        g = decay * x + g
        velocity = alpha * v + beta * g
        along = velocity if node["mode"] == "standard" else g + alpha * velocity
        return (x - rate * along).astype(x.dtype), velocity.astype(v.dtype)

    return _each(tensors, 3, step)
