"""How operations are read that are structure: constants, variables, calls, loops, branches, feeds and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from podrun.core.errors import ApplicationRuntimeError, UnsupportedError
from podrun.private_apis.tensorflow import private_module, symbol
from podrun.runtime.graph import OperatorGraph, reads
from podrun.tensorflow.capture.markers import REFERENCES, reference
from podrun.tensorflow.capture.program_graphs import FunctionGraph, inside_programs_of
from podrun.tensorflow.graph.builder import GraphBuilder, Value, VariableHandle
from podrun.tensorflow.graph.differentiation import differentiate, trimmed
from podrun.tensorflow.graph.importer import MARKERS, Importer, array_of, function_graph, reads_as

_FuncGraph: Any = symbol("framework.func_graph.FuncGraph")


@reads_as("Const")
def _const(importer: Importer, operation: tf.Operation, inputs: list[Value]) -> Sequence[Value]:
    value = array_of(operation)
    return [importer.builder.constant(0 if value is None else value, operation.name)]


@reads_as("Identity", "EnsureShape", "PlaceholderWithDefault", "CheckNumericsV2", "Snapshot")
def _identity(importer: Importer, operation: tf.Operation, inputs: list[Value]) -> Sequence[Value]:
    return [inputs[0]]


@reads_as("NoOp", "ControlTrigger", "PrintV2", "Print", "AssertV2")
def _nothing(importer: Importer, operation: tf.Operation, inputs: list[Value]) -> Sequence[Value]:
    return [inputs[0]] if operation.outputs else []


class Assertions:
    """The outfeed to which steps send whether their assertions were true."""

    def take(self, place: int, value: np.ndarray) -> None:
        """ApplicationRuntimeError if an assertion was false in any iteration."""
        if not np.all(value):
            raise ApplicationRuntimeError(
                "An assertion of the program failed on the device.",
                hint="Print the tensors that it is about with ipu.internal_ops.print_tensor, or run it on the host.",
            )


ASSERTED = reference(Assertions())
"""The number of that queue."""


def leaving(outfeeds: Mapping[int, Sequence[str]]) -> list[str]:
    """The tensors that leave a program by outfeeds of its own, in order: what its assertions say is none of them."""
    return [name for queue, names in outfeeds.items() if queue != ASSERTED for name in names]


@reads_as("Assert")
def _assert(importer: Importer, operation: tf.Operation, inputs: list[Value]) -> Sequence[Value]:
    importer.builder.hold(*importer.names(operation, inputs[:1]))
    return []


@reads_as("ReadVariableOp")
def _read(importer: Importer, operation: tf.Operation, inputs: list[Value]) -> Sequence[Value]:
    variable = inputs[0]
    return [importer.builder.read(variable) if isinstance(variable, VariableHandle) else variable]


@reads_as("ResourceGather")
def _gather(importer: Importer, operation: tf.Operation, inputs: list[Value]) -> Sequence[Value]:
    builder, table = importer.builder, inputs[0]
    name = builder.read(table) if isinstance(table, VariableHandle) else table
    axis = builder.constant(0)
    batch = int(operation.get_attr("batch_dims"))
    return builder.add("GatherV2", [name, str(inputs[1]), axis], batch_dims=batch, planned_as="Gather")


@reads_as("VariableShape")
def _variable_shape(importer: Importer, operation: tf.Operation, inputs: list[Value]) -> Sequence[Value]:
    name = importer.builder.read(inputs[0]) if isinstance(inputs[0], VariableHandle) else inputs[0]
    return importer.builder.add("Shape", [name], output="int32")


@reads_as("VarIsInitializedOp")
def _is_initialized(importer: Importer, operation: tf.Operation, inputs: list[Value]) -> Sequence[Value]:
    return [importer.builder.constant(True)]


MOST_DERIVATIVES = 3
"""Of how high an order derivatives pass through a gradient that a program overrides: it may contain itself."""


def backward_of(operation: tf.Operation) -> Callable[[Importer], dict[str, Any]]:
    """What reads the backward function of an ``IdentityN`` whose gradient a program overrides: attributes of the node
    ``CustomGradient``. Inputs without a gradient (the results themselves) have no position.
    """
    name = operation.get_attr("_gradient_op_type").decode()
    function = private_module("framework.ops").gradient_registry.lookup(name)

    def read(importer: Importer) -> dict[str, Any]:
        if importer.depth == MOST_DERIVATIVES:
            return {"backward": None, "positions": ()}
        with operation.graph.as_default():
            graph = _FuncGraph(f"{operation.name}/backward")
        with inside_programs_of(graph), graph.as_default():
            incoming = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in operation.outputs]
            results = list(function(operation, *incoming))
        positions = tuple(i for i, r in enumerate(results) if r is not None)
        with graph.as_default():
            gradients = [graph.capture(tf.convert_to_tensor(results[i])) for i in positions]
        builder = GraphBuilder(f"{operation.name}/backward", importer.builder.facts, importer.builder)
        names = [builder.unique("incoming") for _ in incoming]
        inputs: dict[str, Value] = {t.name: n for t, n in zip(incoming, names, strict=True)}
        try:
            inputs |= {inner.name: importer.value_in(outer) for outer, inner in graph.captures}
        except UnsupportedError as error:  # Told where a gradient passes; inference has none.
            return {"backward": str(error), "positions": ()}
        outputs = [str(v) for v in Importer(builder, importer).read(graph, inputs, gradients)]
        builder.nodes = trimmed(builder.nodes, outputs)
        return {"backward": builder.graph(names, outputs, {}, {}), "positions": positions}

    return read


@reads_as("IdentityN")
def _identity_n(importer: Importer, operation: tf.Operation, inputs: list[Value]) -> Sequence[Value]:
    override = _custom_gradient(operation)
    if override is None:
        return inputs
    return importer.builder.add(
        "CustomGradient", importer.names(operation, inputs), len(inputs), **override(importer)
    )


def _custom_gradient(operation: tf.Operation) -> Callable[[Importer], dict[str, Any]] | None:
    """How the backward pass of a ``tf.custom_gradient`` is read; None for a plain identity."""
    kind = operation.node_def.attr.get("_gradient_op_type")
    return None if kind is None else backward_of(operation)


@reads_as("PartitionedCall", "StatefulPartitionedCall")
def _call(importer: Importer, operation: tf.Operation, inputs: list[Value]) -> Sequence[Value]:
    return importer.call(function_graph(operation.graph, operation.get_attr("f").name), inputs)


# --- Branches and loops -----------------------------------------------------------------------------------------


def _branch(
    importer: Importer, name: str, graph: FunctionGraph, inputs: Sequence[Value], *, repeats: bool = False
) -> tuple[GraphBuilder, list[str]]:
    """A function read as a subgraph that sees the names around it, and the names of its results."""
    builder = GraphBuilder(name, importer.builder.facts, importer.builder)
    builder.originals = {}
    builder.repeats |= repeats
    results = Importer(builder).call(graph, list(inputs))
    return builder, [r for r in results if isinstance(r, str)]


@reads_as("If", "StatelessIf")
def _if(importer: Importer, operation: tf.Operation, inputs: list[Value]) -> Sequence[Value]:
    graphs = [
        function_graph(operation.graph, operation.get_attr(a).name) for a in ("else_branch", "then_branch")
    ]
    return _choice(importer, operation, graphs, inputs)


@reads_as("Case", "StatelessCase")
def _case(importer: Importer, operation: tf.Operation, inputs: list[Value]) -> Sequence[Value]:
    graphs = [function_graph(operation.graph, f.name) for f in operation.get_attr("branches")]
    return _choice(importer, operation, graphs, inputs)


def _choice(
    importer: Importer, operation: tf.Operation, graphs: Sequence[FunctionGraph], inputs: list[Value]
) -> Sequence[Value]:
    builder = importer.builder
    branches = [_branch(importer, f"{operation.name}/{i}", g, inputs[1:]) for i, g in enumerate(graphs)]
    written = sorted({key for branch, _ in branches for key in branch.written})
    subgraphs = []
    for branch, names in branches:
        results = [*names, *(branch.read(VariableHandle(key)) for key in written)]
        branch.nodes = trimmed(branch.nodes, results)
        subgraphs.append(branch.graph((), results, {}, {}))
    count = len(operation.outputs) + len(written)
    if not count:
        return []
    outputs = builder.add("Branch", [str(inputs[0])], count, name=operation.name, branches=tuple(subgraphs))
    for key, output in zip(written, outputs[len(operation.outputs) :], strict=True):
        builder.write(VariableHandle(key), output)
    return outputs[: len(operation.outputs)]


@reads_as("While", "StatelessWhile")
def _while(importer: Importer, operation: tf.Operation, inputs: list[Value]) -> Sequence[Value]:
    condition = function_graph(operation.graph, operation.get_attr("cond").name)
    body = function_graph(operation.graph, operation.get_attr("body").name)
    return read_loop(importer, operation.name, condition, body, inputs)


def read_loop(
    importer: Importer, name: str, condition: FunctionGraph, body: FunctionGraph, inputs: Sequence[Value]
) -> list[Value]:
    """A loop as a node with two subgraphs. Variables that the body writes are carried besides the loop's own values."""
    builder, facts = importer.builder, importer.builder.facts
    carried = [i for i, value in enumerate(inputs) if isinstance(value, str)]
    probe, _ = _branch(importer, name, body, inputs, repeats=True)
    written = sorted(probe.written)
    keys = [VariableHandle(key) for key in written]
    starts = [*(str(inputs[i]) for i in carried), *(builder.read(key) for key in keys)]

    def inner(kind: str, graph: FunctionGraph) -> OperatorGraph:
        scope = GraphBuilder(f"{name}/{kind}", facts, builder)
        scope.repeats = True
        names = [scope.unique(f"{name}/{kind}/{i}") for i in range(len(starts))]
        values: list[Value] = list(inputs)
        for position, place in enumerate(carried):
            values[place] = names[position]
        scope.current.update(zip(written, names[len(carried) :], strict=True))
        results = Importer(scope).call(graph, values)
        if kind == "condition":
            outputs = [str(results[0])]
        else:
            outputs = [str(results[i]) for i in carried] + [scope.read(key) for key in keys]
        scope.nodes = trimmed(scope.nodes, outputs)
        return scope.graph(names, outputs, {}, {})

    outputs = builder.add(
        "Loop",
        starts,
        max(len(starts), 1),
        name=name,
        condition=inner("condition", condition),
        body=inner("body", body),
    )
    for key, output in zip(keys, outputs[len(carried) :], strict=True):
        builder.write(key, output)
    results: list[Value] = list(inputs)
    for place, output in zip(carried, outputs, strict=False):
        results[place] = output
    return results


# --- Markers ------------------------------------------------------------------------------------------------


def _gradients(
    importer: Importer, operation: tf.Operation, inputs: list[Value], facts: dict[str, Any]
) -> Sequence[Value]:
    builder, targets, sources = importer.builder, facts["targets"], facts["sources"]
    names = [builder.read(v) if isinstance(v, VariableHandle) else v for v in inputs]
    for source in inputs[targets : targets + sources]:
        if isinstance(source, VariableHandle):
            _check_reads(builder, names[:targets], source)
    wanted = names[targets : targets + sources]
    scalar = operation.inputs[0].shape.rank == 0
    incoming = dict(zip(facts["incoming"], names[targets + sources :], strict=False))
    kinds = dict(zip(wanted, operation.inputs[targets : targets + sources], strict=True))

    def zeros(name: str) -> np.ndarray:
        return np.zeros(kinds[name].shape.as_list(), kinds[name].dtype.as_numpy_dtype)

    stops = names[targets + sources + len(incoming) :]
    results = differentiate(builder, names[:targets], list(dict.fromkeys(wanted)), incoming, zeros, stops)
    builder.facts.losses[builder.originals[results[0]].label] = scalar
    placed = dict(zip(dict.fromkeys(wanted), results, strict=True))
    return [placed[name] for name in wanted]


def _check_reads(builder: GraphBuilder, targets: Sequence[str], variable: VariableHandle) -> None:
    """UnsupportedError if targets depend on a value that the variable had before it was written: TensorFlow sums the
    gradients of all its reads. What other variables were written with is no part of it.
    """
    before = builder.facts.replaced.get(variable.key, set()) - {builder.read(variable)}
    waiting, seen = list(targets), set[str]()
    while waiting and before:
        name = waiting.pop()
        if name in before:
            raise UnsupportedError(
                f"a gradient with respect to the variable {variable.key!r} has reads of it before and after it is "
                "written, and an IPU's program would leave the first ones out",
                hint="Write the variable after the gradient is computed, or run the function outside of the scope.",
            )
        maker = builder.maker(name)
        if name not in seen and name not in builder.facts.assigned and maker is not None:
            waiting.extend(reads(maker))
        seen.add(name)


def _dequeue(
    importer: Importer, operation: tf.Operation, inputs: list[Value], facts: dict[str, Any]
) -> Sequence[Value]:
    builder, queue = importer.builder, int(facts["queue"])
    if builder.outer is not None:
        raise UnsupportedError(
            f"'{operation.name}' takes from an infeed inside a loop or branch of a program's step.",
            hint="Let the outermost loop of the program take from the queue.",
        )
    feeds = builder.facts.infeeds
    names = getattr(REFERENCES.get(queue), "tensor_names", None)
    feeds.setdefault(queue, list(names or (f"infeed{queue}/{i}" for i in range(len(operation.outputs)))))
    return feeds[queue]


_NARROW = {tf.int64: np.int32, tf.float64: np.float32}
"""Types that an IPU lacks -> those that it has for them."""


def _enqueue(
    importer: Importer, operation: tf.Operation, inputs: list[Value], facts: dict[str, Any]
) -> Sequence[Value]:
    builder = importer.builder
    names = importer.names(operation, inputs)
    if builder.repeats:
        raise UnsupportedError(f"'{operation.name}' enqueues inside a loop of a program's step.")
    if builder.outer is not None:
        empty = [
            np.zeros(t.shape.as_list(), _NARROW.get(t.dtype, t.dtype.as_numpy_dtype))
            for t in operation.inputs
        ]
        builder.give_if_reached(int(facts["queue"]), names, empty)
        return [builder.constant(True)] if operation.outputs else []
    builder.facts.outfeeds[int(facts["queue"])] = [
        builder.add("Result", [name], name=f"outfeed{facts['queue']}")[0] for name in names
    ]
    return [builder.constant(True)] if operation.outputs else []


def _print(
    importer: Importer, operation: tf.Operation, inputs: list[Value], facts: dict[str, Any]
) -> Sequence[Value]:
    """The tensor, which also leaves the program if it is not inside a loop or branch of its step."""
    builder = importer.builder
    if builder.outer is None:
        (name,) = importer.names(operation, inputs)
        builder.facts.outfeeds[int(facts["queue"])] = builder.add("Result", [name], name="print")
    return inputs


def _recompute(
    importer: Importer, operation: tf.Operation, inputs: list[Value], facts: dict[str, Any]
) -> Sequence[Value]:
    """The tensor; what makes it is computed again for gradients, or kept, as the program says."""
    builder = importer.builder
    (name,) = importer.names(operation, inputs)
    maker = builder.maker(name)
    if maker is not None:
        builder.facts.recomputed[maker.label] = bool(facts["again"])
    return inputs


def _repeat(
    importer: Importer, operation: tf.Operation, inputs: list[Value], facts: dict[str, Any]
) -> Sequence[Value]:
    loop = REFERENCES[int(facts["loop"])]
    results = read_loop(importer, operation.name, loop.condition_graph, loop.body_graph, inputs)
    return results[loop.first : loop.first + len(operation.outputs)]


MARKERS.update(
    {
        "gradients": _gradients,
        "dequeue": _dequeue,
        "enqueue": _enqueue,
        "repeat": _repeat,
        "print": _print,
        "recompute": _recompute,
    }
)
