"""Loops on the device: ``repeat`` and ``while_loop``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from podrun.core.quick_dataclass import dataclass
from podrun.private_apis.tensorflow import symbol
from podrun.tensorflow.capture.markers import mark, reference
from podrun.tensorflow.capture.program_graphs import (
    FunctionGraph,
    IpuGraph,
    innermost_program,
    parameter,
    takes,
    trace,
)
from podrun.tensorflow.sdk.ipu_infeed_queue import IPUInfeedQueue

_FuncGraph = symbol("framework.func_graph.FuncGraph")
LoopResults: TypeAlias = "tf.Operation | tf.Tensor | list[tf.Tensor]"
"""The values of a loop after it: an operation that runs it if it has none, one by itself, or several."""
_OUTPUTS = "The loop body must return zero or more Tensor values followed by zero or more Operations."


@dataclass(frozen=True, slots=True)
class DeviceLoop:
    """A loop in a program. ``effects``: operations that each iteration runs besides what its values need; ``first``:
    the position of the program's own values among the body's inputs.
    """

    body_graph: FunctionGraph
    condition_graph: FunctionGraph
    effects: Sequence[tf.Operation]
    first: int = 2


def repeat_loop(
    n: int | tf.Tensor,
    body: Callable[..., Any],
    inputs: Sequence[tf.Tensor] | tf.Tensor | None = None,
    infeed_queue: IPUInfeedQueue | None = None,
    use_while_v1: bool = True,
) -> LoopResults:
    """Run ``body`` ``n`` times. Returns the loop's values after it: an operation, a tensor or a list."""
    return _loop(None, body, inputs, infeed_queue, n)


def while_loop(
    condition: Callable[..., Any],
    body: Callable[..., Any],
    inputs: Sequence[tf.Tensor] | tf.Tensor | None = None,
    infeed_queue: IPUInfeedQueue | None = None,
    maximum_iterations: int | tf.Tensor | None = None,
    use_while_v1: bool = True,
) -> LoopResults:
    """Run ``body`` while ``condition`` holds for the loop's values."""
    return _loop(condition, body, inputs, infeed_queue, maximum_iterations)


def _loop(
    condition: Callable[..., Any] | None,
    body: Callable[..., Any],
    inputs: Sequence[tf.Tensor] | tf.Tensor | None,
    queue: IPUInfeedQueue | None,
    limit: int | tf.Tensor | None,
) -> LoopResults:
    outer = innermost_program()
    if outer is None:
        raise ValueError("ipu.loops can only be used in a program: ipu_compiler.compile, or IPUStrategy.run.")
    values = [tf.convert_to_tensor(v) for v in _as_list(inputs)]
    _check_calls(condition, body, len(values), queue)
    bound = tf.cast(tf.convert_to_tensor(2**31 - 1 if limit is None else limit), tf.int32)
    start = tf.constant(0, tf.int32)
    graph, results, effects = _traced_body(outer, body, [start, bound, *values], queue)
    if queue is not None and not queue.dequeued:
        raise ValueError("The infeed queue has not been dequeued.")
    captured = [tensor for tensor, _ in graph.captures]
    test = _condition(condition, graph, len(values))
    for tensor in test.external_captures:
        if all(tensor is not c for c in captured):
            captured.append(tensor)
    loop = DeviceLoop(graph, test, effects)
    outcome = mark(
        "repeat",
        [start, bound, *values, *captured],
        [tf.TensorSpec(t.shape, t.dtype) for t in results],
        stateful=True,
        name="repeat",
        loop=reference(loop),
    ) if results else _without_values([start, bound, *values, *captured], loop)  # fmt: skip
    if not results:
        return outcome
    return outcome[0] if len(outcome) == 1 else list(outcome)


def _without_values(inputs: Sequence[tf.Tensor], loop: DeviceLoop) -> tf.Operation:
    done = mark("repeat", inputs, [], stateful=True, name="repeat", loop=reference(loop))
    return done if isinstance(done, tf.Operation) else done.op


def _alone(element: Any) -> Any:
    """The element; a dictionary that is all of it without the tuple around it: it gives keyword arguments."""
    alone = isinstance(element, (tuple, list)) and len(element) == 1 and isinstance(element[0], dict)
    return element[0] if alone else element


def _as_list(inputs: Sequence[tf.Tensor] | tf.Tensor | None) -> list[tf.Tensor]:
    if inputs is None:
        return []
    return list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]


def _check_calls(
    condition: Callable[..., Any] | None, body: Callable[..., Any], count: int, queue: IPUInfeedQueue | None
) -> None:
    total, names = count, []
    if queue is not None:
        structure = _alone(queue.structure)
        if isinstance(structure, dict):
            names = list(structure)
        else:
            total += len(structure) if isinstance(structure, (tuple, list)) else 1
    wrong = takes(body, total, names)
    if wrong:
        raise TypeError(
            f"Supplied loop body function cannot be called with the specified inputs: {total} arguments were given. "
            f"{wrong}"
        )
    wrong = None if condition is None else takes(condition, count)
    if wrong:
        raise TypeError(
            f"Supplied loop condition function cannot be called with the specified inputs. {wrong}"
        )


def _traced_body(
    outer: IpuGraph, body: Callable[..., Any], start: Sequence[tf.Tensor], queue: IPUInfeedQueue | None
) -> tuple[IpuGraph, list[tf.Tensor], list[tf.Operation]]:
    graph = IpuGraph("loop_body", outer.ordinal, automatic=outer.automatic)
    parameters = [parameter(graph, t, f"loop_{i}") for i, t in enumerate(start)]

    def step(*own: tf.Tensor) -> Any:
        if queue is None:
            return body(*own)
        element = _alone(queue._dequeue())
        if isinstance(element, dict):
            return body(*own, **element)
        return body(*own, *(element if isinstance(element, (tuple, list)) else [element]))

    outcome = trace(graph, step, parameters[2:])
    flat = [r for r in tf.nest.flatten(outcome) if r is not None]
    tensors = [r for r in flat if isinstance(r, tf.Tensor)]
    effects = [r for r in flat if isinstance(r, tf.Operation)]
    if len(tensors) + len(effects) != len(flat) or (
        flat[: len(tensors)] != tensors and any(a is not b for a, b in zip(flat, tensors, strict=False))
    ):
        raise ValueError(_OUTPUTS)
    _check_types(start[2:], tensors)
    with graph.as_default():
        counter = parameters[0] + 1
    graph.outputs = [counter, parameters[1], *tensors, *(inner for _, inner in graph.captures)]
    for inner in (inner for _, inner in graph.captures):
        if all(inner is not t for t in graph.inputs):
            graph.inputs.append(inner)
    graph.control_outputs = [*effects, *graph.control_outputs]  # A loop in a step is read with these.
    return graph, tensors, list(graph.control_outputs)


def _check_types(start: Sequence[tf.Tensor], results: Sequence[tf.Tensor]) -> None:
    before, after = [t.dtype for t in start], [t.dtype for t in results]
    if before != after:
        raise TypeError(f"Mismatch between input types and output types for loop body: {before} vs {after}")


def _condition(condition: Callable[..., Any] | None, body: FunctionGraph, count: int) -> FunctionGraph:
    """The graph of the condition, with the body's inputs."""
    graph: FunctionGraph = _FuncGraph("loop_condition")
    parameters = [parameter(graph, t, f"loop_{i}") for i, t in enumerate(body.inputs)]
    with graph.as_default():
        holds = tf.less(parameters[0], parameters[1])
        if condition is not None:
            holds = tf.logical_and(holds, tf.convert_to_tensor(condition(*parameters[2 : 2 + count])))
    graph.outputs = [holds]
    return graph
