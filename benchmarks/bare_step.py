"""The arithmetic of a step of 784-512-512-10 by bare calls of oneDNN in several processes, with nothing of podrun.

Each process computes the five large products of its samples, all add up their slices of the gradients and update their
slices of the weights with NumPy, block by block, and wait for each other awake. Bias, activations, loss, inputs and the
three products with ten columns are left out. So no step that is divided like this takes less time: a *limit* of
`step_time`. Processes keep to cores as machines do.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from bare_calls import Call, library, normal, product_of, serve, workers

ROWS, COLUMNS = (784, 512), 512
WEIGHTS = sum(ROWS) * COLUMNS
BLOCK = 16384
"""Elements that NumPy adds up at a time: their sum stays in the cache."""
_LINE = 8  # words between the counters of two processes


@contextlib.contextmanager
def bare_steps(processes: int, samples: int, steps: int) -> Iterator[Callable[[], float]]:
    """A function that gives the seconds of one of ``steps`` such steps, of ``samples`` samples in each process."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        memory = Path(folder, "memory")
        memory.write_bytes(bytes(_bytes(processes)))
        with workers(__file__, processes, library(), memory, samples, steps) as compute:
            yield lambda: compute()[0] / steps


def _bytes(processes: int) -> int:
    return 8 * _LINE * processes + 4 * WEIGHTS * (processes + 1)


def _work(file: str, memory: str, samples: int, steps: int, processes: int, rank: int) -> None:
    """One process: as many steps for every line that it reads."""
    serve(processes, rank, lambda: _calls(file, memory, samples, processes, rank) * steps)


def _calls(file: str, memory: str, samples: int, processes: int, rank: int) -> list[Call]:
    """What one process does in a step."""
    with open(memory, "r+b") as opened:
        shared = mmap.mmap(opened.fileno(), 0)
    counters = np.frombuffer(shared, np.int64, _LINE * processes)[::_LINE]
    arrays = np.frombuffer(shared, np.float32, offset=8 * _LINE * processes).reshape(processes + 1, WEIGHTS)
    weights, gradients = arrays[0], arrays[1:]
    products = _products(file, weights, gradients[rank], samples)
    ends = [WEIGHTS * at // processes for at in (rank, rank + 1)]
    blocks = [slice(at, min(at + BLOCK, ends[1])) for at in range(ends[0], ends[1], BLOCK)]

    def wait() -> None:
        counters[rank] += 1
        deadline = time.monotonic() + 60
        while counters.min() < counters[rank]:
            os.sched_yield()
            if time.monotonic() > deadline:
                raise SystemExit("another process of the bare step ended")

    def update() -> None:
        for part in blocks:
            total = gradients[0, part] + gradients[1, part]
            for other in gradients[2:, part]:
                total += other
            total *= 1e-6
            weights[part] -= total

    return [*products, wait, update, wait]


def _products(file: str, weights: np.ndarray, gradient: np.ndarray, samples: int) -> list[Call]:
    """The five products: two forward, the gradient of the second weights, that of its input, of the first weights."""
    product, first = product_of(file), ROWS[0] * COLUMNS
    generator = np.random.default_rng(0)
    weights[:] = normal(generator, WEIGHTS) * 0.03
    x, *layers = (normal(generator, samples, n) for n in (ROWS[0], *[COLUMNS] * 4))
    hidden, output, of_output, of_hidden = layers
    (lower, upper), (of_lower, of_upper) = (
        (array[:first].reshape(ROWS[0], COLUMNS), array[first:].reshape(ROWS[1], COLUMNS))
        for array in (weights, gradient)
    )
    calls = [
        product("NN", x, lower, hidden),
        product("NN", hidden, upper, output),
        product("TN", hidden, of_output, of_upper),
        product("NT", of_output, upper, of_hidden),
        product("TN", x, of_hidden, of_lower),
    ]
    calls[0]()
    if not np.allclose(hidden, x @ lower, atol=1e-3):
        raise SystemExit("the bare products are wrong")
    return calls


if __name__ == "__main__":
    _work(*sys.argv[1:3], *map(int, sys.argv[3:]))
