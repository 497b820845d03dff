"""The network of the speed benchmarks, 784-512-512-10, as a Program and as plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.compiler.compile import compile_program
from podrun.compiler.program import AnchorSpec, InputSpec, ParameterSpec, Program
from podrun.core.executable import Executable, TensorSpec

SIZES = (784, 512, 512, 10)
BATCH = 32
RATE = 0.1


@dataclass(frozen=True)
class Descent:
    """Gradient descent as a Program's update: w - rate * g. For benchmarks that are not about optimizers."""

    rate: float
    elementwise: bool = True

    def group_key(self, weight: str) -> tuple[Any, ...]:
        return ()

    def state(self, weight: TensorSpec) -> dict[str, tuple[TensorSpec, float]]:
        return {}

    def scalars(self, weight: str) -> dict[str, float]:
        return {}

    def apply(self, name: str, w: Any, g: Any, state: Mapping[str, Any], scalars: Mapping[str, Any]) -> Any:
        return w - self.rate * g, {}


@dataclass(frozen=True)
class StreamedDescent(Descent):
    """With a rate that the host may change."""

    def scalars(self, weight: str) -> dict[str, float]:
        return {"rate": self.rate}

    def apply(self, name: str, w: Any, g: Any, state: Mapping[str, Any], scalars: Mapping[str, Any]) -> Any:
        return w - scalars["rate"] * g, {}


def loss_of(p: Mapping[str, Any], x: Any, y: Any) -> Any:
    """Mean cross entropy of one batch."""
    for layer in range(len(SIZES) - 1):
        x = x @ p[f"w{layer}"] + p[f"b{layer}"]
        if layer < len(SIZES) - 2:
            x = jax.nn.relu(x)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(x) * jax.nn.one_hot(y, SIZES[-1]), axis=-1))


def executable(replicas: int) -> Executable:
    """One SGD step on ``replicas`` replicas of `BATCH` samples."""
    shapes = {f"w{i}": SIZES[i : i + 2] for i in range(len(SIZES) - 1)}
    shapes |= {f"b{i}": (SIZES[i + 1],) for i in range(len(SIZES) - 1)}
    program = Program(
        name="mlp",
        forward=lambda p, inputs, key: {"loss": loss_of(p, inputs["x"], inputs["y"])},
        parameters={n: ParameterSpec(TensorSpec(n, "float32", s), True) for n, s in sorted(shapes.items())},
        inputs={
            "x": InputSpec(TensorSpec("x", "float32", (BATCH, SIZES[0]))),
            "y": InputSpec(TensorSpec("y", "int32", (BATCH,))),
        },
        anchors=(AnchorSpec("loss"),),
        replicas=replicas,
        loss="loss",
        update=StreamedDescent(RATE),
    )
    return compile_program(program)


def weights() -> dict[str, np.ndarray]:
    """Start values."""
    generator = np.random.default_rng(0)
    found = {}
    for i in range(len(SIZES) - 1):
        found[f"w{i}"] = (generator.normal(size=SIZES[i : i + 2]) / np.sqrt(SIZES[i])).astype(np.float32)
        found[f"b{i}"] = np.zeros(SIZES[i + 1], np.float32)
    return found


def inputs(replicas: int) -> dict[str, np.ndarray]:
    """One batch for all replicas: ``[1, 1, replicas, BATCH, ...]``."""
    generator = np.random.default_rng(1)
    lead = (1, 1, replicas, BATCH)
    return {
        "x": generator.normal(size=(*lead, SIZES[0])).astype(np.float32),
        "y": generator.integers(0, SIZES[-1], size=lead).astype(np.int32),
    }


def plain_jax(replicas: int) -> Callable[[], float]:
    """One plain JAX step on the same samples in one process; each call makes one and gives the loss.

    The mean over replicas of gradients that podrun adds up: the same step but for the rate.
    """
    data = inputs(replicas)
    x, y = data["x"].reshape(-1, SIZES[0]), data["y"].reshape(-1)

    @jax.jit
    def step(p: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(p, x, y)
        return loss, jax.tree.map(lambda w, g: w - RATE * replicas * g, p, gradients)

    state = {"p": jax.tree.map(jnp.asarray, weights())}

    def one() -> float:
        loss, state["p"] = step(state["p"], x, y)
        jax.block_until_ready(state["p"])
        return float(loss)

    return one
