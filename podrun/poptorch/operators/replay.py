"""Runs a captured graph with the table's functions, as one traceable JAX function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.poptorch.capture.graph import Argument, CapturedGraph, GraphNode, GraphValue
from podrun.poptorch.errors import Error
from podrun.poptorch.operators.table import Array, Call, dtype_named, find


def replay(
    graph: CapturedGraph,
    parameters: Mapping[str, Array],
    inputs: Mapping[int, Array],
    key: Any = None,
    training: bool = False,
) -> tuple[list[Any], dict[str, Array]]:
    """What forward returned (leaves in order) and what parameters and buffers become."""
    values: dict[int, Array] = {}
    for name, value in graph.parameters.items():
        values[value.number] = jnp.asarray(parameters[name])
    for place, value in graph.inputs.items():
        values[value.number] = jnp.asarray(inputs[place])
    for number, (_, data) in graph.constants.items():
        values[number] = jnp.asarray(data)
    for place, node in enumerate(graph.nodes):
        results = run_node(node, values, functools.partial(jax.random.fold_in, key, place), training)
        values.update({value.number: made for value, made in zip(node.results, results, strict=True)})
    outputs = [values[each.number] if isinstance(each, GraphValue) else each for each in graph.outputs]
    return outputs, {name: values[value.number] for name, value in graph.updates.items()}


def run_node(
    node: GraphNode, values: Mapping[int, Array], key: Callable[[], Any], training: bool = False
) -> tuple[Array, ...]:
    """The results of one node. Raises `Error`, which names operator, module and line, if the table lacks it, or if
    what it gives has another shape than torch said."""
    operator = find(node.operator)
    if operator is None:
        raise Error(
            f"operator {node.operator} is not supported on the IPU (module '{node.origin.module}', "
            f"{node.origin.line})"
        )
    arguments = _resolved(node.arguments, values)
    keywords = {name: _resolved(each, values) for name, each in node.keywords.items()}
    if node.writes:
        made: Any = (_written(operator.function, node, arguments, keywords, key),)
    else:
        call = Call(node.results, key, training)
        made = operator.function(call, *arguments, **keywords)
        if node.item is not None:
            made = (made[node.item],)
    if not isinstance(made, (tuple, list)):
        made = (made,)
    return tuple(_checked(node, value, array) for value, array in zip(node.results, made, strict=False))


def _resolved(argument: Argument, values: Mapping[int, Array]) -> Any:
    if isinstance(argument, GraphValue):
        return values[argument.number]
    if isinstance(argument, tuple):
        return tuple(_resolved(each, values) for each in argument)
    return argument


def _checked(node: GraphNode, value: GraphValue, array: Array) -> Array:
    array = jnp.asarray(array)
    if tuple(array.shape) != value.shape:
        raise Error(
            f"{node.operator} gives shape {list(array.shape)} on the IPU and {list(value.shape)} in torch "
            f"(module '{node.origin.module}', {node.origin.line})"
        )
    array = array.astype(dtype_named(value.dtype))
    if not node.differentiable and jnp.issubdtype(array.dtype, jnp.floating):
        array = lax.stop_gradient(array)
    return array


def _written(
    function: Any,
    node: GraphNode,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    key: Callable[[], Any],
) -> Array:
    """The first argument with the second where the view lies."""
    base, part, *rest = arguments
    part = part.astype(base.dtype)
    name = node.operator.split(".")[1]
    if name in ("detach", "alias", "view", "_unsafe_view", "unsqueeze", "squeeze", "reshape"):
        return part.reshape(base.shape)
    if name == "select":
        return base.at[(slice(None),) * (rest[0] % base.ndim) + (rest[1],)].set(part)
    if name == "slice":
        defaults: tuple[Any, ...] = (0, None, None, 1)
        dim, start, end, step = [*rest, *defaults[len(rest) :]]
        return base.at[(slice(None),) * (dim % base.ndim) + (slice(start, end, step),)].set(part)
    places = _places_of_view(function, node, base.shape, part.shape, rest, keywords, key)
    return base.reshape(-1).at[places.reshape(-1)].set(part.reshape(-1)).reshape(base.shape)


def _places_of_view(
    function: Any,
    node: GraphNode,
    shape: tuple[int, ...],
    part: tuple[int, ...],
    rest: Sequence[Any],
    keywords: Mapping[str, Any],
    key: Callable[[], Any],
) -> np.ndarray:
    """Which element of the base each element of the view is."""
    numbers = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    call = Call((GraphValue(0, part, "int32"),), key)
    with jax.ensure_compile_time_eval():
        seen = function(call, jnp.asarray(numbers), *rest, **keywords)
        return np.asarray(seen if node.item is None else seen[node.item])
