"""The arithmetic of the chain of dense layers of `pipeline` by bare calls of oneDNN, with nothing of podrun.

There is a process for each core, up to one for each product that a pipeline of four machines computes at a time. Each
has as many of the layers; where they cannot be divided so, there is no limit. A process computes for every micro-batch
the products of its layers forward, and in training backward: the gradient of the weights, which the library adds to
those of the micro-batches before, and that of the layer's input. After the last micro-batch it updates its weights with
NumPy, block by block. The first layer's input has no gradient: each process leaves out its share of these products.
Activations and their derivatives, the loss, inputs, and messages between stages are left out, and no process waits for
another: each finds the work in the order that keeps one micro-batch's activations in its cache. So no pipeline over
these cores takes less time: a *limit* of `pipeline`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from bare_calls import Call, Product, library, normal, product_of, serve, workers

RATE = 1e-9
"""So small that weights hardly move: every batch computes the same."""
BLOCK = 16384
"""Elements that NumPy updates at a time: they stay in the cache."""
MOST_PROCESSES = 8
"""Four machines at work, each with two cores for a product."""


@contextmanager
def bare_pipelines(
    layers: int, width: int, samples: int, count: int, *, training: bool
) -> Iterator[Callable[[], tuple[float, float]] | None]:
    """A function that computes a batch of ``count`` micro-batches of ``samples`` samples: its seconds, and those of
    processor time of all processes. The first call is slower than the others. None if cores would have unequal shares.
    """
    processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES, layers)
    if layers % processes:
        yield None
        return
    words = (library(), layers, width, samples, count, int(training))
    with workers(__file__, processes, *words) as compute:
        yield compute


class Chain:
    """Layers of one process, and what it computes for them."""

    def __init__(self, product: Product, layers: int, width: int, samples: int) -> None:
        random = np.random.default_rng(0)
        self._product = product
        self.weights = normal(random, layers, width, width)
        self.weights /= np.float32(width**0.5)
        self.gradients = normal(random, layers, width, width)
        self.values = normal(random, layers + 1, samples, width)
        self.derivatives = normal(random, layers + 1, samples, width)

    def forward(self) -> list[Call]:
        """The products of one micro-batch forward."""
        return [
            self._product("NN", self.values[i], weights, self.values[i + 1])
            for i, weights in enumerate(self.weights)
        ]

    def backward(self, *, adds: bool, whole: bool) -> list[Call]:
        """Those backward. ``adds``: to the gradients so far. ``whole``: the first layer's input has a gradient."""
        calls = []
        for i in reversed(range(len(self.weights))):
            of_output, of_input = self.derivatives[i + 1], self.derivatives[i]
            for half in np.array_split(np.arange(self.values.shape[2]), 2):  # faster than the whole
                part = slice(half[0], half[-1] + 1)
                input_part, into = self.values[i][:, part], self.gradients[i][part]
                calls.append(self._product("TN", input_part, of_output, into, adds=adds))
            if i or whole:
                calls.append(self._product("NT", of_output, self.weights[i], of_input))
        return calls

    def update(self) -> None:
        """Take a step of gradient descent: subtract the scaled gradients from the weights, in place."""
        weights, gradients = self.weights.reshape(-1), self.gradients.reshape(-1)
        change = np.empty(BLOCK, np.float32)
        for at in range(0, weights.size, BLOCK):
            part = weights[at : at + BLOCK]
            np.multiply(gradients[at : at + BLOCK], np.float32(RATE), out=change[: part.size])
            part -= change[: part.size]

    def check(self) -> None:
        """Compare the first layer's products with NumPy's; SystemExit if they are wrong."""
        for call in (*self.forward()[:1], *self.backward(adds=False, whole=True)[-3:]):
            call()
        wanted = (
            (self.values[1], self.values[0] @ self.weights[0]),
            (self.gradients[0], self.values[0].T @ self.derivatives[1]),
            (self.derivatives[0], self.derivatives[1] @ self.weights[0].T),
        )
        if not all(np.allclose(ours, theirs, atol=1e-3) for ours, theirs in wanted):
            raise SystemExit("the bare products are wrong")


def _work(
    file: str, layers: int, width: int, samples: int, count: int, training: int, processes: int, rank: int
) -> None:
    """One process of `bare_pipelines`."""

    def prepare() -> list[Call]:
        chain = Chain(product_of(file), layers // processes, width, samples)
        chain.check()
        calls: list[Call] = []
        for turn in range(count):
            calls += chain.forward()
            if training:
                calls += chain.backward(adds=turn > 0, whole=turn % processes != rank)
        return [*calls, chain.update] if training else calls

    serve(processes, rank, prepare)


if __name__ == "__main__":
    _work(sys.argv[1], *map(int, sys.argv[2:]))
