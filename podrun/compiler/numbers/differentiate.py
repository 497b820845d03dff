"""Differentiation: gradients of a folded chunk.

What is differentiated is the sum, over replicas and micro-batches, of loss times loss scaling: the gradient
that enters the backward pass is the loss scaling for each of them (as on the real system, where nothing is
averaged here).

Anchored gradients are for each replica and micro-batch. Those of activations come along in the same backward
pass: a perturbation is added, for differentiation only, to what the consumers of the activation read. Those
of weights are taken apart, as ``vmap`` of the gradient: in the training itself the sum over replicas stays
inside one matrix product or convolution. XLA shares the rest of the backward pass between the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from podrun.compiler.numbers.fold import Folded

Tensors = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Operands:
    """What a folded forward function takes: parameters and folded inputs by name, key data (None: nothing random)."""

    parameters: Tensors
    inputs: Tensors
    keys: Any


@dataclass(frozen=True, slots=True)
class Gradients:
    """What `gradients` gives.

    ``values``: forward results ``[size, *shape]``. ``summed``: weight gradients, summed over the folded axis.
    ``values_each``: gradients of tapped values and inputs, ``[size, *shape]``.
    """

    values: dict[str, Any]
    summed: dict[str, Any]
    values_each: dict[str, Any]


def gradients(
    folded: Folded,
    loss: str,
    scale: Any,
    operands: Operands,
    trained: Sequence[str],
    taps: Mapping[str, jax.ShapeDtypeStruct],
) -> Gradients:
    """Differentiate the folded chunk with respect to the parameters ``trained``; others are held constant.

    ``taps``: values and inputs whose own gradients are wanted, with what one replica sees of them.
    """
    weights = {name: operands.parameters[name] for name in trained}
    others = {name: value for name, value in operands.parameters.items() if name not in weights}
    deltas = {name: jnp.zeros((folded.size, *spec.shape), spec.dtype) for name, spec in taps.items()}

    def losses(weights: Tensors, deltas: Tensors) -> tuple[Any, dict[str, Any]]:
        values = folded.forward({**others, **weights}, operands.inputs, operands.keys, deltas)
        return values[loss], values

    each, pull_back, values = jax.vjp(losses, weights, deltas, has_aux=True)
    summed, values_each = pull_back(_seed(scale, each))
    return Gradients(values, dict(summed), dict(values_each))


def weight_gradients_each(
    folded: Folded, loss: str, scale: Any, operands: Operands, wanted: Sequence[str]
) -> dict[str, Any]:
    """Gradients of the ``wanted`` parameters for each replica and micro-batch, ``[size, *shape]``."""

    def one(parameters: Tensors, inputs: Tensors, key: Any, token: Any) -> dict[str, Any]:
        def loss_of(chosen: Tensors) -> Any:
            return folded.single({**parameters, **chosen}, inputs, key, {}, token)[loss]

        each, pull_back = jax.vjp(loss_of, {name: parameters[name] for name in wanted})
        return dict(pull_back(_seed(scale, each))[0])

    parameters, tokens = folded.own_rows(operands.parameters), folded.tokens()
    axes = (
        folded.parameter_axes(parameters),
        folded.input_axes(operands.inputs),
        None if operands.keys is None else 0,
        None if tokens is None else 0,
    )
    run = jax.vmap(one, in_axes=axes, out_axes=0, axis_size=folded.size)
    return dict(run(parameters, operands.inputs, operands.keys, tokens))


def _seed(scale: Any, losses: Any) -> Any:
    """What enters the backward pass: the loss scaling, in the loss's dtype, for each loss."""
    return jnp.broadcast_to(jnp.asarray(scale).astype(losses.dtype), losses.shape)
