"""Random numbers. Operations with a state draw from the device's generator, stateless ones from their own seed.

The numbers are not the hardware's: distributions and repeatability are what holds.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from podrun.compiler.model_collectives import replica_position
from podrun.core.errors import UsageError
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context
from podrun.tensorflow.operators.table import Array, computes


def _sizes(ctx: Context) -> tuple[int, ...]:
    return tuple(int(v) for v in np.atleast_1d(ctx.constant(0))) if np.size(ctx.constant(0)) else ()


def _draw(kind: str, key: Array, shape: tuple[int, ...], dtype: str) -> Array:
    wide = jnp.float32
    if kind == "normal":
        return jax.random.normal(key, shape, wide).astype(dtype)
    if kind == "truncated":
        return jax.random.truncated_normal(key, -2.0, 2.0, shape, wide).astype(dtype)
    return jax.random.uniform(key, shape, wide).astype(dtype)


_KINDS = {"RandomStandardNormal": "normal", "TruncatedNormal": "truncated", "RandomUniform": "uniform"}


@computes(*_KINDS, attributes="output", random=True)
def _random(ctx: Context, node: Node, shape: Array) -> Array:
    return _draw(_KINDS[node.op_type], ctx.key(), _sizes(ctx), node["output"])


@computes("RandomUniformInt", attributes="output", random=True)
def _random_int(ctx: Context, node: Node, shape: Array, low: Array, high: Array) -> Array:
    return jax.random.randint(ctx.key(), _sizes(ctx), low, high, jnp.int32)


@computes("RandomShuffle", random=True)
def _shuffle(ctx: Context, node: Node, x: Array) -> Array:
    return jax.random.permutation(ctx.key(), x)


_STATELESS = {
    "StatelessRandomNormal": "normal",
    "StatelessRandomUniform": "uniform",
    "StatelessTruncatedNormal": "truncated",
    "StatelessRandomNormalV2": "normal",
    "StatelessRandomUniformV2": "uniform",
    "StatelessTruncatedNormalV2": "truncated",
}


@computes(*_STATELESS, attributes="output")
def _stateless(ctx: Context, node: Node, shape: Array, seed: Array, *more: Array) -> Array:
    words = jnp.asarray(seed).reshape(-1)
    key = jax.random.fold_in(jax.random.key(words[0]), words[-1])
    return _draw(_STATELESS[node.op_type], key, _sizes(ctx), node["output"])


@computes("StatelessRandomUniformFullInt", "StatelessRandomUniformFullIntV2", attributes="output")
def _stateless_words(ctx: Context, node: Node, shape: Array, seed: Array, *more: Array) -> Array:
    """Every whole number of the type is as likely: seeds that programs split are drawn so."""
    words = jnp.asarray(seed).reshape(-1)
    key = jax.random.fold_in(jax.random.key(words[0]), words[-1])
    narrowed = jax.dtypes.canonicalize_dtype(node["output"])  # An IPU has no type of 64 bits.
    return jax.lax.bitcast_convert_type(jax.random.bits(key, _sizes(ctx), jnp.uint32), narrowed)


@computes("StatelessRandomGetKeyCounter")
def _key_counter(ctx: Context, node: Node, seed: Array) -> tuple[Array, ...]:
    return jnp.asarray(seed).reshape(-1)[:2].astype(jnp.int32), jnp.zeros(2, jnp.int32)


@computes("StatelessRandomGetAlg")
def _algorithm(ctx: Context, node: Node) -> Array:
    return jnp.ones((), jnp.int32)


@computes("Podrun:dropout", attributes="rate noise_shape")
def _dropout(ctx: Context, node: Node, x: Array, seed: Array) -> Array:
    """``x`` scaled where it is kept, zero elsewhere; the mask is the seed's alone."""
    shape = tuple(node["noise_shape"] or x.shape)
    words = seed.reshape(-1)
    key = jax.random.fold_in(jax.random.key(words[0]), words[-1])
    kept = jax.random.uniform(key, shape) >= node["rate"]
    return jnp.where(kept, x * jnp.asarray(1 / (1 - node["rate"]), x.dtype), jnp.zeros((), x.dtype))


class SampleCountError(UsageError):
    """More unique samples than there are classes."""


def _seeded_key(ctx: Context, first: int, second: int) -> Array:
    """The key of two seeds, of which 32 bits count, on this replica."""
    key = jax.random.fold_in(jax.random.key(np.uint32(first & 0xFFFFFFFF)), np.uint32(second & 0xFFFFFFFF))
    if ctx.replicas == 1:
        return key
    groups = (tuple(range(ctx.replicas)),)
    return jax.random.fold_in(key, jnp.asarray(replica_position(groups)).astype(jnp.uint32).reshape(()))


@computes("UniformCandidateSampler", "LogUniformCandidateSampler",
          attributes="num_true num_sampled unique range_max seeds", random=True)  # fmt: skip
def _candidates(ctx: Context, node: Node, true_classes: Array) -> tuple[Array, ...]:
    """Sampled classes, and how often the true and the sampled ones are expected among them.

    Unique classes come in the order in which they would be drawn first. How many draws that takes decides the
    expectation, as in TensorFlow: a draw is new with the probability of what has not been drawn yet. Seeds of the
    program or of the operation give each replica the same samples in every run, as the SDK's kernel does.
    SampleCountError, in its words, for more unique samples than classes.
    """
    count, classes, (first, second) = node["num_sampled"], node["range_max"], node["seeds"]
    if node["unique"] and count > classes:
        raise SampleCountError(
            f"Cannot generate num_sampled ([{count}]) unique samples with the given range_max ([{classes}])"
        )
    key = _seeded_key(ctx, first, second) if first + second else ctx.key()
    ids = jnp.arange(classes, dtype=jnp.float32)
    uniform = node.op_type.startswith("Uniform")
    shares = jnp.full(classes, 1.0 / classes) if uniform else jnp.log1p(1 / (ids + 1)) / np.log1p(classes)
    sampling, waiting = jax.random.split(key)
    if node["unique"]:
        sampled = jax.lax.top_k(jnp.log(shares) + jax.random.gumbel(sampling, shares.shape), count)[1]
        before = jnp.cumsum(shares[sampled]) - shares[sampled]
        new = jnp.clip(1 - before, shares.min(), 1.0)
        chance = jax.random.uniform(waiting, (count,), minval=1e-7, maxval=1.0)
        tries = jnp.sum(
            jnp.where(new < 1, jnp.ceil(jnp.log(chance) / jnp.log1p(-jnp.minimum(new, 1 - 1e-7))), 1.0)
        )
        expected = -jnp.expm1(tries * jnp.log1p(-jnp.minimum(shares, 1 - 1e-7)))
    else:
        sampled = jax.random.categorical(sampling, jnp.log(shares), shape=(count,))
        expected = shares * count
    sampled = sampled.astype(jnp.int32)
    return sampled, expected[jnp.asarray(true_classes)], expected[sampled]
