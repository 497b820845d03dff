"""Programs in parts, which run one after the other on the device and hand values on.

A program is in parts if there is more in it than one loop of queues: two loops, work before or after a loop, a loop in
a loop, a loop whose end depends on what it computes, or operations of the host (`outside_compilation_scope`).
Values between parts have a row for each replica of this process, or one row that holds for all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import Protocol

import numpy as np
import tensorflow as tf

from podrun.core.errors import UnsupportedError
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.feeds import DataFeed
from podrun.tensorflow.capture.markers import reference
from podrun.tensorflow.capture.program_graphs import FunctionGraph, IpuGraph, host_scope
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.execution.host_functions import HostFunction
from podrun.tensorflow.execution.host_program import HostProgram, ProgramPart, fed_names, input_key
from podrun.tensorflow.execution.part_levels import (
    CALLS,
    computed_again,
    has_parts,
    held_everywhere,
    is_in_parts,
    is_nothing,
    part_levels,
    tensors_entering,
)
from podrun.tensorflow.execution.queue_loops import MainLoop, loop_of, origin
from podrun.tensorflow.graph.importer import function_graph, has_effect

_NARROW = {tf.int64: tf.int32, tf.float64: tf.float32}


@dataclass(slots=True)
class PartState:
    """Values of the program's inputs and variables by their key, those that parts wrote, and for variables of which
    each replica has a value of its own the part that has them.
    """

    values: dict[str, np.ndarray]
    written: dict[str, np.ndarray] = field(default_factory=dict)
    owners: dict[str, HostProgram] = field(default_factory=dict)

    def take(self, program: HostProgram, written: Mapping[str, np.ndarray]) -> None:
        """Take what a part wrote."""
        own = {key: value for key, value in written.items() if key in program.keys}
        self.values.update(own)
        self.written.update(own)
        if program.program.settings.replicas > 1:
            self.owners.update(dict.fromkeys(own.keys() - program.program.shared(), program))

    def check(self, program: HostProgram) -> None:
        """UnsupportedError if a part reads a variable of which the replicas have values of their own elsewhere."""
        for key in program.keys:
            if self.owners.get(key, program) is not program:
                raise UnsupportedError(
                    f"The program {program.graph.name!r} writes a variable in one loop, differently on each replica, "
                    "and uses it outside of this loop.",
                    hint="Reduce what is written over the replicas: cross_replica_ops.cross_replica_mean.",
                )


class CrossingQueue:
    """What a part takes from the parts before it: an element for each replica."""

    def __init__(self, tensors: Sequence[tf.Tensor]) -> None:
        self.tensors = list(tensors)
        self.number = reference(self)
        self.used: list[str] = []
        self.rows: list[np.ndarray] = []

    @property
    def flat_specs(self) -> list[tf.TensorSpec]:
        """Types and shapes of what the part uses."""
        names = fed_names(self.number, len(self.tensors))
        named = {name: self._spec(place) for place, name in enumerate(names) if name in self.used}
        return [named[name] for name in self.used]

    def _spec(self, place: int) -> tf.TensorSpec:
        """Type and shape of a tensor; those of a list are its elements', which the parts before it gave."""
        tensor = self.tensors[place]
        if tensor.dtype == tf.variant:
            return tf.TensorSpec(self.rows[place].shape[1:], self.rows[place].dtype)
        return tf.TensorSpec(tensor.shape, _NARROW.get(tensor.dtype, tensor.dtype))

    def data_feed(self, replicas: int, local_replicas: int) -> DataFeed:
        """The elements of one run."""
        names = fed_names(self.number, len(self.tensors))
        elements = [
            {n: v[r % len(v)] for n, v in zip(names, self.rows, strict=True) if n in self.used}
            for r in range(local_replicas)
        ]
        return DataFeed(elements, ahead=local_replicas, name=f"infeed{self.number}")


class ProgramStage(Protocol):
    """A part of a `GraphParts`: it reads values of parts before it, and adds what it computes to ``rows``."""

    def run(self, parts: GraphParts, rows: dict[str, np.ndarray], state: PartState) -> None:
        """Run this part."""


class GraphParts:
    """A graph in parts. ``keys``: tensor of the graph -> key of its value, for variables and what the program's caller
    gives; other inputs are given to `run`.
    """

    def __init__(
        self,
        graph: FunctionGraph,
        keys: Mapping[str, str],
        results: Sequence[tf.Tensor],
        effects: Sequence[tf.Operation],
        place: tuple[int, int],
    ) -> None:
        self.graph, self.keys, self.place = graph, dict(keys), place
        self.results = list(results)
        levels = part_levels(graph, results, effects)
        again, held = computed_again(levels), held_everywhere(levels)
        self.parts: list[ProgramStage] = []
        wanted = {id(r) for r in results}
        for operation, level in levels.items():
            wanted |= {id(t) for t in operation.inputs if levels.get(t.op, level) != level}
        for level in sorted(set(levels.values())):
            own = [operation for operation, number in levels.items() if number == level]
            repeated = again.get(level, set())
            earlier = (o for o, n in levels.items() if n < level and o not in repeated)
            done = frozenset(o for o in earlier if o not in held)
            part = self._part(own, done, wanted)
            if part is not None:
                self.parts.append(part)

    def _part(
        self, own: Sequence[tf.Operation], done: frozenset[tf.Operation], wanted: Collection[int]
    ) -> ProgramStage | None:
        leaving = [t for o in own for t in o.outputs if id(t) in wanted and t.dtype != tf.resource]
        loop = loop_of(self.graph, own[0])
        if loop is not None:
            return LoopPart(self, loop)
        if own[0].type in CALLS and has_parts(function_graph(self.graph, own[0].get_attr("f").name)):
            return CallPart(self, own[0])
        if host_scope(own[0]) is not None:
            return HostPart(self.graph, own, leaving)
        if all(is_nothing(operation) for operation in own):
            return None
        return StraightPart(self, own, [t for t in leaving if tf.get_static_value(t) is None], done)

    def run(self, entry_rows: Mapping[str, np.ndarray], state: PartState) -> list[np.ndarray]:
        """The rows of the results. ``entry_rows``: rows of inputs, by name."""
        rows = dict(entry_rows)
        for part in self.parts:
            part.run(self, rows, state)
        return [self.rows_of(tensor, rows, state) for tensor in self.results]

    def rows_of(self, tensor: tf.Tensor, rows: Mapping[str, np.ndarray], state: PartState) -> np.ndarray:
        """The rows of a tensor. UnsupportedError for one that no part gives."""
        for own in (tensor, origin(tensor)):
            if own.name in rows:
                return rows[own.name]
            if own.name in self.keys:
                return np.asarray(state.values[self.keys[own.name]])[None]
        if origin(tensor).op.type == "ReadVariableOp":
            return self.rows_of(origin(tensor).op.inputs[0], rows, state)
        value = tf.get_static_value(tensor)
        if value is None:
            raise UnsupportedError(f"'{tensor.name}' has no value between the parts of the program.")
        return np.asarray(value)[None]

    def resource_keys(self, tensors: Sequence[tf.Tensor]) -> dict[str, str]:
        """The keys of the variables among tensors of the graph, by name."""
        return {t.name: self.keys[origin(t).name] for t in tensors if t.dtype == tf.resource}


class StraightPart:
    """Operations between loops: one run of the device."""

    def __init__(
        self,
        parts: GraphParts,
        own: Sequence[tf.Operation],
        leaving: list[tf.Tensor],
        done: frozenset[tf.Operation],
    ) -> None:
        outer = tensors_entering(own, done)
        held = [t for t in outer if t.name in parts.keys]
        fed = [t for t in outer if t.name not in parts.keys]
        self.leaving = leaving
        self.queue = CrossingQueue(fed)
        part = ProgramPart(
            parts.place[0],
            held,
            [parts.keys[t.name] for t in held],
            fed=fed,
            queue=self.queue.number,
            done=done,
            reported=False,
        )
        effects = [o for o in own if not o.outputs or o.type == "PyFunc" or has_effect(parts.graph, o)]
        self.program = HostProgram(parts.graph, leaving, effects, shards=parts.place[1], part=part)
        self.queue.used = list(self.program.step.infeeds.get(self.queue.number, []))
        self.idle = not self.program.step.nodes

    def run(self, parts: GraphParts, rows: dict[str, np.ndarray], state: PartState) -> None:
        """Run it, and add what it gives to the rows."""
        if self.idle:
            return
        state.check(self.program)
        self.queue.rows = [parts.rows_of(t, rows, state) for t in self.queue.tensors]
        held = {key: state.values[key] for key in self.program.keys}
        _, written = self.program.iterate(1, held)
        state.take(self.program, written)
        names = self.program.step.results
        rows.update((t.name, self.program.program.rows[n]) for t, n in zip(self.leaving, names, strict=True))


class LoopPart:
    """A loop with queues: as many runs of its body as it counts, or one by one as long as its condition holds."""

    def __init__(self, parts: GraphParts, loop: MainLoop) -> None:
        self.loop, self.place = loop, parts.place
        self.keys = parts.resource_keys(loop.inputs)
        self.counted: HostProgram | None = None
        self.driven: DrivenLoop | None = None
        if loop.counted is not None and not has_parts(loop.body):
            handles = [origin(t) for t in loop.inputs if t.dtype == tf.resource]
            part = ProgramPart(parts.place[0], handles, [parts.keys[t.name] for t in handles], loop)
            self.counted = HostProgram(parts.graph, [], [], shards=parts.place[1], part=part)

    def run(self, parts: GraphParts, rows: dict[str, np.ndarray], state: PartState) -> None:
        """Run it, and add its results to the rows."""
        starts = [None if t.dtype == tf.resource else parts.rows_of(t, rows, state) for t in self.loop.inputs]
        if self.counted is not None and all(s is None or bool((s == s[:1]).all()) for s in starts):
            results = self._iterated(self.counted, starts, state)
        else:
            if self.driven is None:
                self.driven = DrivenLoop(self.loop, self.keys, self.place)
            results = self.driven.run(starts, state)
        rows.update((t.name, r) for t, r in zip(self.loop.operation.outputs, results, strict=False))

    def _iterated(
        self, program: HostProgram, starts: Sequence[np.ndarray | None], state: PartState
    ) -> list[np.ndarray]:
        state.check(program)
        values = {key: state.values[key] for key in program.keys}
        iterations = program.start_loop(values, [None if s is None else s[0] for s in starts])
        _, written = program.iterate(iterations, values)
        state.take(program, written)
        return program.loop_rows(values, iterations)


class DrivenLoop:
    """A loop whose condition the host looks at before each iteration."""

    def __init__(self, loop: MainLoop, keys: Mapping[str, str], place: tuple[int, int]) -> None:
        self.loop = loop
        pairs = list(zip(loop.inputs, loop.body.inputs, strict=True))
        inner = {own.name: keys[outer.name] for outer, own in pairs if outer.dtype == tf.resource}
        self.places = [i for i, (outer, _) in enumerate(pairs) if outer.dtype != tf.resource]
        results = [loop.body.outputs[i] for i in self.places]
        self.body = GraphParts(loop.body, inner, results, loop.effects, place)
        condition = loop.condition
        self.holds = HostFunction(condition, [condition.outputs[0]], condition.inputs)
        reads = [t.op for t in self.holds.entering if t.op.type == "ReadVariableOp"]
        variables = {t.name: inner[b.name] for t, b in zip(condition.inputs, loop.body.inputs, strict=False)
                     if b.name in inner}  # fmt: skip
        self.reads = [(o.outputs[0], variables[origin(o.inputs[0]).name]) for o in reads]

    def run(self, starts: Sequence[np.ndarray | None], state: PartState) -> list[np.ndarray]:
        """The rows of the loop's outputs."""
        values = list(starts)
        while self._holds(values, state):
            entry_rows = {self.loop.body.inputs[i].name: np.asarray(values[i]) for i in self.places}
            for i, rows in zip(self.places, self.body.run(entry_rows, state), strict=True):
                values[i] = rows
        return [np.zeros((1,), np.int32) if v is None else v for v in values[self.loop.first :]]

    def _holds(self, values: Sequence[np.ndarray | None], state: PartState) -> bool:
        feeds = zip(self.loop.condition.inputs, values, strict=False)
        rows = {t.name: v for t, v in feeds if v is not None}
        rows |= {t.name: np.asarray(state.values[key])[None] for t, key in self.reads}
        answers = [bool(answer) for (answer,) in self.holds.of_rows(rows)]
        if len(set(answers)) > 1:
            raise UnsupportedError(
                "A loop with queues goes on on some replicas and ends on others.",
                hint="Let its condition depend on values that all replicas share.",
            )
        return answers[0]


class CallPart:
    """A call of a function that is in parts itself."""

    def __init__(self, parts: GraphParts, operation: tf.Operation) -> None:
        self.operation = operation
        self.graph = function_graph(parts.graph, operation.get_attr("f").name)
        pairs = list(zip(operation.inputs, self.graph.inputs, strict=True))
        keys = {own.name: parts.keys[origin(t).name] for t, own in pairs if t.dtype == tf.resource}
        self.values = [(t, own) for t, own in pairs if t.dtype != tf.resource]
        self.inner = GraphParts(self.graph, keys, self.graph.outputs, self.graph.control_outputs, parts.place)

    def run(self, parts: GraphParts, rows: dict[str, np.ndarray], state: PartState) -> None:
        """Run it, and add its results to the rows."""
        entry_rows = {own.name: parts.rows_of(t, rows, state) for t, own in self.values}
        results = self.inner.run(entry_rows, state)
        rows.update((t.name, r) for t, r in zip(self.operation.outputs, results, strict=True))


class HostPart:
    """Operations that the host computes, for each replica."""

    def __init__(
        self, graph: FunctionGraph, own: Sequence[tf.Operation], leaving: Sequence[tf.Tensor]
    ) -> None:
        self.leaving = list(leaving)
        inside = set(own)
        outer = {t.name: t for o in own for t in o.inputs if t.op not in inside and t.op.type != "Const"}
        targets = [o for o in own if not o.outputs or o.type in ("PyFunc", "EagerPyFunc")]
        self.function = HostFunction(graph, leaving, list(outer.values()), targets)

    def run(self, parts: GraphParts, rows: dict[str, np.ndarray], state: PartState) -> None:
        """Run it, and add what it gives to the rows."""
        values = {t.name: parts.rows_of(t, rows, state) for t in self.function.entering}
        results = self.function.of_rows(values)
        rows.update((t.name, np.stack([r[i] for r in results])) for i, t in enumerate(self.leaving))


class PartedProgram:
    """The program of an `IpuGraph` in parts, with what callers use of a `HostProgram`."""

    def __init__(
        self,
        graph: IpuGraph,
        results: Sequence[tf.Tensor],
        effects: Sequence[tf.Operation],
        *,
        shards: int = 1,
    ) -> None:
        self.graph, self.results, self.ordinal = graph, list(results), graph.ordinal
        self.inputs = list(graph.inputs)
        self.keys = [input_key(t, i) for i, t in enumerate(self.inputs)]
        place = (graph.ordinal, max(shards, getattr(graph, "shards", 1)))
        named = {t.name: key for t, key in zip(self.inputs, self.keys, strict=True)}
        self._parts = GraphParts(graph, named, self.results, effects, place)
        self._report_largest()

    def _report_largest(self) -> None:
        """Let the longest part have the report, where no loop has one."""
        straight = [part.program for part in self._parts.parts if isinstance(part, StraightPart)]
        if straight and all(isinstance(part, (StraightPart, HostPart)) for part in self._parts.parts):
            max(straight, key=lambda program: len(program.step.nodes)).let_report()

    def written_inputs(self) -> list[int]:
        """The positions of the variables, any of which a part may write."""
        return [i for i, t in enumerate(self.inputs) if t.dtype == tf.resource]

    def __call__(self, arrays: Sequence[np.ndarray]) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """Run with the values of ``inputs``, when the device is free. Returns the results, those of replica 0, and the
        new values of variables.
        """
        if self.graph.refused:
            raise tf.errors.UnimplementedError(None, None, self.graph.refused)
        with DEVICES.turns:
            state = PartState(dict(zip(self.keys, arrays, strict=True)))
            rows = self._parts.run({}, state)
        return [value[0] for value in rows], state.written


def program_of(
    graph: IpuGraph, results: Sequence[tf.Tensor], effects: Sequence[tf.Operation], *, shards: int = 1
) -> HostProgram | PartedProgram:
    """The program of a traced graph, in parts if it must be."""
    if is_in_parts(graph, results, effects):
        return PartedProgram(graph, results, effects, shards=shards)
    return HostProgram(graph, results, effects, shards=shards)
