"""A traced program as a function of arrays: what the host calls when it reaches the program.

A program whose outermost operation is a loop that takes from an infeed or gives to an outfeed runs iteration by
iteration; any other program is one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import cast

import numpy as np
import tensorflow as tf

from podrun.core.errors import UnsupportedError
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.feeds import DataFeed
from podrun.runtime.graph import TensorType
from podrun.tensorflow.capture.markers import REFERENCES
from podrun.tensorflow.capture.places import PipelineShape, pipeline_of
from podrun.tensorflow.capture.program_graphs import FunctionGraph, IpuGraph, is_on_host
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.execution.poplar_flags import flags, synthetic_elements
from podrun.tensorflow.execution.queue_loops import MainLoop, main_loop, origin
from podrun.tensorflow.execution.step_program import ReadStep, StepProgram, StepSource, read_step
from podrun.tensorflow.graph.builder import GIVEN


@dataclass(frozen=True, slots=True)
class ProgramPart:
    """What a `HostProgram` is of its graph, if not all of it. ``inputs``: tensors whose values it holds, under
    ``keys``; ``fed``: tensors that the parts before it give, by the queue number ``queue``; ``done``: operations that
    ran before it; ``reported``: whether it has a report of its own.
    """

    ordinal: int
    inputs: Sequence[tf.Tensor]
    keys: Sequence[str]
    loop: MainLoop | None = None
    fed: Sequence[tf.Tensor] = ()
    queue: int = -1
    done: frozenset[tf.Operation] = frozenset()
    reported: bool = True


class HostProgram:
    """The program of an `IpuGraph`, or of a part of one. ``results``: tensors of the graph that the call returns."""

    def __init__(
        self,
        graph: FunctionGraph,
        results: Sequence[tf.Tensor],
        effects: Sequence[tf.Operation],
        *,
        shards: int = 1,
        part: ProgramPart | None = None,
    ) -> None:
        self.graph, self.results = graph, list(results)
        self.shards = max(shards, getattr(graph, "shards", 1))
        if part is None:
            inputs = list(graph.inputs)
            keys = [input_key(t, i) for i, t in enumerate(inputs)]
            part = ProgramPart(cast("IpuGraph", graph).ordinal, inputs, keys, main_loop(graph))
        self.ordinal = part.ordinal
        self.part, self.loop = part, part.loop
        self._effects = list(effects)
        self.inputs = list(part.inputs)
        """Parameters, then what the graph captures."""
        self.keys = list(part.keys)
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
            {t.name: name for t, name in zip(self.part.fed, self.fed_names, strict=True)},
            self.part.queue,
            self.part.done,
            self.part.reported,
        )

    @property
    def fed_names(self) -> list[str]:
        """The names under which the program takes what the parts before it give."""
        return fed_names(self.part.queue, len(self.part.fed))

    def _loop_source(self) -> StepSource:
        loop = self.loop
        if loop is None:
            raise UnsupportedError("The program has no loop.")
        known = {t.name: key for t, key in zip(self.inputs, self.keys, strict=True)}
        names: dict[str, str] = {}
        resources: set[str] = set()
        carried: dict[str, int] = {}
        results: list[tf.Tensor] = []
        for place, (outer, inner) in enumerate(zip(loop.inputs, loop.body.inputs, strict=True)):
            if outer.dtype == tf.resource:
                names[inner.name] = known[origin(outer).name]
                resources.add(known[origin(outer).name])
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

    def let_report(self) -> None:
        """Give a program that is one part of a larger one a report of its own."""
        self._source = replace(self._source, reported=True)

    @property
    def pipeline(self) -> PipelineShape | None:
        """The pipeline of which an iteration is a mini-batch."""
        return self._source.pipeline

    @property
    def program(self) -> StepProgram:
        """The program for the devices as they are configured now."""
        if self._program is None or self._generation != DEVICES.generation:
            tables = [key for t, key in zip(self.inputs, self.keys, strict=True) if is_on_host(t)]
            settings = replace(DEVICES.settings(self.ordinal, self.shards), unsent=tuple(tables))
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
        refused = getattr(self.graph, "refused", "")
        if refused:
            raise tf.errors.UnimplementedError(None, None, refused)
        values = dict(zip(self.keys, arrays, strict=True))
        if self.loop is None:
            return self.iterate(1, values)
        outcome, written = self.iterate(self.start_loop(values), values)
        return [self._result(t, values, outcome) for t in self.results], written

    def iterate(
        self, iterations: int, values: Mapping[str, np.ndarray]
    ) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """Run so many iterations from ``values``. Returns the results of the last, and the new values of variables.
        Without an iteration the results are the values with which the loop starts.
        """
        self._check_iterations(iterations, values)
        if not iterations:
            return [values[key] for key in self._carried], {}
        program = self.program
        return program.run(iterations, values, self._feed(program, iterations), outfeed_taker(program))

    def _check_iterations(self, iterations: int, values: Mapping[str, np.ndarray]) -> None:
        """FailedPreconditionError for a number of iterations that the program cannot run."""
        counted = getattr(self._source.graph, "count_of_updates", None)
        if counted is not None and self.loop is not None:
            place = next(i for i, t in enumerate(self.loop.body.inputs) if t is counted.tensor)
            counted.check(int(values[f"loop/{place}"]))
        shape = self._source.pipeline
        wrong = shape.wrong if shape is not None else ""
        count = getattr(self._source.graph, "accumulation", 1) if self.loop is not None else 1
        if not wrong and iterations % count:
            wrong = (
                f"Detected a gradient accumulation operation with {count} number of mini batches inside a loop with "
                f"{iterations} iterations. The number of iterations must be a multiple of the mini-batches."
            )
        if wrong:
            raise tf.errors.FailedPreconditionError(None, None, wrong)

    def start_loop(
        self, values: dict[str, np.ndarray], starts: Sequence[np.ndarray | None] | None = None
    ) -> int:
        """Add the values with which the loop starts. Returns how often it runs; 1 without a loop."""
        if self.loop is None:
            return 1
        if self.loop.counted is None:
            raise UnsupportedError(
                "A loop with queues must run a number of times that is known when it starts: loops.repeat, or a for "
                "loop over tf.range.",
            )
        chosen = starts or [
            None if t.dtype == tf.resource else self._start(t, values) for t in self.loop.inputs
        ]
        values.update((f"loop/{i}", s) for i, s in enumerate(chosen) if s is not None)
        return min(counter.iterations(chosen) for counter in self.loop.counted)

    def _start(self, tensor: tf.Tensor, values: Mapping[str, np.ndarray]) -> np.ndarray:
        own = origin(tensor)
        for known, key in zip(self.inputs, self.keys, strict=True):
            if known is own:
                return values[key]
        constant = tf.get_static_value(tensor)
        if constant is None:
            raise UnsupportedError(
                f"The loop starts from '{tensor.name}', which the program computes.",
                hint="Compute it outside of the program, and pass it as an input.",
            )
        return np.asarray(constant)

    def _result(
        self, tensor: tf.Tensor, values: Mapping[str, np.ndarray], outcome: Sequence[np.ndarray]
    ) -> np.ndarray:
        own = origin(tensor)
        loop = self.loop
        if loop is not None and own.op is loop.operation:
            key = f"loop/{own.value_index + loop.first}"
            return outcome[self._carried[key]] if key in self._carried else values[key]
        return self._start(tensor, values)

    def loop_rows(self, values: Mapping[str, np.ndarray], iterations: int) -> list[np.ndarray]:
        """The loop's outputs after its iterations, a row for each replica of this process."""
        loop = self.loop
        rows: list[np.ndarray] = []
        for index in range(len(loop.operation.outputs) if loop is not None and loop.operation.outputs else 0):
            key = f"loop/{index + (loop.first if loop is not None else 0)}"
            if iterations and key in self._carried:
                rows.append(self.program.rows[self.step.results[self._carried[key]]])
            else:
                rows.append(np.asarray(values.get(key, 0))[None])
        return rows

    def _feed(self, program: StepProgram, iterations: int) -> DataFeed:
        queues = list(program.step.infeeds)
        if queues and "infeed" in flags().synthetic and not self.part.fed:
            elements = synthetic_elements(program.feed_types, flags().initializer)
            return DataFeed(elements, ahead=2, name=self.graph.name)
        if not queues:
            return DataFeed(repeat({}), ahead=256, name=self.graph.name)
        settings = program.settings
        feeds: list[DataFeed] = [
            REFERENCES[q].data_feed(settings.replicas, settings.local_replicas) for q in queues
        ]
        if len(feeds) == 1:
            return feeds[0]
        count = iterations * settings.local_replicas
        return DataFeed(_joined_elements(feeds, count), ahead=count, name=self.graph.name)


def _joined_elements(feeds: Sequence[DataFeed], count: int) -> Iterator[dict[str, np.ndarray]]:
    """So many elements, each with the inputs of one element of every feed."""
    for number in range(count):
        joined: dict[str, np.ndarray] = {}
        for feed in feeds:
            taken = feed.take(1)
            if not taken:
                raise feed.reason(count, number)
            joined |= taken[0]
        yield joined


def fed_names(queue: int, count: int) -> list[str]:
    """The names of so many inputs that come from a queue of the parts of a program."""
    return [f"infeed{queue}/{i}" for i in range(count)]


def input_key(tensor: tf.Tensor, place: int) -> str:
    """The name of a program's input among its values."""
    return f"{'variable' if tensor.dtype == tf.resource else 'input'}/{place}"


def feed_types(step: ReadStep) -> dict[str, TensorType]:
    """The inputs that infeeds give, by name."""
    types = {}
    for queue, names in step.infeeds.items():
        for name, spec in zip(names, REFERENCES[queue].flat_specs, strict=True):
            types[name] = TensorType(np.dtype(spec.dtype.as_numpy_dtype), tuple(spec.shape.as_list()))
    return types


def outfeed_taker(program: StepProgram) -> Callable[[str, np.ndarray], None]:
    """What gives each outfeed its values when the program runs."""
    owner = {
        name: (queue, i) for queue, names in program.step.outfeeds.items() for i, name in enumerate(names)
    }
    replicated = program.settings.replicas > 1

    if "outfeed" in flags().synthetic:
        return lambda name, value: None

    waiting: dict[int, list[list[np.ndarray]]] = {
        queue: [[] for _ in names]
        for queue, names in program.step.outfeeds.items()
        if names[-1].startswith(f"outfeed{queue}/{GIVEN}")
    }

    def take(name: str, value: np.ndarray) -> None:
        queue, place = owner[name]
        value = value if replicated else value[:, 0]
        if queue not in waiting:
            REFERENCES[queue].take(place, value)
            return
        waiting[queue][place].append(value)
        if all(waiting[queue]):
            *values, reached = (parts.pop(0) for parts in waiting[queue])
            rows = reached.reshape(len(reached), -1)[:, 0]
            for number, part in enumerate(values if rows.any() else ()):
                REFERENCES[queue].take(number, part[rows])

    return take
