"""The functions with which Keras trains, evaluates and predicts, for models made under an IPU strategy.

Keras' own loops over epochs, its callbacks and its metrics stay as they are. An execution of ``steps_per_execution``
steps is one run on the device; a step is the model's own ``train_step``, ``test_step`` or ``predict_step``. The step
gives its results to a queue of the host, for every step and replica.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from podrun.core.quick_dataclass import dataclass
from podrun.private_apis.tensorflow import private_module
from podrun.runtime.feeds import DataFeed
from podrun.tensorflow.capture.markers import mark, reference
from podrun.tensorflow.capture.places import shape_pipeline
from podrun.tensorflow.capture.program_graphs import IpuGraph, trace
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.execution.host_program import HostProgram, outfeed_taker
from podrun.tensorflow.execution.launching import assign_handle, in_words_of_the_sdk, read_handle
from podrun.tensorflow.execution.poplar_flags import flags, synthetic_elements
from podrun.tensorflow.keras.accumulating_optimizers import (
    accumulating,
    check_accumulates,
    of_program,
    standing_in,
)
from podrun.tensorflow.keras.data_rules import replicas_of
from podrun.tensorflow.keras.model_options import options_of
from podrun.tensorflow.keras.reported_values import (
    CallbackThread,
    ReportedValues,
    copies_of_step,
    held_back,
    reported,
    shares_of_sum,
)
from podrun.tensorflow.keras.stage_assignment import check_scopes, entry_stages
from podrun.tensorflow.keras.stage_tracing import (
    check_shared_layers,
    checked_mapping,
    may_be_pipelined,
    pipeline_assignment,
    tracing_stages,
)
from podrun.tensorflow.sdk.carried_state import GradientCaptureContext
from podrun.tensorflow.sdk.gradient_accumulation import Accumulation
from podrun.tensorflow.sdk.pipeline_rules import (
    RecomputationMode,
    checked_pipeline,
    shape_of_pipeline,
    state_storage,
)

if TYPE_CHECKING:
    from tf_keras import Model

Nested = object
"""Tensors, or tuples, lists and dictionaries of them."""


class _ElementQueue:
    """What a traced step takes its element from: the specs of an element, and a place in the table of queues."""

    def __init__(self, element: Nested) -> None:
        _check_doubles(element)
        self.structure = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, _narrow(t.dtype)), element)
        self.flat_specs = tf.nest.flatten(self.structure)
        self.number = reference(self)

    def dequeue(self) -> Nested:
        """An element, in the step's graph."""
        tensors = mark(
            "dequeue", [], self.flat_specs, stateful=True, name="infeed_dequeue", queue=self.number
        )
        packed: Nested = tf.nest.pack_sequence_as(self.structure, tensors)
        return packed

    def arrays(self, element: Nested) -> dict[str, npt.NDArray[np.generic]]:
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


def _check_doubles(element: Nested) -> None:
    """FailedPreconditionError for doubles, where a program has taken the conversion to floats away."""
    if importlib.import_module("tf_keras.src.engine.base_layer_utils").v2_dtype_behavior_enabled():
        return
    for index, tensor in enumerate(tf.nest.flatten(element)):
        if tensor.dtype == tf.float64:
            raise tf.errors.FailedPreconditionError(
                None,
                None,
                f"Unsupported datatype double on index {index} of feed operation: cast it to float32.",
            )


def _narrow(dtype: tf.DType) -> tf.DType:
    return {tf.float64: tf.float32, tf.int64: tf.int32}.get(dtype, dtype)


@dataclass(slots=True)
class _Traced:
    """A step that was traced for elements of one form. ``resets``: how often the metrics had been reset at the last
    run. ``summed``: how many steps' results a pipeline that accumulates its outfeed adds up, or 0.
    """

    queue: _ElementQueue
    program: HostProgram
    template: Nested
    values: ReportedValues
    summed: int
    resets: int = 0


class ModelProgram:
    """One of a model's functions on the device. ``kind``: train, test or predict."""

    def __init__(self, model: Model, kind: str) -> None:
        self.model, self.kind = model, kind
        self.function: Callable[[Nested], Nested] = getattr(model, f"{kind}_step")
        self._traced: dict[object, _Traced] = {}

    @property
    def count(self) -> int:
        """The steps of an execution."""
        steps = self.model._steps_per_execution
        return 1 if steps is None else int(steps.numpy())

    def __call__(self, iterator: Iterator[Nested]) -> Nested:
        """Run one execution with elements of an iterator of the host."""
        self._check_updates()
        first = _first(iterator)
        traced = self._program(first)
        program = traced.program
        shape = program.pipeline
        if shape is not None and shape.wrong:
            raise tf.errors.FailedPreconditionError(None, None, shape.wrong)
        step = program.program
        values = [read_handle(outer) for outer, _ in program.graph.captures]
        keyed = dict(zip(program.keys, values, strict=True))
        self._take_resets(traced)
        traced.values.replicated = step.settings.replicas > 1
        thread = self._thread(traced)
        traced.values.start(thread)
        try:
            with self._feed(traced, first, iterator) as feed:
                _, written = step.run(self.count, keyed, feed, outfeed_taker(step))
        except BaseException as error:
            raise in_words_of_the_sdk(error) from error
        finally:
            if thread is not None:
                thread.finish()
        for (outer, _), key in zip(program.graph.captures, program.keys, strict=True):
            if key in written:
                assign_handle(outer, written[key])
        return self._results(traced)

    def _check_updates(self) -> None:
        """RuntimeError for an execution that ends in the middle of an update of the weights."""
        options = options_of(self.model)
        update = options.pipeline_steps if may_be_pipelined(self.model) else options.accumulation_steps
        optimizer = getattr(self.model, "optimizer", None)
        if self.kind == "train" and update and optimizer is not None:
            check_accumulates(optimizer)
        if self.kind == "train" and update and self.count % update:
            kind = "pipelined model" if may_be_pipelined(self.model) else "model"
            raise RuntimeError(
                f"The {kind} has been configured to use gradient accumulation for training, however the current "
                f"`steps_per_execution` value (set to {self.count}) is not divisible by "
                f"`gradient_accumulation_steps_per_replica` ({update}). You need to adjust either of them."
            )

    def _feed(self, traced: _Traced, first: Nested, iterator: Iterator[Nested]) -> DataFeed:
        step = traced.program.program
        replicas = step.settings.local_replicas
        if "infeed" in flags().synthetic:
            return DataFeed(synthetic_elements(step.feed_types, flags().initializer), ahead=2, name="keras")
        elements = itertools.chain([first], itertools.islice(iterator, self.count * replicas - 1))
        return DataFeed((traced.queue.arrays(e) for e in elements), ahead=4 * replicas, name="keras")

    def _take_resets(self, traced: _Traced) -> None:
        """Metrics that the host has reset go to all replicas, also where replica 0 has the same value."""
        resets = options_of(self.model).resets
        if traced.resets == resets:
            return
        traced.resets = resets
        handles = {id(v.handle) for metric in self.model.metrics for v in metric.variables}
        pairs = zip(traced.program.graph.captures, traced.program.keys, strict=True)
        traced.program.program.forget([key for (outer, _), key in pairs if id(outer) in handles])

    def _thread(self, traced: _Traced) -> CallbackThread | None:
        """What calls the callbacks for every step, if the program asks for that."""
        waiting, options = held_back(self.model), options_of(self.model)
        if waiting is None:
            return None

        def call(step: int, values: list[npt.NDArray[np.generic]]) -> None:
            for flat in copies_of_step(values, options, self.kind):
                packed = tf.nest.pack_sequence_as(traced.template, flat)
                waiting(step, {"outputs": packed} if self.kind == "predict" else packed)

        return CallbackThread(call)

    def _results(self, traced: _Traced) -> Nested:
        values = traced.values.values()
        if self.kind == "predict":
            flat = [v.reshape(-1, *v.shape[3:]) for v in values]
            if not len(values[0]):  # Data are synthetic: nothing came.
                flat = [self._zeros(tensor) for tensor in tf.nest.flatten(traced.template)]
        else:
            flat = reported(values, options_of(self.model), traced.summed)
        packed: Nested = tf.nest.pack_sequence_as(traced.template, [tf.constant(v) for v in flat])
        return packed

    def _zeros(self, tensor: tf.Tensor) -> npt.NDArray[np.generic]:
        """Predictions of zeros for all steps and replicas, which synthetic data give."""
        replicas = replicas_of(self.model)
        size, *rest = tensor.shape
        return np.zeros((self.count * replicas * size, *rest), tensor.dtype.as_numpy_dtype)

    def _program(self, element: Nested) -> _Traced:
        options = options_of(self.model)
        pipelined = may_be_pipelined(self.model)
        key = (
            tuple((tuple(t.shape), t.dtype) for t in tf.nest.flatten(element)),
            DEVICES.generation,
            options.version,
            self.count if pipelined and self.kind != "train" else 0,
        )
        if key not in self._traced:
            self._traced[key] = self._trace(element, pipelined=pipelined)
        return self._traced[key]

    def _trace(self, element: Nested, *, pipelined: bool) -> _Traced:
        """Trace a step. A pipeline accumulates gradients, and its layers lie on the IPUs of their stages."""
        strategy, options = self.model.distribute_strategy, options_of(self.model)
        queue, values, summed = _ElementQueue(element), ReportedValues(), self._summed()
        with strategy.scope(), strategy.replica():
            graph = IpuGraph(f"keras_{self.model.name}", strategy.ordinal, automatic=True)
        assignment = pipeline_assignment(self.model) if pipelined else None
        if assignment is not None:
            mapping = checked_mapping(self.model, [s for s in entry_stages(assignment) if s is not None])
            check_shared_layers(assignment, mapping)

        def step() -> Nested:
            with capturing_gradients(self.model, self.kind):
                element = queue.dequeue()
                results = self.function(
                    _with_columns(element) if makes_columns(self.model, self.kind) else element
                )
            flat = [tf.convert_to_tensor(t) for t in tf.nest.flatten(results)]
            if stages and summed:
                flat = shares_of_sum(flat, summed, options, training=self.kind == "train")
            values.count = len(flat)
            mark("enqueue", flat, [tf.TensorSpec([], tf.bool)], stateful=True, queue=values.number)
            return results

        with strategy.scope(), strategy.replica(), tracing_stages(self.model, assignment) as stages:

            def accumulation() -> Accumulation | None:
                if stages:
                    return options.pipeline_accumulation()
                return options.accumulation()

            if self.kind == "train" and assignment is not None:
                options.pipeline_accumulation()
            with accumulating(self.model, accumulation if self.kind == "train" else None):
                template = trace(graph, step, [], convert=True)
        if stages:
            if assignment is None:
                check_scopes(self.model)
            self._shape(graph, sorted(stages))
            if self.kind == "train":
                warn_of_moving_statistics(self.model)
        graph.inputs = [inner for _, inner in graph.captures]
        program = HostProgram(graph, [], graph.control_outputs)
        return _Traced(queue, program, template, values, summed if stages else 0)

    def _summed(self) -> int:
        """The steps whose results a pipeline adds up before they leave; 0 where all of them leave."""
        options = options_of(self.model)
        if not options.accumulates_outfeed or self.kind == "predict":
            return 0
        return int(options.pipeline_steps or 1) if self.kind == "train" else self.count

    def _shape(self, graph: IpuGraph, stages: list[int]) -> None:
        """Let the step be a mini-batch of the model's pipeline."""
        options, training = options_of(self.model), self.kind == "train"
        mapping = checked_mapping(self.model, stages)
        count = options.pipeline_steps if training else self.count
        arguments = dict(options.pipeline_arguments)
        mode = arguments.get("recomputation_mode")
        schedule = arguments.pop("pipeline_schedule", None)
        if len(mapping) > 1:
            stand_ins = [None] * len(mapping)
            _, schedule = checked_pipeline(stand_ins, count, mapping, schedule, training, arguments)
            shape = shape_of_pipeline(
                int(count or 1),
                mapping,
                schedule,
                training=training,
                recomputation_mode=mode if isinstance(mode, RecomputationMode) else None,
                storage=state_storage(arguments),
            )
            shape_pipeline(graph, shape)


def makes_columns(model: Model, kind: str) -> bool:
    """Whether Keras' own step runs a model whose layers see the data as they come: a graph of layers adds dimensions
    itself.
    """
    step = getattr(type(model), f"{kind}_step")
    return not of_program(step) and not model._is_graph_network


def _with_columns(element: Nested) -> Nested:
    """An element whose inputs of one dimension are columns, as Keras' steps of the SDK's version see them."""

    def column(tensor: tf.Tensor) -> tf.Tensor:
        return tf.expand_dims(tensor, -1) if tensor.shape.rank == 1 else tensor

    if isinstance(element, tuple):
        return (tf.nest.map_structure(column, element[0]), *element[1:])
    return tf.nest.map_structure(column, element)


@contextlib.contextmanager
def capturing_gradients(model: Model, kind: str) -> Iterator[None]:
    """While a training step is traced, gradients that layers capture go to an optimizer that takes them."""
    optimizer = getattr(model, "optimizer", None)
    captures = kind == "train" and getattr(optimizer, "supports_captured_grads", False)
    if optimizer is None or not captures:
        yield
        return
    plain = optimizer.apply_gradients
    with GradientCaptureContext() as context:
        parameters = inspect.signature(plain).parameters.values()
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        known = {p.name for p in parameters}

        def apply(grads_and_vars: object, *args: object, **kwargs: object) -> object:
            fitting = {name: value for name, value in kwargs.items() if takes_all or name in known}
            return plain(grads_and_vars, *args, captured_grads=dict(context.captured_gradients), **fitting)

        with standing_in(optimizer, apply):
            yield


def warn_of_moving_statistics(model: Model) -> None:
    """Say that moving averages of batch norm are not reliable in a pipeline that is trained."""
    names = [
        layer.name
        for layer in model.submodules
        if type(layer).__name__.startswith("BatchNormalization") and 0 < layer.momentum < 1
    ]
    if names:
        private_module("platform.tf_logging").warn(
            "The moving statistics of BatchNormalization layers are not reliable in a pipeline, whose stages see "
            "mini-batches of one update. Layers: " + ", ".join(names)
        )


def _first(iterator: Iterator[Nested]) -> Nested:
    """The first element of an execution. OutOfRangeError, which Keras expects, if there is none."""
    try:
        return next(iterator)
    except StopIteration:
        raise tf.errors.OutOfRangeError(None, None, "The dataset has no more elements.") from None
