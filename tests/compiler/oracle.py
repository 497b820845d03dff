"""Training by a plain program: every replica and micro-batch by itself, in a loop, with JAX's own gradients.

Shares nothing with the compiler but the front end's forward function and update rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.compiler import extra_state
from podrun.compiler.program import Program


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
    now = {name: jnp.asarray(value) for name, value in weights.items()}
    states = {
        n: {p: jnp.full(s.shape, initial, s.dtype) for p, (s, initial) in rule.state(specs[n]).items()}
        for n in names
    }
    scale = float(program.loss_scaling)

    @jax.jit
    def gradient(trained: Any, rest: Any, data: Any, key: Any) -> Any:
        def scaled(chosen: Any) -> Any:
            value = program.forward({**rest, **chosen}, data, key)[loss]
            return value * jnp.asarray(scale, value.dtype), value

        return jax.grad(scaled, has_aux=True)(trained)

    losses, gradients = [], []
    for batch in range(len(next(iter(inputs.values())))):
        total = {n: jnp.zeros(specs[n].shape, jnp.float32) for n in names}
        for micro in range(program.accumulation_factor):
            losses.append([])
            gradients.append([])
            for replica in range(program.replicas):
                data = {
                    n: v[batch, micro] if program.inputs[n].broadcast else v[batch, micro, replica]
                    for n, v in inputs.items()
                }
                base = advanced(seed, batch * program.accumulation_factor + micro) + replica
                key = jax.random.wrap_key_data(
                    jnp.array(extra_state.seed_words(base), jnp.uint32), impl="threefry2x32"
                )
                trained = {n: now[n] for n in names}
                rest = {n: v for n, v in now.items() if n not in trained}
                found, value = gradient(trained, rest, data, key)
                losses[-1].append(np.asarray(value))
                gradients[-1].append({n: np.asarray(g) for n, g in found.items()})
                total = {n: total[n] + found[n] for n in names}
        for n in names:
            scalars = {s: jnp.float32(v) for s, v in rule.scalars(n).items()}
            now[n], states[n] = rule.apply(n, now[n], total[n].astype(now[n].dtype), states[n], scalars)
    return Trained(
        {n: np.asarray(v) for n, v in now.items()},
        {n: {p: np.asarray(v) for p, v in s.items()} for n, s in states.items()},
        np.array(losses),
        gradients,
    )
