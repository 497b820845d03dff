"""Random networks in one call, against NumPy in float64, every buffer beside a page that nobody may touch.

    python -m tests.stress.networks [--cases N] [--seed S] [--first K]

A network is wrong if it differs from NumPy's by more than rounding, or from one run or thread to another by a bit; a
stray access is a crash at once. ``ONEDNN_MAX_CPU_ISA=AVX2`` makes another instruction set of this host's.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from podrun.device.xla import convolutions
from podrun.device.xla.convolutions import SHUFFLE, ConvolutionCall, Kind
from podrun.device.xla.network_steps import (
    ChainLink,
    ChainOperand,
    ChainOperation,
    LayerNetwork,
    NetworkStep,
    StepKind,
)
from podrun.device.xla.packing import PACKED
from tests.stress.guarded import GuardedMemory, native

CHANNELS = (3, 4, 8, 12, 16, 24, 32, 48)
SIZES = (4, 5, 7, 8, 13, 20)
THREADS = 3
TOLERANCE = 1e-4
"""Of the greatest value of a result; values are of order 1, and sums have at most a few hundred terms."""

_STEPS = ((1, 7), (1, 4), (0, 4))
"""Least and most rows of a kernel, of a stride and of padding where planes are convolved."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(slots=True)
class RandomNetwork:
    """A network, its operands, and what NumPy computes: by image."""

    dice: random.Random
    draw: np.random.Generator
    module: Any
    network: LayerNetwork = field(default_factory=LayerNetwork)
    operands: list[Array] = field(default_factory=list)
    values: dict[int, Array] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)

    def operand(self, shape: tuple[int, ...], *, scale: float = 1.0, least: float | None = None) -> int:
        values = self.draw.standard_normal(shape) * scale
        self.operands.append((values if least is None else np.abs(values) + least).astype(np.float32))
        return len(self.operands) - 1

    def wide(self, position: int) -> Array:
        return self.operands[position].astype(np.float64)

    def planes(self) -> bool:
        """A convolution of few planes, often with a window over it; False if it would have no result."""
        c, m = self.dice.randint(1, 4), self.dice.choice((*CHANNELS, 64, 70, 144))
        size = [self.dice.randint(1, 40) for _ in range(2)]
        kernel, stride, pads = ([self.dice.randint(low, high) for _ in range(2)] for low, high in _STEPS)
        out = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip(size, pads, kernel, stride, strict=True)]
        if min(out) < 1:
            return False
        whole = (1, *size, c)
        call = ConvolutionCall(
            Kind.FORWARD, whole, (1, *out, m), tuple(kernel), tuple(stride), (1, 1), tuple(pads), 1
        )
        src = self.operand((1, c, *size))
        weights = self.operand((*kernel, c, m), scale=(kernel[0] * kernel[1] * c) ** -0.5)
        w, x = self.wide(weights), self.wide(src)[0]
        order = (0, 1, m, kernel[1] * c * m, c * m)
        if self.dice.random() < 0.5:  # outputs first
            self.operands[weights] = np.ascontiguousarray(self.operands[weights].transpose(3, 2, 0, 1))
            order = (0, c * kernel[0] * kernel[1], kernel[0] * kernel[1], kernel[1], 1)
        wide = np.pad(x, ((0, 0), *((p, p + s) for p, s in zip(pads, stride, strict=True))))
        views = np.lib.stride_tricks.sliding_window_view(wide, tuple(kernel), axis=(1, 2))
        views = views[:, :: stride[0], :: stride[1]][:, : out[0], : out[1]]
        y = np.einsum("cijyx,yxcm->ijm", views, w)[None]
        follows = (self.dice.random() < 0.5, False, self.dice.random() < 0.5)
        bias = self.operand((m,)) if follows[0] else 0
        y = y + self.wide(bias) if follows[0] else y
        y = np.maximum(y, 0) if follows[2] else y
        numbers = tuple(call.numbers(order, follows, self.dice.choice((1, 2)), 0))
        step = NetworkStep(
            StepKind.PLANES, self.network.image((1, c, *size), src), self.new(y), numbers, weights, bias
        )
        self.network.steps.append(step)
        if self.dice.random() < 0.7:
            self.pool()
        return True

    def begin(self) -> None:
        if self.module.PLANES and self.dice.random() < 0.4 and self.planes():
            return
        sizes = (1, self.dice.choice(SIZES), self.dice.choice(SIZES), self.dice.choice(CHANNELS))
        if self.dice.random() < 0.5:
            n, height, width, channels = sizes
            planes = self.operand((n, channels, height, width))
            src, dst = self.network.image((n, channels, height, width), planes), self.network.image(sizes)
            self.network.steps.append(NetworkStep(StepKind.TURN, src, dst))
            self.values[dst] = self.wide(planes).transpose(0, 2, 3, 1)
        else:
            sizes = (self.dice.choice((1, 1, 2)), *sizes[1:])
            position = self.operand(sizes)
            self.values[self.network.image(sizes, position)] = self.wide(position)

    def choose(self) -> int:
        """One of the images, rather a late one."""
        images = sorted(self.values)
        image = images[-1 - min(int(self.dice.expovariate(0.7)), len(images) - 1)]
        self.read.add(image)
        return image

    def new(self, value: Array) -> int:
        image = self.network.image(value.shape)
        self.values[image] = value
        return image

    def convolve(self) -> None:
        src = self.choose()
        x = self.values[src]
        n, height, width, c = x.shape
        k, stride = self.dice.choice((1, 1, 3)), self.dice.choice((1, 1, 2))
        depthwise = self.dice.random() < 0.2
        m, groups = (c, c) if depthwise else (self.dice.choice(CHANNELS), 1)
        out = [(size + 2 * (k // 2) - k) // stride + 1 for size in (height, width)]
        call = ConvolutionCall(
            Kind.FORWARD, x.shape, (n, *out, m), (k, k), (stride,) * 2, (1, 1), (k // 2,) * 2, groups
        )
        weights = self.operand((k, k, c // groups, m), scale=(k * k * c // groups) ** -0.5)
        fits = [image for image, value in self.values.items() if value.shape == (n, *out, m)]
        follows = (
            self.dice.random() < 0.5,
            bool(fits) and self.dice.random() < 0.5,
            self.dice.random() < 0.5,
        )
        order = (m // groups, 1, m, k * c // groups * m, c // groups * m)
        numbers = call.numbers(order, follows, self.dice.choice((1, 2)), 0)
        if not convolutions.algorithms(numbers):
            return
        y = _convolved(x, self.wide(weights), k, stride, out, groups)
        bias = self.operand((m,)) if follows[0] else 0
        y = y + self.wide(bias) if follows[0] else y
        other = self.dice.choice(fits) if follows[1] else None
        y = y if other is None else y + self.values[other]
        self.read.update(() if other is None else (other,))
        y = np.maximum(y, 0) if follows[2] else y
        rows = self.dice.choice((1, 1, 2, 4))
        if m % rows == 0 and rows > 1:
            numbers[SHUFFLE] = rows
            y = y.reshape(*y.shape[:3], rows, m // rows).swapaxes(3, 4).reshape(y.shape)
        if self.dice.random() < 0.5:
            self._pack(weights, numbers)
        dst = self.new(y)
        self.network.steps.append(
            NetworkStep(StepKind.CONVOLVE, src, dst, tuple(numbers), weights, bias, other)
        )

    def _pack(self, weights: int, numbers: list[int]) -> None:
        vector = np.zeros(4 * self.operands[weights].size + 1024, np.float32)
        try:
            self.module.pack(numbers, self.operands[weights], vector)
        except ValueError:
            return
        self.operands[weights] = vector
        numbers[1] |= PACKED

    def pool(self) -> None:
        src = self.choose()
        x, sums = self.values[src], self.dice.choice((0, 1))
        n, height, width, c = x.shape
        kernel = (self.dice.choice((2, 2, 3, 3, 5, 18)), self.dice.choice((2, 3, 3, 5, 18)))
        stride, pads = self.dice.choice((1, 2, 3)), self.dice.choice((0, 1))
        wide = np.full((n, height + 4, width + 4, c), 0.0 if sums else -np.inf)
        wide[:, pads : pads + height, pads : pads + width] = x
        out = [(size + 2 * pads - k) // stride + 1 for size, k in zip((height, width), kernel, strict=True)]
        if min(out) < 1:
            return
        views = [
            wide[:, i : i + (out[0] - 1) * stride + 1 : stride, j : j + (out[1] - 1) * stride + 1 : stride]
            for i in range(kernel[0])
            for j in range(kernel[1])
        ]
        y = np.sum(views, axis=0) if sums else np.max(views, axis=0)
        numbers = (sums, *kernel, stride, stride, pads, pads)
        lone = src not in self.read_before(src)
        joined = lone and self.dice.random() < 0.8
        self.network.window(src, self.new(y), numbers, lone=joined)
        if joined and all(step.dst != src for step in self.network.steps):
            del self.values[src]  # It is never stored.

    def chain(self) -> None:
        src, operation = self.choose(), self.dice.choice(tuple(ChainOperation))
        x, by = self.values[src], self.dice.choice(tuple(ChainOperand))
        n, height, width, c = x.shape
        least = 0.5 if operation is ChainOperation.DIVIDE else None
        fits = [image for image, value in self.values.items() if value.shape == x.shape]
        if by is ChainOperand.ELEMENT and least is None:
            value = self.dice.choice(fits)
            self.read.add(value)
            other: Array = self.values[value]
        elif by is ChainOperand.CHANNEL:
            value = self.operand((c,), least=least)
            other = self.wide(value)
        elif by is ChainOperand.PIXEL and n == 1:
            value = self.operand((height, width, 1), least=least)
            other = self.wide(value)
        else:
            by, number = ChainOperand.NUMBER, np.float32(self.draw.standard_normal() ** 2 + 0.5)
            value, other = int(number.view(np.uint32)), np.float64(number)  # type: ignore[assignment]
        compute = {
            ChainOperation.ADD: np.add,
            ChainOperation.SUBTRACT: np.subtract,
            ChainOperation.MULTIPLY: np.multiply,
            ChainOperation.DIVIDE: np.divide,
        }.get(operation, np.maximum)
        image = self.new(compute(x, other))
        link = ChainLink(operation, by, value)
        lone = src not in self.read_before(src) and src != value
        if lone and self.network.lengthen(src, link, image):
            del self.values[src]  # It is never stored.
        else:
            self.network.steps.append(NetworkStep(StepKind.CHAIN, src, image, links=(link,)))

    def read_before(self, src: int) -> set[int]:
        """The images that steps and concatenations read, without the choice of ``src`` just now."""
        read = {image for step in self.network.steps for image in step.read()}
        return read | {part for _, parts, _ in self.network._joined for part in parts}

    def sum(self) -> None:
        """Means of channels, often with a softmax of them."""
        src = self.choose()
        x = self.values[src]
        if x.shape[0] > 1:
            return
        total = x.sum(axis=(1, 2), keepdims=True)
        image = self.new(total)
        self.network.steps.append(NetworkStep(StepKind.SUM, src, image))
        number = np.float32(x.shape[1] * x.shape[2])
        mean = self.new(total / number)
        link = ChainLink(ChainOperation.DIVIDE, ChainOperand.NUMBER, int(number.view(np.uint32)))
        assert self.network.lengthen(image, link, mean)
        del self.values[image]
        if self.dice.random() < 0.7:
            powers = np.exp(self.values[mean] - self.values[mean].max())
            self.read.add(mean)
            self.network.steps.append(NetworkStep(StepKind.SOFTMAX, mean, self.new(powers / powers.sum())))

    def concatenate(self) -> None:
        first = self.choose()
        shape = self.values[first].shape
        fits = [image for image, value in self.values.items() if value.shape[:3] == shape[:3]]
        parts = [first, *self.dice.choices(fits, k=self.dice.choice((1, 2)))]
        self.read.update(parts)
        whole = self.new(np.concatenate([self.values[part] for part in parts], axis=3))
        self.network.concatenate(parts, whole)


def _convolved(x: Array, w: Array, k: int, stride: int, out: list[int], groups: int) -> Array:
    n, height, width, c = x.shape
    wide = np.zeros((n, height + 2 * (k // 2), width + 2 * (k // 2), c))
    wide[:, k // 2 : k // 2 + height, k // 2 : k // 2 + width] = x
    y = np.zeros((n, *out, w.shape[3]))
    for i in range(k):
        for j in range(k):
            view = wide[
                :, i : i + (out[0] - 1) * stride + 1 : stride, j : j + (out[1] - 1) * stride + 1 : stride
            ]
            y += view * w[i, j, 0] if groups > 1 else view @ w[i, j]
    return y


def random_network(module: Any, seed: int, number: int) -> RandomNetwork:
    """The network of that number."""
    made = RandomNetwork(random.Random(f"{seed}:{number}"), np.random.default_rng([seed, number]), module)
    made.begin()
    for _ in range(made.dice.randint(2, 14)):
        made.dice.choice(
            (made.convolve, made.convolve, made.pool, made.chain, made.chain, made.concatenate, made.sum)
        )()
    if not made.network.steps:
        made.pool()
    return made


def wrong(module: Any, seed: int, number: int) -> str:
    """What is wrong with a network; empty if nothing is."""
    made = random_network(module, seed, number)
    network = made.network
    images = [i for i in made.values if network.images[i].operand is None]
    kept = [i for i in images if i not in made.read or made.dice.random() < 0.2]
    if not network.steps or not kept:
        return ""
    for position, image in enumerate(kept):
        network.images[image].result = position
    network.operands, network.results = len(made.operands), len(kept)
    numbers = np.array(network.numbers(), np.int64)
    at_end = made.dice.random() < 0.5
    operands = tuple(_beside_a_page(array, at_end) for array in made.operands)
    runs: list[list[Array]] = []

    def run() -> None:
        results = [_beside_a_page(np.full(made.values[i].shape, np.nan, np.float32), at_end) for i in kept]
        module.network(numbers, operands, tuple(results))
        runs.append(results)

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(runs) < THREADS:
        return "a run failed"
    for place, image in enumerate(kept):
        right, got = made.values[image], runs[0][place].reshape(made.values[image].shape)
        greatest = float(np.abs(right[np.isfinite(right)]).max(initial=1.0))
        close = np.isclose(got, right, rtol=0, atol=TOLERANCE * greatest)
        if not close.all():
            return f"image {image} differs from NumPy's"
        if any(other[place].tobytes() != runs[0][place].tobytes() for other in runs[1:]):
            return f"image {image} has other bits in another thread"
    return ""


def _beside_a_page(array: Array, at_end: bool) -> Array:
    place = GuardedMemory(array.size).array(array.size, at_end)
    place[:] = array.reshape(-1)
    return place


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    module, bad = native(), 0
    for number in range(options.first, options.first + options.cases):
        print(number, end="\r", flush=True, file=sys.stderr)
        reason = wrong(module, options.seed, number)
        if reason:
            bad += 1
            print(f"network {number}: {reason}")
    print(f"{options.cases} networks, {bad} wrong")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
