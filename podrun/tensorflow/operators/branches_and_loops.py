"""Loops, branches and derivatives: operations with graphs among their attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.numerics.precision import is_float
from podrun.runtime.graph import Node, OperatorGraph
from podrun.runtime.operators import Context
from podrun.tensorflow.operators.table import Array, computes, tracing_gradients

ArrayTuple = tuple[Array, ...]
"""Values that go through a loop, a branch or a derivative together."""
MOST_COUNTED = 100_000
"""Most iterations of a loop that are counted while the program is compiled."""
MOST_GUARDED = 1_000
"""Most iterations of a loop that ends by its data, but has a limit, and is differentiable because of it."""


@computes("Differentiate", attributes="graph targets sources incoming", random=True)
def _differentiate(ctx: Context, node: Node, *inputs: Array) -> tuple[Array, ...]:
    """Gradients of the targets with respect to the sources, then what the forward pass computes for others."""
    count, targets = node["sources"], node["targets"]
    sources = [jnp.asarray(x) for x in inputs[:count]]

    def forward(*values: Array) -> tuple[list[Array], list[Array]]:
        with tracing_gradients():
            results = [jnp.asarray(r) for r in ctx.run(node["graph"], values)]
        return results[:targets], results[targets:]

    values, backward, others = jax.vjp(forward, *sources, has_aux=True)
    incoming = dict(zip(node["incoming"], inputs[count:], strict=True))
    seeds = [
        jnp.asarray(incoming[i], v.dtype) if i in incoming else jnp.ones_like(v) for i, v in enumerate(values)
    ]
    gradients = backward(seeds)
    return (*gradients, *others)


@computes("CustomGradient", attributes="backward positions", random=True)
def _custom_gradient(ctx: Context, node: Node, *inputs: Array) -> tuple[Array, ...]:
    """The inputs. The gradients of those at ``positions`` are what the program's own function makes of the incoming
    ones, which it may clip or compare; the others have none.
    """
    graph, positions = node["backward"], node["positions"]
    tensors = {name: ctx.environment[name] for name in sorted(graph.captures())}
    outside = {name: jnp.asarray(tensor.operand) for name, tensor in tensors.items() if not tensor.at_hand}
    backward = replace(graph, inputs=(*graph.inputs, *outside))

    @jax.custom_vjp
    def same(values: ArrayTuple, read: ArrayTuple) -> ArrayTuple:
        return tuple(values)

    def forward(values: ArrayTuple, read: ArrayTuple) -> tuple[ArrayTuple, tuple[ArrayTuple, ArrayTuple]]:
        return tuple(values), (tuple(values), tuple(read))

    def pull(
        kept: tuple[ArrayTuple, ArrayTuple], incoming: ArrayTuple
    ) -> tuple[list[Array | None], list[None]]:
        values, read = kept
        own = [g if g.dtype == v.dtype else jnp.zeros_like(v) for g, v in zip(incoming, values, strict=True)]
        results = dict(zip(positions, ctx.run(backward, [*own, *read]), strict=True))
        gradients = [
            jnp.asarray(results[i]).astype(v.dtype) if i in results and is_float(v) else None
            for i, v in enumerate(values)
        ]
        return gradients, [None] * len(read)

    same.defvjp(forward, pull)
    return same([jnp.asarray(x) for x in inputs], list(outside.values()))


@computes("Branch", attributes="branches", random=True)
def _branch(ctx: Context, node: Node, choice: Array, *inputs: Array) -> tuple[Array, ...]:
    """The results of one of the graphs: number ``choice``, or the second if it is true."""
    known = ctx.known(0)
    if known is not None:
        return ctx.run(node["branches"][int(known)], inputs)

    def run(index: int) -> Callable[[], ArrayTuple]:
        return lambda: tuple(jnp.asarray(r) for r in ctx.run(node["branches"][index], inputs))

    results = [run(i) for i in range(len(node["branches"]))]
    return tuple(lax.switch(jnp.asarray(choice).astype(jnp.int32), results))


@computes("Loop", attributes="condition body", random=True)
def _loop(ctx: Context, node: Node, *inputs: Array) -> tuple[Array, ...]:
    """Run the body while the condition holds. A loop whose iterations can be counted is differentiable."""
    values = tuple(jnp.asarray(x) for x in inputs)

    def body(count: Array, state: ArrayTuple) -> ArrayTuple:
        results = ctx.run(node["body"], state, iteration=count)
        return tuple(jnp.asarray(r).astype(v.dtype) for r, v in zip(results, state, strict=True))

    def holds(state: ArrayTuple) -> Array:
        return jnp.asarray(ctx.run(node["condition"], state)[0])

    trips, exact = _trips(ctx, node, inputs)
    if trips is not None and not exact:

        def guarded(state: ArrayTuple, count: Array) -> tuple[ArrayTuple, None]:
            return lax.cond(holds(state), lambda s: body(count, s), lambda s: s, state), None

        return lax.scan(guarded, values, jnp.arange(trips))[0]
    if trips is not None:

        def scanned(state: ArrayTuple, count: Array) -> tuple[ArrayTuple, None]:
            return body(count, state), None

        return lax.scan(scanned, values, jnp.arange(trips))[0]

    def step(state: ArrayTuple) -> ArrayTuple:
        return (state[0] + 1, *body(state[0], state[1:]))

    return lax.while_loop(lambda state: holds(state[1:]), step, (jnp.zeros((), jnp.int32), *values))[1:]


def _trips(ctx: Context, node: Node, inputs: ArrayTuple) -> tuple[int | None, bool]:
    """How often a loop runs at most, by the comparisons of a counter with a constant in its condition, and whether it
    runs so often: no other test ends it. None if that is not known.
    """
    condition, body = node["condition"], node["body"]
    makers = {o: n for n in condition.nodes for o in n.outputs}
    limits: list[int] = []
    exact, waiting = True, [condition.outputs[0]]
    while waiting:
        test = makers.get(waiting.pop())
        if test is not None and test.op_type == "LogicalAnd":
            waiting += list(test.inputs)
            continue
        count = None if test is None else _count(ctx, makers, condition, body, test)
        exact = exact and count is not None
        limits += [] if count is None else [count]
    trips = min(limits) if limits else None
    if trips is None or trips > (MOST_COUNTED if exact else MOST_GUARDED):
        return None, False
    return trips, exact


def _count(
    ctx: Context, makers: Mapping[str, Node], condition: OperatorGraph, body: OperatorGraph, test: Node
) -> int | None:
    """After how many iterations a comparison is false; None if it does not compare a counter with a constant."""
    if test.op_type != "Less" or test.inputs[0] not in condition.inputs:
        return None
    place = condition.inputs.index(test.inputs[0])
    first, limit = ctx.known(place), _limit(ctx, makers, condition, body, test.inputs[1])
    if place not in _counters(body) or first is None or limit is None:
        return None
    return max(int(limit) - int(np.asarray(first)), 0)


def _limit(
    ctx: Context, makers: Mapping[str, Node], condition: OperatorGraph, body: OperatorGraph, name: str
) -> int | None:
    """The value with which a counter is compared."""
    if name in condition.inputs:
        place = condition.inputs.index(name)
        value = ctx.known(place)
        return (
            int(np.asarray(value))
            if value is not None and body.outputs[place] == body.inputs[place]
            else None
        )
    maker = makers.get(name)
    if maker is not None and maker.op_type == "Const":
        return int(np.asarray(maker["value"]))
    if maker is None:
        outer = ctx.environment.get(name)
        return int(np.asarray(outer.known)) if outer is not None and outer.at_hand else None
    return None


def _counters(body: OperatorGraph) -> set[int]:
    """The inputs of a loop's body that grow by one in each iteration."""
    makers = {o: n for n in body.nodes for o in n.outputs}
    counters = set()
    for place, (name, output) in enumerate(zip(body.inputs, body.outputs, strict=True)):
        maker = makers.get(output)
        if maker is None or maker.op_type not in ("AddV2", "Add") or name not in maker.inputs:
            continue
        other = makers.get(next((i for i in maker.inputs if i != name), ""))
        if other is not None and other.op_type == "Const" and np.all(np.asarray(other["value"]) == 1):
            counters.add(place)
    return counters
