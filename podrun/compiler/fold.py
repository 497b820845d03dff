"""Folding: the replicas of a machine, and micro-batches in chunks, as one leading axis; forward and gradients.

``vmap`` over that axis with the weights left unbatched makes XLA see one large matrix product or convolution; the
gradient of the sum over the axis then arrives already summed. The size of a chunk follows from the program and a fixed
budget, never from the memory free at the moment: it decides the order of sums.

What is differentiated is the sum, over replicas and micro-batches, of loss times loss scaling: the gradient that enters
the backward pass is the loss scaling for each of them, as on the real system, where nothing is averaged here. Anchored
gradients are for each replica and micro-batch. Those of activations come from the same backward pass: a perturbation
is added, for differentiation only, to what the consumers of the activation read. Those of weights come from a pass of
their own, as ``vmap`` of the gradient, because in training the sum over replicas stays inside one matrix product or
convolution. XLA shares the rest of the backward pass between the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp

from podrun.compiler import extra_state
from podrun.compiler.extra_state import averages
from podrun.compiler.forward_trace import Trace, evaluate_forward
from podrun.compiler.model_collectives import exchanges, with_tokens
from podrun.compiler.program import Program, Tensors
from podrun.compiler.replica_groups import GroupOf, rows
from podrun.compiler.stochastic import entered
from podrun.core.executable import REPLICA_OFFSET
from podrun.core.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatchChunk:
    """Micro-batches ``[first, first + count)`` of a batch, run as one on all replicas of a machine."""

    first: int
    count: int


def activation_bytes(traced: Trace) -> int:
    """Bytes of every intermediate tensor of one micro-batch on one replica, which a gradient may have to keep."""
    return sum(
        variable.aval.size * variable.aval.dtype.itemsize
        for equation in traced.jaxpr.jaxpr.eqns
        for variable in equation.outvars
        if hasattr(variable.aval, "dtype") and hasattr(variable.aval.dtype, "itemsize")
    )


def micro_batch_chunks(
    program: Program, traced: Trace, replicas: int, budget: int
) -> tuple[MicroBatchChunk, ...]:
    """How the micro-batches of a batch are cut, so that the folded intermediates stay near ``budget`` bytes.

    All chunks are of one size if a divisor of the accumulation factor fills at least half of the budget (each
    size is a compilation of its own); else the last one is smaller. A program with state updates runs
    micro-batch by micro-batch: each reads what the one before wrote. So does one whose gradients are running means.
    """
    total = program.accumulation_factor
    most = max(1, min(total, budget // max(1, activation_bytes(traced) * replicas)))
    if program.state_updates or averages(program):
        most = 1
    divisor = max(size for size in range(1, most + 1) if total % size == 0)
    size = divisor if 2 * divisor >= most else most
    return tuple(MicroBatchChunk(first, min(size, total - first)) for first in range(0, total, size))


@dataclass(frozen=True, slots=True)
class Folded:
    """The forward function over ``micro_batches * replicas`` at once, micro-batch major.

    ``batched``: parameters that have a value of their own for each replica (only with one micro-batch at a
    time). ``shared``: results that are equal on all replicas (likewise). ``broadcast``: inputs without a replica
    axis. ``group_of``: parameters with a leading axis of groups of replicas; they come with `REPLICA_OFFSET` among the
    parameters, which says who the replicas here are.
    """

    traced: Trace
    micro_batches: int
    replicas: int
    batched: frozenset[str]
    broadcast: frozenset[str]
    group_of: Mapping[str, GroupOf] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """Length of the folded axis."""
        return self.micro_batches * self.replicas

    def fold_inputs(self, buffers: Tensors) -> dict[str, Any]:
        """Stream buffers ``[count, replicas, *shape]`` (broadcast: ``[count, *shape]``) on the folded axis."""
        return {name: self._fold_input(name, buffer) for name, buffer in buffers.items()}

    def _fold_input(self, name: str, buffer: jax.Array) -> Any:
        if name in self.broadcast:
            if self.micro_batches == 1:
                return buffer[0]
            shape = (self.micro_batches, self.replicas, *buffer.shape[1:])
            buffer = jnp.broadcast_to(buffer[:, None], shape)
        return buffer.reshape(self.size, *buffer.shape[2:])

    def input_axes(self, names: Tensors) -> dict[str, int | None]:
        """The vmap axis of each input."""
        return {name: None if name in self.broadcast and self.micro_batches == 1 else 0 for name in names}

    def keys(self, seed: jax.Array, replica_offset: jax.Array) -> Any:
        """Data of the random keys of all folded micro-batches and replicas, ``[size, 2]``."""
        return extra_state.folded_keys(seed, replica_offset, self.micro_batches, self.replicas)

    def tokens(self) -> Any:
        """A number for each place of the folded axis, for `exchange`; None if the program has no collectives."""
        return jnp.arange(self.size, dtype=jnp.int32) if exchanges(self.traced.jaxpr) else None

    def single(
        self,
        parameters: Tensors,
        inputs: Tensors,
        key: jax.Array | None,
        deltas: Tensors,
        token: jax.Array | None = None,
    ) -> dict[str, Any]:
        """The values of one micro-batch on one replica; what the trace does not use may be missing."""
        named = {**parameters, **inputs}
        names = (*self.traced.parameters, *self.traced.inputs)
        arguments = [named.get(name) for name in names]
        if token is None:
            return evaluate_forward(self.traced, [*arguments, key], deltas)
        apply = with_tokens(token, once=bool(self.shared))
        return evaluate_forward(self.traced, [*arguments, key], deltas, apply)

    def own_rows(self, parameters: Tensors) -> dict[str, Any]:
        """Parameters as replicas see them: parameters with groups get the folded axis."""
        own = {name: value for name, value in parameters.items() if name != REPLICA_OFFSET}
        for name in self.group_of.keys() & parameters.keys():
            offset = parameters[REPLICA_OFFSET]
            own[name] = rows(parameters[name], self.group_of[name], offset, self.micro_batches, self.replicas)
        return own

    def parameter_axes(self, parameters: Tensors) -> dict[str, int | None]:
        """The vmap axis of each of `own_rows`."""
        return {name: 0 if name in self.batched or name in self.group_of else None for name in parameters}

    def forward(
        self, parameters: Tensors, inputs: Tensors, keys: jax.Array | None, deltas: Tensors
    ) -> dict[str, Any]:
        """Every result with the folded axis in front. ``inputs`` from `fold_inputs`, ``deltas`` ``[size, ...]``."""
        parameters, tokens = self.own_rows(parameters), self.tokens()
        if self.size == 1 and self.shared and tokens is None and not (self.batched or self.group_of):
            return self._forward_alone(parameters, inputs, keys)
        if self.traced.stochastic and keys is not None:
            # Outside of vmap, so that gradients of weights are summed before they are rounded.
            parameters = entered(parameters, keys)
        axes = (
            self.parameter_axes(parameters),
            self.input_axes(inputs),
            None if keys is None else 0,
            dict.fromkeys(deltas, 0),
            0 if tokens is not None else None,
        )
        run = jax.vmap(self.single, in_axes=axes, out_axes=0, axis_size=self.size)
        return run(parameters, inputs, keys, deltas, tokens)

    def _forward_alone(self, parameters: Tensors, inputs: Tensors, keys: jax.Array | None) -> dict[str, Any]:
        """`forward` of the only replica, without an axis inside: XLA sees kernels and images as they are."""
        axes = self.input_axes(inputs)
        own = {name: value if axes[name] is None else value[0] for name, value in inputs.items()}
        values = self.single(parameters, own, None if keys is None else keys[0], {})
        return {name: jax.tree.map(lambda leaf: leaf[None], value) for name, value in values.items()}

    def unfold(self, value: jax.Array) -> Any:
        """``[size, *shape]`` as ``[micro_batches, replicas, *shape]``."""
        return value.reshape(self.micro_batches, self.replicas, *value.shape[1:])


@dataclass(frozen=True, slots=True)
class FoldedOperands:
    """The operands of a folded forward function: parameters and folded inputs by name, key data (None: nothing
    random).
    """

    parameters: Tensors
    inputs: Tensors
    keys: jax.Array | None


@dataclass(frozen=True, slots=True)
class Gradients:
    """The results of `gradients`.

    ``values``: forward results ``[size, *shape]``. ``summed``: weight gradients, summed over the folded axis.
    ``values_each``: gradients of tapped values and inputs, ``[size, *shape]``.
    """

    values: dict[str, Any]
    summed: dict[str, Any]
    values_each: dict[str, Any]


def gradients(
    folded: Folded,
    loss: str,
    scale: jax.Array,
    operands: FoldedOperands,
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

    replica_losses, pull_back, values = jax.vjp(losses, weights, deltas, has_aux=True)
    summed, values_each = pull_back(_seed(scale, replica_losses))
    return Gradients(values, dict(summed), dict(values_each))


def weight_gradients_each(
    folded: Folded, loss: str, scale: jax.Array, operands: FoldedOperands, wanted: Sequence[str]
) -> dict[str, Any]:
    """Gradients of the ``wanted`` parameters for each replica and micro-batch, ``[size, *shape]``."""

    def one(parameters: Tensors, inputs: Tensors, key: jax.Array | None, token: jax.Array) -> dict[str, Any]:
        def loss_of(chosen: Tensors) -> Any:
            return folded.single({**parameters, **chosen}, inputs, key, {}, token)[loss]

        replica_losses, pull_back = jax.vjp(loss_of, {name: parameters[name] for name in wanted})
        return dict(pull_back(_seed(scale, replica_losses))[0])

    parameters, tokens = folded.own_rows(operands.parameters), folded.tokens()
    axes = (
        folded.parameter_axes(parameters),
        folded.input_axes(operands.inputs),
        None if operands.keys is None else 0,
        None if tokens is None else 0,
    )
    run = jax.vmap(one, in_axes=axes, out_axes=0, axis_size=folded.size)
    return dict(run(parameters, operands.inputs, operands.keys, tokens))


def _seed(scale: jax.Array, losses: jax.Array) -> Any:
    """The gradient that enters the backward pass: the loss scaling, in the loss's dtype, for each loss."""
    return jnp.broadcast_to(jnp.asarray(scale).astype(losses.dtype), losses.shape)
