"""Random keys: one for each replica and micro-batch, the same however they are folded.

The base seed is a 64-bit number, held as uint32 ``[2]`` (high word, low word). Micro-batch *i* after a seed
*s* has the seed ``s + i * STRIDE``; replica *r* (counted over the whole program) uses that plus *r*, as
PopART's replicas do; and the result is a threefry key. After a batch the base seed has moved on by
``accumulation_factor * STRIDE``, so that reading it and writing it back continues the sequence. All
arithmetic is modulo 2**64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

SEED_VARIABLE = "randomSeed___fromHost"
"""Name of the variable that holds the base seed, in every Executable that draws random numbers."""

STRIDE = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, odd: seeds of neighbouring micro-batches lie far from those of
replicas."""


def seed_words(seed: int) -> tuple[int, int]:
    """(high, low) uint32 words of ``seed`` modulo 2**64: what the host writes to `SEED_VARIABLE`."""
    seed &= (1 << 64) - 1
    return seed >> 32, seed & 0xFFFFFFFF


def advance(seed: jax.Array, micro_batches: int) -> jax.Array:
    """The base seed after that many micro-batches, inside a trace: uint32 ``[2]`` to uint32 ``[2]``."""
    import jax.numpy as jnp

    high, low = seed_words(micro_batches * STRIDE)
    return _add(seed, jnp.array([high, low], jnp.uint32))


def folded_keys(seed: jax.Array, replica_offset: jax.Array, micro_batches: int, replicas: int) -> jax.Array:
    """Key data uint32 ``[micro_batches * replicas, 2]``, micro-batch major, for replicas from
    ``replica_offset``."""
    import jax.numpy as jnp
    import numpy as np

    steps = np.array([seed_words(i * STRIDE) for i in range(micro_batches)], np.uint32)
    base = _add(seed, jnp.asarray(steps))
    replica = jnp.arange(replicas, dtype=jnp.uint32) + replica_offset.astype(jnp.uint32)
    shift = jnp.stack([jnp.zeros_like(replica), replica], axis=-1)
    return _add(base[:, None, :], shift[None, :, :]).reshape(micro_batches * replicas, 2)


def _add(a: jax.Array, b: Any) -> jax.Array:
    """64-bit addition on words in the last axis, with broadcasting (JAX runs without 64-bit types here)."""
    import jax.numpy as jnp

    low = a[..., 1] + b[..., 1]
    carry = (low < b[..., 1]).astype(jnp.uint32)
    return jnp.stack([a[..., 0] + b[..., 0] + carry, low], axis=-1)
