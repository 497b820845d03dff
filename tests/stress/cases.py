"""Random programs of convolutions: their description, how they come from a seed and a number, and what they compute."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_PRODUCTS = 1 << 25
"""Multiplications of an ordinary case's forward pass; one case of `LARGE_EVERY` may have 16 times as many."""
LARGE_EVERY = 10
CHANNELS = (1, 2, 3, 4, 5, 8, 8, 16, 16, 24, 32, 32, 48, 64, 64, 96, 128)

Arrays = list[np.ndarray[Any, np.dtype[np.float32]]]


@dataclass(frozen=True, slots=True)
class Case:
    """A chain of ``layers`` convolutions and who computes it. Sizes are ``(height, width)``.

    ``epilogue``: what follows the last convolution of a forward pass, of "bias", "add" and "relu". ``machines`` compute
    it side by side in each of ``processes`` processes, each ``repeats`` times, on a client of ``threads`` threads.
    """

    seed: int
    number: int
    batch: int
    channels: tuple[int, int]
    groups: int
    size: tuple[int, int]
    kernel: tuple[int, int]
    strides: tuple[int, int]
    pads: tuple[tuple[int, int], tuple[int, int]]
    dilation: tuple[int, int]
    spread: tuple[int, int]
    layers: int
    channels_last: bool
    training: bool
    epilogue: tuple[str, ...]
    threads: int
    machines: int
    processes: int
    repeats: int = 3

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Of the image before each layer and of the result."""
        found = [self.size]
        for layer in range(self.layers):
            strides, spread = (self.strides, self.spread) if layer == 0 else ((1, 1), (1, 1))
            axes = zip(found[-1], self.kernel, strides, self.pads, self.dilation, spread, strict=True)
            found.append(tuple(_out(*axis) for axis in axes))  # type: ignore[arg-type]
        return found

    @property
    def products(self) -> int:
        """Multiplications of the forward pass."""
        taps = math.prod(self.kernel) * self.channels[1] // self.groups
        first = math.prod(self.sizes[1]) * self.channels[0]
        more = sum(math.prod(size) * self.channels[1] for size in self.sizes[2:])
        return self.batch * taps * (first + more)

    @property
    def terms(self) -> int:
        """The lengths of the sums that a result goes through."""
        taps = math.prod(self.kernel) * max(self.channels)
        return self.layers * (taps + (self.batch * math.prod(self.sizes[1]) if self.training else 0))

    def shapes(self) -> list[tuple[int, ...]]:
        """Of the image, the layers' weights, and the result's gradient or the epilogue's operands."""
        into, out = self.channels
        weights = [
            (out, (into if layer == 0 else out) // self.groups, *self.kernel) for layer in range(self.layers)
        ]
        result = self._order((self.batch, out, *self.sizes[-1]))
        more = {"bias": (out,), "add": result}
        extra = [result] if self.training else [more[name] for name in self.epilogue if name in more]
        return [self._order((self.batch, into, *self.size)), *weights, *extra]

    def arrays(self) -> Arrays:
        """The arrays of the computation; the same at every call."""
        generator = np.random.default_rng([self.seed, self.number])
        return [generator.standard_normal(shape, dtype=np.float32) for shape in self.shapes()]

    def function(self, *, padded: bool = False) -> Callable[..., Sequence[Any]]:
        """From these arrays to the results: the last image, in training also the gradients of image and weights.

        ``padded``: padding is an operation of its own. XLA then compiles some gradients that it dies of otherwise.
        """
        import jax

        pads = ((0, 0), (0, 0)) if padded else self.pads
        around = ((0, 0), *self.pads, (0, 0)) if self.channels_last else ((0, 0), (0, 0), *self.pads)

        def chain(image: Any, *weights: Any) -> Any:
            for layer, w in enumerate(weights):
                if padded and layer == 0 and max(self.spread) > 1:
                    spread = [(*each, 0) for each in around]
                    spread = [
                        (a, b, s - 1)
                        for (a, b, _), s in zip(spread, self._order((1, 1, *self.spread)), strict=True)
                    ]
                    image = jax.lax.pad(image, np.float32(0), spread)
                elif padded:
                    image = jax.numpy.pad(image, around)
                image = jax.lax.conv_general_dilated(
                    image,
                    w,
                    self.strides if layer == 0 else (1, 1),
                    pads,
                    self.spread if layer == 0 and not padded else (1, 1),
                    self.dilation,
                    ("NHWC", "OIHW", "NHWC") if self.channels_last else ("NCHW", "OIHW", "NCHW"),
                    self.groups,
                )
            return image

        def train(*arrays: Any) -> Sequence[Any]:
            result, gradients = jax.vjp(chain, *arrays[:-1])
            return [result, *gradients(arrays[-1])]

        def infer(*arrays: Any) -> Sequence[Any]:
            result, extra = chain(*arrays[: 1 + self.layers]), list(arrays[1 + self.layers :])
            for name in self.epilogue:
                if name == "bias":
                    bias = extra.pop(0)
                    result = result + (bias if self.channels_last else bias[:, None, None])
                elif name == "add":
                    result = result + extra.pop(0)
                else:
                    result = jax.numpy.maximum(result, 0)
            return [result]

        return train if self.training else infer

    def _order(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], *shape[2:], shape[1]) if self.channels_last else shape


def case(seed: int, number: int) -> Case:
    """The case of that number."""
    dice = random.Random(f"{seed}:{number}")
    while True:
        found = _draw(dice, seed, number)
        most = MOST_PRODUCTS * (16 if number % LARGE_EVERY == 0 else 1)
        if min(min(size) for size in found.sizes) >= 1 and found.products <= most:
            return found


def _draw(dice: random.Random, seed: int, number: int) -> Case:
    def pair(choices: Sequence[int]) -> tuple[int, int]:
        one = dice.choice(choices)
        return (one, one) if dice.random() < 0.7 else (one, dice.choice(choices))

    kernel = pair((1, 1, 2, 3, 3, 3, 4, 5, 7))
    pads = tuple((dice.randint(0, k // 2), dice.randint(0, k // 2)) for k in kernel)
    if dice.random() < 0.6:
        pads = tuple((k // 2, k // 2) for k in kernel)
    into, out = dice.choice(CHANNELS), dice.choice(CHANNELS)
    layers = dice.choice((1, 1, 2, 3))
    groups = 1
    if dice.random() < 0.3:
        groups = dice.choice([g for g in range(1, into + 1) if into % g == 0 and out % g == 0])
        if dice.random() < 0.5:
            groups = out = into
    training = dice.random() < 0.6
    epilogue = tuple(name for name in ("bias", "add", "relu") if dice.random() < 0.4)
    machines, processes = dice.choice(((1, 1), (1, 1), (2, 1), (3, 1), (1, 2), (2, 2)))
    return Case(
        seed=seed,
        number=number,
        batch=dice.choice((1, 2, 3, 4, 5, 8, 16)),
        channels=(into, out),
        groups=groups,
        size=pair((1, 3, 4, 7, 8, 12, 14, 16, 17, 28, 32, 40)),
        kernel=kernel,
        strides=pair((1, 1, 1, 2, 3)),
        pads=pads,  # type: ignore[arg-type]
        dilation=pair((1, 1, 1, 1, 2, 3)),
        spread=pair((1, 1, 1, 1, 1, 2)),
        layers=layers,
        channels_last=dice.random() < 0.3,
        training=training,
        epilogue=() if training else epilogue,
        threads=dice.choice((1, 2, 2)),
        machines=machines,
        processes=processes,
    )


def _out(size: int, kernel: int, stride: int, pads: tuple[int, int], dilation: int, spread: int) -> int:
    spread_size, window = (size - 1) * spread + 1, (kernel - 1) * dilation + 1
    return (spread_size + sum(pads) - window) // stride + 1 if spread_size + sum(pads) >= window else 0
