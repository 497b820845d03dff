"""Functions that the IPU computes for PopTorch's own operators."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from podrun.numerics.gradients import with_gradient
from podrun.numerics.precision import widen
from podrun.poptorch.capture.graph import COMPARED, CUSTOM, Subgraph
from podrun.poptorch.operators.products import product
from podrun.poptorch.operators.table import Call, Sizes, aten, aten_expressions, axis, run_aten
from podrun.runtime.graph import Node
from podrun.runtime.operators import offered_operator

SUM, MEAN = 0, 1


@aten("podrun.identity_loss.default", kind="IdentityLoss")
def marked_loss(call: Call, x: Array, reduction: int) -> Array:
    """x as a loss: its sum, its mean or as it is."""
    if reduction == SUM:
        return jnp.sum(widen(x))
    return jnp.mean(widen(x)) if reduction == MEAN else x


@aten("podrun.written_without_gradient.default", kind="Identity")
def written_without_gradient(call: Call, before: Array, after: Array) -> Array:
    """Values written in place under ``no_grad``. Torch's gradient goes to the values before, as if nothing had been
    written.
    """
    result: Array = with_gradient(after, before)
    return result


@aten("podrun.overlap_input.default", kind="Identity")
@aten("podrun.overlap_output.default", kind="Identity")
def overlap(call: Call, x: Array, mode: str) -> Array:
    """x, whose transfer may overlap with computing."""
    return x


@aten("podrun.dynamic_slice.default", kind="DynamicSlice")
def slice_at(call: Call, x: Array, dim: int, start: Array, size: int, step: int) -> Array:
    """``size`` elements of a dimension from a place that data determine."""
    where = axis(dim, x.ndim)
    part = lax.dynamic_slice_in_dim(x, start.reshape(-1)[0], size, where)
    return lax.slice_in_dim(part, 0, size, step, where)


@aten("podrun.dynamic_update.default", kind="DynamicUpdate")
def replaced_at(call: Call, x: Array, part: Array, dim: int, start: Array, size: int) -> Array:
    """x with a part replaced at a place that data determine."""
    return lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start.reshape(-1)[0], axis(dim, x.ndim))


@aten(COMPARED)
def compared(call: Call, *operands: Array) -> Array:
    """No number if one of the operands has a value that is none, 0 otherwise."""
    wrong = functools.reduce(
        jnp.logical_or, [jnp.isnan(operand).any() for operand in operands], jnp.array(False)
    )
    return jnp.where(wrong, jnp.nan, 0.0).astype(jnp.float32)


@aten(CUSTOM, kind="CustomOp")
def custom(
    call: Call,
    inputs: Sequence[Array],
    name: str,
    domain: str,
    version: int,
    attributes: str,
    examples: Sequence[Array],
) -> tuple[Array, ...]:
    """An operator that was registered with PODRUN_CUSTOM_OPS or ``podrun.popart.register_op``, or one of PopART's."""
    return custom_results(call, name, domain, version, json.loads(attributes), inputs)


def custom_results(
    call: Call, name: str, domain: str, version: int, attributes: dict[str, Any], inputs: Sequence[Array]
) -> tuple[Array, ...]:
    """The results of an operator that another front end offers (`podrun.runtime.operators.offer_operators`)."""
    outputs = tuple(f"output:{i}" for i in range(len(call.results)))
    names = tuple(f"input:{i}" for i in range(len(inputs)))
    node = Node(name, domain, name, names, outputs, attributes, version)
    results = offered_operator(node).function(_CustomContext(call), node, *inputs)
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


class _CustomContext:
    """What an offered operator may ask for while it is traced: the training mode and random keys."""

    def __init__(self, call: Call) -> None:
        self.training, self.key = call.training, call.key
        self.x64, self.grouped, self.replicas, self.sdk, self.xp = False, False, 1, None, jnp


@aten("podrun.fps.default")
def farthest_points(call: Call, points: Array, begins: Sizes, ratio: float, random_start: bool) -> Array:
    """Indices of points that are far from each other, for each part of ``points [N, D]``.

    Part i is ``begins[i]`` to ``begins[i + 1]``. The first point is the part's first, or a random one; each next point
    is the one with the greatest distance to those before.
    """
    parts = []
    for part, (first, end) in enumerate(itertools.pairwise(begins)):
        count = math.ceil((end - first) * ratio)
        inside = widen(points)[first:end]
        start = jnp.zeros((), jnp.int32)
        if random_start:
            start = jax.random.randint(jax.random.fold_in(call.key(), part), (), 0, end - first)

        def choose(i: Array, state: tuple[Array, Array], inside: Array = inside) -> tuple[Array, Array]:
            chosen, nearest = state
            away = jnp.sum(jnp.square(inside - inside[chosen[i - 1]]), -1)
            nearest = jnp.minimum(nearest, away)
            return chosen.at[i].set(jnp.argmax(nearest).astype(jnp.int32)), nearest

        chosen = jnp.zeros(count, jnp.int32).at[0].set(start.astype(jnp.int32))
        chosen, _ = lax.fori_loop(1, count, choose, (chosen, jnp.full(end - first, jnp.inf)))
        parts.append(chosen + first)
    return jnp.concatenate(parts)


def _runner(call: Call, body: Subgraph, outer: Sequence[Array]) -> Callable[..., tuple[Array, ...]]:
    """A captured body as a function of its inputs and of a value that makes its random keys different."""

    def run(inputs: Sequence[Array], round_: Array | int) -> tuple[Array, ...]:
        values = {v.number: a for v, a in zip(body.outer, outer, strict=True)}
        values.update({v.number: a for v, a in zip(body.inputs, inputs, strict=True)})
        for place, node in enumerate(body.nodes):

            def key(place: int = place) -> Array:
                return jax.random.fold_in(jax.random.fold_in(call.key(), round_), place)

            results = run_aten(node, values, key, call.training)
            values.update({v.number: a for v, a in zip(node.results, results, strict=True)})
        return tuple(values[v.number] for v in body.outputs)

    return run


@aten("podrun.for_loop.default", kind="Loop")
def repeated_body(
    call: Call, count: int, body: Subgraph, inputs: Sequence[Array], outer: Sequence[Array]
) -> tuple[Array, ...]:
    """The results of a body after ``count`` rounds, each of which takes the results of the previous one."""
    run = _runner(call, body, outer)

    def round_(index: Array, values: tuple[Array, ...]) -> tuple[Array, ...]:
        return run(values, index)

    return tuple(lax.fori_loop(0, count, round_, tuple(inputs)))


Branch = tuple[Subgraph, Sequence[Array], Sequence[Array]]
"""A body, its inputs and the outer values that it reads."""


@aten("podrun.cond.default", kind="If")
def chosen_body(call: Call, condition: Array, then: Branch, otherwise: Branch) -> tuple[Array, ...]:
    """The results of one of two bodies."""

    def branch(taken: Branch, place: int) -> Callable[[], tuple[Array, ...]]:
        body, inputs, outer = taken
        return lambda: _runner(call, body, outer)(inputs, place)

    return tuple(lax.cond(condition.reshape(()) != 0, branch(then, 0), branch(otherwise, 1)))


aten_expressions(
    {
        "Nop": {
            "podrun.nop.default": lambda call, x: x,
        },
        "Identity": {
            "podrun.recomputation_checkpoint.default": lambda call, x: x,
            # x; the proportion is for the planner of the operator that made it.
            "podrun.set_available_memory.default": lambda call, x, proportion: x,
        },
        "MatMul": {
            # ``a @ b``; computing it in parts changes only rounding.
            "podrun.serialized_matmul.default": lambda call, a, b, mode, factor, keep_precision: product(
                a, b
            ),
        },
        "PrintTensor": {
            # A session prints the tensors of its main graph (`podrun.poptorch.compile.session_model`); a loop's body
            # prints nothing.
            "podrun.print_tensor.default": lambda call, x, *settings: x,
        },
    }
)
