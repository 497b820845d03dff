"""Folding: the replicas of a machine, and micro-batches in chunks, as one leading axis of the computation.

``vmap`` over that axis with the weights left unbatched makes XLA see one large matrix product or convolution;
the gradient of the sum over the axis then arrives already summed. The size of a chunk follows from the
program and a fixed budget, never from the memory free at the moment: it decides the order of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from podrun.compiler.exchange import exchanges, with_tokens
from podrun.compiler.program import Program
from podrun.compiler.state import seeds
from podrun.compiler.state.averaging import averages
from podrun.compiler.state.grouped import GroupOf, rows
from podrun.compiler.tracing.stochastic import entered
from podrun.compiler.tracing.trace import Trace, evaluate
from podrun.executable import REPLICA_OFFSET

Tensors = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Micro-batches ``[first, first + count)`` of a batch, run as one on all replicas of a machine."""

    first: int
    count: int


def activation_bytes(traced: Trace) -> int:
    """Bytes of every intermediate tensor of one micro-batch on one replica: what a gradient may have to
    keep."""
    return sum(
        variable.aval.size * variable.aval.dtype.itemsize
        for equation in traced.jaxpr.jaxpr.eqns
        for variable in equation.outvars
        if hasattr(variable.aval, "dtype") and hasattr(variable.aval.dtype, "itemsize")
    )


def chunks(program: Program, traced: Trace, replicas: int, budget: int) -> tuple[Chunk, ...]:
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
    return tuple(Chunk(first, min(size, total - first)) for first in range(0, total, size))


@dataclass(frozen=True, slots=True)
class Folded:
    """The forward function over ``micro_batches * replicas`` at once, micro-batch major.

    ``batched``: parameters that have a value of their own for each replica (only with one micro-batch at a
    time). ``broadcast``: inputs without a replica axis. ``group_of``: parameters with a leading axis of groups of
    replicas; they come with `REPLICA_OFFSET` among the parameters, which says who the replicas here are.
    """

    traced: Trace
    micro_batches: int
    replicas: int
    batched: frozenset[str]
    broadcast: frozenset[str]
    group_of: Mapping[str, GroupOf] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Length of the folded axis."""
        return self.micro_batches * self.replicas

    def fold_inputs(self, buffers: Tensors) -> dict[str, Any]:
        """Stream buffers ``[count, replicas, *shape]`` (broadcast: ``[count, *shape]``) on the folded
        axis."""
        return {name: self._fold_input(name, buffer) for name, buffer in buffers.items()}

    def _fold_input(self, name: str, buffer: Any) -> Any:
        if name in self.broadcast:
            if self.micro_batches == 1:
                return buffer[0]
            shape = (self.micro_batches, self.replicas, *buffer.shape[1:])
            buffer = jnp.broadcast_to(buffer[:, None], shape)
        return buffer.reshape(self.size, *buffer.shape[2:])

    def input_axes(self, names: Tensors) -> dict[str, int | None]:
        """The vmap axis of each input."""
        return {name: None if name in self.broadcast and self.micro_batches == 1 else 0 for name in names}

    def keys(self, seed: Any, replica_offset: Any) -> Any:
        """Key data ``[size, 2]``."""
        return seeds.folded_keys(seed, replica_offset, self.micro_batches, self.replicas)

    def tokens(self) -> Any:
        """A number for each place of the folded axis, for `exchange`; None if the program has no collectives."""
        return jnp.arange(self.size, dtype=jnp.int32) if exchanges(self.traced.jaxpr) else None

    def single(
        self, parameters: Tensors, inputs: Tensors, key: Any, deltas: Tensors, token: Any = None
    ) -> dict[str, Any]:
        """The values of one micro-batch on one replica; what the trace does not use may be missing."""
        named = {**parameters, **inputs}
        names = (*self.traced.parameters, *self.traced.inputs)
        arguments = [named.get(name) for name in names]
        if token is None:
            return evaluate(self.traced, [*arguments, key], deltas)
        return evaluate(self.traced, [*arguments, key], deltas, with_tokens(token))

    def own_rows(self, parameters: Tensors) -> dict[str, Any]:
        """Parameters as replicas see them: those with groups on the folded axis."""
        found = {name: value for name, value in parameters.items() if name != REPLICA_OFFSET}
        for name in self.group_of.keys() & parameters.keys():
            offset = parameters[REPLICA_OFFSET]
            found[name] = rows(
                parameters[name], self.group_of[name], offset, self.micro_batches, self.replicas
            )
        return found

    def parameter_axes(self, parameters: Tensors) -> dict[str, int | None]:
        """The vmap axis of each of `own_rows`."""
        return {name: 0 if name in self.batched or name in self.group_of else None for name in parameters}

    def forward(self, parameters: Tensors, inputs: Tensors, keys: Any, deltas: Tensors) -> dict[str, Any]:
        """Every result with the folded axis in front. ``inputs`` from `fold_inputs`, ``deltas`` ``[size,
        ...]``."""
        parameters, tokens = self.own_rows(parameters), self.tokens()
        if self.traced.stochastic:
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

    def unfold(self, value: Any) -> Any:
        """``[size, *shape]`` as ``[micro_batches, replicas, *shape]``."""
        return value.reshape(self.micro_batches, self.replicas, *value.shape[1:])
