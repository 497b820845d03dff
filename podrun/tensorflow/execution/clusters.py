"""What a version-1 program places on an IPU without compiling it: a session runs it in clusters on the device.

The SDK compiles such operations when a session runs them. Here a run of a session is cut in the same way
(`cluster_plans`): the host computes what a cluster takes, the cluster runs as a program on the device, and the host
goes on with what it gives. Variables are written back where a cluster wrote them. Initializers of variables are the
host's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from podrun.core.quick_dataclass import dataclass
from podrun.private_apis.tensorflow import symbol
from podrun.tensorflow.execution.cluster_plans import ClusterPlanner, PlannedCluster, outside_of
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.execution.host_pieces import CopiedOperations, HostPiece
from podrun.tensorflow.execution.host_program import HostProgram
from podrun.tensorflow.execution.placed_devices import is_placed_graph, placed_on
from podrun.tensorflow.execution.trace_events import note_fetched, note_written

if TYPE_CHECKING:
    from podrun.tensorflow.execution.host_pieces import GraphOperation, GraphTensor

PlainRun = Callable[..., Any]
"""``run`` of a session as TensorFlow has it."""

_MOST_PROGRAMS = 16
"""The most programs that a cluster keeps: it has one for each set of input shapes."""
_MOST_PLANS = 256
_STARTING = RLock()
"""Held while the plans of a graph are made."""


@dataclass(frozen=True, slots=True)
class SessionCluster:
    """A cluster that runs. ``programs``: shapes of what enters -> the program for them."""

    plan: PlannedCluster
    programs: dict[Hashable, HostProgram] = field(default_factory=dict)

    def run(
        self, known: dict[Any, Any], compute: Callable[..., Any], turn: AbstractContextManager[Any]
    ) -> None:
        """Run with the values that are ``known``, and add those that it gives. ``compute``: a run of the host;
        ``turn``: held while variables are read and written.
        """
        plan = self.plan
        plan.before.run(known, compute)
        if not plan.program.step.nodes:
            return
        handles = {key: value for key, value in known.items() if key.deref().dtype == tf.resource}
        with turn if plan.variables else nullcontext():
            read = compute([plan.entering[i] for i in plan.variables], handles) if plan.variables else []
            of_variables = dict(zip(plan.variables, read, strict=True))
            arrays = [
                _checked(t, of_variables[i] if i in of_variables else known[t.ref()])
                for i, t in enumerate(plan.entering)
            ]
            host_program = self._program(arrays)
            outcome, written = host_program(arrays)
            self._write(written, handles, compute)
            if host_program.program.evented:
                self._note_written(written)
        for tensor, value in zip(plan.results, outcome, strict=True):
            known[tensor.ref()] = np.asarray(value, _numpy_type(tensor))[()]

    def _note_written(self, written: Mapping[str, np.ndarray]) -> None:
        assigned = [(self.plan.writes[k][0], value) for k, value in written.items() if k in self.plan.writes]
        sizes = {assign.inputs[0].op.name: int(value.nbytes) for assign, value in assigned}
        if assigned:
            note_written(assigned[0][0].graph, sizes, len(self.plan.results))

    def _program(self, arrays: Sequence[np.ndarray]) -> HostProgram:
        shapes = tuple(a.shape for a in arrays)
        if shapes not in self.programs:
            program = self.plan.read() if self.programs else self.plan.program
            self.programs[shapes] = program
            if len(self.programs) > _MOST_PROGRAMS:
                self.programs.pop(next(iter(self.programs)))
        return self.programs[shapes]

    def _write(
        self, written: Mapping[str, np.ndarray], handles: Mapping[Any, Any], compute: Callable[..., Any]
    ) -> None:
        """Assign what the program wrote: all in one run, unless two variables are assigned the same tensor."""
        waiting = [
            (*self.plan.writes[key], value) for key, value in written.items() if key in self.plan.writes
        ]
        while waiting:
            feeds: dict[Any, Any] = {}
            assigns: list[GraphOperation] = []
            later = []
            for assign, source, value in waiting:
                if source.ref() in feeds:
                    later.append((assign, source, value))
                    continue
                feeds[source.ref()] = np.asarray(value, _numpy_type(source))
                assigns.append(assign)
            compute(assigns, {**handles, **feeds})
            waiting = later


def _numpy_type(tensor: GraphTensor) -> Any:
    return tensor.dtype.base_dtype.as_numpy_dtype


def _checked(tensor: GraphTensor, value: object) -> np.ndarray:
    """A value that enters a cluster. InvalidArgumentError if an IPU's integers cannot hold it."""
    array = np.asarray(value, _numpy_type(tensor))
    limits = outside_of(array)
    if limits is not None:
        raise tf.errors.InvalidArgumentError(
            None,
            tensor.op,
            f"'{tensor.name}' has values outside of {limits.min}..{limits.max}. An IPU computes {array.dtype} as "
            f"{limits.dtype}: place what uses these values on the host, with tf.device('/device:CPU:0').",
        )
    return array


@dataclass(slots=True)
class CutRun:
    """How one kind of run is cut: its clusters, and what the host runs behind them."""

    clusters: tuple[SessionCluster, ...]
    last: HostPiece


class ClusterPlans:
    """How the runs of a graph's sessions are cut, by what they fetch and feed."""

    def __init__(self, graph: tf.Graph) -> None:
        self.plans: dict[Hashable, CutRun] = {}
        self._copies = CopiedOperations(graph)
        self._numbers: Iterator[int] = itertools.count()
        self._planning, self._updating = RLock(), RLock()

    def run(self, plain: PlainRun, session: Any, fetches: Any, feed_dict: Any, rest: Sequence[Any]) -> Any:
        """A run of a session. ``rest``: its options and metadata."""
        graph = session.graph
        fed = _fed_tensors(graph, feed_dict)
        handler = None if fed is None else _fetch_handler(graph, fetches)
        if fed is None or handler is None:
            return plain(session, fetches, feed_dict, *rest)
        tensors, targets = list(handler.fetches()), list(handler.targets())
        plan = self._plan(session, fed, tensors, targets)
        if DEVICES.connection == "NEVER":
            _refuse_initializers([*(t.op for t in tensors), *targets])
        if not plan.clusters:
            note_fetched(graph, _variables_of(tensors))
            return plain(session, fetches, feed_dict, *rest)
        known: dict[Any, Any] = {t.ref(): value for t, value in fed}

        def compute(wanted: Sequence[Any], values: Mapping[Any, Any]) -> Any:
            return plain(session, wanted, {key.deref(): value for key, value in values.items()}, *rest)

        for cluster in plan.clusters:
            cluster.run(known, compute, self._updating)
        plan.last.run(known, compute)
        note_fetched(graph, _variables_of(tensors))
        return handler.build_results(session, [known[t.ref()] for t in tensors])

    def _plan(
        self,
        session: Any,
        fed: Sequence[tuple[GraphTensor, Any]],
        tensors: Sequence[GraphTensor],
        targets: Sequence[GraphOperation],
    ) -> CutRun:
        soft = bool(session._config and session._config.allow_soft_placement)
        key = (
            soft,
            tuple(t.name for t in tensors),
            tuple(o.name for o in targets),
            tuple(sorted(t.name for t, _ in fed)),
        )
        with self._planning, session.graph.as_default():
            if key not in self.plans:
                plan = ClusterPlanner(self._copies, self._numbers, [t for t, _ in fed], soft=soft)
                clusters, last = plan.clusters(tensors, targets)
                self.plans[key] = CutRun(tuple(map(SessionCluster, clusters)), last)
                if len(self.plans) > _MOST_PLANS:
                    self.plans.pop(next(iter(self.plans)))
            return self.plans[key]


def _refuse_initializers(starts: Sequence[GraphOperation]) -> None:
    """InvalidArgumentError if a run computes the initial value of a variable on an IPU, where none is attached."""
    waiting, seen = list(starts), set(starts)
    while waiting:
        operation = waiting.pop()
        if operation.type == "AssignVariableOp":
            handle, value = (t.op for t in operation.inputs)
            beside = f"loc:@{handle.name}".encode() in value.node_def.attr["_class"].list.s
            on_ipu = placed_on(value) is not None or (placed_on(handle) is not None and beside)
            if on_ipu and value.type not in ("Const", "Placeholder"):
                raise tf.errors.InvalidArgumentError(
                    None,
                    operation,
                    f"The device of '{value.name}' is configured for compilation only, with "
                    "DeviceConnectionType.NEVER. Initialize variables on the host: call "
                    "ipu.utils.move_variable_initialization_to_cpu() before the initializer runs.",
                )
        before = [*(t.op for t in operation.inputs), *operation.control_inputs]
        waiting += [o for o in before if o not in seen]
        seen.update(before)


def _variables_of(tensors: Sequence[GraphTensor]) -> list[str]:
    """The variables whose values are among the tensors, by name."""
    return [t.op.inputs[0].op.name for t in tensors if t.op.type == "ReadVariableOp"]


def _fed_tensors(graph: tf.Graph, feed_dict: Any) -> list[tuple[GraphTensor, Any]] | None:
    """What is fed; None if something is no tensor, or TensorFlow is to say that it does not fit."""
    fed = []
    for key, value in (feed_dict or {}).items():
        try:
            tensor = graph.as_graph_element(key, allow_operation=False)
        except (TypeError, ValueError, KeyError):
            return None
        if isinstance(value, tf.Tensor) or not isinstance(tensor, tf.Tensor):
            return None
        if tensor.dtype not in (tf.resource, tf.variant):
            value = np.asarray(value, _numpy_type(tensor))
            if not tensor.shape.is_compatible_with(value.shape):
                return None
        fed.append((tensor, value))
    return fed


def _fetch_handler(graph: tf.Graph, fetches: Any) -> Any:
    """What a run fetches; None if TensorFlow is to say what is wrong with it."""
    try:
        return symbol("client.session._FetchHandler")(graph, fetches, {})
    except (TypeError, ValueError, KeyError):
        return None


def cluster_run(plain: PlainRun, session: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """A run of a session, with what is placed on IPUs there."""
    graph = session.graph
    if not is_placed_graph(graph):
        return plain(session, *args, **options)
    with _STARTING:
        plans = getattr(graph, "_ipu_clusters", None)
        if plans is None:
            plans = graph._ipu_clusters = ClusterPlans(graph)
    names = ("fetches", "feed_dict", "options", "run_metadata")
    chosen = {**dict(zip(names, args, strict=False)), **options}
    rest = (chosen.get("options"), chosen.get("run_metadata"))
    return plans.run(plain, session, chosen.get("fetches"), chosen.get("feed_dict"), rest)
