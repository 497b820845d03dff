"""Connectionist temporal classification: the loss, and the decoder that PopART has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podrun.poptorch.operators.ipu import registered
from podrun.poptorch.operators.losses import MEAN, NONE
from podrun.poptorch.operators.table import Array, Call, aten, widened

LEAST = -1e30
"""The logarithm of 0, such that differences stay finite."""


def _rows_of(targets: Array, lengths: Array, samples: int) -> Array:
    """``[samples, most]`` labels; labels that are given one sample after another are cut apart."""
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
    wide = widened(logs)[:, None] if single else widened(logs)
    ends, lengths = (jnp.atleast_1d(jnp.asarray(each)) for each in (input_lengths, target_lengths))
    rows = targets[None] if single and targets.ndim == 1 else targets
    losses = negative_log_probabilities(wide, rows, ends, lengths, blank)
    counted = jnp.arange(wide.shape[0])[:, None, None] < ends[:, None]
    whole = jnp.sum(jnp.where(counted, jnp.exp(wide), 0), (0, 2))
    losses = losses + (
        whole - lax.stop_gradient(whole)
    )  # As torch: the gradient of what log_softmax was made from.
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
