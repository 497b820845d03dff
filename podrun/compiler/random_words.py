"""Random words: Threefry-2x32, as a function of its own in StableHLO.

JAX's generator of random numbers is a primitive, which becomes a loop on CPUs. XLA compiles such a loop, through MLIR,
for 0.5 to 1.5 s of a core in a piece of its own and 50 to 100 ms beside others; a program with dropout has two for each
of its layers. So a piece calls a function by the name of `RANDOM_WORDS`, and machines replace the call by native code
of the same bits (`podrun.device.xla.own_functions`).

Words of a counter depend on the key and the counter alone. So a piece that is divided, or whose samples are folded to
one axis, draws the same numbers.

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011); jax-ml/jax, ``threefry2x32``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.random import threefry2x32_p

from podrun.core.names import RANDOM_WORDS

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_GROUPS = 5
_PARITY = np.uint32(0x1BD11BDA)


def threefry(first: jax.Array, second: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Both random words of each counter, ``[2, *shape]``, with 20 rounds.

    ``low``, ``high``: the words of counters, uint32 ``[*shape]``. ``first``, ``second``: those of one key, uint32
    without axes, or of one for each counter.
    """
    keys = first, second, first ^ second ^ _PARITY
    low, high = low + keys[0], high + keys[1]
    for group in range(1, _GROUPS + 1):
        for distance in _ROTATIONS[1 - group % 2]:
            low = low + high
            high = low ^ (high << np.uint32(distance) | high >> np.uint32(32 - distance))
        low, high = low + keys[group % 3], high + keys[(group + 1) % 3] + np.uint32(group)
    return jnp.stack((low, high))


threefry.__name__ = RANDOM_WORDS
_called = jax.jit(threefry)


def random_words(
    first: jax.Array, second: jax.Array, low: jax.Array, high: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What JAX's primitive gives for the words of keys and counters: both random words of each counter, by one call of
    a function named `RANDOM_WORDS`. Operands of one element are broadcast to the others' shape, as JAX does."""
    shape = jnp.broadcast_shapes(first.shape, second.shape, low.shape, high.shape)
    keys = [
        key.reshape(()) if math.prod(key.shape) == 1 else jnp.broadcast_to(key, shape)
        for key in (first, second)
    ]
    if keys[0].shape != keys[1].shape:
        keys = [jnp.broadcast_to(key, shape) for key in keys]
    words = _called(*keys, *(jnp.broadcast_to(counter, shape) for counter in (low, high)))
    return words[0], words[1]


FORMULAS: Mapping[Primitive, Callable[..., Sequence[Any]]] = {threefry2x32_p: random_words}
"""Primitives that pieces compute by other formulas than JAX's, with the same bits."""
