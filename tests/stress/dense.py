"""Random training steps of dense networks, by the C module without XLA, compared with JAX in float64.

    python -m tests.stress.dense [--cases N] [--seed S] [--first K]

Operands and results end where a page begins that nobody may touch, or start where one ends. Each step is computed with
vectors of 16 elements, of 8 and without, and by two threads at a time: all have to give the same bits.
``ONEDNN_MAX_CPU_ISA=AVX2`` makes another instruction set of this host's.

Inputs and weights are small integers over a power of 2, so that layers with cuts are exact: which elements are cut does
not depend on roundings.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.device.xla import dense_steps
from podrun.device.xla.clients import on_one_thread_device
from podrun.device.xla.dense_programs import DenseProgram, dense_program
from tests.stress.guarded import GuardedMemory, native

Array = np.ndarray[Any, Any]
Values = Mapping[str, Any]
TOLERANCE = 2e-5
"""Difference from float64 over the greatest value of a result."""
WIDTHS = (1, 2, 3, 5, 10, 15, 16, 17, 31, 40, 64, 100)
LEAST_PRODUCT = 1 << 22
BENDS: Mapping[str, Callable[[Any], Any]] = {
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
}


@dataclass(frozen=True, slots=True)
class DenseCase:
    """A network: samples of each replica, widths from the input on, what follows each layer, and its loss."""

    replicas: int
    samples: int
    widths: tuple[int, ...]
    bends: tuple[str, ...]
    loss: str
    turned: bool
    mean: bool

    def values(self, seed: int) -> dict[str, Array]:
        """Random inputs and weights."""
        generator = np.random.default_rng(seed)
        rows = (self.replicas, self.samples)
        values: dict[str, Array] = {
            "x": generator.integers(-2, 3, (*rows, self.widths[0])).astype(np.float32),
            "y": generator.integers(0, self.widths[-1], rows).astype(np.int32),
        }
        for layer, (inner, outer) in enumerate(zip(self.widths, self.widths[1:], strict=False)):
            scale = np.float32(2.0 ** -np.ceil(np.log2(2 * inner**0.5)))
            shape = (outer, inner) if self.turned else (inner, outer)
            values[f"w{layer}"] = generator.integers(-2, 3, shape).astype(np.float32) * scale
            bias = generator.integers(-2, 3, outer).astype(np.float32) + np.float32(0.5)
            values[f"b{layer}"] = bias * scale
        return values

    def step(self, values: Values) -> dict[str, Any]:
        """Losses of the replicas, and gradients of the sum of them."""
        inputs = {name: values[name] for name in ("x", "y")}
        weights = {name: value for name, value in values.items() if name not in inputs}

        def whole(weights: Values) -> Any:
            losses = jax.vmap(lambda x, y: self._loss(weights, x, y))(inputs["x"], inputs["y"])
            return losses.sum(), losses

        gradients, losses = jax.grad(whole, has_aux=True)(weights)
        return {**gradients, "loss": losses}

    def _loss(self, weights: Values, x: Any, y: Any) -> Any:
        for layer, bend in enumerate((*self.bends, "")):
            w = weights[f"w{layer}"]
            x = x @ (w.T if self.turned else w) + weights[f"b{layer}"]
            x = BENDS[bend](x) if bend else x
        width = self.widths[-1]
        if self.loss == "squares":
            costs = jnp.square(x - jax.nn.one_hot(y, width, dtype=x.dtype)).sum(-1)
        elif self.loss == "picked":
            costs = -jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], axis=-1)[:, 0]
        else:
            costs = -(jax.nn.log_softmax(x) * jax.nn.one_hot(y, width, dtype=x.dtype)).sum(-1)
        return costs.mean() if self.mean else costs.sum()


def random_case(seed: int, number: int) -> DenseCase:
    """The case of that number. Its first product is one for the library; others may be narrow."""
    dice = random.Random(f"dense:{seed}:{number}")
    replicas, samples = dice.choice((1, 1, 2, 4)), dice.choice((16, 23, 32))
    outer = dice.choice((200, 256, 300))
    inner = -(-LEAST_PRODUCT // (replicas * samples * outer)) + dice.choice((0, 1, 7))
    layers = dice.choice((1, 1, 2))
    smooth = dice.random() < 0.4
    bends = [dice.choice(("tanh", "logistic")) if smooth else "relu" for _ in range(layers)]
    widths = (inner, outer, *(dice.choice(WIDTHS) for _ in range(layers)))
    loss = dice.choice(("squares", "picked", "chosen"))
    return DenseCase(replicas, samples, widths, tuple(bends), loss, dice.random() < 0.5, dice.random() < 0.5)


def program_of(case: DenseCase, values: Mapping[str, Array]) -> DenseProgram | None:
    """The step for the C module; None if it does not take it."""
    dense_steps.BIG_MAP = 1 << 40  # also those that XLA computes faster
    with on_one_thread_device():
        return dense_program(jax.jit(lambda *flat: _flat(case, values, flat)).lower(*values.values()))


def _flat(case: DenseCase, values: Mapping[str, Array], flat: tuple[Any, ...]) -> list[Any]:
    return list(case.step(dict(zip(values, flat, strict=True))).values())


def exact(case: DenseCase, values: Mapping[str, Array]) -> list[Array]:
    """The results in float64, by JAX."""
    with jax.enable_x64(True):
        wide = {n: v.astype(np.float64) if v.dtype == np.float32 else v for n, v in values.items()}
        return [np.asarray(result) for result in jax.jit(lambda v: list(case.step(v).values()))(wide)]


def wrong(module: Any, seed: int, number: int) -> str:
    """What is wrong with a step; empty if nothing is."""
    case = random_case(seed, number)
    values = case.values(number)
    program = program_of(case, values)
    if program is None:
        return f"is not taken: {case}"
    step = module.dense(np.array(program.numbers, np.int64))
    runs: list[list[Array]] = []

    def run(at_end: bool) -> None:
        operands = [_beside_a_page(array, at_end) for array in values.values()]
        results = [_beside_a_page(np.full(shape, -1, dtype), at_end) for shape, dtype in program.results]
        module.run_dense(step, tuple(operands), tuple(results))
        runs.append(results)

    for lanes in (16, 8, 0):
        before = module.vectors(lanes)
        threads = [threading.Thread(target=run, args=(at_end,)) for at_end in (False, True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        module.vectors(before)
    if len(runs) < 6:
        return "a run failed"
    if any(a.tobytes() != b.tobytes() for other in runs for a, b in zip(other, runs[0], strict=True)):
        return f"bits differ: {case}"
    for place, right in enumerate(exact(case, values)):
        error = np.abs(runs[0][place].reshape(right.shape) - right).max()
        if not error <= TOLERANCE * max(np.abs(right).max(), 1e-3):
            return f"result {place} differs from float64 by {error}: {case}"
    return ""


def _beside_a_page(array: Array, at_end: bool) -> Array:
    place = GuardedMemory(array.size).array(array.size, at_end).view(array.dtype)
    place[:] = array.reshape(-1)
    return place


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    module, bad = native(), 0
    for number in range(options.first, options.first + options.cases):
        print(number, end="\r", flush=True, file=sys.stderr)
        reason = wrong(module, options.seed, number)
        if reason:
            bad += 1
            print(f"step {number}: {reason}")
    print(f"{options.cases} steps, {bad} wrong")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
