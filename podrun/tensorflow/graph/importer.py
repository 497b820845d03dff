"""Reads a graph of TensorFlow into a builder: one call for each operation, in the graph's order.

Functions that the program calls are read in place. Reads and writes of variables become names (`GraphBuilder.read`,
`GraphBuilder.write`), so that nothing in the runtime's graph has an effect. Everything that is not structure becomes a
node with TensorFlow's own type and attributes, whose function is in `podrun.tensorflow.operators`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from podrun.core.errors import UnsupportedError
from podrun.private_apis.tensorflow import symbol
from podrun.runtime.graph import Place
from podrun.tensorflow.capture.markers import REFERENCES, marked
from podrun.tensorflow.capture.places import places_in
from podrun.tensorflow.capture.program_graphs import FunctionGraph
from podrun.tensorflow.graph.attributes import node_attributes, planned_operator
from podrun.tensorflow.graph.builder import GraphBuilder, Value, VariableHandle

_make_ndarray = symbol("framework.tensor_util.MakeNdarray")
_function_def_to_graph = symbol("framework.function_def_to_graph.function_def_to_graph")

_OF_DEFINITION = "_ipu_of_definition"
"""The attribute of graphs of functions that are made of the function's definition, for want of its own graph."""
Reader = Callable[["Importer", tf.Operation, list[Value]], Sequence[Value]]
"""``reader(importer, operation, inputs)`` gives the values of the operation's outputs."""
READERS: dict[str, Reader] = {}
"""Operations that are structure: how they are read."""
MARKERS: dict[str, Callable[[Importer, tf.Operation, list[Value], dict[str, Any]], Sequence[Value]]] = {}
"""Kinds of markers that are structure; the others become nodes of type ``Podrun:<kind>``."""

UPDATES: dict[str, tuple[int, ...]] = {
    "AssignVariableOp": (0,),
    "AssignAddVariableOp": (0,),
    "AssignSubVariableOp": (0,),
    "ResourceApplyGradientDescent": (0,),
    "ResourceApplyMomentum": (0, 1),
    "ResourceApplyKerasMomentum": (0, 1),
    "ResourceApplyAdam": (0, 1, 2),
    "ResourceApplyAdamWithAmsgrad": (0, 1, 2, 3),
    "ResourceApplyAdaMax": (0, 1, 2),
    "ResourceApplyAdagrad": (0, 1),
    "ResourceApplyAdagradV2": (0, 1),
    "ResourceApplyAdadelta": (0, 1, 2),
    "ResourceApplyRMSProp": (0, 1, 2),
    "ResourceApplyCenteredRMSProp": (0, 1, 2, 3),
    "ResourceApplyFtrl": (0, 1, 2),
    "ResourceApplyFtrlV2": (0, 1, 2),
    "ResourceScatterAdd": (0,),
    "ResourceScatterSub": (0,),
    "ResourceScatterUpdate": (0,),
    "ResourceScatterMul": (0,),
    "ResourceScatterDiv": (0,),
    "ResourceScatterMin": (0,),
    "ResourceScatterMax": (0,),
    "ResourceScatterNdUpdate": (0,),
    "ResourceScatterNdAdd": (0,),
    "ResourceScatterNdSub": (0,),
    "ResourceApplyProximalGradientDescent": (0,),
    "ResourceApplyProximalAdagrad": (0, 1),
    "ResourceApplyAdagradDA": (0, 1, 2),
    "ResourceApplyAddSign": (0, 1),
    "ResourceApplyPowerSign": (0, 1),
}
"""Operations that write variables, and at which inputs these stand. Their nodes give the new values in that order."""


def reads_as(*types: str) -> Callable[[Reader], Reader]:
    """Register how operations of these types are read."""

    def register(reader: Reader) -> Reader:
        READERS.update(dict.fromkeys(types, reader))
        return reader

    return register


class Importer:
    """Reads one graph, and the functions that it calls, into ``builder``."""

    def __init__(self, builder: GraphBuilder, around: Importer | None = None) -> None:
        self.builder, self.around = builder, around
        self.values: dict[str, Value] = {}
        """The values of the graph that is being read."""
        self.reading: list[tuple[FunctionGraph, dict[str, Value]]] = []
        """The graphs that are being read, the innermost last, and their values."""
        self._open: set[tf.Operation] = set()
        """The operations that are being read."""

    def read(
        self,
        graph: FunctionGraph,
        inputs: Mapping[str, Value],
        results: Sequence[tf.Tensor],
        effects: Sequence[tf.Operation] = (),
        done: Collection[tf.Operation] = (),
    ) -> list[Value]:
        """The values of ``results``. ``inputs``: name of a tensor of ``graph`` -> its value. Only what the results
        and the effects need is read, without the operations that are ``done``.
        """
        values = dict(inputs)
        needed = needed_operations([*(r.op for r in results), *effects], done)
        self.reading.append((graph, values))
        try:
            self._read_all(
                graph,
                values,
                (
                    operation
                    for operation in graph.get_operations()
                    if operation in needed and not (operation.outputs and operation.outputs[0].name in values)
                ),
            )
        finally:
            self.reading.pop()
        return [values[r.name] for r in results]

    def _read_all(
        self, graph: FunctionGraph, values: dict[str, Value], operations: Iterable[tf.Operation]
    ) -> None:
        """Read operations of a graph with these values, each at the place where the program has put it."""
        outer, self.values = self.values, values
        places = places_in(graph)
        try:
            for operation in operations:
                with self._at(places.get(operation.name)):
                    self._read_operation(values, operation)
        finally:
            self.values = outer

    def _read_operation(self, values: dict[str, Value], operation: tf.Operation) -> None:
        arguments = [self._value(values, operation, tensor) for tensor in operation.inputs]
        self._open.add(operation)
        try:
            outputs = self.operation(operation, arguments)
        finally:
            self._open.discard(operation)
        values.update((t.name, v) for t, v in zip(operation.outputs, outputs, strict=True))

    def value_in(self, tensor: tf.Tensor) -> Value:
        """The value of a tensor of a graph that is being read, here or around, and which no result needs until then.
        UnsupportedError if it has none.
        """
        if not tf.is_symbolic_tensor(tensor):
            return self._value_outside(tensor)
        importer: Importer | None = self
        while importer is not None:
            for graph, values in reversed(importer.reading):
                if graph is tensor.graph and (tensor.name in values or importer._read_late(values, tensor)):
                    return values[tensor.name]
            importer = importer.around
        if self.reading and _is_twin(tensor, self.reading[-1][0]) and tensor.name in self.values:
            return self.values[tensor.name]
        owner = getattr(tensor.graph, "name", None)
        place = "the graph around the program" if owner is None else f"'{owner}'"
        raise UnsupportedError(
            f"A gradient function of the program reads '{tensor.name}' of {place}, which has no value where it runs.",
            hint="Let the gradient function read only what its own function computes or takes.",
        )

    def _value_outside(self, tensor: tf.Tensor) -> Value:
        """The program's input for an eager tensor that one of its graphs captures. UnsupportedError if none does."""
        importer: Importer | None = self
        while importer is not None:
            for graph, values in importer.reading:
                names = (inner.name for outer, inner in getattr(graph, "captures", ()) if outer is tensor)
                for name in names:
                    if name in values:
                        return values[name]
            importer = importer.around
        raise UnsupportedError(
            "A gradient function of the program reads a variable or tensor that nothing else in the program reads.",
            hint="Read it in the function whose gradient it is: its gradient function then takes that value.",
        )

    def _read_late(self, values: dict[str, Value], tensor: tf.Tensor) -> bool:
        """Read what a tensor needs, if nothing of it has an effect, waits for what is being read, or reads a variable
        that was written by now.
        """
        late: set[tf.Operation] = set()
        waiting = [tensor]
        while waiting:
            operation = waiting.pop().op
            if operation not in late:
                late.add(operation)
                waiting += [t for t in operation.inputs if t.name not in values]
        graph = cast("FunctionGraph", tensor.graph)
        handles = [values.get(t.name) for o in late for t in o.inputs if t.dtype == tf.resource]
        written = any(isinstance(h, VariableHandle) and h.key in self.builder.written for h in handles)
        if written or any(o in self._open or o.type == "Placeholder" or has_effect(graph, o) for o in late):
            return False
        self._read_all(graph, values, sorted(late, key=lambda o: o._id))
        return True

    @property
    def depth(self) -> int:
        """How many gradient functions are being read around."""
        return 0 if self.around is None else self.around.depth + 1

    @contextlib.contextmanager
    def _at(self, place: Place | None) -> Iterator[None]:
        """Nodes that are added here lie at ``place``, or where those around them do."""
        before = self.builder.place
        self.builder.place = place or before
        try:
            yield
        finally:
            self.builder.place = before

    def _value(self, values: Mapping[str, Value], operation: tf.Operation, tensor: tf.Tensor) -> Value:
        if tensor.name not in values:
            raise UnsupportedError(
                f"{operation.type} '{operation.name}' reads '{tensor.name}', which has no value in the program on the "
                "IPU.",
                hint="Give placeholders and tensors of the host to ipu_compiler.compile as inputs.",
            )
        return values[tensor.name]

    def operation(self, operation: tf.Operation, inputs: list[Value]) -> Sequence[Value]:
        """The values of the outputs of one operation."""
        marker = marked(operation)
        if marker is not None:
            kind = marker.pop("kind")
            if kind in MARKERS:
                return MARKERS[kind](self, operation, inputs, marker)
            return self.builder.add(
                f"Podrun:{kind}", self.names(operation, inputs), len(operation.outputs), **marker
            )
        reader = READERS.get(operation.type)
        if reader is not None:
            return reader(self, operation, inputs)
        if operation.type in UPDATES:
            return self._update(operation, inputs)
        return self._node(operation, self.names(operation, inputs))

    def names(self, operation: tf.Operation, inputs: Sequence[Value]) -> list[str]:
        """The names of inputs that are tensors. UnsupportedError for a variable among them."""
        for value in inputs:
            if isinstance(value, VariableHandle):
                raise UnsupportedError(
                    f"{operation.type} '{operation.name}' uses the variable {value.key!r} in a way that programs on "
                    "IPUs cannot."
                )
        return [value for value in inputs if isinstance(value, str)]

    def _node(self, operation: tf.Operation, names: Sequence[str], count: int | None = None) -> list[str]:
        attributes = node_attributes(operation)
        replicas = self.builder.facts.batch_norm_replicas
        if replicas > 1 and operation.type.startswith("FusedBatchNorm") and attributes.get("is_training"):
            attributes["replicas"] = replicas
        return self.builder.add(
            operation.type,
            names,
            len(operation.outputs) if count is None else count,
            name=operation.name,
            planned_as=planned_operator(operation.type),
            **attributes,
        )

    def _update(self, operation: tf.Operation, inputs: list[Value]) -> Sequence[Value]:
        places = UPDATES[operation.type]
        names = [self.builder.read(v) if isinstance(v, VariableHandle) else v for v in inputs]
        outputs = self._node(operation, names, len(places))
        for place, output in zip(places, outputs, strict=True):
            variable = inputs[place]
            if not isinstance(variable, VariableHandle):
                raise UnsupportedError(f"{operation.type} '{operation.name}' writes what is no variable.")
            self.builder.write(variable, output)
        return []

    def call(self, graph: FunctionGraph, inputs: Sequence[Value]) -> list[Value]:
        """Read a function in place."""
        names = {tensor.name: value for tensor, value in zip(graph.inputs, inputs, strict=True)}
        effects = [*graph.control_outputs]
        return self.read(graph, names, graph.outputs, effects)


def function_graph(graph: tf.Graph, name: str) -> FunctionGraph:
    """The function ``name`` that ``graph`` calls, as a graph.

    It is the graph of the trace. Where a tape on the host has differentiated the function, TensorFlow adds what the
    gradients need to that graph; then it is a new graph, read from the function's definition.
    """
    while graph is not None:
        definition = graph._get_function(name)
        if definition is not None:
            own: FunctionGraph | None = getattr(definition, "graph", None)
            written = getattr(definition, "cached_definition", None) or definition.function_def
            defined = len(written.signature.input_arg), len(written.signature.output_arg)
            if own is None or not hasattr(own, "inputs") or (len(own.inputs), len(own.outputs)) != defined:
                with graph.as_default():
                    own = _function_def_to_graph(written)
                setattr(own, _OF_DEFINITION, True)
            return own
        graph = getattr(graph, "outer_graph", None)
    raise UnsupportedError(f"The program calls the function {name!r}, which is not there.")


def _is_twin(tensor: tf.Tensor, graph: FunctionGraph) -> bool:
    """Whether ``graph`` is that of the tensor, made again of its definition: TensorFlow puts a function's name between
    a prefix and a number. Another graph may have a tensor of the same name.
    """
    if not hasattr(graph, _OF_DEFINITION) or not hasattr(tensor.graph, "name"):
        return False
    own, name = str(tensor.graph.name), str(graph.name)
    if name != own and not re.fullmatch(rf"__[a-z]+_{re.escape(own)}_\d+", name):
        return False
    try:
        twin = cast("tf.Graph", graph).get_tensor_by_name(tensor.name)
    except (KeyError, ValueError):
        return False
    return bool(twin.dtype == tensor.dtype and twin.shape.is_compatible_with(tensor.shape))


def needed_operations(
    starts: Sequence[tf.Operation | tf.Variable], done: Collection[tf.Operation] = ()
) -> set[tf.Operation]:
    """Operations that results and effects need, through data and control, without those that are ``done``."""
    needed: set[tf.Operation] = set()
    waiting = [getattr(start, "op", start) for start in starts]
    while waiting:
        operation = waiting.pop()
        if operation in needed or operation in done:
            continue
        needed.add(operation)
        waiting += [tensor.op for tensor in operation.inputs]
        waiting += list(operation.control_inputs)
    return needed


def has_effect(graph: FunctionGraph, operation: tf.Operation) -> bool:
    """Whether an operation, or what it calls, writes variables or gives to a queue."""
    facts = marked(operation)
    if facts is None and operation.type in UPDATES:
        return True
    if facts is None:
        attributes = operation.node_def.attr
        names = [
            attributes[n].func.name for n in ("f", "body", "then_branch", "else_branch") if n in attributes
        ]
        names += [f.name for f in attributes["branches"].list.func] if "branches" in attributes else []
        inner = [function_graph(graph, name) for name in names if name]
    elif facts["kind"] == "repeat":
        inner = [REFERENCES[facts["loop"]].body_graph]
    else:
        return bool(facts["kind"] == "enqueue")
    return any(
        has_effect(body, o)
        for body in inner
        for o in needed_operations([*(t.op for t in body.outputs), *body.control_outputs])
    )


def array_of(operation: tf.Operation) -> np.ndarray | None:
    """The value of a constant. UnsupportedError for strings."""
    value = _make_ndarray(operation.get_attr("value"))
    return None if operation.outputs[0].dtype == tf.string else np.asarray(value)
