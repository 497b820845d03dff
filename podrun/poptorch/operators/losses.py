"""Loss functions, in float32; the CTC loss and its decoder are among them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from podrun.numerics import loss_functions
from podrun.numerics.ctc import alignment_losses, best_label_sequences, without_infinity
from podrun.numerics.gradients import absolute
from podrun.numerics.loss_functions import class_losses, weighted_reduction
from podrun.numerics.precision import widen
from podrun.poptorch.operators.table import Call, Sizes, aten

NONE, MEAN, SUM = 0, 1, 2
"""Torch's numbers for ``reduction``."""
HOW = ("none", "mean", "sum")
"""What they mean, by number."""


def by_reduction(losses: Array, reduction: int) -> Array:
    """All losses, their mean or their sum."""
    result: Array = loss_functions.reduced(losses, HOW[reduction])
    return result


@aten("nll_loss_forward", "nll_loss2d_forward", kind="Nll")
def negative_log_likelihood(
    call: Call, x: Array, target: Array, weight: Array | None, reduction: int, ignore: int
) -> tuple[Array, Array]:
    """``-x[target]``, weighted by class; the mean is over the weights. Also the sum of the weights."""
    single = x.ndim == 1
    x, target = (widen(x)[None], target.reshape(1)) if single else (widen(x), target)
    losses, weights = class_losses(x, target, widen(weight), ignore, by_product=True)
    result = weighted_reduction(losses, weights, HOW[reduction])
    return (result[0] if single and reduction == NONE else result), jnp.sum(weights)


@aten("nll_loss", "nll_loss_nd", "nll_loss2d", kind="Nll")
def nll_loss(
    call: Call,
    x: Array,
    target: Array,
    weight: Array | None = None,
    reduction: int = MEAN,
    ignore: int = -100,
) -> Array:
    """`negative_log_likelihood` without the weights."""
    return negative_log_likelihood(call, x, target, weight, reduction, ignore)[0]


@aten("cross_entropy_loss", kind="Nll")
def cross_entropy(
    call: Call,
    x: Array,
    target: Array,
    weight: Array | None = None,
    reduction: int = MEAN,
    ignore: int = -100,
    smoothing: float = 0.0,
) -> Array:
    """Softmax and negative log likelihood; targets are classes, or probabilities of classes."""
    single = x.ndim == 1
    logs = jax.nn.log_softmax(widen(x), 0 if single else 1)
    if jnp.issubdtype(target.dtype, jnp.floating):
        return _soft_cross_entropy(logs, target, weight, reduction, smoothing, single)
    if single:
        logs, target = logs[None], target.reshape(1)
    losses, weights = class_losses(logs, target, widen(weight), ignore, by_product=True)
    if smoothing:
        classes = logs.shape[1]
        counted = (target != ignore).astype(logs.dtype)
        smooth = -jnp.sum(logs if weight is None else logs * _along_classes(weight, logs.ndim), 1) * counted
        losses = (1 - smoothing) * losses + smooth * (smoothing / classes)
    result: Array = weighted_reduction(losses, weights, HOW[reduction])
    return result[0] if single and reduction == NONE else result


def _along_classes(weight: Array, rank: int) -> Array:
    return jnp.reshape(widen(weight), (1, -1) + (1,) * (rank - 2))


def _soft_cross_entropy(
    logs: Array, target: Array, weight: Array | None, reduction: int, smoothing: float, single: bool
) -> Array:
    where = 0 if single else 1
    classes = logs.shape[where]
    target = widen(target)
    if smoothing:
        target = target * (1 - smoothing) + smoothing / classes
    if weight is not None:
        logs = logs * (widen(weight) if single else _along_classes(weight, logs.ndim))
    losses = -jnp.sum(logs * target, where)
    if reduction == NONE:
        return losses
    return jnp.sum(losses) / (max(losses.size, 1) if reduction == MEAN else 1)


@aten("mse_loss")
def mean_squared_error(call: Call, a: Array, b: Array, reduction: int = MEAN) -> Array:
    """Squares of differences; by default their mean."""
    return by_reduction(jnp.square(widen(a) - widen(b)), reduction)


@aten("l1_loss")
def mean_absolute_error(call: Call, a: Array, b: Array, reduction: int = MEAN) -> Array:
    """Absolute differences; the gradient at 0 is 0."""
    return by_reduction(absolute(widen(a) - widen(b)), reduction)


@aten("smooth_l1_loss")
def smooth_l1(call: Call, a: Array, b: Array, reduction: int = MEAN, beta: float = 1.0) -> Array:
    """Squares below ``beta``, absolute differences above."""
    distance = absolute(widen(a) - widen(b))
    if beta == 0:
        return by_reduction(distance, reduction)
    return by_reduction(
        jnp.where(distance < beta, 0.5 * distance**2 / beta, distance - 0.5 * beta), reduction
    )


@aten("huber_loss")
def huber(call: Call, a: Array, b: Array, reduction: int = MEAN, delta: float = 1.0) -> Array:
    """Squares below ``delta``, ``delta`` times absolute differences above."""
    distance = absolute(widen(a) - widen(b))
    return by_reduction(
        jnp.where(distance < delta, 0.5 * distance**2, delta * (distance - 0.5 * delta)), reduction
    )


LEAST_LOG = -100.0
"""Torch keeps logarithms in binary cross entropy above this."""


@aten("binary_cross_entropy")
def binary_cross_entropy(
    call: Call, x: Array, target: Array, weight: Array | None = None, reduction: int = MEAN
) -> Array:
    """Cross entropy of probabilities of two classes."""
    x, target = widen(x), widen(target)
    losses = -(
        target * jnp.maximum(jnp.log(x), LEAST_LOG) + (1 - target) * jnp.maximum(jnp.log1p(-x), LEAST_LOG)
    )
    return by_reduction(losses if weight is None else losses * widen(weight), reduction)


@aten("binary_cross_entropy_with_logits")
def binary_cross_entropy_of_logits(
    call: Call,
    x: Array,
    target: Array,
    weight: Array | None = None,
    pos_weight: Array | None = None,
    reduction: int = MEAN,
) -> Array:
    """Cross entropy of two classes from logits, without overflow."""
    x, target = widen(x), widen(target)
    positive = 1 if pos_weight is None else (widen(pos_weight) - 1) * target + 1
    losses = (1 - target) * x + positive * jax.nn.softplus(-x)
    return by_reduction(losses if weight is None else losses * widen(weight), reduction)


@aten("kl_div")
def kl_divergence(
    call: Call, x: Array, target: Array, reduction: int = MEAN, log_target: bool = False
) -> Array:
    """``target * (log(target) - x)``; 0 where the target is 0."""
    x, target = widen(x), widen(target)
    if log_target:
        return by_reduction(jnp.exp(target) * (target - x), reduction)
    safe = jnp.where(target > 0, target, 1)
    return by_reduction(jnp.where(target > 0, target * jnp.log(safe), 0) - target * x, reduction)


@aten("soft_margin_loss")
def soft_margin(call: Call, x: Array, target: Array, reduction: int = MEAN) -> Array:
    """``log(1 + exp(-target * x))``."""
    return by_reduction(jax.nn.softplus(-widen(target) * widen(x)), reduction)


def _rows_of(targets: Array, lengths: Array) -> Array:
    """``[samples, most]`` labels; a flat list of labels is cut by samples."""
    if targets.ndim == 2:
        return targets
    begins = jnp.cumsum(lengths) - lengths
    places = begins[:, None] + jnp.arange(targets.shape[0])
    return jnp.take(targets, jnp.clip(places, 0, targets.shape[0] - 1))


@aten("ctc_loss", kind="Ctc")
def ctc_loss(
    call: Call,
    logs: Array,
    targets: Array,
    input_lengths: Array | Sizes,
    target_lengths: Array | Sizes,
    blank: int = 0,
    reduction: int = MEAN,
    zero_infinity: bool = False,
) -> Array:
    """Minus the log probability of each target; their mean divides each by its target's length first."""
    single = logs.ndim == 2
    wide = widen(logs)[:, None] if single else widen(logs)
    ends, lengths = (jnp.atleast_1d(jnp.asarray(counts)) for counts in (input_lengths, target_lengths))
    rows = targets[None] if single and targets.ndim == 1 else targets
    labels = _rows_of(rows, lengths)
    losses = alignment_losses(wide, labels, ends, lengths, blank, pairwise=False)
    counted = jnp.arange(wide.shape[0])[:, None, None] < ends[:, None]
    whole = jnp.sum(jnp.where(counted, jnp.exp(wide), 0), (0, 2))
    losses = losses + (
        whole - lax.stop_gradient(whole)
    )  # As in torch: the gradient with respect to the input of log_softmax.
    if zero_infinity:
        losses = without_infinity(losses)
    if reduction == NONE:
        return jnp.reshape(losses, call.shape)
    if reduction == MEAN:
        return jnp.mean(losses / jnp.maximum(lengths, 1))
    return jnp.sum(losses)


@aten("podrun.ctc_beam_search.default", kind="CtcBeamSearchDecoder")
def beam_search(
    call: Call, logs: Array, lengths: Array, blank: int, width: int, best: int
) -> tuple[Array, Array, Array]:
    """PopART's ``CtcBeamSearchDecoder``: scores and lengths ``[samples, best]``, labels ``[samples, best, time]``.

    ``logs``: log probabilities ``[time, samples, classes]``.
    """
    return best_label_sequences(widen(logs), lengths.astype(jnp.int32), blank, width, best)
