"""Outfeed queues: what programs on IPUs give back while they run."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from podrun.private_apis.tensorflow import symbol
from podrun.tensorflow.capture.markers import mark, reference
from podrun.tensorflow.capture.program_graphs import (
    IpuGraph,
    TensorStructure,
    innermost_program,
    outermost_program,
)
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.execution.launching import raising_itself
from podrun.tensorflow.execution.placed_devices import placed_ordinal
from podrun.tensorflow.execution.poplar_flags import flags
from podrun.tensorflow.sdk.ipu_infeed_queue import _checked_ordinal

_CondBranch: Any = symbol("ops.control_flow_v2_func_graphs.CondBranchFuncGraph")


class IPUOutfeedMode(Enum):
    """Which elements a dequeue gives: all since the last, or the last."""

    ALL = "all"
    LAST = "get_last"


_OLD = {"feed_name", "outfeed_all", "replication_factor", "io_batch_size"}


class IPUOutfeedQueue:
    """Results of a program's iterations. ``buffer_depth`` has no effect on them. A name, which stood before the mode
    until SDK 2.1, is what messages call the queue.
    """

    def __init__(self, *names_and_options: Any, **options: Any) -> None:
        name = options.get("feed_name")
        if names_and_options and isinstance(names_and_options[0], str):
            name, *rest = names_and_options
            names_and_options = tuple(rest)
        self._set_options(*names_and_options, **options)
        self._number = reference(self)
        self._name = str(name or self._number)
        self._graphs: weakref.WeakSet[tf.Graph] = weakref.WeakSet()
        self._giving: weakref.WeakSet[tf.Graph] = weakref.WeakSet()
        """Graphs that give to the queue themselves."""
        self._outer: weakref.WeakSet[tf.Graph] = weakref.WeakSet()
        self._thread: int | None = None
        self._enqueued_in: IpuGraph | None = None
        self.structure: TensorStructure | None = None
        self._specs: list[tf.TensorSpec] = []
        self._parts: list[list[np.ndarray]] = []
        self._lock = threading.Lock()
        self._executed = False
        self.configured = False
        """Whether no configuration follows, so that the number of replicas is known."""
        self.summed_over = 1
        """Elements that a pipeline adds up to one."""

    def _set_options(
        self,
        outfeed_mode: object = None,
        device_ordinal: int | None = None,
        buffer_depth: int = 3,
        **old: object,
    ) -> None:
        for option in old:
            if option not in _OLD:
                raise TypeError(f"IPUOutfeedQueue got an unexpected keyword argument {option!r}")
            if option != "feed_name":
                warnings.warn(f"IPUOutfeedQueue({option}=...) has no effect any more.", stacklevel=3)
        mode = IPUOutfeedMode.ALL if outfeed_mode is None else outfeed_mode
        if old.get("outfeed_all") is False:
            mode = IPUOutfeedMode.LAST
        if not isinstance(mode, IPUOutfeedMode):
            raise ValueError(
                "Expected `outfeed_mode` value to be of `ipu_outfeed_queue.IPUOutfeedMode` type, but is "
                f"{type(mode)}."
            )
        if buffer_depth < 1:
            raise ValueError(f"The buffer depth must be >= 1, but got {buffer_depth}.")
        self._mode, self._ordinal = mode, _checked_ordinal(device_ordinal)

    @property
    def enqueued(self) -> bool:
        """Whether what is traced gives to the queue; outside of programs, and in other threads, whether any did."""
        if self._thread != threading.get_ident() or not tf.compat.v1.executing_eagerly_outside_functions():
            return self._thread is not None
        return tf.compat.v1.get_default_graph() in self._outer

    def enqueue(self, tensors: TensorStructure) -> tf.Operation:
        """The operation that gives ``tensors`` to the queue, in a program's graph. Where Keras only traces a layer for
        its shapes, an operation without an effect.
        """
        program = innermost_program()
        if program is None and _is_scratch():
            return self._noted(tf.no_op(name="outfeed_enqueue"))
        if program is None:
            placed = None if tf.executing_eagerly() else placed_ordinal(tf.compat.v1.get_default_graph())
            if placed is None:
                raise ValueError("IPUOutfeedQueue.enqueue can only be called in a program on an IPU.")
        eager = tf.compat.v1.executing_eagerly_outside_functions()
        place = program if program is None or eager else program.outer_graph
        current = tf.compat.v1.get_default_graph()
        graph = place or current
        if graph in self._graphs and not (program is self._enqueued_in and self._in_another_branch(current)):
            raise ValueError("An outfeed can only be enqueued once.")
        self._graphs.add(graph)
        self._giving.add(current)
        self._enqueued_in = program
        tensors = tf.nest.map_structure(tf.convert_to_tensor, tensors)
        self.structure = tensors
        flat = tf.nest.flatten(tensors)
        self._specs = [tf.TensorSpec(t.shape, t.dtype) for t in flat]
        with self._lock:
            if len(self._parts) != len(flat):
                self._parts = [[] for _ in flat]
        (done,) = mark(
            "enqueue",
            flat,
            [tf.TensorSpec([], tf.bool)],
            stateful=True,
            name="outfeed_enqueue",
            queue=self._number,
        )
        return self._noted(done.op)

    def _in_another_branch(self, graph: tf.Graph) -> bool:
        """Whether a graph is a branch of a choice, and neither it nor a graph around it gives to the queue already."""
        if not isinstance(graph, _CondBranch) or graph in self._outer:
            return False
        around: tf.Graph | None = graph
        while around is not None and around not in self._giving:
            around = getattr(around, "outer_graph", None)
        return around is None

    def _noted(self, operation: tf.Operation) -> tf.Operation:
        """Note the graph of an operation that gives to the queue, and those around it."""
        self._thread = threading.get_ident()
        graph: tf.Graph | None = operation.graph
        while graph is not None:
            self._outer.add(graph)
            graph = getattr(graph, "outer_graph", None)
        return operation

    def take(self, place: int, value: np.ndarray) -> None:
        """Results of iterations, ``[iterations, ...]``, of the tensor number ``place``."""
        with self._lock:
            self._executed = True
            if self._mode is IPUOutfeedMode.LAST:
                self._parts[place] = [value[-1:]]
            else:
                self._parts[place].append(value)

    def dequeue(self, wait_for_completion: bool = False) -> Any:
        """What the programs have given: see the module docstring of the SDK's queue for shapes."""
        if tf.executing_eagerly():
            if self.structure is None:
                raise ValueError("Trying to dequeue an outfeed which has not been enqueued.")
            return tf.nest.pack_sequence_as(self.structure, [tf.constant(v) for v in self._drain()])
        if self.structure is None:
            raise ValueError("Trying to dequeue an outfeed which has not been enqueued.")
        outputs = tf.numpy_function(
            raising_itself(self._drain),
            [],
            [spec.dtype for spec in self._specs],
            stateful=True,
            name="outfeed_dequeue",
        )
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        if (
            self.configured or DEVICES.config is not None
        ):  # Otherwise the number of replicas is not known yet.
            replicas = self._replicas()
            lead = ([None] if self._mode is IPUOutfeedMode.ALL else []) + ([replicas] if replicas > 1 else [])
            for output, spec in zip(outputs, self._specs, strict=True):
                output.set_shape([*lead, *spec.shape])
        return tf.nest.pack_sequence_as(self.structure, list(outputs))

    def _replicas(self) -> int:
        shards = getattr(self._enqueued_in, "shards", 1)
        return DEVICES.settings(self._ordinal, shards).local_replicas

    def _drain(self) -> list[np.ndarray]:
        with self._lock:
            if self._mode is IPUOutfeedMode.LAST:
                if "outfeed" in flags().synthetic:
                    raise tf.errors.FailedPreconditionError(
                        None,
                        None,
                        "Trying to get the last value from an outfeed queue when using synthethic data. This is not "
                        "supported.",  # Misspelt as by the SDK, whose words programs look for.
                    )
                if not all(self._parts):
                    raise tf.errors.FailedPreconditionError(
                        None,
                        None,
                        "Trying to get the last value from an outfeed queue before it was executed.",
                    )
                return [self._typed(i, parts[-1][0]) for i, parts in enumerate(self._parts)]
            parts, self._parts = self._parts, [[] for _ in self._parts]
        count = self._replicas()
        lead = (0, count) if count > 1 else (0,)
        return [
            self._typed(
                i,
                self._summed(np.concatenate(p)) if p else np.zeros((*lead, *self._specs[i].shape.as_list())),
            )
            for i, p in enumerate(parts)
        ]

    def _summed(self, value: np.ndarray) -> np.ndarray:
        if self.summed_over == 1:
            return value
        return np.asarray(value.reshape(-1, self.summed_over, *value.shape[1:]).sum(1))

    def _typed(self, place: int, value: np.ndarray) -> np.ndarray:
        return np.array(value, self._specs[place].dtype.as_numpy_dtype, order="C")

    def __iter__(self) -> Iterator[Any]:
        if not tf.executing_eagerly():
            raise RuntimeError("IPUOutfeedQueue can only be iterated over in eager mode.")
        if self._mode is not IPUOutfeedMode.ALL:
            raise RuntimeError("IPUOutfeedQueue can only be iterated over in mode IPUOutfeedMode.ALL.")
        if self.structure is None:
            return
        values = self._drain()
        for step in range(len(values[0])):
            yield tf.nest.pack_sequence_as(self.structure, [tf.constant(v[step]) for v in values])

    @property
    def deleter(self) -> Any:
        """The operation that ends the queue and drops what it holds."""
        if tf.executing_eagerly():
            self._clear()
            return None
        return tf.numpy_function(
            raising_itself(self._clear), [], tf.int32, stateful=True, name="outfeed_deleter"
        ).op

    def _clear(self) -> np.ndarray:
        with self._lock:
            if not self._executed:
                raise tf.errors.NotFoundError(
                    None,
                    None,
                    f"Outfeed with id='{self._name}' not found. Run a program that enqueues first.",
                )
            self._executed = False
            self._parts = [[] for _ in self._parts]
        return np.zeros((), np.int32)


def _is_scratch() -> bool:
    """Whether Keras traces a layer only to learn the shapes of what it gives."""
    graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
    return str(getattr(graph, "name", "")).endswith(("_scratch_graph", "keras_graph"))


_STREAMS: WeakKeyDictionary[tf.Graph, dict[str, IPUOutfeedQueue]] = WeakKeyDictionary()
"""Graph -> the queues that its operations name."""


def _stream(feed_id: str, outfeed_mode: str) -> IPUOutfeedQueue:
    """The queue of a name in the graph that is being made, or in the one around its programs."""
    program = outermost_program()
    graph = tf.compat.v1.get_default_graph() if program is None else program.outer_graph
    queues = _STREAMS.setdefault(graph, {})
    if feed_id not in queues:
        queues[feed_id] = IPUOutfeedQueue(feed_id, outfeed_mode=IPUOutfeedMode(outfeed_mode))
    return queues[feed_id]


def pop_datastream_outfeed_enqueue(
    inputs: Sequence[tf.Tensor],
    output_shapes: object = None,
    outfeed_mode: str = "all",
    feed_id: str = "",
    **_: object,
) -> tf.Operation:
    """Give tensors to the outfeed of a name."""
    return _stream(feed_id, outfeed_mode).enqueue(list(inputs))


def pop_datastream_outfeed_dequeue(
    output_types: object = None,
    output_shapes: object = None,
    outfeed_mode: str = "all",
    feed_id: str = "",
    **_: object,
) -> Any:
    """What the outfeed of a name was given, a list."""
    return _stream(feed_id, outfeed_mode).dequeue()


class ScopedIPUOutfeedQueue(IPUOutfeedQueue):
    """A queue that ends with its last reference; eager mode only."""

    def __init__(self, outfeed_mode: IPUOutfeedMode | None = None, device_ordinal: int | None = None) -> None:
        if not tf.executing_eagerly():
            raise RuntimeError("ScopedIPUOutfeedQueue can only be used in eager mode.")
        super().__init__(outfeed_mode, device_ordinal)
