"""What a version-1 program places on an IPU without compiling it: a session runs it in clusters on the device.

The SDK compiles such operations when a session runs them. Here a run of a session is cut in the same way: the host
computes what a cluster takes, the cluster runs as a program on the device, and the host goes on with what it gives.
Variables are written back where a cluster wrote them. Initializers of variables are the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import tensorflow as tf

from podrun.core.errors import PodrunError
from podrun.private_apis.tensorflow import symbol
from podrun.tensorflow.capture.markers import marked
from podrun.tensorflow.execution.host_program import HostProgram, ProgramPart, input_key
from podrun.tensorflow.execution.placed_devices import is_placed_graph, placed_on
from podrun.tensorflow.graph.importer import READERS, UPDATES
from podrun.tensorflow.operators.table import HANDLERS, TensorFlowOperators, load_table

if TYPE_CHECKING:

    class GraphTensor(Protocol):
        """A tensor of a graph, as far as it is used here."""

        op: GraphOperation
        name: str
        dtype: tf.DType

        def ref(self) -> Hashable: ...
        def consumers(self) -> list[GraphOperation]: ...

    class GraphOperation(Protocol):
        """An operation of a graph, as far as it is used here."""

        type: str
        name: str
        inputs: Sequence[GraphTensor]
        outputs: Sequence[GraphTensor]
        control_inputs: Sequence[GraphOperation]
        op_def: tf.compat.v1.OpDef
        _id: int

        def _get_control_flow_context(self) -> object: ...


PlainRun = Callable[..., Any]
"""``run`` of a session as TensorFlow has it."""

_TRIVIAL = {
    "AssignVariableOp", "Const", "ExpandDims", "Identity", "IdentityN", "NoOp", "Pack", "Placeholder", "ReadVariableOp",
    "Reshape", "Shape", "Squeeze", "StridedSlice", "Unpack", "VarIsInitializedOp",
}  # fmt: skip
"""Operations that alone are no work for a device."""
_WITHOUT_EFFECT = {"VarHandleOp", "ReadVariableOp", "VarIsInitializedOp", "Placeholder"}
_REFUSED_TYPES = {tf.float64, tf.complex64, tf.complex128, tf.string, tf.variant}
_NO_KERNEL = (
    "Cannot assign a device for operation {}: Could not satisfy explicit device specification '{}' because no "
    "supported kernel for IPU devices is available."
)


@dataclass(frozen=True, slots=True)
class SessionCluster:
    """Operations that run as one program. ``read`` reads it; there is one for all shapes of what enters. ``entering``:
    what the host computes for it, the values of variables among it; ``results``: what it gives; ``writes``: key of a
    variable -> the operation that assigns it and what it assigns; ``taken``: other tensors that the host computes at
    once, because it may not compute them twice.
    """

    read: Callable[[], HostProgram]
    entering: tuple[GraphTensor, ...]
    results: tuple[GraphTensor, ...]
    writes: Mapping[str, tuple[GraphOperation, GraphTensor]]
    taken: tuple[GraphTensor, ...]
    programs: dict[Any, HostProgram] = field(default_factory=dict)

    def run(self, known: dict[Any, Any], compute: Callable[..., Any]) -> None:
        """Run with the values that are ``known``, and add those that it gives. ``compute``: a run of the host."""
        missing = [t for t in dict.fromkeys((*self.entering, *self.taken)) if t.ref() not in known]
        if missing:
            known.update(zip((t.ref() for t in missing), compute(missing, known), strict=True))
        arrays = [np.asarray(known[t.ref()], _numpy_type(t)) for t in self.entering]
        shapes = tuple(a.shape for a in arrays)
        if shapes not in self.programs:
            self.programs[shapes] = self.read()
        outcome, written = self.programs[shapes](arrays)
        for tensor, value in zip(self.results, outcome, strict=True):
            known[tensor.ref()] = np.asarray(value, _numpy_type(tensor))[()]
        for key, (assign, source) in self.writes.items():
            if key in written:
                compute([assign], {source.ref(): np.asarray(written[key], _numpy_type(source))})


def _numpy_type(tensor: GraphTensor) -> Any:
    return tensor.dtype.base_dtype.as_numpy_dtype


@dataclass(slots=True)
class ClusterPlans:
    """How a session's runs are cut, by what they fetch and feed."""

    plans: dict[Any, tuple[tuple[SessionCluster, ...], frozenset[GraphOperation]]] = field(
        default_factory=dict
    )

    def run(self, plain: PlainRun, session: Any, fetches: Any, feed_dict: Any, rest: Sequence[Any]) -> Any:
        """A run of a session. ``rest``: its options and metadata."""
        graph = session.graph
        fed = _fed_tensors(graph, feed_dict)
        handler = None if fed is None else _fetch_handler(graph, fetches)
        if fed is None or handler is None:
            return plain(session, fetches, feed_dict, *rest)
        tensors, targets = list(handler.fetches()), list(handler.targets())
        key = (
            graph.version,
            tuple(t.name for t in (*tensors, *targets)),
            tuple(sorted(k.name for k, _ in fed)),
        )
        if key not in self.plans:
            soft = bool(session._config and session._config.allow_soft_placement)
            chosen = _SessionPlan(graph, [t for t, _ in fed], soft=soft)
            self.plans[key] = chosen.clusters(tensors, targets), frozenset(chosen.ordinals)
        clusters, on_device = self.plans[key]
        if not clusters:
            return plain(session, fetches, feed_dict, *rest)
        known: dict[Any, Any] = {t.ref(): value for t, value in fed}

        def compute(wanted: Sequence[Any], values: Mapping[Any, Any]) -> Any:
            return plain(session, wanted, {key.deref(): value for key, value in values.items()})

        for cluster in clusters:
            cluster.run(known, compute)
        last = [t for t in tensors if t.ref() not in known] + [t for t in targets if t not in on_device]
        feeds = {key.deref(): value for key, value in known.items()}
        values = plain(session, last, feeds, *rest) if last else []
        known.update((t.ref(), v) for t, v in zip(last, values, strict=True) if isinstance(t, tf.Tensor))
        return handler.build_results(session, [known[t.ref()] for t in tensors])


def _fed_tensors(graph: tf.Graph, feed_dict: Any) -> list[tuple[GraphTensor, Any]] | None:
    """What is fed; None if something is no tensor."""
    fed = []
    for key, value in (feed_dict or {}).items():
        try:
            tensor = graph.as_graph_element(key, allow_operation=False)
        except (TypeError, ValueError, KeyError):
            return None
        if isinstance(value, tf.Tensor) or not isinstance(tensor, tf.Tensor):
            return None
        handle = tensor.dtype in (tf.resource, tf.variant)
        fed.append((tensor, value if handle else np.asarray(value, _numpy_type(tensor))))
    return fed


def _fetch_handler(graph: tf.Graph, fetches: Any) -> Any:
    """What a run fetches; None if TensorFlow is to say what is wrong with it."""
    try:
        return symbol("client.session._FetchHandler")(graph, fetches, {})
    except (TypeError, ValueError, KeyError):
        return None


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
    kinds = [t.dtype for t in (*operation.inputs, *operation.outputs)]
    if tf.float64 in kinds and not soft:
        raise tf.errors.InvalidArgumentError(
            None, operation, _NO_KERNEL.format(operation.name, f"/device:IPU:{ordinal}")
        )
    known = operation.type in READERS or operation.type in UPDATES or operation.type in HANDLERS
    fits = known and not any(k._is_ref_dtype or k in _REFUSED_TYPES for k in kinds)
    return ordinal if fits and not any(t.dtype == tf.resource for t in operation.outputs) else None


def differentiated_on_device(targets: Sequence[Any], sources: Sequence[Any]) -> bool:
    """Whether the device computes all that lies between tensors of a session's graph, so that it differentiates it:
    what only IPUs compute is there, or all of it is placed on one IPU.
    """
    load_table()
    behind = {getattr(source, "handle", source).ref() for source in sources if not isinstance(source, str)}
    waiting, seen = [t.op for t in targets if isinstance(t, tf.Tensor)], set[Any]()
    while waiting:
        operation = waiting.pop()
        if operation not in seen:
            seen.add(operation)
            waiting += [t.op for t in operation.inputs]
    if any(marked(operation) is not None for operation in seen):
        return True
    devices: set[int | None] = set()
    for operation in sorted(seen, key=lambda o: o._id):
        if any(t.ref() in behind for t in operation.inputs):
            behind.update(t.ref() for t in operation.outputs)
            devices.add(computing_device(operation))
    return len(devices) == 1 and None not in devices


class ClusterGraph:
    """A graph of a session as one of a program on an IPU."""

    def __init__(self, graph: tf.Graph, ordinal: int, number: int) -> None:
        self._graph, self.ordinal, self.name = graph, ordinal, f"cluster_{number}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


class _SessionPlan:
    """One run's operations: which are the device's, and in which cluster."""

    def __init__(self, graph: tf.Graph, fed: Iterable[GraphTensor], *, soft: bool) -> None:
        load_table()
        self.graph, self.soft = graph, soft
        self.fed = {t.ref() for t in fed}
        self.ordinals: dict[GraphOperation, int] = {}
        """The operations of clusters -> the number of their device."""
        self.stages: dict[GraphOperation, int] = {}
        """Operation -> the cluster that it is in, or behind which it is."""

    def clusters(
        self, tensors: Sequence[GraphTensor], targets: Sequence[GraphOperation]
    ) -> tuple[SessionCluster, ...]:
        """The clusters in order; none where the host runs all."""
        needed = self._needed([*tensors, *targets], self.fed)
        if needed & self._initializers():
            return ()
        self._place(needed)
        marks = [o for o in self.ordinals if marked(o) is not None]
        if all(o.type in _TRIVIAL for o in self.ordinals) and not marks:
            return ()
        try:
            return self._cut(needed, tensors, targets)
        except (PodrunError, LookupError, NotImplementedError):
            if marks:
                raise
            return ()

    def _needed(self, starts: Iterable[Any], known: set[Any]) -> set[GraphOperation]:
        needed: set[GraphOperation] = set()
        waiting = list(starts)
        while waiting:
            start = waiting.pop()
            if isinstance(start, tf.Tensor):
                if start.ref() in known:
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
            before = [*(t.op for t in operation.inputs if t.ref() not in self.fed), *operation.control_inputs]
            if operation.type == "NoOp":
                ordinal = next((self.ordinals[o] for o in before if o in self.ordinals), None)
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

    def _cut(
        self, needed: set[GraphOperation], tensors: Sequence[GraphTensor], targets: Sequence[GraphOperation]
    ) -> tuple[SessionCluster, ...]:
        known, ran = set(self.fed), set[Any]()
        clusters: list[SessionCluster] = []
        for ordinal, stage in sorted(
            {(self.ordinals[o], self.stages[o]) for o in self.ordinals}, key=lambda p: (p[1], p[0])
        ):
            own = {o for o in self.ordinals if self.stages[o] == stage and self.ordinals[o] == ordinal}
            cluster = self._cluster(own, ordinal, needed, tensors, len(clusters))
            taken = self._check_host(cluster.entering, known, ran)
            known |= {t.ref() for t in (*cluster.entering, *taken, *cluster.results)}
            parts = (cluster.read, cluster.entering, cluster.results, cluster.writes, taken)
            clusters.append(SessionCluster(*parts))
        self._check_host([t for t in (*tensors, *targets) if t not in self.ordinals], known, ran)
        return tuple(clusters)

    def _check_host(self, starts: Sequence[Any], known: set[Any], ran: set[Any]) -> tuple[GraphTensor, ...]:
        """What else the host must compute at once with ``starts``. LookupError if it would run something twice, or
        what is the device's.
        """
        taken = []
        for operation in self._needed(starts, known):
            if operation in self.ordinals and operation.type not in _TRIVIAL:
                raise LookupError(operation.name)
            if not operation.op_def.is_stateful or operation.type in _WITHOUT_EFFECT:
                continue
            if operation in ran:
                raise LookupError(operation.name)
            ran.add(operation)
            taken += [t for t in operation.outputs if t.dtype not in (tf.resource, tf.variant)]
        return tuple(taken)

    def _cluster(
        self,
        own: set[GraphOperation],
        ordinal: int,
        needed: set[GraphOperation],
        fetched: Sequence[GraphTensor],
        number: int,
    ) -> SessionCluster:
        inputs = {
            t.ref(): t
            for o in sorted(own, key=lambda o: o._id)
            for t in o.inputs
            if t.ref() in self.fed or (t.op not in own and t.op.type != "Const")
        }
        outside = {t.ref() for o in needed - own for t in o.inputs} | {t.ref() for t in fetched}
        results = [
            t
            for o in sorted(own, key=lambda o: o._id)
            for t in o.outputs
            if t.ref() in outside and t.ref() not in self.fed
        ]
        effects = [o for o in own if not o.outputs]
        keys = [input_key(t, i) for i, t in enumerate(inputs.values())]
        done = frozenset({t.op for t in inputs.values()} | {o for o in needed - own if o.type != "Const"})
        part = ProgramPart(ordinal, list(inputs.values()), keys, done=done)
        graph = ClusterGraph(self.graph, ordinal, number)
        read = partial(HostProgram, graph, results, effects, part=part)
        program, operators = read(), TensorFlowOperators()
        for node in program.step.nodes:
            operators.lookup(node)
        entering, writes = [], {}
        for key, tensor in zip(keys, inputs.values(), strict=True):
            entering.append(_reading(tensor) if tensor.dtype == tf.resource else tensor)
            if key in program.step.written:
                writes[key] = _assigning(tensor)
        return SessionCluster(read, tuple(entering), tuple(results), writes, ())


def _reading(handle: GraphTensor) -> GraphTensor:
    """What reads a variable. LookupError if nothing does."""
    for operation in handle.consumers():
        if operation.type == "ReadVariableOp" and not operation.control_inputs:
            return operation.outputs[0]
    raise LookupError(handle.name)


def _assigning(handle: GraphTensor) -> tuple[GraphOperation, GraphTensor]:
    """What assigns a variable, and the tensor that it assigns. LookupError if nothing does."""
    for operation in handle.consumers():
        if operation.type == "AssignVariableOp" and not operation.control_inputs:
            return operation, operation.inputs[1]
    raise LookupError(handle.name)


def cluster_run(plain: PlainRun, session: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """A run of a session, with what is placed on IPUs there."""
    graph = session.graph
    if not is_placed_graph(graph):
        return plain(session, *args, **options)
    plans = getattr(graph, "_ipu_clusters", None)
    if plans is None:
        plans = graph._ipu_clusters = ClusterPlans()
    names = ("fetches", "feed_dict", "options", "run_metadata")
    chosen = {**dict(zip(names, args, strict=False)), **options}
    rest = (chosen.get("options"), chosen.get("run_metadata"))
    return plans.run(plain, session, chosen.get("fetches"), chosen.get("feed_dict"), rest)
