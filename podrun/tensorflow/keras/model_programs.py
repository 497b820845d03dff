"""The functions with which Keras trains, evaluates and predicts, for models made under an IPU strategy.

Keras' own loops over epochs, its callbacks and its metrics stay as they are. An execution of ``steps_per_execution``
steps is one run on the device; a step is the model's own ``train_step``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from podrun.runtime.feeds import DataFeed
from podrun.tensorflow.capture.markers import mark, reference
from podrun.tensorflow.capture.program_graphs import IpuGraph, trace
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.execution.host_program import HostProgram
from podrun.tensorflow.execution.launching import _assign, in_words_of_the_sdk


class _ElementQueue:
    """What a traced step takes its element from: the specs of an element, and a place in the table of queues."""

    def __init__(self, element: Any) -> None:
        self.structure = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, _narrow(t.dtype)), element)
        self.flat_specs = tf.nest.flatten(self.structure)
        self.number = reference(self)

    def dequeue(self) -> Any:
        """An element, in the step's graph."""
        tensors = mark(
            "dequeue", [], self.flat_specs, stateful=True, name="infeed_dequeue", queue=self.number
        )
        return tf.nest.pack_sequence_as(self.structure, tensors)

    def arrays(self, element: Any) -> dict[str, np.ndarray]:
        """An element as the device takes it. ValueError for one of another shape."""
        flat = [np.asarray(t) for t in tf.nest.flatten(element)]
        named = {}
        for i, (value, spec) in enumerate(zip(flat, self.flat_specs, strict=True)):
            if tuple(value.shape) != tuple(spec.shape):
                raise ValueError(
                    f"The dataset has a partial batch: an element has shape {value.shape}, the first one had "
                    f"{tuple(spec.shape)}. Use a batch size that divides the data, or drop_remainder=True."
                )
            named[f"infeed{self.number}/{i}"] = value.astype(spec.dtype.as_numpy_dtype, copy=False)
        return named


def _narrow(dtype: Any) -> Any:
    return {tf.float64: tf.float32, tf.int64: tf.int32}.get(dtype, dtype)


class ModelProgram:
    """One of a model's functions on the device. ``function``: takes an element in a graph, returns its results."""

    def __init__(self, model: Any, function: Callable[[Any], Any], *, collects: bool) -> None:
        self.model, self.function, self.collects = model, function, collects
        self._traced: dict[Any, Any] = {}

    def __call__(self, iterator: Any) -> Any:
        """Run one execution with elements of an iterator of the host."""
        strategy = self.model.distribute_strategy
        settings = DEVICES.settings(strategy.ordinal, getattr(self.model, "_ipu_shards", 1))
        count = (
            int(self.model._steps_per_execution.numpy()) if self.model._steps_per_execution is not None else 1
        )
        elements = _elements(iterator, count * settings.local_replicas)
        first = next(elements)
        queue, program, template = self._program(first)
        names = itertools.chain([first], elements)
        feed = DataFeed((queue.arrays(e) for e in names), ahead=4 * settings.local_replicas, name="keras")
        values = [_value(outer) for outer, _ in program.graph.captures]
        keyed = dict(zip(program.keys, values, strict=True))
        parts: list[list[np.ndarray]] = [[] for _ in program.program.outfed]

        def take(name: str, value: np.ndarray) -> None:
            parts[program.program.outfed.index(name)].append(value)

        try:
            with feed:
                results, written = program.program.run(count, keyed, feed, take)
        except BaseException as error:
            raise in_words_of_the_sdk(error) from error
        for (outer, _), key in zip(program.graph.captures, program.keys, strict=True):
            if key in written:
                _assign(outer, written[key])
        flat = [np.concatenate(p).reshape(-1, *p[0].shape[3:]) for p in parts] if self.collects else results
        return tf.nest.pack_sequence_as(template, [tf.constant(v) for v in flat])

    def _program(self, element: Any) -> Any:
        key = (
            tuple((tuple(t.shape), t.dtype) for t in tf.nest.flatten(element)),
            DEVICES.generation,
            getattr(self.model, "_ipu_options", 0),
        )
        if key not in self._traced:
            self._traced[key] = self._trace(element)
        return self._traced[key]

    def _trace(self, element: Any) -> Any:
        strategy = self.model.distribute_strategy
        queue = _ElementQueue(element)
        graph = IpuGraph(f"keras_{self.model.name}", strategy.ordinal, automatic=True)
        gone: list[int] = []

        def step() -> Any:
            results = self.function(queue.dequeue())
            if self.collects:
                flat = [tf.convert_to_tensor(t) for t in tf.nest.flatten(results)]
                gone.append(reference(None))
                mark("enqueue", flat, [tf.TensorSpec([], tf.bool)], stateful=True, queue=gone[0])
            return results

        with strategy.scope(), strategy.replica():
            template = trace(graph, step, [], convert=True)
        graph.inputs = [inner for _, inner in graph.captures]
        results = [] if self.collects else tf.nest.flatten(template)
        program = HostProgram(
            graph, results, graph.control_outputs, shards=getattr(self.model, "_ipu_shards", 1)
        )
        return queue, program, template


def _elements(iterator: Any, count: int) -> Iterator[Any]:
    """So many elements; the end of the data ends them, and an end before the first is Keras' own."""
    for place in range(count):
        try:
            yield next(iterator)
        except StopIteration:
            if place == 0:
                raise tf.errors.OutOfRangeError(None, None, "The dataset has no more elements.") from None
            return


def _value(handle: Any) -> np.ndarray:
    from podrun.tensorflow.execution.launching import _read_variable, variable_type

    if handle.dtype == tf.resource:
        return np.asarray(_read_variable(handle, variable_type(handle)[0]))
    return np.asarray(handle)
