"""Connectionist temporal classification: the loss of all alignments of a sequence, and its decoder by beam search.

Log probabilities are ``[time, samples, classes]`` in float32. Source: Graves et al., Connectionist Temporal
Classification, 2006.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from podrun.core.errors import InputMismatch

LEAST = -1e30
"""A finite stand-in for the logarithm of 0, so that differences stay finite."""


def alignment_losses(
    logs: Array, labels: Array, input_lengths: Array, target_lengths: Array, blank: int, *, pairwise: bool
) -> Array:
    """Minus the log probability of each sample's ``labels [samples, most]``; infinity for the impossible.

    The forward variables run over labels with blanks between them. ``pairwise``: the ways into a state are added two by
    two, as PopART's front end has always had it; else all at once, as PopTorch's has. They differ in bits.
    """
    time, samples, _ = logs.shape
    states = 2 * labels.shape[1] + 1
    extended = jnp.full((samples, states), blank, labels.dtype).at[:, 1::2].set(labels)
    scores = jnp.take_along_axis(logs, jnp.broadcast_to(extended, (time, samples, states)), 2)
    before = jnp.pad(extended, ((0, 0), (2, 0)), constant_values=blank)[:, :states]
    may_skip = (extended != blank) & (extended != before)
    start = jnp.where(jnp.arange(states) < 2, scores[0], LEAST)
    start = jnp.where((jnp.arange(states) == 1) & (target_lengths[:, None] == 0), LEAST, start)

    def step(alpha: Array, at: tuple[Array, Array]) -> tuple[Array, None]:
        score, now = at
        one = jnp.pad(alpha, ((0, 0), (1, 0)), constant_values=LEAST)[:, :states]
        two = jnp.pad(alpha, ((0, 0), (2, 0)), constant_values=LEAST)[:, :states]
        moved = jnp.maximum(
            _sum_of_ways(alpha, one, jnp.where(may_skip, two, LEAST), pairwise) + score, LEAST
        )
        return jnp.where((now < input_lengths)[:, None], moved, alpha), None

    alpha, _ = lax.scan(step, start, (scores[1:], jnp.arange(1, time)))
    last = 2 * target_lengths[:, None]
    ends = jnp.take_along_axis(alpha, jnp.concatenate([last, jnp.maximum(last - 1, 0)], 1), 1)
    ends = jnp.where((target_lengths[:, None] == 0) & (jnp.arange(2) == 1), LEAST, ends)
    total = jnp.logaddexp(ends[:, 0], ends[:, 1]) if pairwise else jax.nn.logsumexp(ends, 1)
    return jnp.where(total <= LEAST / 2, jnp.inf, -total)


def _sum_of_ways(stay: Array, one: Array, two: Array, pairwise: bool) -> Array:
    if pairwise:
        return jnp.logaddexp(jnp.logaddexp(stay, one), two)
    return jax.nn.logsumexp(jnp.stack([stay, one, two]), 0)


def without_infinity(losses: Array) -> Array:
    """Losses of what is impossible, and their gradients, as 0."""
    return jnp.where(jnp.isinf(losses), 0, losses)


def best_label_sequences(
    logs: Array, lengths: Array, blank: int, width: int, paths: int
) -> tuple[Array, Array, Array]:
    """The ``paths`` best label sequences by prefix beam search with ``width`` beams: scores and lengths ``[samples,
    paths]``, labels ``[samples, paths, time]``, those beyond a length being ``blank``. InputMismatch for more
    paths than beams.
    """
    if paths > width:
        raise InputMismatch(f"top_paths {paths} is more than beam_width {width}")

    def one(p: Array, n: Array) -> tuple[Array, Array, Array]:
        return _beam_search(p, n, blank, width)

    scores, counts, labels = jax.vmap(one, in_axes=(1, 0))(logs, lengths)
    return scores[:, :paths], counts[:, :paths], labels[:, :paths]


def _beam_search(log_p: Array, length: Array, blank: int, width: int) -> tuple[Array, Array, Array]:
    """One sequence ``[time, classes]``: beams of equal prefixes merged, the best ``width`` kept at every step."""
    steps, classes = log_p.shape
    labels = jnp.full((width, steps), blank, jnp.int32)
    counts = jnp.zeros(width, jnp.int32)
    start = jnp.where(jnp.arange(width) == 0, 0.0, LEAST)
    ends_blank, ends_label = start, jnp.full(width, LEAST)
    others = np.asarray([c for c in range(classes) if c != blank], np.int32)

    def step(state: Any, now: Any) -> tuple[Any, None]:
        t, p = now
        labels, counts, with_blank, with_label = state
        total = jnp.logaddexp(with_blank, with_label)
        last = jnp.where(
            counts > 0, jnp.take_along_axis(labels, jnp.maximum(counts - 1, 0)[:, None], 1)[:, 0], -1
        )
        stay_blank = total + p[blank]
        stay_label = jnp.where(last >= 0, with_label + p[last], LEAST)
        grown = (
            jnp.where(others[None] == last[:, None], with_blank[:, None], total[:, None]) + p[others][None]
        )
        new = jnp.broadcast_to(labels[:, None], (width, len(others), steps))
        place = jnp.arange(steps)[None, None] == counts[:, None, None]
        new = jnp.where(place, others[None, :, None], new).reshape(-1, steps)
        all_labels = jnp.concatenate([labels, new])
        all_counts = jnp.concatenate([counts, jnp.repeat(counts + 1, len(others))])
        all_blank = jnp.concatenate([stay_blank, jnp.full(grown.size, LEAST)])
        all_label = jnp.concatenate([stay_label, grown.reshape(-1)])
        same = (all_counts[:, None] == counts[None]) & jnp.all(all_labels[:, None] == labels[None], axis=-1)
        fresh = jnp.arange(len(all_counts)) >= width
        merged = fresh & jnp.any(same, axis=1)
        into = jnp.where(merged[:, None] & same, all_label[:, None], LEAST)
        all_label = all_label.at[:width].set(jnp.logaddexp(all_label[:width], jax.nn.logsumexp(into, axis=0)))
        all_label = jnp.where(merged, LEAST, all_label)
        _, best = lax.top_k(jnp.logaddexp(all_blank, all_label), width)
        chosen = (all_labels[best], all_counts[best], all_blank[best], all_label[best])
        live = t < length
        return tuple(jnp.where(live, a, b) for a, b in zip(chosen, state, strict=True)), None

    state, _ = lax.scan(step, (labels, counts, ends_blank, ends_label), (jnp.arange(steps), log_p))
    labels, counts, with_blank, with_label = state
    return jnp.logaddexp(with_blank, with_label), counts, labels
