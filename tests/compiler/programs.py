"""Programs and update rules for the compiler's tests: small, with every feature once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.compiler.compile import compile_program, model_program
from podrun.compiler.program import AnchorSpec, InputSpec, ParameterSpec, Program, tap
from podrun.core.executable import Executable, TensorSpec

RATE = "learningRate___default___FLOAT"
_COMPILED: dict[int, tuple[Program, Executable]] = {}
_MODELLED: dict[int, tuple[Program, dict[str, Any]]] = {}


def compiled(program: Program) -> Executable:
    """`compile_program` with its own options, once for one Program (that very object, not one that is equal)."""
    if id(program) not in _COMPILED:
        _COMPILED[id(program)] = program, compile_program(program)
    return _COMPILED[id(program)][1]


def modelled(program: Program) -> dict[str, Any]:
    """The tile report of the Program as `compiled` has it, not compiled; once for each. ``test_cost.py`` compares the
    two for programs of some kinds: whole, pipelined, with sharded state, with groups of replicas."""
    if id(program) not in _MODELLED:
        _MODELLED[id(program)] = program, model_program(program)
    return _MODELLED[id(program)][1]


@dataclass(frozen=True)
class Sgd:
    """w - rate * g with a streamed rate; ``widths`` gives weights a group of their own."""

    rate: float = 0.1
    own_group: frozenset[str] = frozenset()
    accumulate_in: str | None = None
    elementwise: bool = True

    def group_key(self, weight: str) -> tuple[Any, ...]:
        return (weight if weight in self.own_group else "",)

    def state(self, weight: TensorSpec) -> dict[str, tuple[TensorSpec, float]]:
        return {}

    def scalars(self, weight: str) -> dict[str, float]:
        return {RATE: self.rate}

    def gradient_dtype(self, weight: TensorSpec) -> str:
        return self.accumulate_in or weight.dtype

    def apply(self, name: str, w: Any, g: Any, state: Mapping[str, Any], scalars: Mapping[str, Any]) -> Any:
        return (w - (scalars[RATE] * g).astype(w.dtype)), {}


@dataclass(frozen=True)
class Momentum:
    """v = 0.9 v + g; w - rate * v."""

    rate: float = 0.1
    elementwise: bool = True

    def group_key(self, weight: str) -> tuple[Any, ...]:
        return ()

    def state(self, weight: TensorSpec) -> dict[str, tuple[TensorSpec, float]]:
        return {"Accl___": (TensorSpec("Accl___" + weight.name, weight.dtype, weight.shape), 0.0)}

    def scalars(self, weight: str) -> dict[str, float]:
        return {}

    def apply(self, name: str, w: Any, g: Any, state: Mapping[str, Any], scalars: Mapping[str, Any]) -> Any:
        v = 0.9 * state["Accl___"] + g
        return w - self.rate * v, {"Accl___": v}


@dataclass(frozen=True)
class Adam:
    """Adam with a step counter for each weight: element-wise, with a scalar state."""

    rate: float = 0.01
    elementwise: bool = True

    def group_key(self, weight: str) -> tuple[Any, ...]:
        return ()

    def state(self, weight: TensorSpec) -> dict[str, tuple[TensorSpec, float]]:
        return {
            "Accl1___": (TensorSpec("Accl1___" + weight.name, weight.dtype, weight.shape), 0.0),
            "Accl2___": (TensorSpec("Accl2___" + weight.name, weight.dtype, weight.shape), 0.0),
            "Step___": (TensorSpec("Step___" + weight.name, "float32", ()), 0.0),
        }

    def scalars(self, weight: str) -> dict[str, float]:
        return {}

    def apply(self, name: str, w: Any, g: Any, state: Mapping[str, Any], scalars: Mapping[str, Any]) -> Any:
        step = state["Step___"] + 1
        m = 0.9 * state["Accl1___"] + 0.1 * g
        v = 0.99 * state["Accl2___"] + 0.01 * g * g
        x = (m / (1 - 0.9**step)) / (jnp.sqrt(v / (1 - 0.99**step)) + 1e-6)
        return w - self.rate * x, {"Accl1___": m, "Accl2___": v, "Step___": step}


@dataclass(frozen=True)
class NormScaled:
    """w - rate * g * |w| / |g|: needs each weight whole."""

    rate: float = 0.1
    elementwise: bool = False

    def group_key(self, weight: str) -> tuple[Any, ...]:
        return ()

    def state(self, weight: TensorSpec) -> dict[str, tuple[TensorSpec, float]]:
        return {"Norm___": (TensorSpec("Norm___" + weight.name, "float32", ()), 0.0)}

    def scalars(self, weight: str) -> dict[str, float]:
        return {}

    def apply(self, name: str, w: Any, g: Any, state: Mapping[str, Any], scalars: Mapping[str, Any]) -> Any:
        norm = jnp.sqrt(jnp.sum(g * g))
        return w - self.rate * g * jnp.sqrt(jnp.sum(w * w)) / (norm + 1e-6), {"Norm___": norm}


@dataclass(frozen=True)
class Clipped:
    """w - rate * g / max(1, |all g|): one factor for all weights together."""

    rate: float = 0.1
    elementwise: bool = False
    joint: bool = True

    def group_key(self, weight: str) -> tuple[Any, ...]:
        return (weight,)

    def state(self, weight: TensorSpec) -> dict[str, tuple[TensorSpec, float]]:
        return {}

    def scalars(self, weight: str) -> dict[str, float]:
        return {RATE: self.rate}

    def apply(self, name: str, w: Any, g: Any, state: Mapping[str, Any], scalars: Mapping[str, Any]) -> Any:
        return w - scalars[RATE] * g, {}

    def apply_joint(
        self,
        weights: Mapping[str, Any],
        gradients: Mapping[str, Any],
        states: Any,
        scalars: Mapping[str, Any],
    ) -> Any:
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients.values()))
        factor = scalars[RATE] / jnp.maximum(1.0, norm)
        return {n: w - factor * gradients[n] for n, w in weights.items()}, {n: {} for n in weights}


def mlp(
    *,
    sizes: Sequence[int] = (6, 5, 3),
    batch: int = 4,
    dtype: str = "float32",
    anchors: Sequence[AnchorSpec] = (AnchorSpec("loss"),),
    update: Any = None,
    loss: str | None = "loss",
    **more: Any,
) -> Program:
    """Dense layers with relu between, cross entropy at the end. Values: ``h0`` ..., ``logits``, ``loss``."""
    layers = len(sizes) - 1
    parameters = {}
    for i in range(layers):
        for name, shape in ((f"w{i}", (sizes[i], sizes[i + 1])), (f"b{i}", (sizes[i + 1],))):
            parameters[name] = ParameterSpec(TensorSpec(name, dtype, shape), trainable=loss is not None)

    def forward(p: Mapping[str, Any], inputs: Mapping[str, Any], key: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        x = inputs["x"]
        for i in range(layers):
            x = values[f"h{i}"] = tap(f"h{i}", x @ p[f"w{i}"] + p[f"b{i}"])
            if i < layers - 1:
                x = jax.nn.relu(x)
        chosen = jax.nn.one_hot(inputs["y"], sizes[-1], dtype=x.dtype)
        per_sample = -jnp.sum(jax.nn.log_softmax(x) * chosen, axis=-1)
        return values | {"logits": x, "loss": jnp.mean(per_sample)}

    return Program(
        name="mlp",
        forward=forward,
        parameters=parameters,
        inputs={
            "x": InputSpec(TensorSpec("x", dtype, (batch, sizes[0]))),
            "y": InputSpec(TensorSpec("y", "int32", (batch,))),
        },
        anchors=tuple(anchors),
        loss=loss,
        update=(update or Sgd()) if loss is not None else None,
        **more,
    )


def convolution(*, batch: int = 2, update: Any = None, **more: Any) -> Program:
    """A small convolutional network on 8x8 images."""
    shapes = {"c0": (4, 1, 3, 3), "c1": (6, 4, 3, 3), "w": (6 * 2 * 2, 3), "b": (3,)}

    def forward(p: Mapping[str, Any], inputs: Mapping[str, Any], key: Any) -> dict[str, Any]:
        x = inputs["x"]
        for name in ("c0", "c1"):
            x = jax.nn.relu(jax.lax.conv_general_dilated(x, p[name], (2, 2), "SAME"))
        x = x.reshape(batch, -1) @ p["w"] + p["b"]
        chosen = jax.nn.one_hot(inputs["y"], 3, dtype=x.dtype)
        return {"loss": -jnp.mean(jnp.sum(jax.nn.log_softmax(x) * chosen, axis=-1))}

    return Program(
        name="convolution",
        forward=forward,
        parameters={n: ParameterSpec(TensorSpec(n, "float32", s), True) for n, s in shapes.items()},
        inputs={
            "x": InputSpec(TensorSpec("x", "float32", (batch, 1, 8, 8))),
            "y": InputSpec(TensorSpec("y", "int32", (batch,))),
        },
        anchors=(AnchorSpec("loss"),),
        loss="loss",
        update=update or Sgd(),
        **more,
    )


def weights_for(program: Program, seed: int = 0) -> dict[str, np.ndarray]:
    """Normally distributed values for every parameter."""
    generator = np.random.default_rng(seed)
    return {
        name: (generator.normal(size=item.spec.shape) * 0.5).astype(item.spec.dtype)
        for name, item in sorted(program.parameters.items())
    }


def inputs_for(program: Program, batches: int, seed: int = 1) -> dict[str, np.ndarray]:
    """Inputs of a run, ``[batches, accumulation, replicas, *shape]``; integers below 3."""
    generator = np.random.default_rng(seed)
    found = {}
    for name, item in sorted(program.inputs.items()):
        lead = [batches, program.accumulation_factor] + ([] if item.broadcast else [program.replicas])
        shape = (*lead, *item.spec.shape)
        integer = np.issubdtype(np.dtype(item.spec.dtype), np.integer)
        values = generator.integers(0, 3, shape) if integer else generator.normal(size=shape)
        found[name] = values.astype(item.spec.dtype)
    return found
