"""Infeed queues: datasets from which programs on IPUs take. The iterator lives on from one run to the next."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from podrun.runtime.feeds import DataFeed
from podrun.tensorflow.capture.markers import mark, reference
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.execution.launching import SESSIONS, raising_itself

_SUPPORTED = {"float32", "float16", "int32", "bool", "int8", "uint8", "uint32", "uint16", "int16"}
LONGEST_ROW = 32
"""Most elements that one call draws: TensorFlow warns of iterators with more operations."""
_OLD_ORDER = ("replication_factor", "data_to_prefetch", "prefetch_depth")
"""The arguments that stood behind the ordinal while a name stood before it."""
_OLD = {"feed_name", "replication_factor", "data_to_prefetch", "optimise_latency"}


def _checked_ordinal(ordinal: object) -> int:
    if ordinal is None:
        return 0
    if not isinstance(ordinal, int) or ordinal < 0:
        raise ValueError(f"Device ordinal must be >= 0, got {ordinal}.")
    return ordinal


def _on_host(dataset: tf.data.Dataset) -> Any:
    """The host's own iterator, also in the scope of a strategy, where ``iter`` gives one for programs on IPUs."""
    plain = getattr(type(dataset).__iter__, "plain", iter)
    return plain(dataset)


class IPUInfeedQueue:
    """A dataset as a queue. Behind it stand the device's ordinal and ``prefetch_depth``, the elements that are drawn
    ahead, 1 to 255. A name, which stood before the ordinal until SDK 2.3, is what messages call the queue; behind
    it and the ordinal stood ``replication_factor`` and ``data_to_prefetch``, which have no effect.
    """

    def __init__(self, dataset: tf.data.Dataset, *names_and_options: Any, **options: Any) -> None:
        name = options.get("feed_name")
        if names_and_options and isinstance(names_and_options[0], str):
            name, *rest = names_and_options
            names_and_options = tuple(rest[:1])
            options = dict(zip(_OLD_ORDER, rest[1:], strict=False)) | options
            if len(rest) > 1 + len(_OLD_ORDER):
                raise TypeError(f"IPUInfeedQueue takes {3 + len(_OLD_ORDER)} arguments, not {2 + len(rest)}.")
        self._set_options(*names_and_options, **options)
        self.dataset = dataset
        self.structure = dataset.element_spec
        self._check_structure()
        self.flat_specs = tf.nest.flatten(self.structure)
        self._number = reference(self)
        self._name = str(name or self._number)
        """What messages call the queue."""
        self._graph: tf.Graph | None = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._dequeued = self._initializer_read = False
        self._feed: DataFeed | None = None
        self._replicas: int | None = None
        self._row: list[Any] = []
        """The elements of one call of the session, each drawn after the one before it."""
        self._ready = self._graph is None
        if self._graph is not None:
            with self._graph.as_default(), tf.device(None):
                self._iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
                self._row = [self._iterator.get_next()]
                with tf.control_dependencies([self._iterator.initializer]):
                    self._initializer = self._host_operation(self._start, "infeed_initializer")

    def _set_options(
        self, device_ordinal: int | None = None, prefetch_depth: int | None = None, **old: object
    ) -> None:
        for option in old:
            if option not in _OLD:
                raise TypeError(f"IPUInfeedQueue got an unexpected keyword argument {option!r}")
            if option != "feed_name":
                warnings.warn(f"IPUInfeedQueue({option}=...) has no effect any more.", stacklevel=3)
        depth = 3 if prefetch_depth is None else prefetch_depth
        if depth < 1:
            raise ValueError(f"prefetch_depth must be greater than zero, but it is {depth}")
        if depth > 255:
            raise ValueError(f"prefetch_depth must be less than 256, but it is {depth}")
        self._ordinal, self._depth = _checked_ordinal(device_ordinal), depth

    def _host_operation(self, function: Callable[[], np.ndarray], name: str) -> tf.Operation:
        """An operation of the queue's graph, also where another graph is the default one."""
        with (self._graph or tf.compat.v1.get_default_graph()).as_default(), tf.device(None):
            return tf.numpy_function(raising_itself(function), [], tf.int32, stateful=True, name=name).op

    def _check_structure(self) -> None:
        for spec in tf.nest.flatten(self.structure):
            if not spec.shape.is_fully_defined():
                raise ValueError(
                    f"Output shape {spec.shape} is not fully defined. If using tf.Dataset.batch, set "
                    "`drop_remainder=True`."
                )
        if isinstance(self.structure, (tuple, list)) and any(
            isinstance(item, (tuple, list)) for item in self.structure
        ):
            raise ValueError("Nested list/tuple input shapes are not supported.")

    @property
    def number_of_tuple_elements(self) -> int:
        """Tensors of an element."""
        return len(self.flat_specs)

    @property
    def dequeued(self) -> bool:
        """Whether a program takes from the queue."""
        return self._dequeued

    @property
    def initializer(self) -> Any:
        """The operation that starts the queue; in graph mode, once."""
        if self._initializer_read:
            raise ValueError("The IPUInfeedQueue `initializer` function can only be accessed once.")
        self._initializer_read = True
        if self._graph is None:
            return tf.no_op() if not tf.executing_eagerly() else None
        return self._initializer

    def _check_types(self) -> None:
        """FailedPreconditionError for a type that an IPU does not take."""
        for index, spec in enumerate(self.flat_specs):
            if spec.dtype.name not in _SUPPORTED:
                raise tf.errors.FailedPreconditionError(
                    None, None, f"Unsupported datatype {spec.dtype.name} on index {index} of feed operation "
                    f"{self._number}. You should use an int32/float32/float16 dataset.",
                )  # fmt: skip

    def _start(self) -> np.ndarray:
        self._check_types()
        self._close()
        self._ready = True
        return np.zeros((), np.int32)

    @property
    def deleter(self) -> Any:
        """The operation that ends the queue."""
        if self._graph is None:
            self._close()
            return None
        return self._host_operation(self._delete, "infeed_deleter")

    def _delete(self) -> np.ndarray:
        if not self._ready:
            raise tf.errors.NotFoundError(None, None, f"Infeed with id='{self._name}' not found.")
        self._ready = False
        self._close()
        return np.zeros((), np.int32)

    def _close(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()

    def get_next(self) -> None:
        """Gone since SDK 1.2."""
        raise ValueError(
            "`get_next()` is now obsolete as the IPUInfeedQueue is now automatically dequeued by the loop."
        )

    def _dequeue(self) -> Any:
        """The element of this iteration, in a program's graph."""
        self._dequeued = True
        self._lengthen_row()
        tensors = mark(
            "dequeue", [], self.flat_specs, stateful=True, name="infeed_dequeue", queue=self._number
        )
        return tf.nest.pack_sequence_as(self.structure, tensors)

    def _lengthen_row(self) -> None:
        """Let one call of the session draw what all replicas take in an iteration."""
        if self._graph is None or self._graph.finalized or DEVICES.config is None:
            return
        count = min(DEVICES.settings(self._ordinal, 1).local_replicas, LONGEST_ROW)
        with self._graph.as_default(), tf.device(None), tf.control_dependencies(None):
            while len(self._row) < count:
                with tf.control_dependencies(tf.nest.flatten(self._row[-1])):
                    self._row.append(self._iterator.get_next())

    def __iter__(self) -> IPUInfeedQueue:
        return self

    def __next__(self) -> Any:
        if tf.executing_eagerly():
            raise RuntimeError("IPUInfeedQueue iterators can only be used inside a `tf.function`.")
        return self._dequeue()

    def data_feed(self, replicas: int, local_replicas: int) -> DataFeed:
        """The elements for a program with so many replicas."""
        if not self._ready:
            raise tf.errors.FailedPreconditionError(
                None, None, f"Infeed with id='{self._name}' not found. Did you initialize the infeed_queue?"
            )
        self._check_types()
        for spec in self.flat_specs:
            if 0 in tuple(spec.shape):
                raise tf.errors.InvalidArgumentError(
                    None,
                    None,
                    f"Detected zero-sized dimension in the shape {spec.shape} of infeed {self._number}.",
                )
        if self._replicas is not None and self._replicas != replicas:
            raise tf.errors.FailedPreconditionError(
                None,
                None,
                f"Infeed {self._number} is used by programs of {self._replicas} and {replicas} replicas.",
            )
        self._replicas = replicas
        if self._feed is None:
            self._feed = DataFeed(
                self._elements(local_replicas),
                ahead=self._depth * local_replicas,
                name=f"infeed{self._number}",
            )
        return self._feed

    def _elements(self, local_replicas: int) -> Iterator[dict[str, np.ndarray]]:
        names = [f"infeed{self._number}/{i}" for i in range(len(self.flat_specs))]
        if self._graph is None:
            for element in _on_host(self.dataset):
                yield dict(zip(names, (np.asarray(t) for t in tf.nest.flatten(element)), strict=True))
            return
        row = self._row if local_replicas % len(self._row) == 0 else self._row[:1]
        draw = _drawing(SESSIONS[self._graph], tf.nest.flatten(row))
        while True:
            try:
                drawn = draw()
            except tf.errors.OutOfRangeError:
                return
            except tf.errors.OpError as error:
                raise type(error)(
                    None, None, f"An infeed dataset iterator has failed with status: {error}"
                ) from error
            for place in range(0, len(drawn), len(names)):
                values = drawn[place : place + len(names)]
                yield dict(zip(names, map(np.asarray, values), strict=True))


def _drawing(session: tf.compat.v1.Session, tensors: list[tf.Tensor]) -> Callable[[], list[Any]]:
    """A function that gives values of tensors, none of which needs an IPU. Which operations give them is worked out
    once, not in every call. The caller's thread computes: a pool of one thread is busy with the program itself.
    """
    options = tf.compat.v1.RunOptions(inter_op_thread_pool=-1)
    if session.sess_str:  # Sessions of a server have no such functions.
        make = type(session).make_callable
        run = getattr(make, "plain", make)(session, tensors, accept_options=True)
        return lambda: list(run(options=options))
    messages = importlib.import_module("tensorflow.core.protobuf.config_pb2")
    chosen = messages.CallableOptions(fetch=[tensor.name for tensor in tensors], run_options=options)
    make = type(session)._make_callable_from_options
    draw: Callable[[], list[Any]] = getattr(make, "plain", make)(session, chosen)
    return draw


class IPUOwnedIterator(IPUInfeedQueue):
    """What ``iter(dataset)`` gives inside the scope of an IPU strategy."""

    def __iter__(self) -> IPUOwnedIterator:
        return self

    def __next__(self) -> Any:
        if tf.executing_eagerly():
            raise RuntimeError(
                "Accessing dataset elements can not be accessed in eager mode when inside 'IPUStrategy': take them in "
                "a `tf.function` that the strategy runs, or set 'enable_dataset_iterators=False' when creating the "
                "'IPUStrategy'."
            )
        return self._dequeue()

    def get_next(self) -> Any:
        """The next element, in a tf.function that the strategy runs."""
        return next(self)

    def get_next_as_optional(self) -> Any:
        """Refused with NotImplementedError, as in the SDK."""
        raise NotImplementedError("`get_next_as_optional` is not supported by IPUIterator.")


IPUIterator = IPUOwnedIterator
