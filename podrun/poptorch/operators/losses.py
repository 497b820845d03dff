"""Loss functions, in float32; the CTC loss and its decoder are among them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podrun.numerics.gradients import absolute
from podrun.numerics.precision import widen
from podrun.poptorch.operators.ipu import registered
from podrun.poptorch.operators.table import Array, Call, aten

NONE, MEAN, SUM = 0, 1, 2
"""Torch's numbers for ``reduction``."""


def reduced(losses: Array, reduction: int) -> Array:
    """All losses, their mean or their sum."""
    if reduction == NONE:
        return losses
    return jnp.mean(losses) if reduction == MEAN else jnp.sum(losses)


def _class_losses(x: Array, target: Array, weight: Array | None, ignore: int) -> tuple[Array, Array]:
    """``-weight * x[target]`` and the weights; 0 for targets that are ignored."""
    counted = target != ignore
    safe = jnp.where(counted, target, 0)
    picked = jnp.take_along_axis(x, jnp.expand_dims(safe, 1), 1).squeeze(1)
    weights = (jnp.ones_like(picked) if weight is None else jnp.take(widen(weight), safe)) * counted
    return -picked * weights, weights


@aten("nll_loss_forward", "nll_loss2d_forward", kind="Nll")
def negative_log_likelihood(
    call: Call, x: Array, target: Array, weight: Array | None, reduction: int, ignore: int
) -> tuple[Array, Array]:
    """``-x[target]``, weighted by class; the mean is over the weights. Also the sum of the weights."""
    single = x.ndim == 1
    losses, weights = _class_losses(
        widen(x)[None] if single else widen(x), target.reshape(1) if single else target, weight, ignore
    )
    total = jnp.sum(weights)
    if reduction == NONE:
        return (losses[0] if single else losses), total
    summed = jnp.sum(losses)
    return (summed / total if reduction == MEAN else summed), total


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
    losses, weights = _class_losses(logs, target, weight, ignore)
    if smoothing:
        classes = logs.shape[1]
        by_class = _along_classes(weight, logs.ndim)
        counted = (target != ignore).astype(logs.dtype)
        smooth = -jnp.sum(logs if weight is None else logs * by_class, 1) * counted
        losses = (1 - smoothing) * losses + smooth * (smoothing / classes)
    if reduction == NONE:
        return losses[0] if single else losses
    total = jnp.sum(losses)
    return total / jnp.sum(weights) if reduction == MEAN else total


def _along_classes(weight: Array | None, rank: int) -> Any:
    return None if weight is None else widen(weight).reshape((1, -1) + (1,) * (rank - 2))


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
    """Squares of differences."""
    return reduced(jnp.square(widen(a) - widen(b)), reduction)


@aten("l1_loss")
def mean_absolute_error(call: Call, a: Array, b: Array, reduction: int = MEAN) -> Array:
    """Absolute differences; the gradient at 0 is 0."""
    return reduced(absolute(widen(a) - widen(b)), reduction)


@aten("smooth_l1_loss")
def smooth_l1(call: Call, a: Array, b: Array, reduction: int = MEAN, beta: float = 1.0) -> Array:
    """Squares below ``beta``, absolute differences above."""
    distance = absolute(widen(a) - widen(b))
    if beta == 0:
        return reduced(distance, reduction)
    return reduced(jnp.where(distance < beta, 0.5 * distance**2 / beta, distance - 0.5 * beta), reduction)


@aten("huber_loss")
def huber(call: Call, a: Array, b: Array, reduction: int = MEAN, delta: float = 1.0) -> Array:
    """Squares below ``delta``, ``delta`` times absolute differences above."""
    distance = absolute(widen(a) - widen(b))
    return reduced(
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
    return reduced(losses if weight is None else losses * widen(weight), reduction)


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
    return reduced(losses if weight is None else losses * widen(weight), reduction)


@aten("kl_div")
def kl_divergence(
    call: Call, x: Array, target: Array, reduction: int = MEAN, log_target: bool = False
) -> Array:
    """``target * (log(target) - x)``; 0 where the target is 0."""
    x, target = widen(x), widen(target)
    if log_target:
        return reduced(jnp.exp(target) * (target - x), reduction)
    safe = jnp.where(target > 0, target, 1)
    return reduced(jnp.where(target > 0, target * jnp.log(safe), 0) - target * x, reduction)


@aten("soft_margin_loss")
def soft_margin(call: Call, x: Array, target: Array, reduction: int = MEAN) -> Array:
    """``log(1 + exp(-target * x))``."""
    return reduced(jax.nn.softplus(-widen(target) * widen(x)), reduction)


LEAST = -1e30
"""A finite stand-in for the logarithm of 0, so that differences stay finite."""


def _rows_of(targets: Array, lengths: Array, samples: int) -> Array:
    """``[samples, most]`` labels; a flat list of labels is cut by samples."""
    if targets.ndim == 2:
        return targets
    begins = jnp.cumsum(lengths) - lengths
    places = begins[:, None] + jnp.arange(targets.shape[0])
    return jnp.take(targets, jnp.clip(places, 0, targets.shape[0] - 1))


def negative_log_probabilities(
    logs: Array, targets: Array, input_lengths: Array, target_lengths: Array, blank: int
) -> Array:
    """``-log(P(targets))`` of each sample, logs ``[time, samples, classes]``; infinity for the impossible.

    Source: Graves et al., Connectionist Temporal Classification, 2006: the forward variables, over labels with blanks
    between them.
    """
    time, samples, _ = logs.shape
    labels = _rows_of(targets, target_lengths, samples)
    states = 2 * labels.shape[1] + 1
    extended = jnp.full((samples, states), blank).at[:, 1::2].set(labels)
    scores = jnp.take_along_axis(logs, jnp.broadcast_to(extended, (time, samples, states)), 2)
    before = jnp.pad(extended, ((0, 0), (2, 0)), constant_values=blank)[:, :states]
    may_skip = (extended != blank) & (extended != before)
    start = jnp.where(jnp.arange(states) < 2, scores[0], LEAST)
    start = jnp.where((jnp.arange(states) == 1) & (target_lengths[:, None] == 0), LEAST, start)

    def step(alpha: Array, at: tuple[Array, Array]) -> tuple[Array, None]:
        score, now = at
        one = jnp.pad(alpha, ((0, 0), (1, 0)), constant_values=LEAST)[:, :states]
        two = jnp.pad(alpha, ((0, 0), (2, 0)), constant_values=LEAST)[:, :states]
        ways = jnp.stack([alpha, one, jnp.where(may_skip, two, LEAST)])
        moved = jnp.maximum(jax.nn.logsumexp(ways, 0) + score, LEAST)
        return jnp.where((now < input_lengths)[:, None], moved, alpha), None

    alpha, _ = lax.scan(step, start, (scores[1:], jnp.arange(1, time)))
    last = 2 * target_lengths[:, None]
    ends = jnp.take_along_axis(alpha, jnp.concatenate([last, jnp.maximum(last - 1, 0)], 1), 1)
    ends = jnp.where((target_lengths[:, None] == 0) & (jnp.arange(2) == 1), LEAST, ends)
    total = jax.nn.logsumexp(ends, 1)
    return jnp.where(total <= LEAST / 2, jnp.inf, -total)


@aten("ctc_loss", kind="Ctc")
def ctc_loss(
    call: Call,
    logs: Array,
    targets: Array,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = MEAN,
    zero_infinity: bool = False,
) -> Array:
    """`negative_log_probabilities` of each sample; their mean divides each by its target's length first."""
    single = logs.ndim == 2
    wide = widen(logs)[:, None] if single else widen(logs)
    ends, lengths = (jnp.atleast_1d(jnp.asarray(each)) for each in (input_lengths, target_lengths))
    rows = targets[None] if single and targets.ndim == 1 else targets
    losses = negative_log_probabilities(wide, rows, ends, lengths, blank)
    counted = jnp.arange(wide.shape[0])[:, None, None] < ends[:, None]
    whole = jnp.sum(jnp.where(counted, jnp.exp(wide), 0), (0, 2))
    losses = losses + (
        whole - lax.stop_gradient(whole)
    )  # As in torch: the gradient with respect to the input of log_softmax.
    if zero_infinity:
        losses = jnp.where(jnp.isinf(losses), 0, losses)
    if reduction == NONE:
        return losses.reshape(call.shape)
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
    attributes = {"blank": blank, "beam_width": width, "top_paths": best}
    return tuple(registered(call, "CtcBeamSearchDecoder", "ai.graphcore", 1, attributes, (logs, lengths)))
