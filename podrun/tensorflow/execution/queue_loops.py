"""Loops of a program that take from infeeds or give to outfeeds: which there are, and how often they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from podrun.core.quick_dataclass import dataclass
from podrun.tensorflow.capture.markers import REFERENCES, marked
from podrun.tensorflow.capture.program_graphs import FunctionGraph
from podrun.tensorflow.graph.importer import function_graph


def origin(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor itself, behind operations that change nothing."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


@dataclass(frozen=True, slots=True)
class Counter:
    """A comparison of a loop's condition: a counter is less than a bound. ``place``: the counter's position among the
    loop's inputs; an iteration adds ``step`` to it. ``bound``: ("input", a position) or ("number", the number).
    """

    place: int
    bound: tuple[str, int]
    step: int = 1

    def iterations(self, starts: Sequence[Any]) -> int:
        """The number of iterations in which it holds. ``starts``: the values of the loop's inputs when it begins."""
        kind, value = self.bound
        left = (int(starts[value]) if kind == "input" else value) - int(starts[self.place])
        return max(-(-left // self.step), 0)


@dataclass(frozen=True, slots=True)
class MainLoop:
    """A loop that uses queues. ``inputs``: tensors of the graph around it. ``counted``: the comparisons for all of
    which it goes on; None if it asks for something else.
    """

    operation: tf.Operation
    body: FunctionGraph
    condition: FunctionGraph
    inputs: Sequence[tf.Tensor]
    effects: Sequence[tf.Operation]
    first: int
    """The position of the operation's first output among the inputs."""
    counted: Sequence[Counter] | None = None


def loop_of(graph: FunctionGraph, operation: tf.Operation) -> MainLoop | None:
    """The loop that an operation is, if it is one that uses queues."""
    facts = marked(operation)
    if facts is not None and facts["kind"] == "repeat":
        traced = REFERENCES[facts["loop"]]
        body, condition = traced.body_graph, traced.condition_graph
        effects, first = traced.effects, traced.first
    elif operation.type in ("While", "StatelessWhile"):
        body = function_graph(graph, operation.get_attr("body").name)
        condition = function_graph(graph, operation.get_attr("cond").name)
        effects, first = body.control_outputs, 0
    else:
        return None
    if not uses_queues(body):
        return None
    loop = MainLoop(operation, body, condition, list(operation.inputs), effects, first)
    return replace(loop, counted=_counters(loop))


def main_loop(graph: FunctionGraph) -> MainLoop | None:
    """The loop that uses queues, if the graph has one."""
    loops = (loop_of(graph, operation) for operation in graph.get_operations())
    return next((loop for loop in loops if loop is not None), None)


def uses_queues(graph: FunctionGraph, *, reached: bool = True) -> bool:
    """Whether a graph, what it calls, a branch or a loop in it takes from an infeed or gives to an outfeed.
    ``reached``: whether every iteration reaches it, so that what it prints counts too.
    """
    for operation in graph.get_operations():
        facts = marked(operation)
        kind = None if facts is None else facts["kind"]
        if kind in ("dequeue", "enqueue") or (kind == "print" and reached):
            return True
        branches = _branches(graph, operation)
        if any(uses_queues(branch, reached=False) for branch in branches):
            return True
        if facts is not None and kind == "repeat":
            inner = REFERENCES[facts["loop"]].body_graph
        elif operation.type in ("PartitionedCall", "StatefulPartitionedCall"):
            inner = function_graph(graph, operation.get_attr("f").name)
        elif operation.type in ("While", "StatelessWhile"):
            inner = function_graph(graph, operation.get_attr("body").name)
        else:
            continue
        if uses_queues(inner, reached=reached):
            return True
    return False


def _branches(graph: FunctionGraph, operation: tf.Operation) -> list[FunctionGraph]:
    """The branches of an operation that chooses one; none for any other operation."""
    if operation.type in ("If", "StatelessIf"):
        chosen = [operation.get_attr(name) for name in ("then_branch", "else_branch")]
    else:
        chosen = operation.get_attr("branches") if operation.type in ("Case", "StatelessCase") else []
    return [function_graph(graph, function.name) for function in chosen]


def _counters(loop: MainLoop) -> Sequence[Counter] | None:
    """What a loop's condition compares; None for a condition that does not count."""
    places = {tensor.name: i for i, tensor in enumerate(loop.condition.inputs)}
    counters: list[Counter] = []
    waiting = [loop.condition.outputs[0]]
    while waiting:
        operation = waiting.pop().op
        if operation.type in ("Identity", "LogicalAnd"):
            waiting += list(operation.inputs)
            continue
        place = places.get(operation.inputs[0].name) if operation.type == "Less" else None
        step = None if place is None else _growth(loop, place)
        if place is None or step is None:
            return None
        limit = operation.inputs[1]
        value = tf.get_static_value(limit)
        if (
            limit.name in places
            and loop.body.outputs[places[limit.name]] is loop.body.inputs[places[limit.name]]
        ):
            counters.append(Counter(place, ("input", places[limit.name]), step))
        elif value is not None:
            counters.append(Counter(place, ("number", int(value)), step))
        else:
            return None
    return counters


def _growth(loop: MainLoop, place: int) -> int | None:
    """By how much an iteration of a loop increases a value; None if that is not a known positive number."""
    operation = origin(loop.body.outputs[place]).op
    if operation.type not in ("Add", "AddV2"):
        return None
    for counter, step in (operation.inputs, reversed(operation.inputs)):
        if origin(counter) is not loop.body.inputs[place]:
            continue
        value = tf.get_static_value(step)
        inside = [i for i, tensor in enumerate(loop.body.inputs) if tensor is origin(step)]
        if value is None and inside:
            value = tf.get_static_value(loop.inputs[inside[0]])
        return int(value) if value is not None and value > 0 and value == int(value) else None
    return None
