"""Loops, branches and derivatives: operations with graphs among their attributes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.core.errors import UnsupportedError
from podrun.core.quick_dataclass import dataclass
from podrun.numerics.precision import is_float
from podrun.runtime.graph import Node, OperatorGraph, subgraphs
from podrun.runtime.operators import Context
from podrun.tensorflow.operators.table import USER_OPERATOR, Array, computes, tracing_gradients

ArrayTuple = tuple[Array, ...]
"""Values that go through a loop, a branch or a derivative together."""
MOST_COUNTED = 100_000
"""Most iterations of a loop that are counted while the program is compiled."""
MOST_GUARDED = 1_000
"""Most iterations of a loop that ends by its data, but has a limit, and is differentiable because of it."""


@computes("Differentiate", attributes="graph targets sources incoming", random=True)
def _differentiate(ctx: Context, node: Node, *inputs: Array) -> tuple[Array, ...]:
    """Gradients of the targets with respect to the sources, then what the forward pass computes for others. Where only
    shapes are asked for, the forward pass tells them.
    """
    count, targets = node["sources"], node["targets"]
    sources = [jnp.asarray(x) for x in inputs[:count]]

    def forward(*values: Array) -> tuple[list[Array], list[Array]]:
        with tracing_gradients():
            results = [jnp.asarray(r) for r in ctx.run(node["graph"], values, by_name=True)]
        return results[:targets], results[targets:]

    incoming = dict(zip(node["incoming"], inputs[count:], strict=True))
    if ctx.shapes_only and _asks_forward_only(node["graph"], sources):
        values, others = forward(*sources)
        if _seeds_fit(values, incoming):
            return (*(jnp.zeros_like(source) for source in sources), *others)
    with _counting_loops():
        values, backward, others = jax.vjp(forward, *sources, has_aux=True)
        seeds = [
            jnp.asarray(incoming[i], v.dtype) if i in incoming else jnp.ones_like(v)
            for i, v in enumerate(values)
        ]
        gradients = backward(seeds)
    return (*gradients, *others)


def _asks_forward_only(graph: OperatorGraph, sources: Sequence[Array]) -> bool:
    """Whether the gradients of a graph have the types and shapes of its sources, and the backward pass asks for nothing
    that the forward pass does not: it has neither loops nor branches nor gradients of the program's own. A source whose
    value is known would be known in the forward pass, which it is not while JAX differentiates.
    """
    return all(isinstance(s, jax.core.Tracer) and is_float(s) for s in sources) and not any(
        node.op_type in _OWN_GRADIENTS or next(subgraphs(node), None) for node in graph.nodes
    )


_OWN_GRADIENTS = ("CustomGradient", USER_OPERATOR)


def _seeds_fit(values: Sequence[Array], incoming: Mapping[int, Array]) -> bool:
    """Whether gradients of these targets can begin with what comes in."""
    return all(
        is_float(v) and (i not in incoming or incoming[i].shape == v.shape) for i, v in enumerate(values)
    )


_UNCOUNTED: ContextVar[list[str] | None] = ContextVar("_UNCOUNTED", default=None)
"""While gradients are traced, the loops that run an unknown number of times."""


@contextlib.contextmanager
def _counting_loops() -> Iterator[None]:
    """UnsupportedError, instead of JAX's, for loops whose iterations cannot be counted and are differentiated."""
    loops: list[str] = []
    token = _UNCOUNTED.set(loops)
    try:
        yield
    except ValueError as error:
        if not loops:
            raise
        names = ", ".join(f"'{name.partition('#')[0]}'" for name in loops)
        raise UnsupportedError(
            f"a gradient passes through the loop {names}, of which it is not known how often it runs",
            hint=f"Give it a limit of at most {MOST_GUARDED} iterations: tf.while_loop(..., maximum_iterations=100), "
            "or tf.autograph.experimental.set_loop_options(maximum_iterations=100) as the first line of its body.",
        ) from error
    finally:
        _UNCOUNTED.reset(token)


@computes("CustomGradient", attributes="backward positions", random=True)
def _custom_gradient(ctx: Context, node: Node, *inputs: Array) -> tuple[Array, ...]:
    """The inputs. The gradients of those at ``positions`` are what the program's own function makes of the incoming
    ones, which it may clip or compare; the others have none.
    """
    graph, positions = node["backward"], node["positions"]
    if graph is None or isinstance(graph, str):
        return _not_differentiated(graph, [jnp.asarray(x) for x in inputs])
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _not_differentiated(reason: str | None, values: list[Array]) -> ArrayTuple:
    """The values. UnsupportedError where a gradient passes through them: for a reason, or of too high an order."""
    return tuple(values)


def _refuse_derivative(reason: str | None, kept: None, incoming: ArrayTuple) -> tuple[Array, ...]:
    if reason is not None:
        raise UnsupportedError(
            reason, hint="Let the gradient function read only what its own function computes or takes."
        )
    raise UnsupportedError(
        "A program differentiates a function with a gradient of its own (tf.custom_gradient) too often.",
        hint="Write the derivative of higher order with operations of TensorFlow.",
    )


_not_differentiated.defvjp(lambda reason, values: (tuple(values), None), _refuse_derivative)


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

    trips, exact = LoopCount(ctx, node["condition"], node["body"], demands=False).trips()
    uncounted = _UNCOUNTED.get()
    if trips is None and (uncounted is not None or ctx.training):
        trips, exact = LoopCount(ctx, node["condition"], node["body"], demands=True).trips()
        if trips is None and uncounted is not None:
            uncounted.append(node.label)
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


@dataclass(frozen=True, slots=True)
class LoopCount:
    """How a loop is counted. ``demands``: whether values that may change from run to run are fixed in the program,
    which is compiled again for others.
    """

    ctx: Context
    condition: OperatorGraph
    body: OperatorGraph
    demands: bool

    def trips(self) -> tuple[int | None, bool]:
        """How often the loop runs at most, by the comparisons of a counter with a limit in its condition, and whether
        it runs so often: no other test ends it. None if that is not known.
        """
        makers = _makers(self.condition)
        limits: list[int] = []
        exact, waiting = True, [self.condition.outputs[0]]
        while waiting:
            test = makers.get(waiting.pop())
            if test is not None and test.op_type == "LogicalAnd":
                waiting += list(test.inputs)
                continue
            if test is not None and test.op_type == "Branch" and _ends(test["branches"][0]):
                waiting.append(
                    test.inputs[0]
                )  # A break: the loop ends at the latest when the choice is false.
                exact = False
                continue
            count = None if test is None else self._count(test)
            exact = exact and count is not None
            limits += [] if count is None else [count]
        trips = min(limits) if limits else None
        if trips is None or trips > (MOST_COUNTED if exact else MOST_GUARDED):
            return None, False
        return trips, exact

    def _count(self, test: Node) -> int | None:
        """After how many iterations a comparison is false; None if it does not compare a counter with a limit."""
        if test.op_type not in _COMPARISONS:
            return None
        compares = _COMPARISONS[test.op_type]
        first, second = test.inputs
        orders: list[tuple[str, str, Comparison]] = [(first, second, compares)]
        orders.append((second, first, lambda a, b: compares(b, a)))
        for counter, limit, holds in orders:
            if counter not in self.condition.inputs:
                continue
            place = self.condition.inputs.index(counter)
            end, growth, start = self._value(self.condition, limit), self._growth(place), self._start(place)
            if end is not None and growth is not None and start is not None and start.size == 1:
                return _counted(end.reshape(()), growth.reshape(()), start.reshape(()), holds)
        return None

    def _start(self, place: int) -> np.ndarray | None:
        """The value of one of the loop's inputs when it begins, if it is known."""
        value = self.ctx.known(place)
        if value is None and self.demands:
            with contextlib.suppress(UnsupportedError):
                return self.ctx.constant(place)
        return value

    def _value(self, graph: OperatorGraph, name: str) -> np.ndarray | None:
        """A value in the condition or the body that is the same in all iterations, if it is known."""
        if name in graph.inputs:
            place = graph.inputs.index(name)
            return self._start(place) if self.body.outputs[place] == self.body.inputs[place] else None
        maker = _makers(graph).get(name)
        if maker is not None:
            return np.asarray(maker["value"]) if maker.op_type == "Const" else None
        outer = self.ctx.environment.get(name)
        return np.asarray(outer.known) if outer is not None and outer.at_hand else None

    def _growth(self, place: int) -> np.ndarray | None:
        """What an iteration adds to one of the loop's values, if that is always the same and known."""
        maker = _makers(self.body).get(self.body.outputs[place])
        name = self.body.inputs[place]
        if maker is None or maker.op_type not in ("AddV2", "Add", "Sub") or name not in maker.inputs:
            return None
        first, second = maker.inputs
        if maker.op_type == "Sub":
            step = self._value(self.body, second) if first == name else None
            return None if step is None else np.negative(step)
        return self._value(self.body, second if first == name else first)


Comparison: TypeAlias = Callable[[float, float], bool]
"""Whether a loop goes on with a counter and a limit."""
_COMPARISONS: dict[str, Comparison] = {
    "Less": lambda a, b: a < b,
    "LessEqual": lambda a, b: a <= b,
    "Greater": lambda a, b: a > b,
    "GreaterEqual": lambda a, b: a >= b,
}


def _ends(branch: OperatorGraph) -> bool:
    """Whether a branch returns the constant False."""
    maker = _makers(branch).get(branch.outputs[0])
    return maker is not None and maker.op_type == "Const" and not np.any(maker["value"])


def _makers(graph: OperatorGraph) -> dict[str, Node]:
    return {output: node for node in graph.nodes for output in node.outputs}


def _counted(limit: np.ndarray, growth: np.ndarray, start: np.ndarray, holds: Comparison) -> int | None:
    """How often ``growth`` is added to ``start``, as the device does, while ``holds`` compares it with ``limit``; None
    for more than is counted.
    """
    exact = start.dtype.kind in "iu"
    value, step, end = (
        cast("float", v.item() if exact else v.astype(start.dtype)) for v in (start, growth, limit)
    )
    for count in range(MOST_COUNTED + 1):
        if not holds(value, end):
            return count
        value = value + step
    return None
