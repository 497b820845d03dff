"""Operators for training in models: losses (PopART's, and ONNX's negative log-likelihood), and steps of optimizers.

**Steps of optimizers** (domain ai.onnx.preview.training) are for models that hold their own training. Every operator
takes a learning rate R, a count of updates T, and then n tensors of each kind: X1..Xn, their gradients G1..Gn and their
states. Sessions have their own optimizers (`podrun.popart.optimizers`) and do not use these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.core.errors import InputMismatch
from podrun.numerics.gradients import absolute
from podrun.numerics.loss_functions import (
    bounded_nll,
    class_losses,
    hot_classes,
    nll_of_softmax,
    reduced,
    weighted_reduction,
)
from podrun.numerics.precision import is_float, rounds_once
from podrun.onnx_models.annotations import SOFTMAX_AXIS
from podrun.onnx_models.ops.common import Array, axis_in
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context
from podrun.runtime.widening import WIDE

REDUCTIONS = {0: "sum", 1: "mean", 2: "none", "NoReduction": "none"}
"""popart.ReductionType by value; models hold it as a string or as the number."""


def reduction_of(node: Node) -> str:
    """``sum``, ``mean`` or ``none`` (NoReduction) from the attribute ``reduction``. InputMismatch for anything else."""
    stated = node.get("reduction", "Mean")
    name = REDUCTIONS.get(stated, str(stated))
    name = (
        name
        if name in ("sum", "mean", "none")
        else {"Sum": "sum", "Mean": "mean", "None": "none"}.get(name, "")
    )
    if not name:
        raise InputMismatch(f"reduction {stated!r} is none of Sum, Mean, NoReduction")
    return name


@operator(GRAPHCORE, "L1")
@rounds_once
def l1loss(ctx: Context, node: Node, x: Array) -> Array:
    """``lambda`` times the sum (or mean, or each) of abs(x); the gradient at 0 is 0 (PopART L1)."""
    if x.ndim == 0:
        raise InputMismatch("a rank-0 input is not accepted")
    return reduced(absolute(x) * np.asarray(node.get("lambda", 1.0), x.dtype), reduction_of(node))


@operator(GRAPHCORE, "IdentityLoss")
@rounds_once
def graphcore_identity_loss(ctx: Context, node: Node, x: Array) -> Array:
    """Sum or mean of x, or x itself: makes any tensor a loss (PopART IdentityLoss)."""
    return reduced(x, reduction_of(node))


@operator(GRAPHCORE, "Nll")
def nllloss(ctx: Context, node: Node, p: Array, label: Array, logits: Array = None) -> Array:
    """-log of the probability of the label, ``p [..., classes]`` and ``label [...]`` (PopART Nll).

    Probabilities are bounded below by 1e-7 (float32) or 6.1e-5 (float16), and by 1e-10 (float32) where the gradient
    divides by them. ``inputIsLogProbability``: p is a logarithm already. Labels equal to ``ignoreIndex`` give neither
    loss nor gradient, and Mean divides by the others (at least 1).

    ``logits``: what a Softmax over the last axis made p of (`popart.program.lowering_models` joins them). The gradient
    goes to them as p - 1 at the label and p elsewhere, which neither vanishes where p is below its bound nor overflows
    a half (PopART's pattern NlllWithSoftMaxGradDirect).
    """
    if not jnp.issubdtype(label.dtype, jnp.integer):
        raise InputMismatch(f"labels must be integers, not {label.dtype}")
    if label.shape != p.shape[:-1]:
        raise InputMismatch(f"labels {label.shape} do not fit probabilities {p.shape}")
    dtype = p.dtype
    wide: Any = p.astype(jnp.float32) if is_float(p) and p.dtype.itemsize < 4 else p
    classes = p.shape[-1]
    hot = hot_classes(label, classes)
    if logits is not None and axis_in(node.get(SOFTMAX_AXIS), p.ndim) == p.ndim - 1:
        losses = nll_of_softmax(jax.lax.stop_gradient(wide), logits, hot)
    else:
        picked = jnp.sum(jnp.where(hot, wide, jnp.zeros((), wide.dtype)), axis=-1)
        losses = -picked if node.get("inputIsLogProbability", 0) else bounded_nll(picked, dtype)
    ignored = node.get("ignoreIndex")
    dtype = losses.dtype if node.get(WIDE) else dtype
    if ignored is None:
        return reduced(losses, reduction_of(node)).astype(dtype)
    keep = label != ignored
    losses = jnp.where(keep, losses, jnp.zeros((), wide.dtype))
    if reduction_of(node) == "mean":
        return (jnp.sum(losses) / jnp.maximum(jnp.sum(keep), 1).astype(wide.dtype)).astype(dtype)
    return reduced(losses, reduction_of(node)).astype(dtype)


def _nll(ctx: Context, node: Node, log_p: Array, target: Array, weight: Array | None) -> Array:
    """Losses of ``log_p [N, C, ...]`` at classes ``target [N, ...]``, weighted by class, reduced (ONNX's rule)."""
    losses, factor = class_losses(log_p, target, weight, node.get("ignore_index"))
    return weighted_reduction(losses, jnp.broadcast_to(factor, losses.shape), node.get("reduction", "mean"))


@operator(ONNX, "NegativeLogLikelihoodLoss", since=(12, 13, 22))
@rounds_once
def onnx_negative_log_likelihood(
    ctx: Context, node: Node, x: Array, target: Array, weight: Array = None
) -> Array:
    """Minus the log-probability of the target class; ``mean`` is weighted (ONNX NegativeLogLikelihoodLoss)."""
    return _nll(ctx, node, x, target, weight)


@operator(ONNX, "SoftmaxCrossEntropyLoss", since=(12, 13))
@rounds_once
def softmax_cross_entropy(
    ctx: Context, node: Node, x: Array, target: Array, weight: Array = None
) -> tuple[Array, Array]:
    """Negative log-likelihood of log-softmax over axis 1, and the log-probabilities (ONNX SoftmaxCrossEntropyLoss)."""
    log_p = jax.nn.log_softmax(x, axis=1)
    return _nll(ctx, node, log_p, target, weight), log_p


TRAINING = "ai.onnx.preview.training"

OptimizerStep = Callable[..., tuple[Array, ...]]


def _each(tensors: tuple[Array, ...], kinds: int, step: OptimizerStep) -> tuple[Array, ...]:
    """``step`` on the i-th tensor of each kind; all first results, then all second ones, and so on."""
    if not tensors or len(tensors) % kinds:
        raise InputMismatch(f"{len(tensors)} tensors cannot be {kinds} for each weight")
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
        raise InputMismatch(f"mode is standard or nesterov, not {node['mode']!r}")
    beta = jnp.where(count > 0, jnp.asarray(node["beta"], rate.dtype), jnp.asarray(1, rate.dtype))

    def step(x: Array, g: Array, v: Array) -> tuple[Array, ...]:
        g = decay * x + g
        velocity = alpha * v + beta * g
        along = velocity if node["mode"] == "standard" else g + alpha * velocity
        return (x - rate * along).astype(x.dtype), velocity.astype(v.dtype)

    return _each(tensors, 3, step)
