"""Functions that a program calls under a gradient tape in the scope of an IPU: programs that the tape records.

The function is one program. When a gradient is asked for, a second one of the same graph computes its operations again,
from the values of the first time, and the gradients; the tapes around record that one too, so that gradients have
gradients. What a second program cannot give exactly is refused before the first one runs, and the host runs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import tensorflow as tf

from podrun.core.errors import UnsupportedError
from podrun.private_apis.tensorflow import private_module, symbol
from podrun.runtime.graph import Node, subgraphs
from podrun.tensorflow.capture.gradient_cuts import cut_gradients
from podrun.tensorflow.capture.program_graphs import IpuGraph
from podrun.tensorflow.execution.host_program import HostProgram, ProgramPart, input_key
from podrun.tensorflow.execution.launching import launch_program, value_tensor, variable_type
from podrun.tensorflow.execution.program_parts import PartedProgram
from podrun.tensorflow.graph.structure import ASSERTED
from podrun.tensorflow.operators.table import HANDLERS, load_table

_record = private_module("eager.record")
_recording = symbol("eager.record.record_operation")
Gradients = tuple[HostProgram | None, list[bool]]
"""The program of the gradients that there are, and for which sources there is one."""
_backward: weakref.WeakKeyDictionary[HostProgram, Gradients] = weakref.WeakKeyDictionary()
_SPARSE = {"Gather", "GatherV2", "GatherNd", "ResourceGather", "ResourceGatherNd"}
"""Operations whose gradients may be ``IndexedSlices`` in TensorFlow."""
_MAKE_DENSE = frozenset({
    "Const", "MatMul", "Einsum", "Mul", "RealDiv", "Pow", "Maximum", "Reshape", "ExpandDims", "Squeeze", "Transpose",
    "Tile", "Pad", "PadV2", "Slice", "StridedSlice", "Split", "Unpack", "Pack", "SelectV2", "Sum", "Mean", "Softmax",
    "LogSoftmax", "Tanh", "Sigmoid", "Relu", "Relu6", "Elu", "Softplus", "Exp", "Log", "Sqrt", "Rsqrt", "Square", "Abs",
})  # fmt: skip
"""Operations whose gradients are dense also where that of their result is ``IndexedSlices``. Others, as a sum or a
cast, may hand these on.
"""
_READ = "ReadVariableOp"
_WRITES = {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}
"""Operations on variables whose order tells which value a gradient is of."""


class _Handle:
    """The handle of a variable in a graph, as a source of gradients."""

    def __init__(self, handle: tf.Tensor) -> None:
        self.handle = handle
        self.dtype, self.shape = variable_type(handle)

    def read_value(self) -> tf.Tensor:
        """The value of the variable."""
        return value_tensor(self.handle)


def recorded_call(program: HostProgram | PartedProgram, arguments: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The results of the program of a function, which the tapes that are open record. UnsupportedError, before any of
    it has run, for one whose gradients a second program cannot give.
    """
    program = _repeatable(program)
    variables = cast("IpuGraph", program.graph).variables_by_handle()
    values = [_entering(tensor, variables) for tensor in arguments]
    return _recorded(program, values, lambda: launch_program(program, arguments))


def _repeatable(program: HostProgram | PartedProgram) -> HostProgram:
    """A program that computes the same a second time, and whose gradients are TensorFlow's."""
    load_table()
    why = "is in parts or loops over a queue"
    if isinstance(program, HostProgram) and program.loop is None:
        step = program.step
        if step.infeeds or step.outfeeds.keys() - {ASSERTED}:
            why = "uses queues"
        elif _reads_what_it_wrote(program):
            why = "reads a floating-point variable after it writes it"
        elif any(_passes_through(t) for t in program.results):
            why = "returns an argument or a variable as it is"
        elif _gathers(program.graph):
            why = "gathers rows, of which TensorFlow gives sparse gradients"
        else:
            why = next(_reasons(step.nodes), "")
            if not why:
                return program
    raise UnsupportedError(f"A tape records no function as a program that {why}.")


def _floating(tensor: tf.Tensor) -> bool:
    """Whether a tensor, or the variable of a handle, is of floating-point numbers."""
    dtype = variable_type(tensor)[0] if tensor.dtype == tf.resource else tensor.dtype
    return bool(dtype.is_floating)


def _passes_through(tensor: tf.Tensor) -> bool:
    """Whether a result is what enters the program."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor.op.type in ("Placeholder", _READ)


def _reads_what_it_wrote(program: HostProgram) -> bool:
    """Whether a result is made of a floating-point variable's value behind a write: TensorFlow's gradient is that of
    this value, a second program's that of the one before. Variables used otherwise than here count as such.
    """
    for index in program.written_inputs():
        handle = program.inputs[index]
        if not _floating(handle):
            continue
        users = handle.consumers()
        if any(user.type != _READ and user.type not in _WRITES for user in users):
            return True
        writes = {user for user in users if user.type in _WRITES}
        reads = _reads_of_results(program, handle)
        if any(writes & _ancestors([read.op], by_control=True) for read in reads):
            return True
    return False


def _ancestors(operations: Iterable[tf.Operation], *, by_control: bool) -> set[tf.Operation]:
    """Operations and all that they are made of, or with ``by_control`` all that runs before them."""
    queue, seen = list(operations), set[tf.Operation]()
    while queue:
        operation = queue.pop()
        if operation not in seen:
            seen.add(operation)
            queue += [t.op for t in operation.inputs]
            queue += operation.control_inputs if by_control else []
    return seen


def _gathers(graph: tf.Graph) -> bool:
    """Whether a gradient may be ``IndexedSlices`` when it leaves the program."""
    inside = (node.op for function in graph.as_graph_def().library.function for node in function.node_def)
    return any(op in _SPARSE for op in inside) or any(map(_has_sparse_gradient, graph.get_operations()))


def _has_sparse_gradient(operation: tf.Operation) -> bool:
    if operation.type not in _SPARSE or not _floating(operation.inputs[0]):
        return False
    rows = operation.inputs[0]
    if operation.type == "GatherV2":
        axis = tf.get_static_value(operation.inputs[2])
        if operation.get_attr("batch_dims") or axis not in (None, 0):
            return False
    places = operation.inputs[1].shape
    if operation.type == "GatherNd" and places.rank is not None and places.as_list()[1:] not in ([1], [None]):
        return False
    while rows.op.type in ("Identity", "Neg"):
        rows = rows.op.inputs[0]
    return rows.op.type not in _MAKE_DENSE


def _reasons(nodes: Iterable[Node]) -> Iterator[str]:
    """Why operations, or some inside them, have no second program."""
    for node in nodes:
        graphs, handler = list(subgraphs(node)), HANDLERS.get(node.op_type)
        if node.op_type == "Differentiate":
            yield "has gradients of its own"
        elif node.op_type == "Loop":
            yield "has a loop"
        elif not graphs and handler is not None and handler.random:
            yield "draws random numbers"
        for graph in graphs:
            yield from _reasons(graph.nodes)


def _entering(tensor: tf.Tensor, variables: Mapping[int, tf.Variable]) -> tf.Tensor:
    """What a program takes from outside, read such that tapes see it."""
    if tensor.dtype != tf.resource:
        return tensor
    variable = variables.get(id(tensor))
    return value_tensor(tensor) if variable is None else variable.read_value()


def _recorded(
    program: HostProgram, values: Sequence[tf.Tensor], launch: Callable[[], list[tf.Tensor]]
) -> list[tf.Tensor]:
    """The results that ``launch`` gives of a program, recorded as functions of the values of its inputs."""
    sources = [value for value in values if value.dtype.is_floating]
    if _record.should_record_backprop(sources):  # What has no gradient is told before the program runs.
        _gradients_of(program)
    with _record.stop_recording():
        results = launch()

    def backward(*incoming: tf.Tensor) -> list[tf.Tensor | None]:
        second, places = _gradients_of(program)
        if second is None:
            return [None] * len(sources)
        entering = [*values, *incoming]
        gradients = iter(_recorded(second, entering, lambda: launch_program(second, entering, writes=False)))
        return [next(gradients) if present else None for present in places]

    outputs = [result for result, t in zip(results, program.results, strict=False) if t.dtype.is_floating]
    _recording("IpuProgram", outputs, sources, backward)
    return results


def _sources(program: HostProgram) -> list[tf.Tensor | _Handle]:
    """What a gradient of each input is a gradient of. That of a variable which the program writes is of its value
    before: of the first read that results are made of, and otherwise there is none.
    """
    sources = [_Handle(t) if t.dtype == tf.resource else t for t in program.inputs]
    for index in program.written_inputs():
        if _floating(program.inputs[index]):
            reads = _reads_of_results(program, program.inputs[index])
            sources[index] = reads[0] if reads else tf.zeros(sources[index].shape, sources[index].dtype)
    return sources


def _reads_of_results(program: HostProgram, handle: tf.Tensor) -> list[tf.Tensor]:
    """The values read of a variable that results of floating-point numbers are made of."""
    targets = _ancestors([t.op for t in program.results if t.dtype.is_floating], by_control=False)
    return [user.outputs[0] for user in handle.consumers() if user.type == _READ and user in targets]


def _gradients_of(program: HostProgram) -> Gradients:
    """The program of the gradients of a program's results with respect to its inputs, from those of the results."""
    if program not in _backward:
        graph = program.graph
        with graph.as_default():
            targets = [t for t in program.results if t.dtype.is_floating]
            incoming = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in targets]
            entering = _sources(program)
            sources = [source for source in entering if source.dtype.is_floating]
            gradients = cut_gradients(targets, sources, incoming) if targets else [None] * len(sources)
        inputs = [*program.inputs, *incoming]
        keys = [input_key(t, i) for i, t in enumerate(inputs)]
        present = [gradient for gradient in gradients if gradient is not None]
        part = ProgramPart(program.ordinal, inputs, keys)
        second = HostProgram(graph, present, (), shards=program.shards, part=part) if present else None
        _backward[program] = second, [gradient is not None for gradient in gradients]
    return _backward[program]
