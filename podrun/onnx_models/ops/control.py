"""Control flow (If, Loop, Scan, and PopART's call). What it carries may be sequences and optionals, too.

Decisions that are known while tracing are made while tracing: an If with a known condition is its branch, a Loop that
no data can end early is a ``lax.scan`` (and so has gradients). A Loop that data may end runs as a ``lax.scan`` of its
trip count whose later iterations change nothing if the trip count is known, else as a ``lax.while_loop``, which has no
gradients.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.core.errors import UnsupportedError
from podrun.onnx_models.ops.common import Array, axis_in
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, operator
from podrun.onnx_models.ops.sdk import called
from podrun.runtime.graph import Node, OperatorGraph
from podrun.runtime.operators import Context

_VERSIONS = (1, 11, 13, 16, 19, 21, 23, 24, 25)


@operator(ONNX, "If", since=_VERSIONS)
def if_(ctx: Context, node: Node, condition: Array) -> tuple[Any, ...]:
    """The outputs of ``then_branch`` if the boolean scalar holds, else of ``else_branch`` (ONNX If).

    Unless the condition is known while tracing both branches must give equal shapes and types. Under
    ``vmap`` with a condition per replica both are computed and one is selected.
    """
    branches = (node["else_branch"], node["then_branch"])
    known = ctx.known(0)
    if known is not None:
        return ctx.run(branches[int(bool(known.reshape(())))], ())
    shapes = [jax.eval_shape(lambda b=b: _arrays(ctx.run(b, ()))) for b in branches]
    if _form(shapes[0]) != _form(shapes[1]):
        return ctx.run(branches[int(bool(ctx.constant(0).reshape(())))], ())
    chosen = lax.cond(
        condition.reshape(()),
        lambda: _arrays(ctx.run(branches[1], ())),
        lambda: _arrays(ctx.run(branches[0], ())),
    )
    return tuple(chosen)


def _arrays(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Values as JAX arrays, constants too."""
    return tuple(jnp.asarray(v) if isinstance(v, np.ndarray) else v for v in values)


def _form(shapes: object) -> Any:
    leaves, tree = jax.tree.flatten(shapes)
    return [(leaf.shape, leaf.dtype) for leaf in leaves], tree


def _trips(ctx: Context, count: Array | None) -> int | None:
    """The trip count, if it is given and known while tracing without fixing anything."""
    if count is None:
        return None
    known = ctx.known(0)
    return None if known is None else int(known.reshape(()))


@operator(ONNX, "Loop", since=_VERSIONS)
def onnx_loop(
    ctx: Context, node: Node, count: Array, condition: Array, *carried: tuple[Any, ...]
) -> tuple[Any, ...]:
    """``body(i, condition, *carried)`` up to ``count`` times while its condition holds (ONNX Loop).

    Outputs: the carried values at the end, then for each further output of the body its values stacked.
    """
    body = node["body"]
    trips = _trips(ctx, count)
    carried = tuple(carried)
    endless = _always(ctx, body, condition, carried)
    shapes_stay = endless is not None and _stays(ctx, body, condition, carried)
    stacked = len(body.outputs) - 1 - len(carried)
    if shapes_stay and trips is not None and (endless or stacked == 0):
        return _scanned(ctx, body, trips, condition, carried, bool(endless))
    if shapes_stay and stacked == 0:
        return _while(ctx, body, count, condition, carried)
    if shapes_stay and endless and count is not None:
        return _scanned(ctx, body, int(ctx.constant(0).reshape(())), condition, carried, True)
    return _unrolled(ctx, node, count, condition, carried)


def _initial(condition: Array | None) -> Array:
    return jnp.ones((), bool) if condition is None else condition.reshape(())


def _always(
    ctx: Context, body: OperatorGraph, condition: Array | None, carried: tuple[Any, ...]
) -> bool | None:
    """True iff the body's condition is a constant true, or the loop's own passed on and known; None: cannot tell."""
    if any(isinstance(c, tuple) or c is None for c in carried):
        return None
    start = True if condition is None else None
    if start is None:
        known = ctx.known(1)
        start = None if known is None else bool(known.reshape(()))
    makers = {o: n for n in body.nodes for o in n.outputs}
    name = body.outputs[0]
    while name in makers and makers[name].op_type == "Identity":
        name = makers[name].inputs[0]
    if name == body.inputs[1]:
        return bool(start)
    value = body.initializers.get(name)
    if name in makers and makers[name].op_type == "Constant":
        value = makers[name].get("value")
    return bool(start) and value is not None and bool(np.asarray(value).reshape(()))


def _counter(ctx: Context) -> Any:
    return jnp.int64 if ctx.x64 else jnp.int32


def _step(
    ctx: Context, body: OperatorGraph, i: Array, condition: Array, carried: tuple[Any, ...]
) -> tuple[Array, tuple[Any, ...], tuple[Any, ...]]:
    """One run of the body: new condition, new carried values, values to stack."""
    results = _arrays(ctx.run(body, (i, condition, *carried), iteration=i))
    return results[0].reshape(()), results[1 : 1 + len(carried)], results[1 + len(carried) :]


def _stays(ctx: Context, body: OperatorGraph, condition: Array | None, carried: tuple[Any, ...]) -> bool:
    """True iff one run of the body keeps the shapes and types of the carried values."""

    def once(carried: tuple[Any, ...]) -> Any:
        return _step(ctx, body, jnp.zeros((), _counter(ctx)), _initial(condition), carried)[1]

    try:
        after = jax.eval_shape(once, carried)
    except (UnsupportedError, jax.errors.JAXTypeError):
        return False
    return bool(_form(after) == _form(jax.eval_shape(lambda: carried)))


def _scanned(
    ctx: Context,
    body: OperatorGraph,
    trips: int,
    condition: Array | None,
    carried: tuple[Any, ...],
    endless: bool,
) -> tuple[Any, ...]:
    def step(state: Any, i: Array) -> Any:
        running, values = state
        continues, new, stacked = _step(ctx, body, i, running, values)
        if endless:
            return (running, new), stacked
        kept = jax.tree.map(lambda a, b: jnp.where(running, a, b), new, values)
        return (running & continues, kept), stacked

    state = (_initial(condition), carried)
    (_, values), stacked = lax.scan(step, state, jnp.arange(trips, dtype=_counter(ctx)))
    return (*values, *stacked)


def _while(
    ctx: Context, body: OperatorGraph, count: Array | None, condition: Array | None, carried: tuple[Any, ...]
) -> tuple[Any, ...]:
    def more(state: Any) -> Array:
        i, running, _ = state
        return running if count is None else running & (i < count.reshape(()).astype(i.dtype))

    def step(state: Any) -> Any:
        i, running, values = state
        continues, new, _ = _step(ctx, body, i, running, values)
        return i + 1, continues, new

    state = (jnp.zeros((), _counter(ctx)), _initial(condition), carried)
    return tuple(lax.while_loop(more, step, state)[2])


MOST_TRIPS = 10_000
"""Most iterations of a loop that is unrolled while tracing."""


def _unrolled(
    ctx: Context, node: Node, count: Array | None, condition: Array | None, carried: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The loop written out, for bodies that change shapes or carry sequences; its end must be known while tracing."""
    body = node["body"]
    trips = MOST_TRIPS if count is None else int(ctx.constant(0).reshape(()))
    running = True if condition is None else bool(ctx.constant(1).reshape(()))
    stacks: list[list[Any]] = [[] for _ in range(len(body.outputs) - 1 - len(carried))]
    values: tuple[Any, ...] = carried
    index = 0
    while running and index < trips:
        counter = np.asarray(index, np.int64)
        results = ctx.run(body, (counter, np.asarray(running), *values), iteration=index)
        known = ctx.static(results[0])
        if known is None:
            raise UnsupportedError(
                f"{node.describe()} ends when data say so, and its outputs' shapes depend on when"
            )
        running = bool(known.reshape(()))
        values = results[1 : 1 + len(carried)]
        for stack, value in zip(stacks, results[1 + len(carried) :], strict=True):
            stack.append(value)
        index += 1
        if index == MOST_TRIPS:
            raise UnsupportedError(
                f"{node.describe()} runs for more than {MOST_TRIPS} iterations while tracing"
            )
    return (
        *values,
        *(
            jnp.stack(_arrays(tuple(s))) if s else _nothing(ctx, body, k, carried)
            for k, s in enumerate(stacks)
        ),
    )


def _nothing(ctx: Context, body: OperatorGraph, index: int, carried: tuple[Any, ...]) -> Array:
    """A stack of no values, of the shape and type that the body would make."""

    def once(carried: tuple[Any, ...]) -> Any:
        return _step(ctx, body, jnp.zeros((), _counter(ctx)), jnp.ones((), bool), carried)[2][index]

    element = jax.eval_shape(once, carried)
    return jnp.zeros((0, *element.shape), element.dtype)


@operator(ONNX, "Scan", since=(8,))
def scan_batched(ctx: Context, node: Node, lengths: Array, *inputs: Array) -> tuple[Array, ...]:
    """`onnx_scan` for each element of a leading batch axis (ONNX Scan 8, whose sequence axis is 1)."""
    if lengths is not None:
        raise UnsupportedError(f"{node.describe()} gives sequence lengths, which make its shapes dynamic")
    directions = node.get("directions") or (0,) * node["num_scan_inputs"]

    def each(*parts: Array) -> tuple[Array, ...]:
        return _scan(ctx, node, parts, directions, (), (), ())

    return jax.vmap(each)(*inputs)


@operator(ONNX, "Scan", since=(9, 11, 16, 19, 21, 23, 24, 25))
def onnx_scan(ctx: Context, node: Node, *inputs: Array) -> tuple[Array, ...]:
    """``body(*state, *elements)`` over the elements of the scan inputs in order (ONNX Scan).

    Outputs: the state at the end, then for each further output of the body its values stacked. The SDK's Scan puts
    them one after the other along ``scan_output_axes``, without a new axis; elements of vectors are vectors of one.
    """
    return _scan(
        ctx,
        node,
        inputs,
        node.get("scan_input_directions") or (),
        node.get("scan_input_axes") or (),
        node.get("scan_output_directions") or (),
        node.get("scan_output_axes") or (),
    )


def _scan(
    ctx: Context,
    node: Node,
    inputs: tuple[Array, ...],
    directions: Any,
    axes: Any,
    output_directions: Any,
    output_axes: Any,
) -> tuple[Array, ...]:
    body = node["body"]
    count = node["num_scan_inputs"]
    split = len(inputs) - count
    state, sequences = inputs[:split], list(inputs[split:])
    for k in range(count):
        axis = axis_in(axes[k], sequences[k].ndim) if axes else 0
        sequences[k] = jnp.moveaxis(sequences[k], axis, 0)
        if directions and directions[k]:
            sequences[k] = jnp.flip(sequences[k], 0)
    length = sequences[0].shape[0]
    if ctx.sdk is not None:
        sequences = [s if s.ndim > 1 else s[:, None] for s in sequences]

    def step(carry: Any, scanned: Any) -> Any:
        i, elements = scanned
        results = _arrays(ctx.run(body, (*carry, *elements), iteration=i))
        return results[:split], results[split:]

    final, stacked = lax.scan(step, tuple(state), (jnp.arange(length), tuple(sequences)))
    outputs = []
    for k, value in enumerate(stacked):
        value = jnp.flip(value, 0) if output_directions and output_directions[k] else value
        if ctx.sdk is not None and value.ndim > 1:
            axis = axis_in(output_axes[k], value.ndim - 1) if output_axes else 0
            joined = [d * length if a == axis else d for a, d in enumerate(value.shape[1:])]
            outputs.append(jnp.moveaxis(value, 0, axis).reshape(joined))
            continue
        axis = axis_in(output_axes[k], value.ndim) if output_axes else 0
        outputs.append(jnp.moveaxis(value, 0, axis))
    return (*final, *outputs)


@operator(GRAPHCORE, "Call")
def graphcore_call(ctx: Context, node: Node, *inputs: object) -> tuple[Any, ...]:
    """The outputs of the subgraph ``callee`` on the inputs (PopART Call).

    Tensors that the subgraph has from the graph around it (``addInputTensorFromParentGraph``) are inputs of it like
    others: the n-th is given by the call's n-th input, whichever that is.
    """
    callee = node["callee"]
    called(node, len(callee.inputs), len(callee.outputs))
    return ctx.run(callee, inputs)
