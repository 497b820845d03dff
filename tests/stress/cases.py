"""Random programs of convolutions: their description, how they come from a seed and a number, and what they compute."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

MOST_PRODUCTS = 1 << 25
"""Multiplications of an ordinary case's forward pass; one case of `LARGE_EVERY` may have 16 times as many."""
LARGE_EVERY = 10
UNUSUAL_EVERY = 4
"""One case of so many has what networks seldom have (`_unusual`)."""
CHANNELS = (1, 2, 3, 4, 5, 8, 8, 16, 16, 24, 32, 32, 48, 64, 64, 96, 128)

Arrays = list[np.ndarray[Any, np.dtype[Any]]]
Sizes = tuple[int, ...]
"""By spatial axis."""
Pads = tuple[tuple[int, int], ...]
"""By spatial axis: before and after. Negative ones crop."""


@dataclass(frozen=True, slots=True)
class Case:
    """A chain of ``layers`` convolutions and who computes it.

    ``epilogue``: what follows the last convolution of a forward pass, of "bias", "add" and "relu". ``machines`` compute
    it side by side in each of ``processes`` processes, each ``repeats`` times, on a client of ``threads`` threads.
    ``strided``: operands do not lie row by row.
    """

    seed: int
    number: int
    batch: int
    channels: tuple[int, int]
    groups: int
    size: Sizes
    kernel: Sizes
    strides: Sizes
    pads: Pads
    dilation: Sizes
    spread: Sizes
    layers: int
    channels_last: bool
    training: bool
    epilogue: tuple[str, ...]
    threads: int
    machines: int
    processes: int
    repeats: int = 3
    dtype: str = "float32"
    strided: bool = False

    @property
    def sizes(self) -> list[Sizes]:
        """Of the image before each layer and of the result."""
        found = [self.size]
        for layer in range(self.layers):
            strides, spread = (self.strides, self.spread) if layer == 0 else (self._ones, self._ones)
            axes = zip(found[-1], self.kernel, strides, self.pads, self.dilation, spread, strict=True)
            found.append(tuple(_out(*axis) for axis in axes))
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
        found = [generator.standard_normal(shape, dtype=np.float32) for shape in self.shapes()]
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        return [array.astype(dtype, order="F" if self.strided else "C") for array in found]

    def function(self, *, padded: bool = False) -> Callable[..., Sequence[Any]]:
        """From these arrays to the results: the last image, in training also the gradients of image and weights.

        ``padded``: padding is an operation of its own. XLA then compiles some gradients that it dies of otherwise.
        """
        import jax

        pads: Pads = tuple((0, 0) for _ in self.size) if padded else self.pads
        places = "DHW"[-len(self.size) :]
        images, kernels = f"N{places}C" if self.channels_last else f"NC{places}", f"OI{places}"

        def chain(image: Any, *weights: Any) -> Any:
            for layer, w in enumerate(weights):
                strides, spread = (self.strides, self.spread) if layer == 0 else (self._ones, self._ones)
                if padded:
                    around = [(*pad, s - 1) for pad, s in zip(self.pads, spread, strict=True)]
                    image = jax.lax.pad(
                        image, np.zeros((), image.dtype), self._order(((0, 0, 0), (0, 0, 0), *around))
                    )
                    spread = self._ones
                image = jax.lax.conv_general_dilated(
                    image, w, strides, pads, spread, self.dilation, (images, kernels, images), self.groups
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
                    result = result + (
                        bias if self.channels_last else bias.reshape(-1, *(1 for _ in self.size))
                    )
                elif name == "add":
                    result = result + extra.pop(0)
                else:
                    result = jax.numpy.maximum(result, 0)
            return [result]

        return train if self.training else infer

    @property
    def _ones(self) -> Sizes:
        return (1,) * len(self.size)

    def _order(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return (shape[0], *shape[2:], shape[1]) if self.channels_last else shape


def case(seed: int, number: int) -> Case:
    """The case of that number."""
    dice = random.Random(f"{seed}:{number}")
    while True:
        found = _draw(dice, seed, number)
        if number % UNUSUAL_EVERY == UNUSUAL_EVERY - 1:
            found = _unusual(dice, found)
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


def _unusual(dice: random.Random, usual: Case) -> Case:
    """A case with one or three spatial axes, halves, kernels larger than the image, strides larger than the kernel,
    padding that crops or is wider than the kernel, no samples or many, or operands that do not lie row by row."""
    axes = dice.choice((1, 2, 2, 2, 3))

    def each(choices: Sequence[int]) -> Sizes:
        return tuple(dice.choice(choices) for _ in range(axes))

    kernel = each((1, 2, 3, 5, 9, 13) if axes < 3 else (1, 2, 3))
    into, multiple = dice.choice((1, 2, 3, 7, 16, 33)), dice.choice((1, 2, 3))
    groups = dice.choice((1, into))
    return replace(
        usual,
        batch=dice.choice((0, 1, 2, 7, 33, 100)),
        channels=(into, into * multiple if usual.layers == 1 else into),
        groups=groups,
        size=each((1, 2, 3, 5, 8, 13, 30)),
        kernel=kernel,
        strides=each((1, 1, 2, 4, 7)),
        pads=tuple((dice.randint(-1, k + 1), dice.randint(-1, k + 1)) for k in kernel),
        dilation=each((1, 1, 2, 4)),
        spread=each((1, 1, 1, 2, 3)),
        dtype=dice.choice(("float32", "float32", "float32", "float16", "bfloat16")),
        strided=dice.random() < 0.3,
    )


def _out(size: int, kernel: int, stride: int, pads: tuple[int, int], dilation: int, spread: int) -> int:
    spread_size, window = (size - 1) * spread + 1, (kernel - 1) * dilation + 1
    return (spread_size + sum(pads) - window) // stride + 1 if spread_size + sum(pads) >= window else 0
