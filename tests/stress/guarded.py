"""Random calls of oneDNN where every buffer ends at a page that nobody may touch: a stray access is a crash at once.

    python -m tests.stress.guarded [--cases N] [--seed S] [--first K]

A write just beyond a buffer mostly hits memory of nobody's, and the process dies of it later, or never. Here operands,
result and scratch memory each end where such a page begins, or start where one ends. ``ONEDNN_MAX_CPU_ISA=AVX2`` makes
another instruction set of this host's. With every eighth goes a random product, whose numbers are compared;
`tests.stress.convolutions` compares those of convolutions.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import math
import mmap
import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from podrun.device.xla import convolutions
from podrun.device.xla.convolutions import Convolution, ConvolutionCall, Kind
from podrun.device.xla.matrix_products import WITH_BIAS, WITH_CUT, WITH_MASK
from podrun.device.xla.packing import PACKED

CHANNELS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 20, 24, 31, 32, 33, 48, 64)
SIZES = (1, 3, 4, 7, 8, 12, 14, 17, 28, 40)
KERNELS = ((1, 1), (1, 1), (2, 2), (3, 3), (3, 3), (5, 5), (7, 7), (1, 3), (3, 1), (4, 3), (9, 2), (13, 13))
MOST_PRODUCTS = 1 << 21
DEADLINE = 300.0
"""Seconds that a process may take for all its cases."""
_BUFFER = convolutions.LEAST_PRODUCTS * 64


@dataclass(frozen=True, slots=True)
class GuardedCase:
    """A call, the order of its weights' axes (outputs, inputs, rows, columns), what follows, and in how many parts."""

    call: ConvolutionCall
    lying: tuple[int, ...]
    follows: tuple[bool, bool, bool]
    parts: int

    @property
    def numbers(self) -> list[int]:
        """Arguments of the native module."""
        made, steps, inner = self.call, [0] * 4, 1
        sizes = (made.dst[3], made.src[3] // made.groups, *made.kernel)
        for axis in reversed(self.lying):
            steps[axis], inner = inner, inner * sizes[axis]
        numbers = made.numbers((made.dst[3] // made.groups * steps[0], *steps), self.follows, self.parts)
        return [*numbers[:-1], self.parts]

    @property
    def elements(self) -> list[int]:
        """Of the operands, and last of the result."""
        made = self.call
        src, dst = math.prod(made.src), math.prod(made.dst)
        weights = made.dst[3] * made.src[3] // made.groups * math.prod(made.kernel)
        more = [size for size, on in zip((made.dst[3], dst), self.follows, strict=False) if on]
        return {
            Kind.FORWARD: [src, weights, *more, dst],
            Kind.OF_IMAGE: [dst, weights, src],
            Kind.OF_WEIGHTS: [src, dst, weights],
        }[made.kind]


def guarded_case(seed: int, number: int) -> GuardedCase:
    """The case of that number: of a random convolution, itself or one of its gradients, as JAX writes them."""
    dice = random.Random(f"{seed}:{number}")
    while True:
        made = convolutions.convolution_call(_draw(dice))
        if made is None or made.products > MOST_PRODUCTS:
            continue
        follows = tuple(dice.random() < 0.4 and made.kind is Kind.FORWARD for _ in range(3))
        lying = dice.sample(range(4), 4)
        found = GuardedCase(made, tuple(lying), follows, dice.choice((1, 2)))  # type: ignore[arg-type]
        if max(found.elements) <= _BUFFER:
            return found


def _draw(dice: random.Random) -> Convolution:
    batch, channels, out = dice.choice((1, 2, 3, 8)), dice.choice(CHANNELS), dice.choice(CHANNELS)
    groups = 1
    if dice.random() < 0.3:
        groups = dice.choice([g for g in range(1, channels + 1) if channels % g == out % g == 0])
        if dice.random() < 0.5:
            groups = out = channels
    kernel, image = dice.choice(KERNELS), (dice.choice(SIZES), dice.choice(SIZES))
    strides, dilation = _pair(dice, (1, 1, 2, 3, 5)), _pair(dice, (1, 1, 1, 2, 3))
    widest = dice.choice((1, 2))
    pads = tuple((dice.randint(0, widest * k // 2), dice.randint(0, widest * k // 2)) for k in kernel)
    forward = Convolution(
        (batch, *image, channels), (*kernel, channels // groups, out), strides, pads, dilation
    )
    kind = dice.choice(tuple(Kind))
    if kind is Kind.FORWARD or min(forward.out) < 1:
        return _grouped(forward, groups)
    ends = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    read = [(o - 1) * s + e + 1 for o, s, e in zip(forward.out, strides, ends, strict=True)]
    if kind is Kind.OF_WEIGHTS:
        around = tuple((before, r - n - before) for (before, _), r, n in zip(pads, read, image, strict=True))
        return Convolution(
            (channels, *image, batch),
            (*forward.out, batch, out),
            dilation,
            around,
            strides,
            batch_groups=groups,
            batch_inside=True,
        )
    around = tuple(
        (e - before, n + before - (o - 1) * s - 1)
        for e, (before, _), n, o, s in zip(ends, pads, image, forward.out, strides, strict=True)
    )
    back = Convolution(
        (batch, *forward.out, out), (*kernel, out // groups, channels), (1, 1), around, dilation, strides
    )
    return _grouped(back, groups)


def _grouped(convolution: Convolution, groups: int) -> Convolution:
    return replace(convolution, groups=groups, reversed_weights=max(convolution.spread) > 1)


def _pair(dice: random.Random, choices: tuple[int, ...]) -> tuple[int, int]:
    return dice.choice(choices), dice.choice(choices)


class GuardedMemory:
    """Memory between two pages that nobody may touch."""

    def __init__(self, elements: int) -> None:
        page = mmap.PAGESIZE
        self.elements = elements
        self._room = -(-elements * 4 // page) * page
        self._map = mmap.mmap(-1, self._room + 2 * page)
        base = np.frombuffer(self._map, np.uint8).ctypes.data
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for at in (base, base + page + self._room):
            if protect(at, page, 0):
                raise OSError(ctypes.get_errno(), "mprotect")

    def array(self, elements: int, at_end: bool) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The last elements, or the first."""
        skipped = self._room - 4 * elements if at_end else 0
        return np.frombuffer(self._map, np.float32, elements, mmap.PAGESIZE + skipped)


def native() -> Any:
    """podrun's C module, its scratch memory guarded."""
    module: Any = importlib.import_module("podrun.device.xla._onednn")
    module.load(convolutions._path())
    module.guard()
    return module


def run(module: Any, chosen: GuardedCase, memory: list[GuardedMemory]) -> str:
    """Compute a case with its buffers at both ends of the memory. The algorithms, or nothing if there are none."""
    try:
        names = str(module.prepare(chosen.numbers))
    except ValueError:
        return ""
    for at_end in (False, True):
        arrays = [m.array(n, at_end) for m, n in zip(memory, chosen.elements, strict=False)]
        for array in arrays[:-1]:
            array.fill(1)
        module.compute(chosen.numbers, tuple(arrays[:-1]), arrays[-1])
    if chosen.call.kind is Kind.FORWARD:
        _run_packed(module, chosen, memory)
    return names


def _run_packed(module: Any, chosen: GuardedCase, memory: list[GuardedMemory]) -> None:
    """The same with packed weights, if they fit into the weights' own bytes."""
    arrays = [m.array(n, True) for m, n in zip(memory, chosen.elements, strict=False)]
    try:
        module.pack(chosen.numbers, arrays[1].copy(), arrays[1])
    except ValueError:
        return
    numbers = chosen.numbers
    numbers[1] |= PACKED
    module.compute(numbers, tuple(arrays[:-1]), arrays[-1])


SIDES = (
    1,
    2,
    3,
    5,
    8,
    10,
    15,
    16,
    17,
    19,
    23,
    31,
    32,
    33,
    47,
    48,
    63,
    64,
    65,
    96,
    97,
    127,
    128,
    129,
    160,
    200,
    256,
    400,
)
PRODUCT_EVERY = 8
"""Cases for each of which there is a product."""


def guarded_product(module: Any, seed: int, number: int, memory: list[GuardedMemory]) -> None:
    """A random product of integers, whose sums are exact, with its buffers at both ends of the memory.

    Raises AssertionError if a number is wrong.
    """
    dice = random.Random(f"product:{seed}:{number}")
    rows, columns, terms = (dice.choice(SIDES) for _ in range(3))
    left_turned, right_turned, adds, parts = (*(dice.randint(0, 1) for _ in range(3)), dice.choice((1, 2)))
    sizes = (rows * terms, terms * columns, rows * columns, rows * columns)
    if max(sizes) > memory[0].elements:
        return
    follows = 0 if adds else dice.choice((0, *range(8)))
    numbers = [left_turned, right_turned, rows, columns, terms, adds, 0, parts, follows]
    for at_end in (False, True):
        left, right, added, result = (m.array(n, at_end) for m, n in zip(memory, sizes, strict=False))
        left[:], right[:], added[:] = np.arange(left.size) % 7 - 3, np.arange(right.size) % 5 - 2, 1
        a = left.reshape(terms, rows).T if left_turned else left.reshape(rows, terms)
        b = right.reshape(columns, terms).T if right_turned else right.reshape(terms, columns)
        expected = (a.astype(np.float64) @ b + adds).reshape(-1)
        operands = (left, right, added) if adds else (left, right)
        if follows & WITH_BIAS:
            operands += (memory[4].array(columns, at_end),)
            operands[-1][:] = np.arange(columns) % 3 - 1
            expected += np.tile(operands[-1], rows)
        if follows & WITH_CUT:
            expected = np.maximum(expected, 0)
        if follows & WITH_MASK:
            added[:] = np.arange(added.size) % 4 - 1.5
            operands += (added,)
            expected[added <= 0] = 0
        module.multiply(numbers, operands, result)
        assert np.array_equal(result, expected), (seed, number, numbers)
        if adds:
            module.multiply(numbers, operands, added)
            assert np.array_equal(added, expected), (seed, number, numbers)
    if not adds:
        _compare_undivided(module, [*numbers[:7], 2], sizes, (seed, number))


def _compare_undivided(
    module: Any, numbers: list[int], sizes: tuple[int, ...], case: tuple[int, int]
) -> None:
    """A product of random numbers by a thread that keeps to one core has the bits of its halves."""
    generator = np.random.default_rng(case)
    operands = tuple(generator.normal(size=size).astype(np.float32) for size in sizes[:2])
    results = [np.empty(sizes[3], np.float32) for _ in range(2)]
    every = os.sched_getaffinity(0)
    for result, cores in zip(results, (every, {min(every)}), strict=True):
        os.sched_setaffinity(0, cores)
        module.multiply(numbers, operands, result)
    os.sched_setaffinity(0, every)
    assert results[0].tobytes() == results[1].tobytes(), (case, numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    numbers = range(given.first, given.first + given.cases)
    if given.here:
        return _here(given.seed, numbers)
    crashes, computed, algorithms = 0, 0, set()
    while numbers:
        words = ("--here", "--seed", given.seed, "--first", numbers.start, "--cases", len(numbers))
        command = [sys.executable, "-m", "tests.stress.guarded", *map(str, words)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE, check=False)
        said = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
        computed += len([line for line in said if len(line) > 1])
        algorithms |= {name for line in said for name in line[1:]}
        if not done.returncode:
            break
        if done.returncode > 0 or not said:
            return 2
        last = int(said[-1][0])
        numbers = range(last + 1, numbers.stop)
        crashes += 1
        print(
            f"case {last} died by {signal.Signals(-done.returncode).name}: {guarded_case(given.seed, last)}"
        )
    print(f"{computed} cases by {len(algorithms)} algorithms, {crashes} crashes")
    return bool(crashes)


def _here(seed: int, numbers: range) -> int:
    module, memory = native(), [GuardedMemory(_BUFFER) for _ in range(5)]
    for number in numbers:
        print(number, end=" ", flush=True)
        print(run(module, guarded_case(seed, number), memory), flush=True)
        if not number % PRODUCT_EVERY:
            guarded_product(module, seed, number, memory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
