"""A traced program as a function of arrays: what the host calls when it reaches the program.

A program whose outermost operation is a loop that takes from an infeed or gives to an outfeed runs iteration by
iteration; any other program is one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import tensorflow as tf

from podrun.core.errors import UnsupportedError
from podrun.runtime.feeds import DataFeed
from podrun.runtime.graph import TensorType
from podrun.tensorflow.capture.markers import REFERENCES, marked
from podrun.tensorflow.capture.places import PipelineShape, pipeline_of
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.execution.poplar_flags import flags, synthetic_elements
from podrun.tensorflow.execution.step_program import ReadStep, StepProgram, StepSource, read_step
from podrun.tensorflow.graph.importer import function_graph


@dataclass(frozen=True, slots=True)
class MainLoop:
    """The loop that a program is. ``inputs``: tensors of the program's graph. ``counted``: for each comparison that
    goes on, the input that counts, and the input or number with which it is compared.
    """

    operation: Any
    body: Any
    inputs: Sequence[Any]
    effects: Sequence[Any]
    counted: Sequence[tuple[int, tuple[str, int]]]
    first: int
    """The position of the operation's first output among the inputs."""


def main_loop(graph: Any) -> MainLoop | None:
    """The loop that uses queues, if the graph has one."""
    for operation in graph.get_operations():
        facts = marked(operation)
        if facts is not None and facts["kind"] == "repeat":
            loop = REFERENCES[facts["loop"]]
            if uses_queues(loop.body_graph):
                counted = _comparisons(loop.condition_graph)
                inputs = list(operation.inputs)
                return MainLoop(operation, loop.body_graph, inputs, loop.effects, counted, loop.first)
        if operation.type in ("While", "StatelessWhile"):
            body = function_graph(graph, operation.get_attr("body").name)
            if uses_queues(body):
                counted = _comparisons(function_graph(graph, operation.get_attr("cond").name))
                return MainLoop(operation, body, list(operation.inputs), body.control_outputs, counted, 0)
    return None


def uses_queues(graph: Any) -> bool:
    """Whether a graph, or what it calls, takes from an infeed or gives to an outfeed."""
    for operation in graph.get_operations():
        facts = marked(operation)
        if facts is not None and facts["kind"] in ("dequeue", "enqueue", "print"):
            return True
        if operation.type in ("PartitionedCall", "StatefulPartitionedCall") and uses_queues(
            function_graph(graph, operation.get_attr("f").name)
        ):
            return True
    return False


def _comparisons(condition: Any) -> list[tuple[int, tuple[str, int]]]:
    """What a loop's condition compares. UnsupportedError for one that does not count."""
    places = {tensor.name: i for i, tensor in enumerate(condition.inputs)}
    pairs: list[tuple[int, tuple[str, int]]] = []
    waiting = [condition.outputs[0]]
    while waiting:
        tensor = waiting.pop()
        operation = tensor.op
        if operation.type in ("Identity", "LogicalAnd"):
            waiting += list(operation.inputs)
            continue
        if operation.type == "Less" and operation.inputs[0].name in places:
            limit = operation.inputs[1]
            value = tf.get_static_value(limit)
            if limit.name in places:
                pairs.append((places[operation.inputs[0].name], ("input", places[limit.name])))
                continue
            if value is not None:
                pairs.append((places[operation.inputs[0].name], ("number", int(value))))
                continue
        raise UnsupportedError(
            "A loop with queues must run a number of times that is known when it starts: loops.repeat, or a for loop "
            "over tf.range.",
        )
    return pairs


class HostProgram:
    """The program of an `IpuGraph`. ``results``: tensors of the graph that the call returns."""

    def __init__(
        self, graph: Any, results: Sequence[Any], effects: Sequence[Any], *, shards: int = 1
    ) -> None:
        self.graph, self.results, self.ordinal = graph, list(results), graph.ordinal
        self.shards = max(shards, getattr(graph, "shards", 1))
        self.loop = main_loop(graph)
        self._effects = list(effects)
        self.inputs = list(graph.inputs)
        """Parameters, then what the graph captures."""
        self.keys = [_key(t, i) for i, t in enumerate(self.inputs)]
        self._source = self._loop_source() if self.loop is not None else self._step_source()
        self.step = read_step(self._source)
        self._program: StepProgram | None = None
        self._generation = -1

    def _step_source(self) -> StepSource:
        names = {t.name: key for t, key in zip(self.inputs, self.keys, strict=True)}
        resources = frozenset(
            key for t, key in zip(self.inputs, self.keys, strict=True) if t.dtype == tf.resource
        )
        return StepSource(
            self.graph.name,
            self.graph,
            names,
            resources,
            self.results,
            self._effects,
            {},
            pipeline_of(self.graph),
            self.ordinal,
            DEVICES.recomputes,
        )

    def _loop_source(self) -> StepSource:
        loop = self.loop
        if loop is None:
            raise UnsupportedError("The program has no loop.")
        known = {t.name: key for t, key in zip(self.inputs, self.keys, strict=True)}
        names: dict[str, str] = {}
        resources: set[str] = set()
        carried: dict[str, int] = {}
        results: list[Any] = []
        for place, (outer, inner) in enumerate(zip(loop.inputs, loop.body.inputs, strict=True)):
            if outer.dtype == tf.resource:
                names[inner.name] = known[_origin(outer).name]
                resources.add(known[_origin(outer).name])
                continue
            key = f"loop/{place}"
            names[inner.name] = key
            if loop.body.outputs[place] is not inner:
                carried[key] = len(results)
                results.append(loop.body.outputs[place])
        self._carried = carried
        return StepSource(
            self.graph.name,
            loop.body,
            names,
            frozenset(resources),
            results,
            loop.effects,
            carried,
            pipeline_of(loop.body),
            self.ordinal,
            DEVICES.recomputes,
        )

    @property
    def pipeline(self) -> PipelineShape | None:
        """The pipeline of which an iteration is a mini-batch."""
        return self._source.pipeline

    @property
    def program(self) -> StepProgram:
        """The program for the devices as they are configured now."""
        if self._program is None or self._generation != DEVICES.generation:
            settings = DEVICES.settings(self.ordinal, self.shards)
            device = DEVICES.device(self.ordinal)
            self._program = StepProgram(self._source, self.step, device, settings, feed_types)
            self._generation = DEVICES.generation
        return self._program

    @property
    def source_keys(self) -> set[str]:
        """The values from which a step starts, by key."""
        return set(self._source.names.values())

    def written_inputs(self) -> list[int]:
        """The positions of the variables that the program writes."""
        written = self.step.written
        return [
            i
            for i, (t, key) in enumerate(zip(self.inputs, self.keys, strict=True))
            if t.dtype == tf.resource and key in written
        ]

    def __call__(self, arrays: Sequence[np.ndarray]) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """Run with the values of ``inputs``, when the device is free. Returns the results and the new values of
        variables.
        """
        with DEVICES.turns:
            return self._run(arrays)

    def _run(self, arrays: Sequence[np.ndarray]) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        values = dict(zip(self.keys, arrays, strict=True))
        shape = self._source.pipeline
        if shape is not None and shape.wrong:
            raise tf.errors.FailedPreconditionError(None, None, shape.wrong)
        program = self.program
        feed = self._feed(program)
        take = outfeed_taker(program)
        if self.loop is None:
            results, written = program.run(1, values, feed, take)
            return results, written
        iterations = self.start_loop(values)
        count = getattr(self.loop.body, "accumulation", 1)
        if iterations % count:
            raise tf.errors.FailedPreconditionError(
                None,
                None,
                f"Detected a gradient accumulation operation with {count} mini-batches inside a training loop with "
                f"{iterations} iterations: iterations must be a multiple of mini-batches.",
            )
        if not iterations:
            outcome = [values[key] for key in self._carried]
            written = {}
        else:
            outcome, written = program.run(iterations, values, feed, take)
        return [self._result(t, values, outcome) for t in self.results], written

    def start_loop(self, values: dict[str, np.ndarray]) -> int:
        """Add the values with which the loop starts. Returns how often it runs; 1 without a loop."""
        if self.loop is None:
            return 1
        starts = [self._start(t, values) for t in self.loop.inputs]
        counts = [_limit(bound, starts) - int(starts[place]) for place, bound in self.loop.counted]
        values.update((f"loop/{i}", s) for i, s in enumerate(starts) if s is not None)
        return max(min(counts), 0)

    def _start(self, tensor: Any, values: Mapping[str, np.ndarray]) -> Any:
        if tensor.dtype == tf.resource:
            return None
        origin = _origin(tensor)
        for known, key in zip(self.inputs, self.keys, strict=True):
            if known is origin:
                return values[key]
        constant = tf.get_static_value(tensor)
        if constant is None:
            raise UnsupportedError(
                f"The loop starts from '{tensor.name}', which the program computes.",
                hint="Compute it outside of the program, and pass it as an input.",
            )
        return np.asarray(constant)

    def _result(self, tensor: Any, values: Mapping[str, np.ndarray], outcome: Sequence[np.ndarray]) -> Any:
        origin = _origin(tensor)
        loop = self.loop
        if loop is not None and origin.op is loop.operation:
            key = f"loop/{origin.value_index + loop.first}"
            return outcome[self._carried[key]] if key in self._carried else values[key]
        return self._start(tensor, values)

    def _feed(self, program: StepProgram) -> DataFeed:
        queues = list(program.step.infeeds)
        if queues and "infeed" in flags().synthetic:
            elements = synthetic_elements(program.feed_types, flags().initializer)
            return DataFeed(elements, ahead=2, name=self.graph.name)
        if not queues:
            return DataFeed(repeat({}), ahead=256, name=self.graph.name)
        if len(queues) > 1:
            raise UnsupportedError("A program takes from one infeed queue at a time.")
        feed: DataFeed = REFERENCES[queues[0]].data_feed(
            program.settings.replicas, program.settings.local_replicas
        )
        return feed


def _key(tensor: Any, place: int) -> str:
    return f"{'variable' if tensor.dtype == tf.resource else 'input'}/{place}"


def _origin(tensor: Any) -> Any:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _limit(bound: tuple[str, int], starts: Sequence[Any]) -> int:
    return int(starts[bound[1]]) if bound[0] == "input" else bound[1]


def feed_types(step: ReadStep) -> dict[str, TensorType]:
    """The inputs that infeeds give, by name."""
    types = {}
    for queue, names in step.infeeds.items():
        for name, spec in zip(names, REFERENCES[queue].flat_specs, strict=True):
            types[name] = TensorType(np.dtype(spec.dtype.as_numpy_dtype), tuple(spec.shape.as_list()))
    return types


def outfeed_taker(program: StepProgram) -> Any:
    """What gives each outfeed its values when the program runs."""
    owner = {
        name: (queue, i) for queue, names in program.step.outfeeds.items() for i, name in enumerate(names)
    }
    replicated = program.settings.replicas > 1

    if "outfeed" in flags().synthetic:
        return lambda name, value: None

    def take(name: str, value: np.ndarray) -> None:
        queue, place = owner[name]
        REFERENCES[queue].take(place, value if replicated else value[:, 0])

    return take
