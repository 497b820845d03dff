"""How a run of a session is cut: which operations a device computes, in which cluster, and what the host computes
before each of them.

Clusters have stages: an operation is in the first stage in which all is there that it needs, from the host or from
another device. Gradients are computed where their forward pass is, so a cluster computes again what it differentiates
and what is not its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from podrun.core.errors import PodrunError, UnsupportedError
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.graph import Node, subgraphs
from podrun.tensorflow.capture.markers import marked
from podrun.tensorflow.execution.host_pieces import (
    CopiedOperations,
    HostPiece,
    HostPieces,
    UncutRunError,
    runs_once,
)
from podrun.tensorflow.execution.host_program import HostProgram, ProgramPart, input_key
from podrun.tensorflow.execution.part_levels import gradient_path
from podrun.tensorflow.execution.placed_devices import placed_on
from podrun.tensorflow.graph.importer import READERS, UPDATES
from podrun.tensorflow.operators.table import HANDLERS, TensorFlowOperators, load_table

if TYPE_CHECKING:
    from podrun.tensorflow.execution.host_pieces import GraphOperation, GraphTensor

_TRIVIAL = {
    "AssignVariableOp", "Const", "ExpandDims", "Identity", "IdentityN", "NoOp", "Pack", "Placeholder", "ReadVariableOp",
    "Reshape", "Shape", "Squeeze", "StridedSlice", "Unpack", "VarIsInitializedOp",
}  # fmt: skip
"""Operations that alone are no work for a device."""
_READING = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"}
_REFUSED_TYPES = {tf.float64, tf.complex64, tf.complex128, tf.string}
_LOOPS = {"While", "StatelessWhile"}
"""Operations that give the variables that they take."""
_KEPT_TYPES = {tf.resource, tf.variant}
"""Types of what cannot leave a cluster: variables, and lists of tensors, which cannot enter one either."""
_NARROWED = {np.dtype(np.int64): np.int32, np.dtype(np.uint64): np.uint32}
"""Types of integers -> what an IPU computes in their place."""
_NO_KERNEL = (
    "Cannot assign a device for operation {}: Could not satisfy explicit device specification '{}' because no "
    "supported kernel for IPU devices is available."
)


def computing_device(operation: GraphOperation, *, soft: bool = True) -> int | None:
    """The device that computes an operation outside of programs; None for the host. Unless placing is ``soft``,
    InvalidArgumentError for a type that IPUs lack.
    """
    ordinal = placed_on(operation)
    if marked(operation) is not None:
        return ordinal or 0
    handles = [t.op for t in operation.inputs if t.dtype == tf.resource]
    if ordinal is None and handles:
        ordinal = placed_on(handles[0])
    if ordinal is None or operation._get_control_flow_context() is not None:
        return None
    if not soft and any(t.dtype == tf.float64 for t in (*operation.inputs, *operation.outputs)):
        raise tf.errors.InvalidArgumentError(
            None, operation, _NO_KERNEL.format(operation.name, f"/device:IPU:{ordinal}")
        )
    return ordinal if _fits(operation) else None


def _fits(operation: GraphOperation) -> bool:
    """Whether an IPU computes operations of this type and of these types of tensors."""
    known = operation.type in READERS or operation.type in UPDATES or operation.type in HANDLERS
    kinds = [t.dtype for t in (*operation.inputs, *operation.outputs)]
    refused = any(k._is_ref_dtype or k in _REFUSED_TYPES for k in kinds)
    gives = operation.type not in _LOOPS and any(t.dtype == tf.resource for t in operation.outputs)
    return known and not refused and not gives


def outside_of(array: np.ndarray) -> np.iinfo[Any] | None:
    """The limits of an IPU's integers if an array has values outside of them."""
    narrow = _NARROWED.get(array.dtype)
    if narrow is None or not array.size:
        return None
    limits = np.iinfo(narrow)
    return limits if array.min() < limits.min or array.max() > limits.max else None


def _is_wide(tensor: GraphTensor) -> bool:
    """Whether a tensor is a constant that an IPU's integers cannot hold."""
    if tensor.op.type != "Const" or tensor.dtype not in (tf.int64, tf.uint64):
        return False
    return outside_of(np.asarray(tf.get_static_value(tensor))) is not None


def differentiated_on_device(targets: Sequence[Any], sources: Sequence[Any]) -> bool:
    """Whether the device differentiates what lies between tensors of a session's graph: something that only IPUs
    compute is there, or all of it is placed on one IPU.
    """
    load_table()
    behind = {getattr(source, "handle", source).ref() for source in sources if not isinstance(source, str)}
    waiting, seen = [t.op for t in targets if isinstance(t, tf.Tensor)], set[Any]()
    while waiting:
        operation = waiting.pop()
        if operation not in seen:
            seen.add(operation)
            waiting += [t.op for t in operation.inputs]
    devices: set[int | None] = set()
    for operation in sorted(seen, key=lambda o: o._id):
        if any(t.ref() in behind for t in operation.inputs):
            if marked(operation) is not None:
                return True
            behind.update(t.ref() for t in operation.outputs)
            devices.add(computing_device(operation))
    return len(devices) == 1 and None not in devices


class ClusterGraph:
    """A session's graph, read as that of a program on the IPU number ``ordinal``."""

    def __init__(self, graph: tf.Graph, ordinal: int, number: int) -> None:
        self._graph, self.ordinal, self.name = graph, ordinal, f"cluster_{number}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


@dataclass(frozen=True, slots=True)
class PlannedCluster:
    """A cluster as it is cut. ``program``: it, and ``read`` reads it once more; ``before``: what the host runs before
    it; ``entering``: tensors of its inputs, those that read variables at the places ``variables``; ``results``: what it
    gives; ``writes``: key of a variable -> the operation that assigns it and what it assigns.
    """

    program: HostProgram
    read: partial[HostProgram]
    before: HostPiece
    entering: tuple[GraphTensor, ...]
    variables: tuple[int, ...]
    results: tuple[GraphTensor, ...]
    writes: Mapping[str, tuple[GraphOperation, GraphTensor]]


@dataclass(frozen=True, slots=True)
class _Group:
    """Operations of one stage on one device. ``again``: operations of others that it computes again."""

    ordinal: int
    stage: int
    own: frozenset[GraphOperation]
    again: frozenset[GraphOperation]


class ClusterPlanner:
    """One run's operations: which are the device's, and in which cluster. ``numbers``: of the graph's clusters."""

    def __init__(
        self, copies: CopiedOperations, numbers: Iterator[int], fed: Iterable[GraphTensor], *, soft: bool
    ) -> None:
        load_table()
        self.graph, self.copies, self.numbers, self.soft = copies.graph, copies, numbers, soft
        self.fed = {t.ref() for t in fed}
        self.ordinals: dict[GraphOperation, int] = {}
        """The operations of clusters -> the number of their device."""
        self.stages: dict[GraphOperation, int] = {}
        """Operation -> the number of its cluster, or of the last cluster that it waits for."""

    def clusters(
        self, tensors: Sequence[GraphTensor], targets: Sequence[GraphOperation]
    ) -> tuple[list[PlannedCluster], HostPiece]:
        """The clusters in order, and what the host runs behind them; no clusters where the host runs all.
        UnsupportedError if it cannot, because something is there that only IPUs compute.
        """
        alone: tuple[list[PlannedCluster], HostPiece] = [], HostPiece((), (), ())
        needed = self._needed([*tensors, *targets])
        if needed & self._initializers():
            return alone
        self._place(needed)
        only_device = any(marked(o) is not None for o in self.ordinals)
        if all(o.type in _TRIVIAL for o in self.ordinals) and not only_device:
            return alone
        if not only_device and any(_is_wide(t) for o in self.ordinals for t in o.inputs):
            return alone
        try:
            return self._cut(needed, tensors, targets)
        except (PodrunError, UncutRunError, NotImplementedError) as error:
            if not only_device:
                return alone
            if not isinstance(error, UncutRunError):
                raise
            raise UnsupportedError(
                f"A run of a session needs operations that only IPUs compute, and cannot be cut around them: {error}.",
                hint="Compile what is placed on the IPU: ipu.ipu_compiler.compile.",
            ) from error

    def _needed(self, starts: Iterable[Any]) -> set[GraphOperation]:
        needed: set[GraphOperation] = set()
        waiting = list(starts)
        while waiting:
            start = waiting.pop()
            if isinstance(start, tf.Tensor):
                if start.ref() in self.fed:
                    continue
                start = start.op
            if start not in needed:
                needed.add(start)
                waiting += [*start.inputs, *start.control_inputs]
        return needed

    def _initializers(self) -> set[GraphOperation]:
        keys = tf.compat.v1.GraphKeys
        variables = [
            v for k in (keys.GLOBAL_VARIABLES, keys.LOCAL_VARIABLES) for v in self.graph.get_collection(k)
        ]
        return {v.initializer for v in variables if hasattr(v, "initializer")}

    def _place(self, needed: set[GraphOperation]) -> None:
        for operation in self.graph.get_operations():
            if operation not in needed or operation.type == "Const":
                continue
            before = self._before(operation)
            if operation.type == "NoOp":
                ordinal = min((self.ordinals[o] for o in before if o in self.ordinals), default=None)
                if any(o not in self.ordinals for o in before):
                    ordinal = None
            else:
                ordinal = computing_device(operation, soft=self.soft)
            stage = 0 if ordinal is None else 1
            for other in before:
                behind = self.stages.get(other, 0)
                joined = ordinal is None or self.ordinals.get(other) == ordinal
                stage = max(stage, behind if joined else behind + 1)
            self.stages[operation] = stage
            if ordinal is not None:
                self.ordinals[operation] = ordinal

    def _before(self, operation: GraphOperation) -> set[GraphOperation]:
        """The operations that one waits for, also those that its constants wait for."""
        waiting = [*(t.op for t in operation.inputs if t.ref() not in self.fed), *operation.control_inputs]
        before, seen = set[Any](), set[Any]()
        while waiting:
            other = waiting.pop()
            if other.type != "Const":
                before.add(other)
            elif other not in seen:
                seen.add(other)
                waiting += other.control_inputs
        return before

    def _cut(
        self, needed: set[GraphOperation], tensors: Sequence[GraphTensor], targets: Sequence[GraphOperation]
    ) -> tuple[list[PlannedCluster], HostPiece]:
        pieces = HostPieces(self.copies, self.fed, self.ordinals)
        timed = [o for o in _in_order(needed - self.ordinals.keys()) if runs_once(o)]
        groups = self._groups(needed)
        clusters = []
        for group in groups:
            elsewhere = [
                *(needed - group.own),
                *(o for other in groups if other is not group for o in other.again),
            ]
            used = {t.ref() for o in elsewhere for t in o.inputs} | {t.ref() for t in tensors}
            first = [o for o in timed if self.stages.get(o, 0) < group.stage and o not in pieces.done]
            clusters.append(self._cluster(group, needed, used, pieces, first))
        last = [o for o in targets if o not in self.ordinals and o not in pieces.done]
        return clusters, pieces.piece(tensors, last, last=True)

    def _groups(self, needed: set[GraphOperation]) -> list[_Group]:
        groups = []
        for stage, ordinal in sorted({(self.stages[o], n) for o, n in self.ordinals.items()}):
            own = {o for o, n in self.ordinals.items() if n == ordinal and self.stages[o] == stage}
            again = self._computed_again(own, ordinal, stage, needed)
            groups.append(_Group(ordinal, stage, frozenset(own), frozenset(again)))
        return groups

    def _computed_again(
        self, own: set[GraphOperation], ordinal: int, stage: int, needed: set[GraphOperation]
    ) -> set[GraphOperation]:
        """Operations outside of a cluster through which its gradients pass."""
        again = set[Any]()
        waiting = list(own)
        while waiting:
            for passed in gradient_path(waiting.pop()):
                if any(t.ref() in self.fed for t in passed.outputs):
                    raise UncutRunError(f"a gradient passes through '{passed.name}', which is fed")
                if passed in own or passed in again or _stops_gradients(passed):
                    continue
                self._check_again(passed, ordinal, stage, needed)
                again.add(passed)
                waiting.append(passed)
        return again

    def _check_again(
        self, operation: GraphOperation, ordinal: int, stage: int, needed: set[GraphOperation]
    ) -> None:
        """UncutRunError unless a device may compute an operation once more, with the same result."""
        same = self.ordinals.get(operation, ordinal) == ordinal and (
            marked(operation) is not None or _fits(operation)
        )
        fixed = operation.type in _READING or not operation.op_def.is_stateful
        handles = [t for t in operation.inputs if t.dtype == tf.resource]
        writers = {o for t in handles for o in t.consumers() if o in needed and o.type not in _READING}
        if not same or not fixed or any(self.stages.get(o, 0) < stage for o in writers):
            raise UncutRunError(
                f"a gradient passes through {operation.type} '{operation.name}', which is computed before it and "
                "cannot be computed again"
            )

    def _cluster(
        self,
        group: _Group,
        needed: set[GraphOperation],
        used: set[Hashable],
        pieces: HostPieces,
        first: Sequence[GraphOperation],
    ) -> PlannedCluster:
        inside = group.own | group.again
        inputs = {
            t.ref(): t
            for o in _in_order(inside)
            for t in o.inputs
            if t.ref() in self.fed or (t.op not in inside and t.op.type != "Const")
        }
        own = _in_order(group.own)
        results = [t for o in own for t in o.outputs if t.ref() in used and t.ref() not in self.fed]
        lists = [t for t in inputs.values() if t.dtype == tf.variant]
        for tensor in (*lists, *(t for t in results if t.dtype in _KEPT_TYPES)):
            raise UncutRunError(f"'{tensor.name}' of type {tensor.dtype.name} is used in two places")
        effects = [o for o in own if not o.outputs or (o.op_def.is_stateful and o.type not in _READING)]
        keys = [input_key(t, i) for i, t in enumerate(inputs.values())]
        done = {t.op for t in inputs.values()} | {o for o in needed - inside if o.type != "Const"}
        part = ProgramPart(group.ordinal, list(inputs.values()), keys, done=frozenset(done))
        graph = ClusterGraph(self.graph, group.ordinal, next(self.numbers))
        read = partial(HostProgram, graph, results, effects, part=part)
        program, operators = read(), TensorFlowOperators()
        for node in _all_nodes(program.step.nodes):
            operators.lookup(node)
        tensors = list(inputs.values())
        before = pieces.piece([t for t in tensors if t.dtype != tf.resource], first)
        pieces.known |= {t.ref() for t in results}
        places = tuple(i for i, t in enumerate(tensors) if t.dtype == tf.resource)
        entering = tuple(_reading(t) if t.dtype == tf.resource else t for t in tensors)
        written = program.step.written
        writes = {key: _assigning(t) for key, t in zip(keys, tensors, strict=True) if key in written}
        return PlannedCluster(program, read, before, entering, places, tuple(results), writes)


def _all_nodes(nodes: Iterable[Node]) -> Iterator[Node]:
    """The nodes, and those inside them."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from _all_nodes(graph.nodes)


def _in_order(operations: Iterable[GraphOperation]) -> list[GraphOperation]:
    return sorted(operations, key=lambda o: o._id)


def _stops_gradients(operation: GraphOperation) -> bool:
    """Whether an operation is a function of the host, through which no gradient passes."""
    return operation.type in ("PyFunc", "PyFuncStateless") and marked(operation) is None


def _plain_consumers(handle: GraphTensor, kind: str) -> Iterator[GraphOperation]:
    for operation in handle.consumers():
        plain = not operation.control_inputs and operation._get_control_flow_context() is None
        if operation.type == kind and plain:
            yield operation


def _reading(handle: GraphTensor) -> GraphTensor:
    """A tensor that reads a variable. UncutRunError if nothing does."""
    for operation in _plain_consumers(handle, "ReadVariableOp"):
        return operation.outputs[0]
    raise UncutRunError(f"nothing reads the variable '{handle.name}' on the host")


def _assigning(handle: GraphTensor) -> tuple[GraphOperation, GraphTensor]:
    """The operation that assigns a variable, and the tensor that it assigns. UncutRunError if nothing does."""
    for operation in _plain_consumers(handle, "AssignVariableOp"):
        return operation, operation.inputs[1]
    raise UncutRunError(f"nothing assigns the variable '{handle.name}' on the host")
