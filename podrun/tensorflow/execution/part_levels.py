"""In which part of a program each operation is.

Parts have numbers: even ones are operations for the device between loops, odd ones a loop with queues, a call of a
function that has one, or operations of the host. An operation is in the first part in which all is there that it needs,
and loops are in the order of the program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from podrun.core.errors import UnsupportedError
from podrun.tensorflow.capture.gradient_cuts import BLOCKING
from podrun.tensorflow.capture.markers import marked
from podrun.tensorflow.capture.program_graphs import FunctionGraph, host_scope
from podrun.tensorflow.execution.queue_loops import loop_of, origin
from podrun.tensorflow.graph.importer import function_graph, needed_operations
from podrun.tensorflow.operators.table import HANDLERS, load_table

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_NOTHING = {"Const", "Identity", "NoOp", "Placeholder", "PlaceholderWithDefault", "ControlTrigger", "Assert"}
_NOTHING |= {"ScalarSummary", "HistogramSummary", "TensorSummaryV2", "ImageSummary", "MergeSummary"}
"""Operations that are no work for the device by themselves."""


def is_nothing(operation: tf.Operation) -> bool:
    """Whether an operation is no work: it hands on what it has, or its value is known before the program runs."""
    if operation.type in _NOTHING:
        return True
    return bool(operation.outputs) and all(
        t.dtype not in (tf.resource, tf.variant) and tf.get_static_value(t) is not None
        for t in operation.outputs
    )


def is_apart(graph: FunctionGraph, operation: tf.Operation) -> bool:
    """Whether an operation is a part by itself."""
    if operation.type in CALLS:
        return has_parts(function_graph(graph, operation.get_attr("f").name))
    return host_scope(operation) is not None or loop_of(graph, operation) is not None


def has_parts(graph: FunctionGraph) -> bool:
    """Whether a graph, or what it calls, has a part that is not operations of the device alone."""
    return any(is_apart(graph, operation) for operation in graph.get_operations())


def is_in_parts(graph: FunctionGraph, results: Sequence[tf.Tensor], effects: Sequence[tf.Operation]) -> bool:
    """Whether a program has to run in parts. It does not if all of it is operations of the device, or one counted loop
    that starts from inputs and constants and whose results are the program's.
    """
    needed = needed_operations([*(r.op for r in results), *effects])
    apart = [operation for operation in needed if is_apart(graph, operation)]
    if not apart:
        return False
    loop = loop_of(graph, apart[0])
    if len(apart) > 1 or loop is None or loop.counted is None or has_parts(loop.body):
        return True
    if not all(is_nothing(operation) for operation in needed if operation is not apart[0]):
        return True
    return not all(_is_known(tensor, apart[0]) for tensor in (*loop.inputs, *results))


def _is_known(tensor: tf.Tensor, loop: tf.Operation) -> bool:
    own = origin(tensor)
    if own.dtype == tf.resource or own.op is loop or own.op.type == "Placeholder":
        return True
    return tf.get_static_value(tensor) is not None


def part_levels(
    graph: FunctionGraph, results: Sequence[tf.Tensor], effects: Sequence[tf.Operation]
) -> dict[tf.Operation, int]:
    """Operation -> the number of its part, for those that results and effects need, in an order in which they run."""
    needed = needed_operations([*(r.op for r in results), *effects])
    levels: dict[tf.Operation, int] = {}
    scopes: dict[str, int] = {}
    last = -1
    for operation in _in_running_order(graph, needed):
        if operation.type == "Placeholder":
            continue
        before = [*(t.op for t in operation.inputs), *operation.control_inputs]
        behind = max((levels[o] for o in before if o in levels), default=0)
        scope = host_scope(operation)
        if not is_apart(graph, operation):
            level = behind + behind % 2
        elif scope is not None and scopes.get(scope, -1) >= behind:
            level = scopes[scope]
        else:
            base = max(behind, last)
            level = last = base + 1 + base % 2
            if scope is not None:
                scopes[scope] = level
        levels[operation] = level
    return levels


def _in_running_order(graph: FunctionGraph, needed: Collection[tf.Operation]) -> list[tf.Operation]:
    """The needed operations in the order of the graph, but each behind what it waits for: a result waits for effects
    that come later in the graph.
    """
    ordered: dict[tf.Operation, None] = {}
    for first in graph.get_operations():
        waiting = [first] if first in needed else []
        while waiting:
            operation = waiting[-1]
            before = [*(t.op for t in operation.inputs), *operation.control_inputs]
            missing = [o for o in before if o in needed and o not in ordered and o not in waiting]
            waiting += missing[:1]
            if not missing:
                ordered[waiting.pop()] = None
    return list(ordered)


def computed_again(levels: Mapping[tf.Operation, int]) -> dict[int, set[tf.Operation]]:
    """Number of a part -> operations of earlier parts that it computes again, because gradients pass through them; so
    do operations of the host that a device has too.

    UnsupportedError where they pass through a loop with queues, random numbers or other operations of the host.
    """
    load_table()
    again: dict[int, set[tf.Operation]] = {}
    for operation, level in levels.items():
        for passed in gradient_path(operation):
            if levels.get(passed, level) == level:
                continue
            of_device = levels[passed] % 2 == 0 or (
                host_scope(passed) is not None and passed.type in HANDLERS
            )
            if not of_device or (passed.op_def.is_stateful and passed.type != "ReadVariableOp"):
                raise UnsupportedError(
                    f"A gradient passes through {passed.type} '{passed.name}', which is in another part of the "
                    "program: a loop with queues, or operations of the host.",
                    hint="Compute the loss and its gradients inside one loop.",
                )
            again.setdefault(level, set()).add(passed)
    return again


def gradient_path(operation: tf.Operation) -> list[tf.Operation]:
    """The operations that ``operation`` differentiates, between its targets and its sources; none if it stands for no
    gradients.
    """
    facts = marked(operation)
    if facts is None or facts["kind"] != "gradients":
        return []
    count = facts["targets"]
    targets, sources = operation.inputs[:count], operation.inputs[count : count + facts["sources"]]
    starts = {id(origin(s)) for s in sources} | {id(s) for s in sources}
    operations = needed_operations([t.op for t in targets])
    depends: set[tf.Operation] = set()
    for behind in sorted(operations, key=_number):
        if behind.type not in BLOCKING and any(
            id(t) in starts or id(origin(t)) in starts or t.op in depends for t in behind.inputs
        ):
            depends.add(behind)
    return [behind for behind in sorted(depends, key=_number) if behind.type != "Placeholder"]


def _number(operation: tf.Operation) -> int:
    return int(operation._id)


def held_everywhere(operations: Iterable[tf.Operation]) -> set[tf.Operation]:
    """The operations, in the order of the graph, of which each part that needs them has its own copy: constants, what
    depends on constants alone, and names of variables.
    """
    held: set[tf.Operation] = set()
    for operation in operations:
        of_variable = operation.type == "Identity" and operation.outputs[0].dtype == tf.resource
        apart = marked(operation) is not None or host_scope(operation) is not None
        pure = bool(operation.outputs) and not operation.op_def.is_stateful and not apart
        known = pure and operation.type != "Placeholder" and held.issuperset(t.op for t in operation.inputs)
        if operation.type == "Const" or of_variable or known:
            held.add(operation)
    return held


def tensors_entering(own: Collection[tf.Operation], done: Collection[tf.Operation]) -> list[tf.Tensor]:
    """The tensors that a part takes from outside: from parts before it, and inputs of the graph."""
    tensors: dict[str, Any] = {}
    waiting, seen = list(own), set(own)
    while waiting:
        operation = waiting.pop(0)
        for tensor in operation.inputs:
            if tensor.op in done or tensor.op.type == "Placeholder":
                tensors[tensor.name] = tensor
            elif tensor.op not in seen:
                seen.add(tensor.op)
                waiting.append(tensor.op)
    return list(tensors.values())
