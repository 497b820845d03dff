"""What the host computes between clusters of a session's run (`clusters`): operations of the session's graph, of which
those with an effect run once.

A control edge from what a device computed, or from what ran already, would run that again. So the host runs copies of
the operations that have such an edge, without it. Copies are in the session's graph, where its variables are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Protocol

import tensorflow as tf

from podrun.core.quick_dataclass import dataclass

if TYPE_CHECKING:

    class GraphTensor(Protocol):
        """A tensor of a graph, as far as it is used here."""

        op: GraphOperation
        name: str
        dtype: tf.DType
        shape: tf.TensorShape
        value_index: int

        def ref(self) -> Hashable: ...
        def consumers(self) -> list[GraphOperation]: ...

    class GraphOperation(Protocol):
        """An operation of a graph, as far as it is used here."""

        type: str
        name: str
        inputs: Sequence[GraphTensor]
        outputs: Sequence[GraphTensor]
        control_inputs: Sequence[GraphOperation]
        node_def: tf.compat.v1.NodeDef
        op_def: tf.compat.v1.OpDef
        _id: int
        graph: tf.Graph

        def _get_control_flow_context(self) -> object: ...


_WITHOUT_EFFECT = {"VarHandleOp", "ReadVariableOp", "VarIsInitializedOp", "Placeholder", "Identity"}
_CHECKS = {"CheckNumerics", "CheckNumericsV2", "EnsureShape"}
_ENDS = {"Merge", "Exit", "RefMerge", "RefExit"}
"""Where control flow of version 1 ends: what is inside runs when these do."""


class UncutRunError(Exception):
    """A run of a session cannot be cut into clusters; the message says at which operation."""


def _has_effect(operation: GraphOperation) -> bool:
    """Whether the host may run an operation only once in a run, and has to. Control flow of version 1 counts as its
    ends.
    """
    context = operation._get_control_flow_context()
    if operation.type in ("Exit", "RefExit"):
        context = getattr(context, "outer_context", None)
    if context is not None or operation.type in _WITHOUT_EFFECT:
        return False
    if operation.type in _ENDS or operation.type in _CHECKS:
        return True
    if any(argument.is_ref for argument in operation.op_def.input_arg):
        return True
    names_state = operation.outputs and all(_is_state(t) for t in operation.outputs)
    return bool(operation.op_def.is_stateful and not names_state)


def _is_state(tensor: GraphTensor) -> bool:
    return tensor.dtype == tf.resource or bool(tensor.dtype._is_ref_dtype)


def _reads(operation: GraphOperation) -> bool:
    """Whether an operation reads a variable, which what runs later may write."""
    if operation._get_control_flow_context() is not None:
        return False
    of_ref = operation.type == "Identity" and bool(operation.inputs[0].dtype._is_ref_dtype)
    return of_ref or operation.type == "ReadVariableOp"


def runs_once(operation: GraphOperation) -> bool:
    """Whether it matters when the host runs an operation: it has an effect, or reads what may be written later."""
    return _has_effect(operation) or _reads(operation)


@dataclass(frozen=True, slots=True)
class HostPiece:
    """What the host runs at once. ``fetched`` gives the values of ``tensors``; ``targets``: operations without one."""

    tensors: tuple[GraphTensor, ...]
    fetched: tuple[GraphTensor, ...]
    targets: tuple[GraphOperation, ...]

    def run(self, known: dict[Any, Any], compute: Callable[..., Any]) -> None:
        """Run with the values that are ``known``, and add those that it gives. ``compute``: a run of the session."""
        if self.fetched or self.targets:
            values = compute([*self.fetched, *self.targets], known)
            known.update(zip((t.ref() for t in self.tensors), values, strict=False))


@dataclass(slots=True)
class CopiedOperations:
    """Operations of a session's graph without some of their control edges, each made once."""

    graph: tf.Graph
    copies: dict[Hashable, GraphOperation] = field(default_factory=dict)

    def copy(
        self, operation: GraphOperation, inputs: Sequence[GraphTensor], before: Sequence[GraphOperation]
    ) -> GraphOperation:
        """A copy that takes ``inputs`` and runs behind ``before`` alone, also in a graph that is finalized."""

        def create() -> GraphOperation:
            attributes = {name: value for name, value in operation.node_def.attr.items() if name != "_class"}
            copied: GraphOperation = self.graph.create_op(
                operation.type,
                list(inputs),
                [t.dtype for t in operation.outputs],
                [t.dtype for t in inputs],
                name=f"{operation.name}_on_host",
                attrs=attributes,
                op_def=operation.op_def,
            )
            return copied

        return self._once((operation.name, *(t.name for t in inputs)), before, create)

    def fetchable(self, tensor: GraphTensor) -> GraphTensor:
        """The tensor, or one with its value where sessions refuse to fetch it."""
        if self.graph.is_fetchable(tensor):
            return tensor
        return self._once((tensor.name,), (), lambda: tf.identity(tensor).op).outputs[0]

    def runnable(self, operation: GraphOperation) -> GraphOperation:
        """The operation, or one behind it where sessions refuse to run it."""
        if self.graph.is_fetchable(operation):
            return operation
        return self._once((), (operation,), tf.no_op)

    def _once(
        self, key: tuple[str, ...], before: Sequence[GraphOperation], create: Callable[[], GraphOperation]
    ) -> GraphOperation:
        key = (*key, *(f"^{o.name}" for o in before))
        if key not in self.copies:
            graph = self.graph
            finalized = graph.finalized
            if finalized:
                graph._unsafe_unfinalize()
            try:
                with (
                    graph.as_default(),
                    graph.control_dependencies(None),
                    graph.name_scope(None),
                    graph.device(None),
                    graph.control_dependencies(list(before)),
                ):
                    self.copies[key] = create()
            finally:
                if finalized:
                    graph.finalize()
        return self.copies[key]


class HostPieces:
    """The pieces of one run, in their order. ``fed``: tensors whose values are known when it starts; ``of_devices``:
    operations that clusters run.
    """

    def __init__(
        self, copies: CopiedOperations, fed: Collection[Hashable], of_devices: Collection[GraphOperation]
    ) -> None:
        self._copies, self._of_devices = copies, of_devices
        self.known = set(fed)
        self.done: set[GraphOperation] = set()
        """Operations with an effect, and those that read variables, that ran."""

    def piece(
        self, tensors: Iterable[GraphTensor], operations: Sequence[GraphOperation], *, last: bool = False
    ) -> HostPiece:
        """The next piece: it gives ``tensors`` and runs ``operations``, after the clusters behind which these are.
        Unless it is the ``last``, it also gives what later pieces would have to run again. UncutRunError if it would
        run something twice, or what is a device's.
        """
        giving = {t.ref(): t for t in tensors if t.ref() not in self.known}
        reached = self._reached([*(t.op for t in giving.values()), *operations])
        copied: dict[GraphOperation, GraphOperation] = {}
        once = []
        for operation in sorted(reached, key=lambda o: o._id):
            self._copy_bound(operation, copied)
            if runs_once(operation):
                once.append(operation)
        if not last:
            kept = (t for o in once for t in o.outputs if not _is_state(t) and t.dtype != tf.variant)
            giving.update((t.ref(), t) for t in kept if t.ref() not in self.known)
        self.done |= set(once)
        self.known |= set(giving)
        copies = self._copies
        fetched = (copied.get(t.op, t.op).outputs[t.value_index] for t in giving.values())
        targets = (copied.get(o, o) for o in operations)
        return HostPiece(
            tuple(giving.values()),
            tuple(map(copies.fetchable, fetched)),
            tuple(map(copies.runnable, targets)),
        )

    def _reached(self, starts: Iterable[GraphOperation]) -> set[GraphOperation]:
        reached: set[GraphOperation] = set()
        waiting = list(starts)
        while waiting:
            operation = waiting.pop()
            if operation in reached:
                continue
            if self._ran(operation):
                raise UncutRunError(f"the host would run {operation.type} '{operation.name}' again")
            reached.add(operation)
            waiting += [t.op for t in operation.inputs if t.ref() not in self.known]
            waiting += self._behind(operation)[0]
        return reached

    def _behind(self, operation: GraphOperation) -> tuple[Sequence[GraphOperation], bool]:
        """The operations behind which one has to run by its control edges, and whether these differ from its own edges.
        They do if an edge leads to what ran or is known, also through operations of which it does not matter when they
        run: TensorFlow would turn these into edges to what makes their inputs.
        """
        behind: dict[GraphOperation, None] = {}
        waiting, seen, differs = list(operation.control_inputs), set[Any](), False
        while waiting:
            other = waiting.pop()
            if other in seen:
                continue
            seen.add(other)
            if self._ran(other):
                differs = True
            elif runs_once(other) or other._get_control_flow_context() is not None:
                behind[other] = None
            else:
                differs = differs or any(t.ref() in self.known for t in other.inputs)
                waiting += [t.op for t in other.inputs if t.ref() not in self.known]
                waiting += other.control_inputs
        return (list(behind) if differs else operation.control_inputs), differs

    def _ran(self, operation: GraphOperation) -> bool:
        return operation in self.done or operation in self._of_devices

    def _copy_bound(self, operation: GraphOperation, copied: dict[GraphOperation, GraphOperation]) -> None:
        """Add a copy of an operation that must not run as it is: behind what ran, or behind a copy."""
        behind, differs = self._behind(operation)
        changed = [t for t in operation.inputs if t.op in copied and t.ref() not in self.known]
        if not differs and not changed and copied.keys().isdisjoint(behind):
            return
        inside = operation._get_control_flow_context() is not None or operation.type in _ENDS
        if inside or any(_is_state(t) for t in operation.outputs if not operation.inputs):
            raise UncutRunError(
                f"{operation.type} '{operation.name}', which the host computes, waits for what an IPU computes"
            )
        names = {t.ref() for t in changed}
        inputs = [copied[t.op].outputs[t.value_index] if t.ref() in names else t for t in operation.inputs]
        copied[operation] = self._copies.copy(operation, inputs, [copied.get(o, o) for o in behind])
