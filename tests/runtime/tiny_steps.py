"""The tiny front end's own training step: operators for gradients, a sum over replicas, and new values of variables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from podrun.compiler.model_collectives import Combination, all_reduce
from podrun.runtime.graph import Model, Node
from podrun.runtime.operators import Context
from tests.runtime.tiny import FUNCTIONS, Network, TinyOperators, node_of


def error_gradient(ctx: Context, node: Node, y: Any, target: Any) -> Any:
    """Of `square_error`."""
    return y - target


def tanh_gradient(ctx: Context, node: Node, y: Any, of_result: Any) -> Any:
    """Of tanh, from its result."""
    return of_result * (1 - y * y)


def dense_gradient(ctx: Context, node: Node, x: Any, w: Any, of_result: Any) -> tuple[Any, Any, Any]:
    """Of a dense layer: with respect to its input, its weights and its bias."""
    return of_result @ w.T, x.T @ of_result, of_result.sum(0)


def sum_over_replicas(ctx: Context, node: Node, gradient: Any) -> Any:
    """The sum of all replicas' gradients: the same on each."""
    return all_reduce(gradient, Combination.ADD, (tuple(range(ctx.replicas)),))


def descend(ctx: Context, node: Node, variable: Any, gradient: Any) -> Any:
    """The variable's new value, which replaces it when the micro-batch is done."""
    ctx.state_update(0, 0)
    return variable - node["rate"] * gradient


OPERATORS = TinyOperators(
    {
        **FUNCTIONS,
        **{
            function.__name__: function
            for function in (error_gradient, tanh_gradient, dense_gradient, sum_over_replicas, descend)
        },
    }
)


def with_own_step(network: Network, rate: float, *, reduces: bool = True) -> Model:
    """The network's model with a step of its own. ``reduces``: False forgets the sum over replicas."""
    nodes, updates = network.nodes(), []
    last = network.layers - 1
    delta, place = "error_gradient", network.place(last)
    nodes.append(node_of(delta, [f"tanh:{last}", "target"], place=place))
    for i in reversed(range(network.layers)):
        back = network.place(i)
        back = replace(back, stage=2 * network.stages - 2 - (back.stage or 0)) if network.stages > 1 else back
        nodes.append(node_of(f"tanh_gradient:{i}", [f"tanh:{i}", delta], place=back))
        below = f"tanh:{i - 1}" if i else "x"
        results = (f"d{i}", f"dw{i}", f"db{i}")
        nodes.append(
            node_of(f"dense_gradient:{i}", [below, f"w{i}", f"tanh_gradient:{i}"], *results, place=back)
        )
        for variable, gradient in ((f"w{i}", f"dw{i}"), (f"b{i}", f"db{i}")):
            if reduces:
                nodes.append(node_of(f"sum_over_replicas:{variable}", [gradient], place=back))
                gradient = f"sum_over_replicas:{variable}"
            updates.append(f"{variable}/new")
            nodes.append(
                node_of(f"descend:{variable}", [variable, gradient], updates[-1], place=back, rate=rate)
            )
        delta = f"d{i}"
    model = network.model()
    stepped = frozenset(network.start()) - {"mean"}
    graph = model.graph.with_nodes(nodes)
    return replace(model, graph=graph, operators=OPERATORS, updates=tuple(updates), stepped=stepped)
