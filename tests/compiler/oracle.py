"""Training by a plain program: every replica and micro-batch by itself, in a loop, with JAX's own gradients.

Shares nothing with the compiler but the front end's forward function and update rule.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.compiler import extra_state
from podrun.compiler.program import Program
from tests.quick_programs import QUICK


def advanced(seed: int, micro_batches: int) -> int:
    """The base seed after that many micro-batches: `podrun.compiler.extra_state` says how it moves on."""
    return (seed + micro_batches * extra_state.STRIDE) % 2**64


@dataclass
class Trained:
    """Weights and states after the run; for each micro-batch and replica the loss and the scaled
    gradients."""

    weights: dict[str, np.ndarray]
    states: dict[str, dict[str, np.ndarray]]
    losses: np.ndarray
    gradients: list[list[dict[str, np.ndarray]]] = field(default_factory=list)


def train(
    program: Program, weights: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray], seed: int = 0
) -> Trained:
    """Run ``program`` over all batches in ``inputs``."""
    rule, loss = program.update, program.loss
    assert rule is not None
    assert loss is not None
    names = [name for name, item in sorted(program.parameters.items()) if item.trainable]
    specs = {name: program.parameters[name].spec for name in names}
    now = {name: np.asarray(value) for name, value in weights.items()}
    states = {
        n: {p: np.full(s.shape, initial, s.dtype) for p, (s, initial) in rule.state(specs[n]).items()}
        for n in names
    }
    scale = float(program.loss_scaling)

    # Compiled at once and quickly: operation by operation, JAX would compile a program for each.
    @functools.partial(jax.jit, compiler_options=dict(QUICK))
    def gradient(trained: Any, rest: Any, data: Any, words: Any) -> Any:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")

        def scaled(chosen: Any) -> Any:
            value = program.forward({**rest, **chosen}, data, key)[loss]
            return value * jnp.asarray(scale, value.dtype), value

        return jax.grad(scaled, has_aux=True)(trained)

    @functools.partial(jax.jit, compiler_options=dict(QUICK))
    def updated(trained: Any, total: Any, states: Any, scalars: Any) -> Any:
        return {
            n: rule.apply(n, w, total[n].astype(w.dtype), states[n], scalars[n]) for n, w in trained.items()
        }

    losses, gradients = [], []
    for batch in range(len(next(iter(inputs.values())))):
        total = {n: np.zeros(specs[n].shape, np.float32) for n in names}
        for micro in range(program.accumulation_factor):
            losses.append([])
            gradients.append([])
            for replica in range(program.replicas):
                data = {
                    n: v[batch, micro] if program.inputs[n].broadcast else v[batch, micro, replica]
                    for n, v in inputs.items()
                }
                base = advanced(seed, batch * program.accumulation_factor + micro) + replica
                words = np.array(extra_state.seed_words(base), np.uint32)
                trained = {n: now[n] for n in names}
                rest = {n: v for n, v in now.items() if n not in trained}
                found, value = jax.device_get(gradient(trained, rest, data, words))
                losses[-1].append(np.asarray(value))
                gradients[-1].append(dict(found))
                total = {n: total[n] + found[n] for n in names}
        scalars = {n: {s: np.float32(v) for s, v in rule.scalars(n).items()} for n in names}
        changed = jax.device_get(updated({n: now[n] for n in names}, total, states, scalars))
        for n, (weight, state) in changed.items():
            now[n], states[n] = weight, state
    return Trained(now, states, np.array(losses), gradients)
