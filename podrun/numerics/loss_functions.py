"""Losses of classes and their reductions, computed in float32 by callers that widen halves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from podrun.numerics.gradients import with_gradient


def reduced(losses: Array, how: str) -> Array:
    """All losses (``none``), their ``mean`` or their ``sum``."""
    if how == "none":
        return losses
    return jnp.mean(losses) if how == "mean" else jnp.sum(losses)


def class_losses(
    log_p: Array, target: Array, weight: Array | None, ignored: int | None, *, by_product: bool = False
) -> tuple[Array, Array]:
    """``-weight * log_p`` at classes ``target [N, ...]`` of ``log_p [N, C, ...]``; and the weights.

    Weights are 0 for targets that are ``ignored``, and 1 without ``weight [C]``. ``by_product``: a weight becomes 0 by
    a product, as PopTorch's front end always had it, and not by a choice: XLA contracts products and sums into other
    bits.
    """
    counted = jnp.ones(target.shape, bool) if ignored is None else target != ignored
    safe = jnp.where(counted, target, 0)
    if by_product:
        picked = jnp.take_along_axis(log_p, jnp.expand_dims(safe, 1), 1).squeeze(1)
        weights = (jnp.ones_like(picked) if weight is None else jnp.take(weight, safe)) * counted
        return -picked * weights, weights
    picked = jnp.take_along_axis(log_p, safe[:, None], axis=1)[:, 0]
    factor = jnp.ones((), log_p.dtype) if weight is None else weight[safe]
    factor = jnp.where(counted, factor, jnp.zeros((), log_p.dtype))
    return -picked * factor, factor


def weighted_reduction(losses: Array, weights: Array, how: str) -> Array:
    """`reduced`, but a mean divides by the sum of the weights."""
    if how == "none":
        return losses
    return jnp.sum(losses) / jnp.sum(weights) if how == "mean" else jnp.sum(losses)


def hot_classes(label: Array, classes: int) -> Array:
    """True at the class of each label: ``[..., classes]``."""
    return label[..., None] == jnp.arange(classes, dtype=label.dtype)


@jax.custom_jvp
def nll_of_softmax(p: Array, logits: Array, hot: Array) -> Array:
    """-log of the entries of ``p = softmax(logits)`` that ``hot`` selects; the gradient is that of the logits, ``p -
    hot``.
    """
    picked = jnp.sum(jnp.where(hot, p, jnp.zeros((), p.dtype)), axis=-1)
    return -jnp.log(jnp.maximum(picked, np.asarray(_smallest(logits.dtype), p.dtype)))


@nll_of_softmax.defjvp
def _nll_of_softmax_jvp(
    primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]
) -> tuple[Array, Array]:
    p, _, hot = primals
    slope = p - hot.astype(p.dtype)
    return nll_of_softmax(*primals), jnp.sum(slope * tangents[1].astype(p.dtype), axis=-1)


def _smallest(dtype: DTypeLike) -> float:
    return 6.1e-5 if dtype == jnp.float16 else 1e-7


def bounded_nll(p: Array, dtype: DTypeLike) -> Array:
    """-log of p bounded below; the gradient, -1 / p, has a bound of its own and never vanishes (PopART NllGrad)."""
    value = -jnp.log(jnp.maximum(p, np.asarray(_smallest(dtype), p.dtype)))
    least = np.asarray(6.104e-5 if dtype == jnp.float16 else 1e-10, p.dtype)
    return with_gradient(value, -p / jax.lax.stop_gradient(jnp.maximum(p, least)))
